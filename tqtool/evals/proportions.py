"""Two facts about counts: how sure a share is, and how likely chance makes two paired arms so different."""

from __future__ import annotations

import math
from fractions import Fraction

from tqtool.errors import UserError

Z95 = 1.959963984540054
"""The 97.5 % quantile of the normal distribution."""


def wilson(right: int, total: int, z: float = Z95) -> tuple[float, float]:
    """Wilson's score interval of ``right`` of ``total`` (Wilson 1927); UserError unless 0 ≤ right ≤ total ≥ 1."""
    if total < 1 or not 0 <= right <= total:
        raise UserError(f"{right} of {total} is no share")
    share = right / total
    scale = 1 + z * z / total
    middle = share + z * z / (2 * total)
    half = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    # The ends are exact where all or nothing is right; rounding would put them beside 0 and 1.
    low = 0.0 if right == 0 else (middle - half) / scale
    high = 1.0 if right == total else (middle + half) / scale
    return low, high


def mcnemar(only_a: int, only_b: int) -> float:
    """Two-sided exact p-value of McNemar's test.

    Under the null each of the ``only_a + only_b`` items that one arm alone got right is either arm's with probability
    1/2, so this is the binomial test of ``only_a`` among them. Computed in integers: exact for any count.
    """
    total = only_a + only_b
    term, tail = 1, 1
    for count in range(1, min(only_a, only_b) + 1):
        term = term * (total - count + 1) // count
        tail += term
    return float(min(Fraction(1), Fraction(2 * tail, 2**total)))
