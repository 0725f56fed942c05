"""Artifacts reload in forks of one process that has imported mlx-lm: see ``reload_server``.

For tests that make many artifacts on the way to what they prove. That a process of its own reloads them is proved where
nothing stands in between: tests/e2e/test_verify.py, tests/unit/test_reload.py, and each command that a test starts.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import mlx.core as mx

SERVER = Path(__file__).with_name("reload_server.py")
COMMAND = [sys.executable, "-P", "-m", "tqtool.artifact.reload"]
CAN_FORK = sys.platform == "linux" and mx.default_device().type == mx.cpu
"""A GPU's runtime does not survive a fork."""


class Reloader:
    """Stands where ``subprocess`` stands in ``tqtool.artifact.reload``; the process starts with the first call."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Reloader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.communicate()

    def run(
        self, command: Sequence[str], *, env: Mapping[str, str], **streams: Any
    ) -> subprocess.CompletedProcess[str]:
        """What ``subprocess.run`` returns."""
        assert list(command[: len(COMMAND)]) == COMMAND
        assert streams == {"capture_output": True, "text": True, "errors": "replace", "check": False}
        with tempfile.TemporaryDirectory() as folder:
            files = {name: str(Path(folder) / name) for name in ("stdout", "stderr")}
            order = {"arguments": command[len(COMMAND) :], "folder": str(Path.cwd()), **files}
            order["environment"] = dict(env)
            code = self._ask(json.dumps(order))
            told = {name: Path(path).read_text(errors="replace") for name, path in files.items()}
        return subprocess.CompletedProcess(list(command), code, **told)

    def _ask(self, order: str) -> int:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(SERVER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(order + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())
