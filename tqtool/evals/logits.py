"""Logits of whole windows, and sums over the vocabulary in float64.

The sums are numpy's: on the CPU, MLX takes ten times as long for the same exponentials.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tqtool.errors import NumericalError, UserError
from tqtool.kv.scheme import FULL_CACHE, KVOptions

if TYPE_CHECKING:
    import mlx.core as mx
    import mlx.nn as nn

ROWS = 32
"""Positions per step: 32 rows of a 150k vocabulary in float64 are 40 MB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """log Σ exp per position, float64 [P]: over all ids, and over the ids that are not in a given set."""

    all: NDArray[np.float64]
    tail: NDArray[np.float64]


def window_logits(
    model: nn.Module, windows: Iterable[NDArray[np.uint32]], kv: KVOptions = FULL_CACHE
) -> Iterator[NDArray[np.float32]]:
    """Yield float32 [C - 1, vocabulary] for each window of C tokens; memory for two windows.

    With a quantized KV cache each token sees what it would in decoding, its own packed key and value included: a
    token's bytes do not depend on others.

    The next window is already computing while the caller works on the one that was yielded.

    Raises:
        UserError: a token that the model does not have: its tokenizer is of another model.
        NumericalError: a logit is not finite.
    """
    import mlx.core as mx

    width = vocabulary_size(model)

    def logits_of(tokens: NDArray[np.uint32]) -> Any:
        if tokens.max() >= width:  # MLX would read outside the embedding
            message = f"token {tokens.max()}, the model has {width}"
            raise UserError(message, hint="the tokenizer is of another model; copy the right one there")
        read = mx.array(tokens[None, :-1])
        if kv.scheme is None:
            return model(read)
        from tqtool.kv.cache import make_caches

        caches = make_caches(model, kv.scheme, start=kv.start)
        pieces = [piece for piece in (read[:, : kv.start], read[:, kv.start :]) if piece.size]
        return mx.concatenate([model(piece, cache=caches) for piece in pieces], axis=1)

    yield from computed(logits_of(tokens) for tokens in windows)


def computed(windows: Iterable[mx.array]) -> Iterator[NDArray[np.float32]]:
    """Yield float32 [P, vocabulary] for each window's logits [1, P, vocabulary], which come unevaluated.

    The next window is already computing while the caller works on the one that was yielded.

    Raises:
        NumericalError: a logit is not finite.
    """
    import mlx.core as mx

    pending = None
    index = 0
    for logits in windows:
        following = logits[0].astype(mx.float32)
        mx.async_eval(following)  # type: ignore[no-untyped-call]
        if pending is not None:
            yield _to_numpy(pending, index)
            index += 1
        pending = following
    if pending is not None:
        yield _to_numpy(pending, index)


def vocabulary_size(model: nn.Module) -> int:
    """Width of the logits; MLX is lazy, so nothing is computed to know it."""
    import mlx.core as mx

    return int(model(mx.array([[0]])).shape[-1])


def _to_numpy(logits: Any, index: int) -> NDArray[np.float32]:
    values = np.array(logits, copy=False)
    bad = np.count_nonzero(~np.isfinite(values.max(axis=1) - values.min(axis=1)))
    if bad:
        raise NumericalError(f"window {index}: {bad} of {len(values)} positions have logits that are not finite")
    return values


def vocabulary_sums(logits: NDArray[np.float32], ids: NDArray[np.uint32]) -> Sums:
    """Sums for ``logits`` [P, V]; the tail leaves out ``ids`` [P, K] and is -inf where nothing is left."""
    everything = np.empty(len(logits))
    tail = np.empty(len(logits))
    for start in range(0, len(logits), ROWS):
        rows = slice(start, start + ROWS)
        values = logits[rows].astype(np.float64)
        top = values.max(axis=1, keepdims=True)
        np.exp(np.subtract(values, top, out=values), out=values)
        everything[rows] = np.log(values.sum(axis=1)) + top[:, 0]
        np.put_along_axis(values, ids[rows].astype(np.int64), 0.0, axis=1)
        with np.errstate(divide="ignore"):
            tail[rows] = np.log(values.sum(axis=1)) + top[:, 0]
    return Sums(all=everything, tail=tail)


def log_sum_exp(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Log-sum-exp over the vocabulary, float64 [P]."""
    return vocabulary_sums(logits, np.empty((len(logits), 0), np.uint32)).all


def top_ids(logits: NDArray[np.float32], count: int) -> NDArray[np.uint32]:
    """The ``count`` highest ids of each position [P, count], by falling logit, equal logits by rising id."""
    chosen = np.empty((len(logits), count), np.int64)
    for start in range(0, len(logits), ROWS):
        rows = logits[start : start + ROWS]
        if count < rows.shape[1]:
            part = np.sort(np.argpartition(rows, -count, axis=1)[:, -count:], axis=1)
        else:
            part = np.broadcast_to(np.arange(count), rows.shape)
        order = np.argsort(-np.take_along_axis(rows, part, axis=1), axis=1, kind="stable")
        chosen[start : start + ROWS] = np.take_along_axis(part, order, axis=1)
    return chosen.astype(np.uint32)


def gather(logits: NDArray[np.float32], ids: NDArray[np.uint32]) -> NDArray[np.float32]:
    """Logits of ``ids`` [P, K] or [P]."""
    index = ids.astype(np.int64)
    if index.ndim == 1:
        return np.take_along_axis(logits, index[:, None], axis=1)[:, 0]
    return np.take_along_axis(logits, index, axis=1)
