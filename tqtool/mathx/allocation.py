"""Which of its options each group takes under a budget of bits, so that the sum of losses is small.

Only options on the lower convex hull of a group's (bits, loss) curve are considered, from the cheapest on: what lies
above the hull costs more than a mix of its neighbours, and a curve that rises (noise) ends at its minimum. The steps
along all hulls are taken steepest first; one that does not fit ends its group, the others go on.

Laws, exact because sums and slopes are fractions: the bits never exceed the budget; the loss never rises with the
budget; no choice of options, on the hulls or off them, is better by more than the first step that did not fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """What a group may take: all its bits, and the loss that goes with them, from any origin."""

    bits: int
    loss: float


Curve = Sequence[Option]
"""Options of one group by rising bits, no two alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """The choice.

    Attributes:
        chosen: Index into each curve.
        bits: Sum over the groups.
        loss: Sum over the groups.
        bound: No allocation within the budget has a lower loss.
    """

    chosen: tuple[int, ...]
    bits: int
    loss: Fraction
    bound: Fraction


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    slope: Fraction
    group: int
    start: int
    stop: int
    bits: int


def lower_hull(curve: Curve) -> tuple[int, ...]:
    """Indices of the falling part of the lower convex hull, beginning with the cheapest option."""
    hull = [0]
    while True:
        here = hull[-1]
        # Of points on one line the nearest: short steps fill a budget better.
        slopes = {there: _slope(curve, here, there) for there in range(here + 1, len(curve))}
        best = max(slopes, key=lambda there: (slopes[there], -there), default=here)
        if best == here or slopes[best] <= 0:
            return tuple(hull)
        hull.append(best)


def allocate(curves: Sequence[Curve], budget: int) -> Allocation | None:
    """Choose an option of each curve within ``budget`` bits; None where the cheapest ones already exceed it.

    Equal slopes are taken in the order of the curves.
    """
    chosen = [0] * len(curves)
    bits = sum(curve[0].bits for curve in curves)
    loss = sum((Fraction(curve[0].loss) for curve in curves), Fraction(0))
    if bits > budget:
        return None
    bound: Fraction | None = None
    for step in _steps(curves):
        if chosen[step.group] != step.start:  # an earlier step of the group did not fit
            continue
        if bits + step.bits > budget:
            if bound is None:
                bound = loss - step.slope * (budget - bits)
            continue
        chosen[step.group] = step.stop
        bits += step.bits
        loss -= step.slope * step.bits
    return Allocation(chosen=tuple(chosen), bits=bits, loss=loss, bound=loss if bound is None else bound)


def _steps(curves: Sequence[Curve]) -> list[_Step]:
    """Steps along all hulls, steepest first; those of one group stay in their order, for a hull flattens."""
    found = []
    for group, curve in enumerate(curves):
        hull = lower_hull(curve)
        found += [
            _Step(
                slope=_slope(curve, start, stop),
                group=group,
                start=start,
                stop=stop,
                bits=curve[stop].bits - curve[start].bits,
            )
            for start, stop in pairwise(hull)
        ]
    return sorted(found, key=lambda step: (-step.slope, step.group, step.start))


def _slope(curve: Curve, start: int, stop: int) -> Fraction:
    """Loss saved per bit."""
    return (Fraction(curve[start].loss) - Fraction(curve[stop].loss)) / (curve[stop].bits - curve[start].bits)
