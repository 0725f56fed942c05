"""Fixtures of several files."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.reloading import CAN_FORK, Reloader
from tqtool.artifact import reload


@pytest.fixture(scope="session")
def reloader() -> Iterator[Reloader]:
    with Reloader() as started:
        yield started


@pytest.fixture
def reload_by_fork(reloader: Reloader, monkeypatch: pytest.MonkeyPatch) -> None:
    """The artifacts of this test reload in forks of one process, where that can be."""
    if CAN_FORK:
        monkeypatch.setattr(reload, "subprocess", reloader)
