"""What a shell sees when something is wrong that no other test file owns."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest

from tests.support.command import run
from tests.support.tiny_models import Tiny, write_tiny, write_weights


@pytest.mark.parametrize("notes", [5, [{"id": "x", "seed": "many"}], [{"id": "x", "deviations": 5}], [{}], ["x"]])
def test_a_malformed_note_of_transforms_is_refused_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, notes: object
) -> None:
    source = write_tiny(tmp_path / "source")
    (source / "optiq_metadata.json").write_text(json.dumps({"weight_transforms": notes}))
    answer = run(capsys, monkeypatch, "convert", source, tmp_path / "out", "-q", "--check", "none")
    assert answer.code == 2
    assert "optiq_metadata.json: weight_transforms: expected a list" in answer.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_text_that_no_file_can_hold_is_refused_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_tiny(tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"note": "\ud800"}))
    answer = run(capsys, monkeypatch, "convert", source, tmp_path / "out", "-q", "--check", "none")
    assert answer.code == 2
    assert "config.json: holds text that is not valid Unicode" in answer.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_a_bug_of_ours_is_one_line_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tqtool.pipeline import convert

    def broken(request: object) -> None:
        raise KeyError("planted")

    monkeypatch.setattr(convert, "plan_convert", broken)
    answer = run(capsys, monkeypatch, "convert", tmp_path / "a", tmp_path / "b")
    assert answer.code == 1
    assert answer.err.startswith("error: internal error: KeyError: 'planted'\nhint: ")
    with pytest.raises(KeyError):
        run(capsys, monkeypatch, "convert", tmp_path / "a", tmp_path / "b", "--traceback")


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer.json", "tokenizer_config.json"])
def test_a_companion_that_is_no_json_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    source = write_tiny(tmp_path / "source")
    (source / name).write_text("{")
    answer = run(capsys, monkeypatch, "convert", source, tmp_path / "out", "-q", "--check", "none")
    assert answer.code == 2
    assert f"{name}: expected JSON" in answer.err
    assert not (tmp_path / "out").exists()


def test_a_large_json_file_is_only_looked_at(tmp_path: Path) -> None:
    from tqtool.errors import SourceError
    from tqtool.source.checks import PARSED_BYTES, require_json

    path = tmp_path / "tokenizer.json"
    path.write_text('{"a": "' + "x" * PARSED_BYTES + '"}\n')
    require_json([path])
    path.write_text('{"a": "' + "x" * PARSED_BYTES)
    with pytest.raises(SourceError, match="truncated"):
        require_json([path])


def test_a_head_that_a_tied_model_does_not_use_is_left_out_aloud(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_tiny(tmp_path / "source", Tiny(tied=False))
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    answer = run(capsys, monkeypatch, "convert", source, tmp_path / "out", "-q", "--check", "none")
    assert answer.code == 0
    assert "note: left out: lm_head.weight (" in answer.err


@pytest.mark.parametrize(("number", "word"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "terminated")])
def test_a_signal_is_answered_and_nothing_is_left(tmp_path: Path, number: signal.Signals, word: str) -> None:
    source = write_tiny(tmp_path / "source", Tiny(hidden=512, intermediate=2048, layers=8))
    command = [
        Path(sys.executable).with_name("tqtool"),
        "trellis",
        source,
        tmp_path / "out",
        "--modules",
        "all",
        "-L",
        "16",
    ]
    with subprocess.Popen([*map(str, command)], stderr=subprocess.PIPE, text=True) as process:
        while not list(tmp_path.glob(".out*")):
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.02)
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert f"{word}; nothing was left under the final name" in err
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(
    ("verb", "kept"),
    [
        ("trellis", "; nothing was left"),
        ("calibrate", "; --resume goes on"),
        ("upload", "; what was sent stays on the hub, not yet loadable"),
        ("bench", "\n"),
    ],
)
def test_a_signal_says_what_is_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, verb: str, kept: str
) -> None:
    from tqtool.cli import app

    monkeypatch.setattr(sys, "argv", ["tqtool", verb])
    monkeypatch.setattr(app.signal, "signal", lambda number, handler: None)
    with pytest.raises(SystemExit) as stopped:
        app._stop(signal.SIGTERM, None)
    assert stopped.value.code == 143
    assert f"terminated{kept}" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    answer = run(capsys, monkeypatch, "--version")
    assert (answer.code, answer.out) == (0, f"tqtool {version('tqtool')}\n")


@pytest.mark.parametrize("verb", ["convert", "trellis"])
def test_a_value_that_is_not_finite_is_found_before_the_work(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, verb: str
) -> None:
    """In the last tensor of all; and no tensor may be folded or encoded before it was seen."""
    tiny = Tiny()
    source = write_tiny(tmp_path / "source", tiny)
    tensors = tiny.tensors()
    tensors["model.norm.weight"][7] = np.nan
    write_weights(source, tensors)
    monkeypatch.setattr("tqtool.pipeline.job.execute", lambda *arguments: pytest.fail("work began"))
    answer = run(capsys, monkeypatch, verb, source, tmp_path / "out")
    assert answer.code == 3
    assert "model.norm.weight: 1 of 128 values are inf or NaN, the first at [7]" in answer.err


def test_modules_that_stay_dense_are_counted_and_all_of_them_is_an_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = write_tiny(tmp_path / "source", Tiny(intermediate=200))
    answer = run(capsys, monkeypatch, "convert", source, tmp_path / "a", "-q", "--check", "none")
    assert answer.code == 0
    assert "note: 2 modules kept dense: input dimension 200 is not divisible by group size 64" in answer.err
    assert "- 4-bit" in (tmp_path / "a" / "README.md").read_text()
    odd = write_tiny(tmp_path / "odd", Tiny(hidden=120, intermediate=200, heads=4, head_dim=30))
    answer = run(capsys, monkeypatch, "convert", odd, tmp_path / "b", "-q", "--check", "none")
    assert answer.code == 2
    assert "no module would be packed: 13 modules kept dense: input dimension 120" in answer.err
    wide = ("--rule", "*proj=float", "--check", "none")
    assert run(capsys, monkeypatch, "convert", source, tmp_path / "c", "-q", *wide).code == 0
    assert "-bit" not in (tmp_path / "c" / "README.md").read_text()


def test_float64_is_stated_as_what_is_stored(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tiny = Tiny()
    source = write_tiny(tmp_path / "source", tiny)
    write_weights(source, {name: tensor.astype(np.float64) for name, tensor in tiny.tensors().items()})
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"torch_dtype": "float64"}))
    assert run(capsys, monkeypatch, "convert", source, tmp_path / "out", "--check", "none").code == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "float32"


def test_a_bad_seed_is_no_reason_to_leave_the_rotation_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    answer = run(
        capsys, monkeypatch, "trellis", write_tiny(tmp_path / "source"), tmp_path / "out", "--rotation-seed", -1
    )
    assert answer.code == 2
    assert "rotation seed -1: expected 0" in answer.err
    assert "--no-rotate-weights" not in answer.err


def test_a_closed_path_is_a_line_and_exit_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Tests may run as root, to whom nothing is closed: the system's answer is put in its place."""

    def closed(folder: Path) -> None:
        raise PermissionError(13, "Permission denied", str(folder / "model.safetensors.index.json"))

    monkeypatch.setattr("tqtool.source.checkpoint.find_weights", closed)
    source = write_tiny(tmp_path / "source")
    for verb in (("inspect", source), ("convert", source, tmp_path / "out", "-q", "--dry-run")):
        answer = run(capsys, monkeypatch, *verb)
        assert answer.code == 2
        assert answer.err.startswith(f"error: {source}/model.safetensors.index.json: Permission denied\nhint: ")


def test_verify_of_nothing_is_a_mistake_of_the_user(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    answer = run(capsys, monkeypatch, "verify", tmp_path / "nothing")
    assert (answer.code, "no such folder" in answer.err) == (2, True)


def test_a_config_that_no_loader_can_use_is_refused_before_the_work(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = write_tiny(tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"rms_norm_eps": "x"}))
    answer = run(capsys, monkeypatch, "trellis", source, tmp_path / "out", "--dry-run")
    assert (answer.code, "field 'rms_norm_eps': expected a number, found 'x'" in answer.err) == (2, True)
    (source / "config.json").write_text(json.dumps(config), encoding="utf-16")
    answer = run(capsys, monkeypatch, "convert", source, tmp_path / "out", "--dry-run")
    assert (answer.code, "config.json: not JSON" in answer.err) == (2, True)


def test_a_rotated_tied_model_is_rated_over_its_source(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The untied head is no free parameter: line, card and manifest say what the file weighs per source weight."""
    tiny = Tiny(tied=True)
    source = write_tiny(tmp_path / "source", tiny)
    arguments = ("convert", source, tmp_path / "out", "-q", "--rotate-weights", "--check", "none")
    answer = run(capsys, monkeypatch, *arguments)
    weights = sum(tensor.size for tensor in tiny.tensors().values())
    totals = json.loads((tmp_path / "out" / "tqtool" / "manifest.json").read_text())["totals"]
    rate = 8 * totals["tensor_bytes"] / weights
    assert f"{rate:.3f} bits per weight" in answer.out
    card = (tmp_path / "out" / "README.md").read_text()
    rate_of_files = 8 * (tmp_path / "out" / "model.safetensors").stat().st_size / weights
    assert f"| bits per weight | {rate_of_files:.3f}: " in card
    assert f"affine {rate_of_files:.2f} bits" in card


def test_the_page_of_the_command_line_lists_the_codes_of_signals() -> None:
    page = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
    for number, name in ((signal.SIGINT, "interrupted (SIGINT)"), (signal.SIGTERM, "terminated (SIGTERM)")):
        assert f"{128 + number} {name}" in page
