"""``tqtool import-gguf`` as a shell sees it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.command import Answer, run
from tests.support.tiny_gguf import TinyGguf, write_gguf

Tqtool = Callable[..., Answer]
CASE = TinyGguf(settings={"num_hidden_layers": 1})


@pytest.fixture
def tqtool(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Tqtool:
    return lambda *arguments: run(capsys, monkeypatch, *arguments)


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    write_gguf(path, CASE, CASE.model())
    return path


def test_writes_a_folder_that_convert_takes(tqtool: Tqtool, gguf: Path, tmp_path: Path) -> None:
    answer = tqtool("import-gguf", gguf, tmp_path / "out")
    assert answer.code == 0, answer.err
    assert answer.out.splitlines()[-1] == str(tmp_path / "out")
    assert "unpermute q heads: 1 tensors" in answer.out
    assert "import: 100%" in answer.err
    assert tqtool("convert", tmp_path / "out", tmp_path / "q", "-q", "--check", "load").code == 0


def test_dry_run_writes_nothing(tqtool: Tqtool, gguf: Path, tmp_path: Path) -> None:
    answer = tqtool("import-gguf", gguf, tmp_path / "out", "--dry-run")
    assert answer.code == 0
    assert answer.out.startswith("would write")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("dtype", "stored", "size"), [("bf16", "BF16", 2), ("f16", "F16", 2), ("f32", "F32", 4)])
def test_json_and_dtypes(tqtool: Tqtool, gguf: Path, tmp_path: Path, dtype: str, stored: str, size: int) -> None:
    answer = tqtool("import-gguf", gguf, tmp_path / "out", "--dtype", dtype, "--json")
    facts = json.loads(answer.out)
    assert answer.err == ""
    assert (facts["dtype"], facts["weight_bytes"], facts["written"]) == (stored, size * facts["parameters"], True)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["torch_dtype"] == {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}[dtype]


def test_truncated_file(tqtool: Tqtool, gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(gguf.read_bytes()[:-5000])
    answer = tqtool("import-gguf", tmp_path / "m.gguf", tmp_path / "out")
    assert answer.code == 2
    assert answer.err.startswith(f"error: {tmp_path / 'm.gguf'}: truncated; tensor ")
    assert "hint: download the file again" in answer.err
    assert not (tmp_path / "out").exists()


def test_output_not_empty(tqtool: Tqtool, gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "x").write_text("mine")
    answer = tqtool("import-gguf", gguf, tmp_path)
    assert answer.code == 2
    assert "is not empty" in answer.err


def test_convert_points_here(tqtool: Tqtool, gguf: Path, tmp_path: Path) -> None:
    answer = tqtool("convert", gguf, tmp_path / "out")
    assert answer.code == 2
    assert f"hint: tqtool import-gguf {gguf} OUT" in answer.err
