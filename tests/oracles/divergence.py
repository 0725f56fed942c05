"""KL divergence and perplexity over a whole vocabulary, in float64 numpy: the judge of tqtool.evals."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def log_softmax(logits: NDArray[np.floating]) -> NDArray[np.float64]:
    x = logits.astype(np.float64)
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def kl(teacher: NDArray[np.floating], model: NDArray[np.floating]) -> NDArray[np.float64]:
    """KL(teacher ‖ model) per position of logits [..., V]."""
    p, q = log_softmax(teacher), log_softmax(model)
    return (np.exp(p) * (p - q)).sum(axis=-1)


def merged_kl(teacher: NDArray[np.floating], model: NDArray[np.floating], keep: int) -> NDArray[np.float64]:
    """The same after everything but the teacher's ``keep`` highest ids became one outcome."""
    p, q = np.exp(log_softmax(teacher)), np.exp(log_softmax(model))
    order = np.argsort(-teacher, axis=-1, kind="stable")
    p, q = np.take_along_axis(p, order, axis=-1), np.take_along_axis(q, order, axis=-1)
    p = np.concatenate([p[..., :keep], p[..., keep:].sum(axis=-1, keepdims=True)], axis=-1)
    q = np.concatenate([q[..., :keep], q[..., keep:].sum(axis=-1, keepdims=True)], axis=-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = p * np.log(p / q)
    return np.where(p > 0, terms, 0.0).sum(axis=-1)


def nll(logits: NDArray[np.floating], targets: NDArray[np.integer]) -> NDArray[np.float64]:
    """Negative log-likelihood of ``targets`` [...] under logits [..., V]."""
    return -np.take_along_axis(log_softmax(logits), targets[..., None].astype(np.int64), axis=-1)[..., 0]
