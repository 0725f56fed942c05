"""Wilson's interval against tables and its own equation, McNemar against enumeration and scipy."""

from __future__ import annotations

import itertools
import math

import pytest
from scipy.stats import binomtest

from tqtool.errors import UserError
from tqtool.evals.proportions import Z95, mcnemar, wilson


@pytest.mark.parametrize(
    ("right", "total", "low", "high"),
    [
        # Newcombe (1998), table I, method 3: 81/263, 15/148, 0/20, 1/29.
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_is_the_published_table(right: int, total: int, low: float, high: float) -> None:
    assert wilson(right, total) == pytest.approx((low, high), abs=5.1e-5)


@pytest.mark.parametrize(("right", "total"), [(0, 1), (1, 1), (3, 7), (50, 100), (99, 100), (100, 100)])
def test_wilson_inverts_the_score_test(right: int, total: int) -> None:
    low, high = wilson(right, total)
    share = right / total
    assert low <= share <= high
    for end in (low, high):  # |p̂ - p| = z √(p(1-p)/n), the equation whose two roots are the ends
        if 0 < end < 1:
            assert abs(share - end) == pytest.approx(Z95 * math.sqrt(end * (1 - end) / total), rel=1e-12)
    assert binomtest(right, total).proportion_ci(method="wilson")[:] == pytest.approx((low, high), abs=1e-12)
    assert (low == 0.0, high == 1.0) == (right == 0, right == total)


@pytest.mark.parametrize(("right", "total"), [(0, 0), (-1, 3), (4, 3)])
def test_wilson_of_no_share(right: int, total: int) -> None:
    with pytest.raises(UserError, match=f"{right} of {total} is no share"):
        wilson(right, total)


@pytest.mark.parametrize(("a", "b"), [(a, b) for a in range(7) for b in range(7)])
def test_mcnemar_is_the_enumeration_of_all_coin_throws(a: int, b: int) -> None:
    throws = list(itertools.product((0, 1), repeat=a + b))
    extreme = sum(abs(2 * sum(throw) - a - b) >= abs(a - b) for throw in throws)
    assert mcnemar(a, b) == pytest.approx(extreme / len(throws), rel=1e-15)


@pytest.mark.parametrize(("a", "b"), [(0, 15), (12, 3), (40, 61), (300, 201), (5000, 5100), (2, 2000)])
def test_mcnemar_is_scipys_binomial_test(a: int, b: int) -> None:
    assert mcnemar(a, b) == pytest.approx(binomtest(a, a + b, 0.5).pvalue, rel=1e-9, abs=1e-300)
    assert mcnemar(a, b) == mcnemar(b, a)
