"""``python -m tqtool.artifact.reload`` by fork: what each such process imports first is imported once.

Runs as a script: a line of JSON on stdin (arguments, folder, environment, files for both streams), exit codes
on stdout. It imports and forks and does nothing else: each child starts as a fresh process that has just imported.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

import mlx_lm.utils  # noqa: F401 - what takes the time

from tqtool.artifact import reload


def child(order: dict[str, Any]) -> None:
    """Become the process that was asked for; never returns."""
    code = 1
    try:
        for number, path in ((1, order["stdout"]), (2, order["stderr"])):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.chdir(order["folder"])
        os.environ.clear()
        os.environ.update(order["environment"])
        sys.argv = ["tqtool.artifact.reload", *order["arguments"]]
        code = reload.main()
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    """Serve until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            child(order)
        _, status = os.waitpid(pid, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
