"""Caches of prompts that came before, for prompts that begin like them.

Exact: a prompt is always fed in chunks of one fixed size counted from its first token, and a cache is stored and taken
up only at a border between chunks. What a request computes after such a border, and from what, is then the same as
without the store, to the bit; only whole chunks of a prompt are shared, never an answer, whose tokens were computed one
at a time.
"""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any


class PrefixStore:
    """Least recently used prompt caches under a bound in bytes.

    Args:
        chunk: Tokens per chunk.
        max_bytes: Of all entries together; 0 stores nothing.
    """

    def __init__(self, chunk: int, max_bytes: int) -> None:
        self.chunk = chunk
        self.max_bytes = max_bytes
        self.nbytes = 0
        self._entries: OrderedDict[tuple[int, ...], tuple[list[Any], int]] = OrderedDict()
        self._lock = threading.Lock()  # metrics read from another thread

    def __len__(self) -> int:
        return len(self._entries)

    def border(self, prompt: Sequence[int]) -> int:
        """The last border that a prompt can share: at least its last token is always computed."""
        return (len(prompt) - 1) // self.chunk * self.chunk

    def take(self, prompt: Sequence[int]) -> tuple[list[Any] | None, int]:
        """A copy of the longest useful cache and how many tokens of ``prompt`` it holds; (None, 0) if there is none."""
        border = self.border(prompt)
        best, best_length = None, 0
        for tokens, (cache, _) in self._entries.items():
            shared = _shared(tokens, prompt[:border]) // self.chunk * self.chunk
            if shared > best_length and (shared == len(tokens) or _can_trim(cache)):
                best, best_length = tokens, shared
        if best is None:
            return None, 0
        with self._lock:
            self._entries.move_to_end(best)
        cache = copy.deepcopy(self._entries[best][0])  # arrays are shared until one side writes
        if len(best) > best_length:
            for layer in cache:
                layer.trim(len(best) - best_length)
        return cache, best_length

    def put(self, tokens: Sequence[int], cache: list[Any]) -> None:
        """Keep a copy of ``cache``, which holds exactly ``tokens``; a whole number of chunks."""
        key = tuple(tokens)
        nbytes = sum(layer.nbytes for layer in cache)
        if not key or nbytes > self.max_bytes or key in self._entries:
            return
        with self._lock:
            if _can_trim(cache):
                # A shorter one of the same beginning can be cut out of this one.
                for shorter in [entry for entry in self._entries if entry == key[: len(entry)]]:
                    self.nbytes -= self._entries.pop(shorter)[1]
            self._entries[key] = (copy.deepcopy(cache), nbytes)
            self.nbytes += nbytes
            while self.nbytes > self.max_bytes:
                _, (_, freed) = self._entries.popitem(last=False)
                self.nbytes -= freed


def _can_trim(cache: list[Any]) -> bool:
    return all(layer.is_trimmable() for layer in cache)


def _shared(first: Sequence[int], second: Sequence[int]) -> int:
    limit = min(len(first), len(second))
    return next((at for at in range(limit) if first[at] != second[at]), limit)
