"""What a shell sees when something is wrong that no other test file owns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.command import run
from tests.support.tiny_models import Tiny, write_tiny


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
