"""Random models through GGUF and back: the weights are the model's, and transformers and mlx-lm compute its logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from mlx_lm.utils import load_model
from numpy.typing import NDArray
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from tests.support.tiny_gguf import TinyGguf, write_gguf
from tqtool.formats.dtypes import DType
from tqtool.pipeline.import_gguf import plan_import, run_import
from tqtool.source.checkpoint import open_checkpoint
from tqtool.source.gguf import weights

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

TOKENS = [5, 17, 300, 3, 44, 44, 129, 7, 255, 31, 8, 99, 260, 11, 12, 13, 201, 5, 6, 77, 150, 2, 90, 41]
# 24 positions: beyond the tiny Gemma's window of 8, so that local and global layers differ.

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
CASES = {
    "llama": TinyGguf(),
    "llama tied": TinyGguf(settings={"tie_word_embeddings": True}),
    "llama, every head its own kv": TinyGguf(settings={"num_key_value_heads": 4}),
    "llama biases": TinyGguf(settings={"attention_bias": True, "mlp_bias": True}),
    "llama attention bias": TinyGguf(settings={"attention_bias": True}),
    "llama, heads wider than hidden": TinyGguf(settings={"head_dim": 96}),
    "llama 3 rope": TinyGguf(settings={"rope_parameters": LLAMA3, "max_position_embeddings": 131072}),
    "llama linear rope": TinyGguf(settings={"rope_parameters": LINEAR}),
    "qwen2": TinyGguf(family="qwen2"),
    "qwen2 tied": TinyGguf(family="qwen2", settings={"tie_word_embeddings": True}),
    "qwen2 yarn": TinyGguf(family="qwen2", settings={"rope_parameters": YARN}),
    "qwen3": TinyGguf(family="qwen3", settings={"head_dim": 128}),
    "gemma3": TinyGguf(family="gemma3", settings={"tie_word_embeddings": True}),
}


def imported(tmp_path: Path, case: TinyGguf, dtype: DType = DType.F32) -> tuple[Path, Any, dict[str, NDArray[Any]]]:
    model = case.model()
    held = write_gguf(tmp_path / "m.gguf", case, model)
    run_import(plan_import(tmp_path / "m.gguf", tmp_path / "out", dtype=dtype))
    return tmp_path / "out", model, held


def torch_logits(model: Any) -> NDArray[np.float32]:
    with torch.no_grad():
        result: NDArray[np.float32] = model(torch.tensor([TOKENS])).logits[0].numpy()
    return result


def mlx_logits(folder: Path) -> NDArray[np.float32]:
    model, _ = load_model(folder)
    return np.array(model(mx.array([TOKENS]))[0].astype(mx.float32))


@pytest.mark.parametrize("name", CASES)
def test_logits_are_the_models(tmp_path: Path, name: str) -> None:
    folder, model, _ = imported(tmp_path, CASES[name])
    expected = torch_logits(model)
    # Same weights, same code: torch repeats itself. Without biases or Gemma's 1 + w nothing was rounded on the way.
    again = torch_logits(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    scale = float(expected.std())
    # Gemma's gains went through 1 + w in float32: 2^-24 each, some 6 of them a layer, 6 layers.
    np.testing.assert_allclose(again, expected, rtol=0, atol=scale * (2.0**-18 if "gemma" in name else 0.0))
    # Another implementation: 7 products a layer with sums of up to 512 terms in another order, 6 layers at most, and
    # the same again for norms, softmax and rotary tables; errors add up rather than cancel.
    np.testing.assert_allclose(mlx_logits(folder), expected, rtol=0, atol=scale * 2 * 6 * 7 * 512**0.5 * 2.0**-24 * 4)


def test_the_logits_see_a_permutation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof above has power: rows left in llama.cpp's order change the logits by their own size."""
    monkeypatch.setattr(weights, "unpermute_heads", lambda weight, heads: weight)
    folder, model, _ = imported(tmp_path, CASES["llama"])
    expected = torch_logits(model)
    assert np.abs(mlx_logits(folder) - expected).max() > 0.2 * expected.std()


KINDS = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_every_type_is_imported_to_the_bit(tmp_path: Path, kind: str, family: str) -> None:
    case = TinyGguf(family=family, kind=Kind[kind], settings={"num_hidden_layers": 1, "tie_word_embeddings": True})
    folder, _, held = imported(tmp_path, case, DType.BF16)
    stored = load_file(folder / "model.safetensors")
    assert set(stored) == set(held)
    for name, values in held.items():
        expected = torch.from_numpy(np.ascontiguousarray(values)).bfloat16().view(torch.uint16).numpy()
        assert np.array_equal(stored[name].view(np.uint16), expected), name
    assert {ref.dtype for ref in open_checkpoint(str(folder)).tensors.values()} == {DType.BF16}


def test_rows_in_pieces_give_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = TinyGguf(kind=Kind.Q4_K)
    folder, _, _ = imported(tmp_path, case)
    monkeypatch.setattr("tqtool.source.gguf.reader._CHUNK_ELEMENTS", 3 * 256)
    run_import(plan_import(tmp_path / "m.gguf", tmp_path / "again", dtype=DType.F32))
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            assert (tmp_path / "again" / path.relative_to(folder)).read_bytes() == path.read_bytes(), path


def test_configs_say_what_was_stored(tmp_path: Path) -> None:
    folder, model, _ = imported(tmp_path, CASES["llama 3 rope"])
    config = json.loads((folder / "config.json").read_text())
    assert config["rope_scaling"] == {"type": "llama3", **{k: v for k, v in LLAMA3.items() if k != "rope_theta"}}
    assert (config["rope_theta"], config["rms_norm_eps"]) == (500000.0, 1e-5)
    assert (config["tie_word_embeddings"], config["head_dim"]) == (False, 64)
    assert model.config.num_key_value_heads == config["num_key_value_heads"]
    record = json.loads((folder / "tqtool" / "import.json").read_text())
    assert record["edits"] == {"unpermute q heads": 2, "unpermute k heads": 2}
    assert record["source"]["file"] == "m.gguf"
    assert len(record["source"]["sha256"]) == 64


def test_gguf_names_in_the_package_are_the_ones_expected() -> None:
    """Guards the helper, which takes its names from the package's tables."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA3, 1)
    assert names.get_name("model.layers.0.pre_feedforward_layernorm.weight", (".weight",)) == "blk.0.ffn_norm.weight"
