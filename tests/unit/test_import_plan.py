"""Importing GGUF: what is refused before anything is written, and that nothing is left behind when it fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.memory import added_peak_bytes
from tests.support.tiny_gguf import TinyGguf, byte_level_fields, write_gguf
from tqtool.errors import ArtifactError, NumericalError, SourceError, UserError
from tqtool.formats.dtypes import DType
from tqtool.pipeline.import_gguf import plan_import, run_import
from tqtool.source.gguf.config import build_config, llama3_factors, read_shape, rope_scaling
from tqtool.source.gguf.families import family_of, map_tensors
from tqtool.source.gguf.reader import GgufFile, read_gguf

CASE = TinyGguf(settings={"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64, "head_dim": 16})


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("gguf") / "m.gguf"
    write_gguf(target, CASE, CASE.model())
    return target


@pytest.fixture
def file(path: Path) -> GgufFile:
    return read_gguf(path)


def with_metadata(file: GgufFile, **changes: Any) -> GgufFile:
    """``file`` with ``llama.<key>`` set (dots as double underscores), or removed where the value is None."""
    merged = {**file.metadata, **{f"llama.{key.replace('__', '.')}": value for key, value in changes.items()}}
    return replace(file, metadata={key: value for key, value in merged.items() if value is not None})


def resolve(file: GgufFile) -> None:
    """Everything plan_import asks of the directory."""
    family = family_of(file)
    shape = read_shape(file)
    build_config(file, shape, torch_dtype="bfloat16", biases=(False, False))
    map_tensors(file, family, shape)


METADATA: dict[str, tuple[dict[str, Any], str]] = {
    "no layers": ({"block_count": None}, "metadata 'llama.block_count' is missing"),
    "absurd layers": ({"block_count": 10**9}, r"llama.block_count is 1,000,000,000, but only \d+ tensors"),
    "more layers than stored": ({"block_count": 2}, "not those of a llama model; missing: blk.1.attn_q.weight"),
    "heads differ per layer": ({"attention__head_count": [4, 2]}, "differs from layer to layer"),
    "negative": ({"feed_forward_length": -4}, "must be a positive integer, found -4"),
    "a flag as a size": ({"feed_forward_length": True}, "must be a positive integer, found True"),
    "other width": ({"feed_forward_length": 32}, r"'blk.0.ffn_gate.weight': expected \[32, 64\].*found \[64, 64\]"),
    "value heads of another size": ({"attention__value_length": 32}, "value_length is 32, only the head size 16"),
    "half-rotated heads": ({"rope__dimension_count": 8}, "rope.dimension_count is 8, only the head size 16"),
    "no epsilon": ({"attention__layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon' must be a number"),
    "longrope": ({"rope__scaling__type": "longrope"}, "rope scaling rope.scaling.type 'longrope' cannot be expressed"),
    "yarn without factor": ({"rope__scaling__type": "yarn"}, "rope.scaling.factor must be a positive number"),
    "yarn with more": (
        {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__yarn_beta_fast": 16.0},
        "llama.rope.scaling.yarn_beta_fast cannot be expressed",
    ),
    "yarn without context": (
        {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0},
        "'llama.rope.scaling.original_context_length' is missing",
    ),
}


@pytest.mark.parametrize("case", METADATA)
def test_metadata_that_cannot_be_used(file: GgufFile, case: str) -> None:
    changes, message = METADATA[case]
    with pytest.raises(SourceError, match=message) as caught:
        resolve(with_metadata(file, **changes))
    assert str(file.path) in caught.value.message


def test_the_file_itself_is_fine(file: GgufFile) -> None:
    resolve(file)


def test_unknown_architecture_is_named(file: GgufFile) -> None:
    with pytest.raises(
        SourceError, match="architecture 'mamba' cannot be imported; known: llama, qwen2, qwen3, gemma3"
    ):
        resolve(replace(file, metadata={**file.metadata, "general.architecture": "mamba"}))


def test_unknown_tensors_are_listed(file: GgufFile) -> None:
    some = file.tensors["blk.0.ffn_gate.weight"]
    extra = {f"blk.0.{name}.weight": some for name in ("ffn_gate_exps", "ffn_gate_inp")}
    with pytest.raises(SourceError, match=r"unknown: blk.0.ffn_gate_exps.weight, blk.0.ffn_gate_inp.weight"):
        resolve(replace(file, tensors={**file.tensors, **extra}))


def test_a_bias_missing_in_its_group_is_missed(file: GgufFile) -> None:
    norm = file.tensors["blk.0.attn_norm.weight"]
    with pytest.raises(SourceError, match=r"missing: blk.0.attn_k.bias, blk.0.attn_v.bias, blk.0.attn_output.bias"):
        resolve(replace(file, tensors={**file.tensors, "blk.0.attn_q.bias": norm}))


def test_no_embedding(file: GgufFile) -> None:
    tensors = {name: tensor for name, tensor in file.tensors.items() if name != "token_embd.weight"}
    with pytest.raises(SourceError, match=r"'token_embd.weight' .* is missing"):
        resolve(replace(file, tensors=tensors))


def test_a_rope_table_of_ones_means_no_scaling_and_another_is_refused(tmp_path: Path) -> None:
    import gguf

    for values, expected in ((np.ones(8), None), (np.linspace(1, 9, 8), SourceError)):
        writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
        writer.add_tensor("rope_freqs.weight", values.astype(np.float32))
        for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
            step()
        writer.close()
        table = read_gguf(tmp_path / "t.gguf")
        size = read_shape_of_sixteen()
        if expected is None:
            assert rope_scaling(table, size) is None
        else:
            with pytest.raises(SourceError, match=r"not the table of Llama 3 scaling with factor 9.0"):
                rope_scaling(table, size)


def read_shape_of_sixteen() -> Any:
    from tqtool.source.gguf.config import ModelShape

    return ModelShape(layers=1, hidden=64, intermediate=64, heads=4, kv_heads=2, head_dim=16, vocab=8)


def test_llama3_factors_are_one_when_fast_and_the_factor_when_slow() -> None:
    factors = llama3_factors(500000.0, 128, factor=8.0, original_context=8192)
    assert factors[0] == 1.0
    assert factors[-1] == 8.0
    assert np.all(np.diff(factors) >= 0)
    assert np.sum((factors > 1) & (factors < 8)) > 3


def rewrite(path: Path, target: Path, change: Callable[[np.ndarray[Any, Any]], None]) -> Path:
    """A copy of ``path`` with one tensor changed in place."""
    tensor = read_gguf(path).tensors["blk.0.ffn_up.weight"]
    content = bytearray(path.read_bytes())
    values = (
        np.frombuffer(content[tensor.begin : tensor.begin + tensor.nbytes], np.float32).reshape(tensor.shape).copy()
    )
    change(values)
    content[tensor.begin : tensor.begin + tensor.nbytes] = values.tobytes()
    target.write_bytes(content)
    return target


def test_nan_leaves_nothing_behind(path: Path, tmp_path: Path) -> None:
    def poison(values: np.ndarray[Any, Any]) -> None:
        values[7, 3] = np.nan

    bad = rewrite(path, tmp_path / "bad.gguf", poison)
    with pytest.raises(NumericalError, match=r"bad.gguf: blk.0.ffn_up.weight .* 1 of 4,096 .* \[7, 3\]") as caught:
        run_import(plan_import(bad, tmp_path / "out", dtype=DType.BF16))
    assert caught.value.exit_code == 3
    assert [entry.name for entry in tmp_path.iterdir()] == ["bad.gguf"]


def test_a_value_beyond_f16(path: Path, tmp_path: Path) -> None:
    def enlarge(values: np.ndarray[Any, Any]) -> None:
        values[0, 0] = 70000.0

    bad = rewrite(path, tmp_path / "bad.gguf", enlarge)
    with pytest.raises(NumericalError, match=r"mlp.up_proj.weight.*after rounding to F16") as caught:
        run_import(plan_import(bad, tmp_path / "out", dtype=DType.F16))
    assert "bf16" in (caught.value.hint or "")
    run_import(plan_import(bad, tmp_path / "fine", dtype=DType.BF16))


def test_output_that_is_not_empty(path: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "x").write_text("mine")
    with pytest.raises(UserError, match="is not empty"):
        plan_import(path, tmp_path / "out", dtype=DType.BF16)
    assert (tmp_path / "out" / "x").read_text() == "mine"


def test_full_disk(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil
    from types import SimpleNamespace

    plan = plan_import(path, tmp_path / "out", dtype=DType.BF16)
    monkeypatch.setattr(shutil, "disk_usage", lambda where: SimpleNamespace(free=10))
    with pytest.raises(ArtifactError, match="10 B are free"):
        run_import(plan)
    assert list(tmp_path.iterdir()) == []


def test_the_plan_says_all_before_writing(path: Path, tmp_path: Path) -> None:
    plan = plan_import(path, tmp_path / "out", dtype=DType.F16)
    assert list(tmp_path.iterdir()) == []
    told = plan.to_json()
    assert told["weight_bytes"] == 2 * told["parameters"]
    assert told["edits"] == {"unpermute q heads": 1, "unpermute k heads": 1}
    seen: list[str] = []
    run_import(plan, lambda amount, what: seen.append(what))
    assert seen == [item.name for item in plan.stored]
    written = sorted(str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*") if p.is_file())
    assert written == sorted([*told["files"], "model.safetensors", "model.safetensors.index.json"])


def test_tokens_beyond_the_matrix_are_refused(tmp_path: Path) -> None:
    """More tokens than embedding rows would index past the end."""
    fields = byte_level_fields(330)
    write_gguf(tmp_path / "m.gguf", CASE, CASE.model(), tokenizer=fields)
    with pytest.raises(SourceError, match="330 tokens, but the embedding has 320 rows"):
        plan_import(tmp_path / "m.gguf", tmp_path / "out", dtype=DType.BF16)


PLAN = """
import sys
from pathlib import Path
from tqtool.formats.dtypes import DType
from tqtool.pipeline.import_gguf import plan_import, run_import
plan = plan_import(Path(sys.argv[1]), Path(sys.argv[2]), dtype=DType.BF16)
"""


def test_memory_is_one_stored_tensor(tmp_path: Path) -> None:
    """Three matrices of 32 M weights: 64 MB each as bf16, 128 as float32; only one is held, never as float32."""
    import gguf

    case = replace(CASE, settings={**CASE.settings, "intermediate_size": 1 << 19})
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    from tests.support.tiny_gguf import add_sizes, add_value

    add_sizes(writer, case.config())
    for key, value in byte_level_fields(320).items():
        add_value(writer, f"tokenizer.{key}", value)
    shapes = {"attn_q": (64, 64), "attn_k": (32, 64), "attn_v": (32, 64), "attn_output": (64, 64)}
    shapes |= {"ffn_gate": (1 << 19, 64), "ffn_up": (1 << 19, 64), "ffn_down": (64, 1 << 19)}
    writer.add_tensor("token_embd.weight", np.zeros((320, 64), np.float32))
    writer.add_tensor("output_norm.weight", np.ones(64, np.float32))
    for name in ("attn_norm", "ffn_norm"):
        writer.add_tensor(f"blk.0.{name}.weight", np.ones(64, np.float32))
    for name, (rows, cols) in shapes.items():
        raw = np.zeros((rows, cols // 32 * 34), np.uint8)
        writer.add_tensor(f"blk.0.{name}.weight", raw, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    added = added_peak_bytes(PLAN, "run_import(plan)", tmp_path / "m.gguf", tmp_path / "out")
    assert added <= (64 << 20) + (24 << 20)
