"""Allocation against exhaustive search: the budget, the optimum up to the last item, monotony, order."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tqtool.mathx.allocation import Option, allocate, lower_hull

losses = st.one_of(st.integers(-8, 8).map(float), st.floats(-1, 1))


@st.composite
def curves_of(draw: st.DrawFn, most: int = 4) -> list[list[Option]]:
    found = []
    for _ in range(draw(st.integers(1, most))):
        bits = sorted(draw(st.sets(st.integers(0, 30), min_size=1, max_size=4)))
        found.append([Option(bits=each, loss=draw(losses)) for each in bits])
    return found


def exhaustive(curves: list[list[Option]], budget: int) -> Fraction | None:
    sums = [
        sum((Fraction(option.loss) for option in choice), Fraction(0))
        for choice in itertools.product(*curves)
        if sum(option.bits for option in choice) <= budget
    ]
    return min(sums, default=None)


def critical_step(curves: list[list[Option]], budget: int) -> Fraction:
    """Loss saved by the first step along the hulls, steepest first, that the budget does not hold; 0 if all fit."""
    steps = []
    for curve in curves:
        hull = [curve[index] for index in lower_hull(curve)]
        for a, b in itertools.pairwise(hull):
            gain = Fraction(a.loss) - Fraction(b.loss)
            steps.append((gain / (b.bits - a.bits), b.bits - a.bits, gain))
    left = budget - sum(curve[0].bits for curve in curves)
    for _, bits, gain in sorted(steps, key=lambda step: -step[0]):
        if bits > left:
            return gain
        left -= bits
    return Fraction(0)


@settings(max_examples=400, deadline=None)
@given(curves_of(), st.integers(0, 130))
def test_it_is_optimal_up_to_the_step_that_did_not_fit(curves, budget):
    best, found = exhaustive(curves, budget), allocate(curves, budget)
    if best is None:
        assert found is None
        return
    assert found is not None
    taken = [curve[index] for curve, index in zip(curves, found.chosen, strict=True)]
    assert found.bits == sum(option.bits for option in taken) <= budget
    assert found.loss == sum(Fraction(option.loss) for option in taken)
    assert found.bound <= best <= found.loss
    # Equal slopes leave open which step is the first that does not fit, so the largest saving of them counts.
    assert found.loss - found.bound <= max_critical(curves, budget)


def max_critical(curves: list[list[Option]], budget: int) -> Fraction:
    return max(critical_step(list(order), budget) for order in itertools.permutations(curves))


@settings(max_examples=300, deadline=None)
@given(curves_of(most=6), st.integers(0, 180), st.integers(0, 60))
def test_more_bits_never_lose(curves, budget, more):
    small, large = allocate(curves, budget), allocate(curves, budget + more)
    if small is not None:
        assert large is not None
        assert large.loss <= small.loss


@settings(max_examples=200, deadline=None)
@given(curves_of(most=1))
def test_a_hull_falls_and_flattens_and_nothing_lies_below_it(curves):
    curve = curves[0]
    hull = [curve[index] for index in lower_hull(curve)]
    slopes = [(Fraction(a.loss) - Fraction(b.loss)) / (b.bits - a.bits) for a, b in itertools.pairwise(hull)]
    assert hull[0] is curve[0]
    assert all(slope > 0 for slope in slopes)
    assert slopes == sorted(slopes, reverse=True)
    for option in curve:
        for a, b in itertools.pairwise(hull):
            if a.bits <= option.bits <= b.bits:
                line = Fraction(a.loss) + (Fraction(b.loss) - Fraction(a.loss)) * Fraction(
                    option.bits - a.bits, b.bits - a.bits
                )
                assert Fraction(option.loss) >= line
    assert all(Fraction(option.loss) >= Fraction(hull[-1].loss) for option in curve)


def test_noise_is_stepped_over():
    # 3 bits lose against 2 by noise, 4 gain: the step goes from 2 to 4 at once, or not at all.
    curve = [Option(bits=20, loss=1.0), Option(bits=30, loss=1.1), Option(bits=40, loss=0.4)]
    assert lower_hull(curve) == (0, 2)
    for budget, index in ((39, 0), (40, 2)):
        found = allocate([curve], budget)
        assert found is not None
        assert found.chosen == (index,)
    assert allocate([curve], 19) is None


def test_equal_slopes_go_in_the_order_of_the_curves():
    curve = [Option(bits=0, loss=1.0), Option(bits=8, loss=0.0)]
    for count in range(5):
        found = allocate([curve] * 4, 8 * count + 7)
        assert found is not None
        assert found.chosen == (1,) * min(count, 4) + (0,) * (4 - min(count, 4))


def test_large_instances_keep_the_budget_and_nearly_reach_the_bound():
    rng = np.random.default_rng(0)
    curves = [
        [Option(bits=k * weights, loss=float(rng.random() * 4.0**-k)) for k in (2, 3, 4)]
        for weights in rng.integers(1000, 9000, 200).tolist()
    ]
    weights = sum(curve[0].bits // 2 for curve in curves)
    found = allocate(curves, 3 * weights)
    assert found is not None
    assert 3 * weights - 2 * 9000 < found.bits <= 3 * weights
    assert float(found.loss - found.bound) < 1e-3 * float(found.loss)
