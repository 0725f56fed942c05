"""Attention sinks: the few positions every head falls back on, with activations hundreds of times the usual size.

Sun et al., "Massive Activations in Large Language Models" (arXiv 2402.17762): such rows arise at the first token and at
a few delimiters. In a mean over 512 positions they weigh nothing, while what the model computes at them feeds every
other position; a solver that minimizes the mean sacrifices them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

RATIO = 4.0
"""A row is a sink when its norm exceeds this many times the median row's. In SmolLM2-135M the sinks of a text lie at 5
to 165 times and nothing else beyond 2.7. Norms, not largest magnitudes: a rotation spreads the latter."""


def sink_rows(entering: NDArray[np.float32], leaving: NDArray[np.float32], *, ratio: float) -> NDArray[np.bool_]:
    """Sinks of one sequence in one layer, ``[T]``: the first position, and what is massive before or after the layer.

    Args:
        entering: Hidden state ``[T, hidden]`` before the layer.
        leaving: After it.
        ratio: See ``RATIO``.
    """
    sinks = np.zeros(len(entering), bool)
    sinks[0] = True
    for hidden in (entering, leaving):
        norms = np.linalg.norm(hidden, axis=1)
        sinks |= norms > ratio * np.median(norms)
    return sinks
