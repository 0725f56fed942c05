"""Before any test module imports mlx: on a Linux CPU its products then run through a real BLAS."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tqtool.runtime.blas import ensure_blas

ensure_blas()

# A shell's background job ignores Ctrl-C, and so would the commands that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def children_find_no_torch() -> Iterator[None]:
    """Processes that tests start find no torch: see ``support/children``. A fixture, as xdist's workers do need it."""
    paths = [str(Path(__file__).parent / "support" / "children"), os.environ.get("PYTHONPATH", "")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
        yield


def pytest_sessionfinish(session, exitstatus):
    """TQ_MAX_SKIPS: more skipped tests than that is a failure, so that a lost dependency cannot hide a tier."""
    limit = os.environ.get("TQ_MAX_SKIPS")
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if limit is None or reporter is None or exitstatus != 0:
        return
    skipped = len(reporter.stats.get("skipped", []))
    if skipped > int(limit):
        reporter.write_line(f"{skipped} tests were skipped, at most {limit} may be (TQ_MAX_SKIPS)", red=True)
        session.exitstatus = 1
