"""SHA-256 beside the work: hashing costs as much as packing, and hashlib releases the interpreter lock."""

from __future__ import annotations

import hashlib
from collections import deque
from concurrent.futures import Executor, Future

DEPTH = 2
"""Pieces waiting to be hashed: bounds the memory, hides a slow moment."""


class BackgroundHash:
    """A SHA-256 that a single-threaded ``executor`` feeds in the order of ``update``.

    Pieces must not change after ``update``; at most ``DEPTH`` of them are alive.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._digest = hashlib.sha256()
        self._waiting: deque[Future[None]] = deque()

    def update(self, piece: memoryview) -> None:
        """Append ``piece``; waits while ``DEPTH`` pieces are not hashed yet."""
        while len(self._waiting) >= DEPTH:
            self._waiting.popleft().result()
        self._waiting.append(self._executor.submit(self._digest.update, piece))

    def hexdigest(self) -> str:
        """The digest of everything so far."""
        while self._waiting:
            self._waiting.popleft().result()
        return self._digest.hexdigest()
