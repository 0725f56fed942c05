"""``tqtool inspect``: facts, plans of the other verbs, and that it describes what they refuse."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.support.command import Answer, run
from tests.support.tiny_gguf import TinyGguf, write_gguf
from tests.support.tiny_models import Tiny, write_tiny, write_weights

Tqtool = Callable[..., Answer]


@pytest.fixture
def tqtool(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Tqtool:
    return lambda *arguments: run(capsys, monkeypatch, *arguments)


def report(tqtool: Tqtool, path: Path) -> dict[str, Any]:
    answer = tqtool("inspect", path, "--json")
    assert answer.code == 0, answer.err
    assert answer.err == ""
    result: dict[str, Any] = json.loads(answer.out)
    return result


def verbs(facts: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["verb"]: row for row in facts["verbs"]}


def test_a_float_model(tqtool: Tqtool, tmp_path: Path) -> None:
    tiny = Tiny(shards=2)
    facts = report(tqtool, write_tiny(tmp_path / "m", tiny))
    tensors = tiny.tensors()
    assert (facts["kind"], facts["model_type"], facts["architecture"]) == ("float", "llama", "LlamaForCausalLM")
    assert facts["parameters"] == sum(array.size for array in tensors.values())
    assert facts["size_bytes"] == sum(array.nbytes for array in tensors.values())
    assert (facts["tensors"], facts["files"]) == (len(tensors), 2)
    assert facts["head"] == "tied to the embedding"
    assert facts["tokenizer"] == "tokenizer.json, 320 entries, chat template"
    assert facts["sizes"]["kv_cache_bytes_per_token"] == 2 * 2 * 2 * 32 * 2  # k and v, layers, heads, size, bf16
    assert sum(group["count"] for group in facts["groups"]) == len(tensors)
    groups = {group["pattern"]: group for group in facts["groups"]}
    down = groups["model.layers.*.mlp.down_proj.weight"]
    assert (down["count"], down["shape"], down["role"], down["convert"]) == (2, [128, 256], "down", "affine4 g64")
    assert down["trellis"] == "trellis k3 mul1 axis0"
    assert groups["model.norm.weight"]["convert"] == "bf16"


def test_the_estimates_are_what_the_verbs_write(tqtool: Tqtool, tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "m")
    rows = verbs(report(tqtool, folder))
    commands = {
        "convert": ("convert",),
        "convert -q": ("convert", "-q"),
        "convert -q --rotate-weights": ("convert", "-q", "--rotate-weights"),
        "trellis --k 3 --modules all": ("trellis", "--k", 3, "--modules", "all"),
    }
    for index, (verb, (name, *flags)) in enumerate(commands.items()):
        answer = tqtool(name, folder, tmp_path / f"out{index}", *flags, "--check", "none")
        assert answer.code == 0, answer.err
        stored = json.loads((tmp_path / f"out{index}" / "model.safetensors.index.json").read_text())
        assert rows[verb]["possible"]
        assert rows[verb]["estimate"]["tensor_bytes"] == stored["metadata"]["total_size"]
        made = report(tqtool, tmp_path / f"out{index}")
        assert made["kind"] == "artifact"
        untied = 320 * 128 if "rotate" in verb or "trellis" in verb else 0
        assert made["parameters"] == sum(array.size for array in Tiny().tensors().values()) + untied


def test_the_table_can_be_read(tqtool: Tqtool, tmp_path: Path) -> None:
    answer = tqtool("inspect", write_tiny(tmp_path / "m"))
    assert answer.code == 0
    for text in (
        "LlamaForCausalLM (model_type llama)",
        "model.layers.*.self_attn.q_proj",
        "· diag(input_layernorm)",
        "adds lm_head.weight",
        "tied to the embedding",
        "trellis padding",
    ):
        assert text in answer.out
    assert max(len(line.rstrip()) for line in answer.out.splitlines()) <= 160


def test_padding_is_named_where_there_is_any(tqtool: Tqtool, tmp_path: Path) -> None:
    facts = report(tqtool, write_tiny(tmp_path / "m", Tiny(hidden=132, heads=4, head_dim=32, intermediate=133)))
    row, tiles = (row for row in facts["padding"] if row["pattern"].endswith("gate_proj"))
    assert (row["layout"], row["blocks"], row["padded_weights"]) == ("axis1", 69, 69 * 256 - 132 * 133)
    assert row["share"] == pytest.approx(108 / 17556)
    assert (tiles["layout"], tiles["shape"], tiles["count"]) == ("tile", [133, 132], 2)
    assert (tiles["blocks"], tiles["padded_weights"]) == (81, 144 * 144 - 132 * 133)
    assert {row["layout"] for row in facts["padding"] if row["pattern"].endswith("down_proj")} == {"axis0", "tile"}
    shown = tqtool("inspect", tmp_path / "m").out.partition("trellis padding")[2]
    assert all(text in shown for text in ("layout", "axis1", "tile", "18.11 %"))


def test_modules_no_group_divides_are_named(tqtool: Tqtool, tmp_path: Path) -> None:
    facts = report(tqtool, write_tiny(tmp_path / "m", Tiny(intermediate=96)))
    assert "2 kept dense: input dimension 96 is not divisible by group size 64" in verbs(facts)["convert -q"]["detail"]


def test_a_quantized_model_is_described(tqtool: Tqtool, tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    config["quantization"] = {"bits": 4, "group_size": 64, "mode": "affine", "head": {"bits": 8, "group_size": 64}}
    (folder / "config.json").write_text(json.dumps(config))
    half = np.zeros((320, 2), ml_dtypes.bfloat16)
    packed = {
        "body.weight": np.zeros((320, 16), np.uint32),
        "body.scales": half,
        "body.biases": half,
        "head.weight": np.zeros((320, 32), np.uint32),
        "head.scales": half,
        "head.biases": half,
        "norm.weight": np.ones(128, ml_dtypes.bfloat16),
    }
    write_weights(folder, packed)
    facts = report(tqtool, folder)
    assert (facts["kind"], facts["evidence"]) == ("quantized", "config.json has quantization (affine)")
    assert facts["parameters"] == 2 * 320 * 128 + 128
    assert not verbs(facts)["convert"]["possible"]
    assert "full-precision" in verbs(facts)["convert"]["hint"]


def test_a_foreign_packing_has_no_parameter_count(tqtool: Tqtool, tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "m")
    write_weights(folder, {"a.qweight": np.zeros((4, 4), np.int32), "a.scales": np.ones((1, 4), np.float16)})
    facts = report(tqtool, folder)
    assert (facts["kind"], facts["parameters"]) == ("quantized", None)
    assert "unknown (foreign packing)" in tqtool("inspect", folder).out


def test_an_unknown_architecture_is_described(tqtool: Tqtool, tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "m", tokenizer=False)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "nonesuch"}))
    facts = report(tqtool, folder)
    assert [row["possible"] for row in facts["verbs"]] == [False] * len(facts["verbs"])
    assert "model_type 'nonesuch' is not known; known:" in verbs(facts)["convert"]["detail"]
    assert len(facts["warnings"]) == 2
    assert "as above" in tqtool("inspect", folder).out


def test_a_rotation_that_cannot_be_is_a_row_with_its_reason(tqtool: Tqtool, tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "m", Tiny(hidden=92))  # 92 is the first multiple of 4 that Sylvester and Paley miss
    rows = verbs(report(tqtool, folder))
    assert rows["convert"]["possible"]
    assert not rows["convert -q --rotate-weights"]["possible"]
    assert "92" in rows["convert -q --rotate-weights"]["detail"]


@pytest.mark.parametrize(
    ("tied", "stored", "expected"),
    [
        (True, True, "tied to the embedding by config.json; the stored lm_head is redundant"),
        (False, True, "its own tensor"),
        (False, False, "missing: config.json says untied, no lm_head is stored"),
    ],
)
def test_heads(tqtool: Tqtool, tmp_path: Path, tied: bool, stored: bool, expected: str) -> None:
    folder = write_tiny(tmp_path / "m", Tiny(tied=tied))
    tensors = Tiny(tied=False).tensors()
    if not stored:
        del tensors["lm_head.weight"]
    write_weights(folder, tensors)
    assert report(tqtool, folder)["head"] == expected


def test_a_gguf_file(tqtool: Tqtool, tmp_path: Path) -> None:
    case = TinyGguf()
    path = tmp_path / "m.gguf"
    write_gguf(path, case, case.model())
    facts = report(tqtool, path)
    assert (facts["kind"], facts["model_type"], facts["head"]) == ("gguf", "llama", "its own tensor")
    assert facts["parameters"] == sum(p.numel() for p in case.model().parameters())
    assert verbs(facts)["import-gguf"]["possible"]
    assert facts["tokenizer"] == "gpt2 (pre-tokenizer smollm), 320 entries, chat template"
    assert "import-gguf" in tqtool("inspect", path).out


@pytest.mark.parametrize("damage", ["config.json", "model.safetensors"])
def test_damage_is_an_error(tqtool: Tqtool, tmp_path: Path, damage: str) -> None:
    folder = write_tiny(tmp_path / "m")
    (folder / damage).write_bytes((folder / damage).read_bytes()[:-50])
    answer = tqtool("inspect", folder)
    assert answer.code == 2
    assert answer.out == ""
    assert answer.err.startswith(f"error: {folder / damage}: ")
    assert "Traceback" not in answer.err


def test_values_are_read_when_asked_for(tmp_path: Path, tqtool: Tqtool) -> None:
    tiny = Tiny()
    source = write_tiny(tmp_path / "source", tiny)
    assert json.loads(tqtool("inspect", source, "--json").out)["values"] is None
    assert json.loads(tqtool("inspect", source, "--json", "--values").out)["values"] == "every weight is finite"
    tensors = tiny.tensors()
    tensors["model.norm.weight"][3] = np.inf
    write_weights(source, tensors)
    report = json.loads(tqtool("inspect", source, "--json", "--values").out)
    assert "model.norm.weight: 1 of 128 values are inf or NaN" in report["values"]
    assert [verb["possible"] for verb in report["verbs"]] == [False, False]
