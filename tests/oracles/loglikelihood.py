"""Log-likelihood of a continuation from whole-sequence logits, float64, one sequence at a time and no cache."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.oracles.decoder import Weights, forward


def continuation_loglikelihood(
    weights: Weights, config: dict[str, Any], prefix: list[int], continuation: list[int]
) -> float:
    """Σ log p(token | everything before it) over the tokens of ``continuation``, in nats."""
    tokens = np.array([*prefix, *continuation])
    logits = forward(weights, config, tokens)
    total = 0.0
    for position in range(len(prefix), len(tokens)):
        row = logits[position - 1]
        total += row[tokens[position]] - row.max() - np.log(np.sum(np.exp(row - row.max())))
    return float(total)


def greedy(weights: Weights, config: dict[str, Any], prompt: list[int], count: int) -> list[int]:
    """``count`` tokens, each the likeliest after all before it."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(np.argmax(forward(weights, config, np.array(tokens))[-1])))
    return tokens[len(prompt) :]
