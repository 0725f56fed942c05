"""``tqtool codec``: the table, its judgement, and that a broken code is seen."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.support.command import run
from tqtool.mathx import codes


def test_validate_passes_and_prints_every_reference(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = run(capsys, monkeypatch, "codec", "validate", "--blocks", 512)
    assert answer.code == 0, answer.err
    for text in ("mul1, best scale", "QTIP table 2", "distortion bound", "Lloyd-Max", "all figures in range"):
        assert text in answer.out


def test_validate_goes_red_when_a_code_is_off(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: decoders serve the value of the neighbouring state."""
    right = codes.values
    monkeypatch.setattr(codes, "values", lambda code, window: np.roll(right(code, window), 1))
    answer = run(capsys, monkeypatch, "codec", "validate", "--blocks", 32, "--json")
    assert answer.code == 3
    assert "above Lloyd-Max" in answer.err


def test_validate_goes_red_when_the_scale_is_lost(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: a code scale that costs 8 % of the error at k=4."""
    monkeypatch.setitem(codes.CODE_SCALE, 4, 1.01)
    answer = run(capsys, monkeypatch, "codec", "validate", "--blocks", 1024)
    assert answer.code == 3
    assert "code mul1, k=4" in answer.err


def test_info_says_what_can_be_packed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    answer = run(capsys, monkeypatch, "codec", "info", "--json")
    facts = json.loads(answer.out)
    assert facts["packable_codes"] == ["mul1", "1mad", "3inst"]
    assert facts["encoder"] in ("avx512", "avx2", "neon", "scalar")


def test_too_few_blocks_are_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(capsys, monkeypatch, "codec", "validate", "--blocks", 3).code == 2
