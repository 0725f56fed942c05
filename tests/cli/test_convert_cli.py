"""``tqtool convert`` and ``tqtool verify`` as a shell sees them: options, exit codes, messages, JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import Answer, run
from tests.support.tensors import all_files, raw_tensors
from tests.support.tiny_models import Tiny, write_tiny
from tqtool.transform.families import FAMILIES

Tqtool = Callable[..., Answer]


@pytest.fixture
def tqtool(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Tqtool:
    return lambda *arguments: run(capsys, monkeypatch, *arguments)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "source")


def test_convert_then_verify(tqtool: Tqtool, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    answer = tqtool("convert", source, out, "-q", "--rotate-weights", "--rule", "lm_head=bits:8")
    assert answer.code == 0
    assert answer.out.startswith(f"{out}: 53 tensors in 1 shard, ")
    assert "bits per weight (codes alone " in answer.out
    assert "convert: 100%" in answer.err
    verified = tqtool("verify", out, "--json")
    assert verified.code == 0
    report = json.loads(verified.out)
    assert report["is_good"]
    assert [check["name"] for check in report["checks"]] == [
        "manifest",
        "files",
        "tensors",
        "config",
        "decode",
        "reload",
    ]


def test_mlx_lms_names_are_accepted(tqtool: Tqtool, source: Path, tmp_path: Path) -> None:
    old = ("--hf-path", source, "--mlx-path", tmp_path / "a", "-q", "--q-bits", "3", "--q-group-size", "32")
    new = (source, tmp_path / "b", "--bits", "3", "--group-size", "32", "--mode", "affine")
    for arguments in (old, new):
        assert tqtool("convert", *arguments, "--check", "none").code == 0
    assert raw_tensors(tmp_path / "a") == raw_tensors(tmp_path / "b")
    assert tqtool("convert", "--model", source, tmp_path / "c", "--q-mode", "mxfp4", "--check", "none").code == 0
    assert raw_tensors(tmp_path / "c")["model.embed_tokens.scales"][0] == "U8"


def test_without_quantization_the_result_is_dense(tqtool: Tqtool, source: Path, tmp_path: Path) -> None:
    assert tqtool("convert", source, tmp_path / "out", "--dtype", "f16", "--check", "none").code == 0
    assert {dtype for dtype, _, _ in raw_tensors(tmp_path / "out").values()} == {"F16"}


def test_dry_run_writes_nothing(tqtool: Tqtool, source: Path, tmp_path: Path) -> None:
    before = all_files(tmp_path)
    answer = tqtool("convert", source, tmp_path / "out", "-q", "--dry-run", "--rule", "*v_proj=bf16")
    assert answer.code == 0
    for text in ("model.layers.*.self_attn.q_proj", "affine4 g64", "bits per weight", "memory", "disk", "hint"):
        assert text in answer.out
    as_json = tqtool("convert", source, tmp_path / "out", "-q", "--dry-run", "--json", "--rule", "*v_proj=bf16")
    plan = json.loads(as_json.out)
    rows = {row["module"]: row for row in plan["rows"] if row["module"]}
    assert rows["model.layers.1.self_attn.v_proj"]["quantizer"] == "bf16"
    assert rows["model.embed_tokens"]["stored_bytes"] == 320 * 128 * 4.5 / 8
    totals = plan["totals"]
    assert totals["bits_per_weight"] == pytest.approx(8 * totals["tensor_bytes"] / totals["parameters"])
    assert {"peak_memory_bytes", "disk_bytes", "code_bits_per_weight", "shards"} <= set(totals)
    assert all_files(tmp_path) == before


def test_json_result_is_the_plan_and_stderr_is_quiet(tqtool: Tqtool, source: Path, tmp_path: Path) -> None:
    answer = tqtool("convert", source, tmp_path / "out", "-q", "--json", "--check", "none")
    result = json.loads(answer.out)
    assert result["out"] == str(tmp_path / "out")
    assert result["kind"] == "affine"
    assert "convert:" not in answer.err


WRONG: list[tuple[tuple[Any, ...], str, str]] = [
    (("--bits", "7"), "7 bits: affine has 1, 2, 3, 4, 5, 6, 8", ""),
    (("--group-size", "16"), "group size 16: affine has 32, 64, 128", ""),
    (("--mode", "mxfp4", "--bits", "8"), "mxfp4 is 4 bits in groups of 32 and nothing else", ""),
    (("--mode", "int4"), "mode 'int4' is unknown", "affine, mxfp4, nvfp4, mxfp8"),
    (("--dtype", "int8"), "--dtype: 'int8' is unknown", "bf16, f16, f32"),
    (("--check", "maybe"), "--check 'maybe' is unknown", "forward, load, none"),
    (("--rule", "*.q_prj=bits:8"), "'*.q_prj' matches no module", "self_attn.q_proj"),
    (("--rule", "lm_head"), "expected GLOB=SETTING", "--rule 'lm_head=bits:8,group:32'"),
    (("--rotation-seed", "7"), "--rotation-seed without --rotate-weights", "add --rotate-weights"),
    (("--revision", "main"), "--revision main is for hub ids", ""),
]


@pytest.mark.parametrize(("options", "message", "hint"), WRONG, ids=[" ".join(case[0]) for case in WRONG])
def test_wrong_options(
    tqtool: Tqtool, source: Path, tmp_path: Path, options: tuple[str, ...], message: str, hint: str
) -> None:
    answer = tqtool("convert", source, tmp_path / "out", *options)
    assert answer.code == 2
    assert answer.err.startswith("error: ")
    assert message in answer.err
    assert hint in answer.err
    assert "Traceback" not in answer.err
    assert answer.out == ""
    assert not (tmp_path / "out").exists()


def test_missing_and_double_arguments(tqtool: Tqtool, source: Path, tmp_path: Path) -> None:
    assert "SRC is missing" in tqtool("convert").err
    assert "OUT is missing" in tqtool("convert", source).err
    answer = tqtool("convert", source, tmp_path / "a", "--mlx-path", tmp_path / "b")
    assert answer.code == 2
    assert "OUT is given twice, as argument and by --mlx-path" in answer.err


def test_non_empty_output_and_overwrite(tqtool: Tqtool, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ("convert", source, out, "--check", "none")
    assert tqtool(*arguments).code == 0
    refused = tqtool(*arguments, "-q")
    assert refused.code == 2
    assert "is not empty" in refused.err
    assert raw_tensors(out)["model.norm.weight"][0] == "BF16"
    assert tqtool(*arguments, "-q", "--overwrite").code == 0
    assert "model.embed_tokens.scales" in raw_tensors(out)


def test_unknown_architecture(tqtool: Tqtool, source: Path, tmp_path: Path) -> None:
    config = json.loads((source / "config.json").read_bytes())
    (source / "config.json").write_text(json.dumps({**config, "model_type": "perceptron"}))
    answer = tqtool("convert", source, tmp_path / "out", "-q")
    assert answer.code == 2
    assert f"'perceptron' is not known; known: {', '.join(sorted(FAMILIES))}" in answer.err


def test_gemma_cannot_be_rotated(tqtool: Tqtool, source: Path, tmp_path: Path) -> None:
    config = json.loads((source / "config.json").read_bytes())
    (source / "config.json").write_text(json.dumps({**config, "model_type": "gemma3_text"}))
    answer = tqtool("convert", source, tmp_path / "out", "--rotate-weights")
    assert answer.code == 2
    assert "cannot be rotated" in answer.err
    assert "without --rotate-weights" in answer.err


def test_numerical_error_has_its_exit_code(tqtool: Tqtool, tmp_path: Path) -> None:
    import numpy as np

    from tests.support.tiny_models import write_weights

    source = write_tiny(tmp_path / "source")
    tensors = Tiny().tensors()
    tensors["model.layers.0.mlp.down_proj.weight"][0, 0] = np.inf
    write_weights(source, tensors)
    answer = tqtool("convert", source, tmp_path / "out", "-q")
    assert answer.code == 3
    assert "model.layers.0.mlp.down_proj.weight" in answer.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_verify_prints_each_check_and_exits_4(tqtool: Tqtool, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    tqtool("convert", source, out, "-q", "--check", "none")
    (out / "LICENSE").write_text("another\n")
    answer = tqtool("verify", out, "--check", "none")
    assert answer.code == 4
    assert "FAIL files" in answer.out
    assert "ok   tensors" in answer.out
    assert "--   reload" in answer.out
    assert "LICENSE: 8 bytes, the manifest says 15" in answer.out
    assert f"error: {out}: files: LICENSE" in answer.err
    as_json = tqtool("verify", out, "--check", "none", "--json")
    assert as_json.code == 4
    assert json.loads(as_json.out)["is_good"] is False


def test_verify_without_a_manifest(tqtool: Tqtool, source: Path) -> None:
    answer = tqtool("verify", source)
    assert answer.code == 4
    assert "has no tqtool/manifest.json" in answer.err
