"""The command line in this process: what a shell would see."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import pytest

from tqtool.cli.app import main


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Exit code and the two streams."""

    code: int
    out: str
    err: str


def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: Any) -> Answer:
    """``tqtool ARGUMENTS…``."""
    monkeypatch.setattr(sys, "argv", ["tqtool", *map(str, arguments)])
    capsys.readouterr()
    try:
        main()
        code = 0
    except SystemExit as exit_:
        code = int(exit_.code or 0)
    captured = capsys.readouterr()
    return Answer(code=code, out=captured.out, err=captured.err)
