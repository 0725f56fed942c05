"""Multiple choice: the log-likelihood of each continuation, its prefix computed once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tqtool.errors import NumericalError
from tqtool.evals.logits import gather, log_sum_exp, vocabulary_size
from tqtool.evals.prefix import PrefixCache
from tqtool.evals.prompts import ChoicePrompt, Format

if TYPE_CHECKING:
    import mlx.nn as nn

LOGITS = 1 << 26
"""Logits of one batch at most (float32: 268 MB), unless a single choice is longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceOutcome:
    """One item in one format.

    Attributes:
        id: The item's.
        task: The item's.
        format: ``templated`` or ``raw``.
        flags: ``acc``, ``acc_norm``, ``acc_token``: is the answer the choice of highest log-likelihood, log-likelihood
            per UTF-8 byte of the choice, per token.
        logprobs: Of each choice, in nats, summed over its tokens.
        tokens: How many those are.
        merged: Tokens of the prompt that were scored with the choices (see ``ChoicePrompt``).
    """

    id: str
    task: str
    format: Format
    flags: dict[str, bool]
    logprobs: tuple[float, ...]
    tokens: tuple[int, ...]
    merged: int


class ChoiceScorer:
    """Scores prompts with one model."""

    def __init__(self, model: nn.Module, cache: PrefixCache) -> None:
        self._model, self._cache = model, cache
        self.width = vocabulary_size(model)

    def score(self, prompt: ChoicePrompt) -> ChoiceOutcome:
        """The outcome of ``prompt``; NumericalError for logits that are not finite."""
        logprobs = self.logprobs(prompt)
        counts = np.array([len(tokens) for tokens in prompt.continuations])
        sizes = np.array([len(choice.encode()) for choice in prompt.item.choices])
        answer = prompt.item.answer
        return ChoiceOutcome(
            id=prompt.item.id,
            task=prompt.item.task,
            format=prompt.format,
            flags={
                "acc": int(np.argmax(logprobs)) == answer,
                "acc_norm": int(np.argmax(logprobs / sizes)) == answer,
                "acc_token": int(np.argmax(logprobs / counts)) == answer,
            },
            logprobs=tuple(map(float, logprobs)),
            tokens=tuple(map(int, counts)),
            merged=prompt.merged,
        )

    def logprobs(self, prompt: ChoicePrompt) -> NDArray[np.float64]:
        """Log-likelihood of each continuation given the prefix, float64 [choices].

        The prefix but its last token goes through the model once; then each choice is a row that begins with that
        token and leaves out the choice's own last one. Rows that are equal (choices of one token) are one row.
        """
        self._cache.advance(prompt.prefix[:-1])
        rows = [(prompt.prefix[-1], *tokens[:-1]) for tokens in prompt.continuations]
        distinct = list(dict.fromkeys(rows))
        result = np.empty(len(rows))
        for batch in batches(distinct, LOGITS // self.width if self._cache.takes_batches else 1):
            for row, logits in zip(batch, self._logits(prompt, batch), strict=True):
                normalizer = log_sum_exp(logits)
                for index, tokens in enumerate(prompt.continuations):
                    if rows[index] == row:
                        found = gather(logits, np.array(tokens, np.uint32)).astype(np.float64)
                        result[index] = np.sum(found - normalizer)
        return result

    def _logits(self, prompt: ChoicePrompt, rows: Sequence[tuple[int, ...]]) -> list[NDArray[np.float32]]:
        """Float32 [length, vocabulary] of each row; padding on the right cannot be seen by what stands before it."""
        import mlx.core as mx

        longest = max(map(len, rows))
        padded = [row + (0,) * (longest - len(row)) for row in rows]
        logits = self._model(mx.array(padded), cache=self._cache.copies(len(rows))).astype(mx.float32)
        values = np.array(logits)
        pieces = [values[index, : len(row)] for index, row in enumerate(rows)]
        if not all(np.isfinite(piece).all() for piece in pieces):
            raise NumericalError(f"item {prompt.item.id!r}, {prompt.format}: the model's logits are not finite")
        return pieces


def batches(rows: Sequence[tuple[int, ...]], positions: int) -> list[list[tuple[int, ...]]]:
    """``rows`` in order, cut so that a padded batch has at most ``positions`` positions, or a single row."""
    result: list[list[tuple[int, ...]]] = []
    for row in rows:
        if result and (len(result[-1]) + 1) * max(map(len, [*result[-1], row])) <= positions:
            result[-1].append(row)
        else:
            result.append([row])
    return result
