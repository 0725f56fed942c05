"""What an encoder is asked for, and when its float32 costs are exact: values, no device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from tqtool.errors import BackendError
from tqtool.formats.trellis import BLOCK

LEVEL_LIMIT = 560
"""Inputs are clipped to ± this many level units (kMaxAbsX of kernels/cpu)."""
EXACT = 1 << 24
"""Whole numbers up to here are float32 numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeProblem:
    """Search for the best tail-biting paths of blocks of 256 steps.

    Attributes:
        k: Bits per step.
        window: L, state bits.
        warmup: Steps on each side of the seam in the first pass; 128 is QTIP's Algorithm 4.
        blocks: How many.
        lowest: Of the levels of all states.
        highest: Of the levels of all states.
        dearest: The most that a step can cost with the best of the states that end in one suffix, and 560² - x² more;
            see ``dearest_step``. None if the levels are not at hand: then the dearest of all states counts.

    Raises:
        BackendError: no trellis has these numbers.
    """

    k: int
    window: int
    warmup: int = BLOCK // 2
    blocks: int
    lowest: int
    highest: int
    dearest: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.k <= 4 or self.window < 2 * self.k or self.blocks < 1 or self.lowest > self.highest:
            raise BackendError(f"encode problem: {self}")
        if not 1 <= self.warmup <= BLOCK // 2:
            raise BackendError(f"encode problem: warmup {self.warmup}: expected 1 to {BLOCK // 2}")

    @property
    def suffixes(self) -> int:
        """J = 2^(L-k): what a step sees of the step before."""
        return 1 << (self.window - self.k)

    def lanes(self, states: int) -> int:
        """Lanes that a block takes if each has so many states."""
        return (1 << self.window) // states

    @property
    def reach(self) -> int:
        """Steps after which every suffix can be reached from every other: ⌈(L-k)/k⌉."""
        return -(-(self.window - self.k) // self.k)

    @property
    def step_cost(self) -> int:
        """The most that one step can cost."""
        return max((self.highest + LEVEL_LIMIT) ** 2, (LEVEL_LIMIT - self.lowest) ** 2)

    @property
    def greatest_cost(self) -> int:
        """Bound of every number in a search that subtracts one suffix's cost at every step from step ``reach`` on.

        The best suffix of ``reach`` steps ago leads to every suffix of now, and costs never fall: so the costs of a
        step differ by at most ``reach`` steps' worth. Before the first subtraction they are no more than that
        either. Between two subtractions they grow by one step.
        """
        return (self.reach + 1) * self.step_cost


def encode_problem(
    blocks: int, levels: NDArray[np.int16], *, window: int, k: int, warmup: int | None = None
) -> EncodeProblem:
    """The problem of ``blocks`` blocks; ``warmup`` None is Algorithm 4."""
    return EncodeProblem(
        k=k,
        window=window,
        warmup=BLOCK // 2 if warmup is None else warmup,
        blocks=blocks,
        lowest=int(levels.min()),
        highest=int(levels.max()),
        dearest=dearest_step(levels.astype(np.int16).tobytes(), k),
    )


@lru_cache(maxsize=32)
def dearest_step(levels: bytes, k: int) -> int:
    """Over all suffixes and inputs, the largest least cost ``(u - x)² + 560² - x²`` of the 2^k states of a suffix.

    Args:
        levels: int16 of every state; the suffix is what its lowest bits say.
        k: Bits per step.
    """
    by_choice = np.frombuffer(levels, np.int16).astype(np.int32).reshape(1 << k, -1)
    most = 0
    for x in range(-LEVEL_LIMIT, LEVEL_LIMIT + 1):
        least = (by_choice * (by_choice - 2 * x)).min(axis=0)
        most = max(most, int(least.max()))
    return most + LEVEL_LIMIT**2
