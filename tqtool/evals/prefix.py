"""What prompts share is computed once: mlx-lm's cache of the last one, cut back to what the next one keeps."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tqtool.evals.prompts import shared_length
from tqtool.kv.scheme import FULL_CACHE, KVOptions

if TYPE_CHECKING:
    import mlx.nn as nn

STEP = 512
"""Tokens of a prompt per forward pass; bounds the memory of attention."""


class PrefixCache:
    """Holds the model's state after some tokens.

    A next prompt that begins with the same tokens (few-shot examples, a system message) only costs its own part, if
    the model's caches can be trimmed; recurrent ones and full sliding windows cannot, and start again.
    """

    def __init__(self, model: nn.Module, kv: KVOptions = FULL_CACHE) -> None:
        """Caches of ``model`` as ``kv`` says."""
        self._model, self._kv = model, kv
        self._tokens: tuple[int, ...] = ()
        self._cache: list[Any] | None = None
        self.computed = 0
        """Tokens run through the model so far."""

    def advance(self, tokens: Sequence[int]) -> None:
        """Hold the state after ``tokens``, which may be none."""
        import mlx.core as mx
        from mlx_lm.models.cache import can_trim_prompt_cache, trim_prompt_cache

        from tqtool.kv.cache import make_caches

        kept = shared_length([self._tokens, tokens])
        surplus = len(self._tokens) - kept
        can_trim = self._cache is not None and can_trim_prompt_cache(self._cache)
        is_packed_below_start = kept < self._kv.start <= len(self._tokens)  # those tokens would have stayed floats
        if self._cache is None or (surplus and not can_trim) or not kept or is_packed_below_start:
            self._cache, kept = make_caches(self._model, self._kv.scheme, start=self._kv.start), 0
        elif surplus:
            trim_prompt_cache(self._cache, surplus)
        self._tokens = ()  # until it is true again: a run that is interrupted must not leave a wrong claim
        for start in range(kept, len(tokens), STEP):
            self._model(mx.array([tokens[start : start + STEP]]), cache=self._cache)
            mx.eval([layer.state for layer in self._cache])  # the logits are lazy and never computed
        self.computed += len(tokens) - kept
        self._tokens = tuple(tokens)

    @property
    def takes_batches(self) -> bool:
        """Whether ``copies`` gives more than one row: quantized caches hold one sequence."""
        return self._kv.scheme is None or self._kv.scheme.is_batchable

    def copies(self, rows: int) -> list[Any]:
        """A cache of its own to go on from, the state repeated for a batch of ``rows``."""
        import mlx.core as mx
        from mlx.utils import tree_map

        def repeat(value: Any) -> Any:
            return mx.repeat(value, rows, axis=0) if isinstance(value, mx.array) else value

        cache = copy.deepcopy(self._cache)
        assert cache is not None, "advance() comes first"
        if rows > 1 and self._tokens:
            for layer in cache:
                layer.state = tree_map(repeat, layer.state)
        return cache
