"""What an encoder is asked for, and when its float32 costs are exact: values, no device."""

from __future__ import annotations

from dataclasses import dataclass

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

    Raises:
        BackendError: no trellis has these numbers.
    """

    k: int
    window: int
    warmup: int = BLOCK // 2
    blocks: int
    lowest: int
    highest: int

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
