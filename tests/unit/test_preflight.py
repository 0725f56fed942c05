"""Estimates of disk and memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tqtool.errors import ArtifactError
from tqtool.pipeline import preflight
from tqtool.pipeline.preflight import affordable_depth, memory_note, readable_bytes, require_disk


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (75_700_000, "75.7 MB"), (5.4e9, "5.40 GB")]
)
def test_readable_bytes(count: float, text: str) -> None:
    assert readable_bytes(count) == text


def test_disk(tmp_path: Path) -> None:
    require_disk(tmp_path, 1)
    with pytest.raises(ArtifactError, match=r"needs 1000000\.00 GB, .* are free") as caught:
        require_disk(tmp_path, 10**15)
    assert caught.value.exit_code == 4


def test_memory_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "available_memory_bytes", lambda: 10**9)
    assert memory_note(10**9) is None
    assert memory_note(2 * 10**9) == "the job needs about 2.00 GB of memory, 1.00 GB are available"
    monkeypatch.setattr(preflight, "available_memory_bytes", lambda: None)
    assert memory_note(10**18) is None


def test_a_forward_that_does_not_fit_becomes_a_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "available_memory_bytes", lambda: 4 * 10**9)
    assert affordable_depth("forward", 10**9) == ("forward", None)
    depth, reason = affordable_depth("forward", 5 * 10**9)
    assert depth == "load"
    assert "needs about 5.00 GB of memory, 4.00 GB are available" in (reason or "")
    assert affordable_depth("none", 5 * 10**9) == ("none", None)


def test_available_memory_is_known_here() -> None:
    available = preflight.available_memory_bytes()
    assert available is None or available > 1 << 20
