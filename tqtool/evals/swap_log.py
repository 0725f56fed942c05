"""What an interrupted sensitivity run has measured: a file that grows by one sealed line a swap.

A line is written and synced at once, so a run that is killed loses the swap in hand; half a last line is cut off.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from tqtool.errors import ArtifactError
from tqtool.formats.sensitivity import Value

Swap = tuple[int, int]
"""Index of the group, bits."""


class SwapLog:
    """Measured swaps of one run; ``values`` holds those of earlier attempts too."""

    def __init__(self, file: IO[bytes], path: Path, key: str) -> None:
        """Read what ``file`` holds; ArtifactError if it is damaged or of another run."""
        self.values: dict[Swap, Value] = {}
        self._file, self._key = file, key
        data = file.read()
        whole = data.rfind(b"\n") + 1
        lines = data[:whole].splitlines()
        try:
            if lines and json.loads(lines[0]) != {"key": key}:
                raise ArtifactError(f"{path}: of another measurement", hint="remove it, or choose another OUT")
            for line in lines[1:]:
                self._take(json.loads(line))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ArtifactError(f"{path}: damaged ({error})", hint="remove it and measure again") from error
        file.seek(whole)
        file.truncate()
        if not lines:
            self._append({"key": key})

    def add(self, swap: Swap, value: Value) -> None:
        """Keep ``value``: on disk when this returns."""
        self.values[swap] = value
        body: dict[str, Any] = {"swap": list(swap), **value.model_dump()}
        self._append({**body, "seal": self._seal(body)})

    def _take(self, entry: dict[str, Any]) -> None:
        seal = entry.pop("seal")
        if seal != self._seal(entry):
            raise ValueError("a line was edited")
        group, bits = entry.pop("swap")
        self.values[group, bits] = Value.model_validate(entry)

    def _seal(self, body: dict[str, Any]) -> str:
        return hashlib.sha256((self._key + json.dumps(body)).encode()).hexdigest()

    def _append(self, entry: dict[str, Any]) -> None:
        self._file.write(json.dumps(entry).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())


def log_path(out: Path) -> Path:
    """The log of the measurement ``out``."""
    return out.with_name(f"{out.name}.progress")


@contextmanager
def open_log(path: Path, key: str) -> Iterator[SwapLog]:
    """The log at ``path``, made if there is none, held against other runs; one without a swap does not stay.

    Raises:
        ArtifactError: it is damaged, of another run, in use, or cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(path, os.O_CREAT | os.O_RDWR, 0o666), "r+b") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ArtifactError(f"{path}: another run is measuring into it", hint="wait for it") from error
            log = SwapLog(file, path, key)
            try:
                yield log
            finally:
                if not log.values:  # nothing to resume
                    path.unlink(missing_ok=True)
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be written ({error.strerror or error})") from error
