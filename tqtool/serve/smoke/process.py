"""``tqtool serve`` as a process of its own, on a free port."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO

from tqtool.serve.smoke.client import Client

KEY_VARIABLE = "TQTOOL_API_KEY"
START_SECONDS = 1800.0
"""A large model comes from a disk."""
END_SECONDS = 60.0


class NotStarted(Exception):  # noqa: N818 - what it is
    """The server did not get ready; ``code`` is its exit code, None when it hung."""

    def __init__(self, code: int | None, said: str) -> None:
        super().__init__(said)
        self.code = code


class ServerProcess:
    """A running server."""

    def __init__(self, process: subprocess.Popen[bytes], errors: IO[bytes], key: str) -> None:
        self._process = process
        self._errors = errors
        self._key = key
        self.url = ""
        self.client = Client("http://127.0.0.1:0")

    def wait_until_ready(self) -> None:
        """Read the line that the server prints when its first completion has run; NotStarted when none comes."""
        timer = threading.Timer(START_SECONDS, self._process.kill)
        timer.start()
        assert self._process.stdout is not None
        try:
            line = self._process.stdout.readline()
        finally:
            timer.cancel()  # also when a signal ends the wait: a timer that still runs keeps the process alive
        if not line:
            raise NotStarted(self._process.wait(END_SECONDS), self.said())
        self.url = str(json.loads(line)["url"])
        self.client = Client(self.url, self._key)

    def said(self) -> str:
        """What it wrote to stderr."""
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace").strip()

    def end(self) -> int | None:
        """SIGTERM; its exit code, None if it had to be killed."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        """At once, if it still runs."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


@contextmanager
def running(arguments: Sequence[str]) -> Iterator[ServerProcess]:
    """``tqtool serve ARGUMENTS`` with a key of its own.

    Raises:
        NotStarted: it ended before it was ready.
    """
    key = secrets.token_hex(16)
    command = [sys.executable, "-c", "from tqtool.cli.app import main; main()", "serve", *arguments]
    command += ["--host", "127.0.0.1", "--port", "0", "--json", "--grace", "10"]
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, env={**os.environ, KEY_VARIABLE: key}
        )
        server = ServerProcess(process, errors, key)
        try:
            server.wait_until_ready()
            yield server
        finally:
            server.kill()
            if process.stdout is not None:
                process.stdout.close()
