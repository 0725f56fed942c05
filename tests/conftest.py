"""Before any test module imports mlx: on a Linux CPU its products then run through a real BLAS."""

from __future__ import annotations

import os
import signal

from tqtool.runtime.blas import ensure_blas

ensure_blas()

# A shell's background job ignores Ctrl-C, and so would the commands that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


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
