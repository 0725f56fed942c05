"""Sums of outer products: within the stated bound, streaming, and honest about bad rows."""

from __future__ import annotations

import numpy as np
import pytest

from tqtool.errors import NumericalError
from tqtool.solve import hessian as module
from tqtool.solve.hessian import Hessian, HessianSum, error_bound


def rows_of(count: int, width: int, seed: int = 0) -> np.ndarray:
    """Correlated rows of very different channel sizes."""
    rng = np.random.default_rng(seed)
    shared = rng.standard_normal((count, 1)) * rng.standard_normal((1, width))
    return ((rng.standard_normal((count, width)) + shared) * np.exp(rng.normal(0, 3, width))).astype(np.float32)


def summed(rows: np.ndarray, weights: np.ndarray | None = None) -> Hessian:
    total = HessianSum(rows.shape[1])
    total.accumulate(rows, weights)
    return total.finish()


def exact(rows: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    wide = rows.astype(np.float64)
    return wide.T @ (wide if weights is None else wide * weights[:, None]) / len(rows)


@pytest.mark.parametrize("width", [1, 33, module.PANEL, module.PANEL + 88])
@pytest.mark.parametrize("weighted", [False, True])
def test_within_the_bound_of_the_docstring(width: int, weighted: bool) -> None:
    """1300 rows: two whole chunks and a ragged one; the widest case has two panels, the second ragged."""
    rows = rows_of(1300, width)
    weights = np.random.default_rng(1).uniform(0, 3, 1300) if weighted else None
    truth = exact(rows, weights)
    found = summed(rows, weights)
    size = np.sqrt(np.outer(np.diagonal(truth), np.diagonal(truth)))
    assert (np.abs(found.matrix - truth) <= error_bound() * size).all()
    assert np.array_equal(found.matrix, found.matrix.T)
    assert (found.rows, found.dropped) == (1300, 0)


def test_the_bound_is_not_idle() -> None:
    """A sum carried in float32 throughout would break a bound that is 30 times the typical error of ours."""
    rows = np.full((200_000, 2), 1.1, np.float32)
    truth = exact(rows)
    running = np.float32(0)
    for value in np.square(rows[:, 0]):
        running += value
    assert abs(float(running) / len(rows) / truth[0, 0] - 1) > error_bound()
    assert np.abs(summed(rows).matrix / truth - 1).max() < error_bound() / 30


def test_streaming_and_merging_change_nothing_that_matters() -> None:
    rows = rows_of(2000, 40)
    parts, left, right = HessianSum(40), HessianSum(40), HessianSum(40)
    for start in range(0, 2000, 77):
        parts.accumulate(rows[start : start + 77])
    left.accumulate(rows[:900])
    right.accumulate(rows[900:])
    left.merge(right)
    truth = exact(rows)
    size = np.sqrt(np.outer(np.diagonal(truth), np.diagonal(truth)))
    for found in (parts.finish(), left.finish()):
        assert found.rows == 2000
        assert (np.abs(found.matrix - truth) <= error_bound() * size).all()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_bad_rows_are_dropped_and_counted(dtype: type) -> None:
    rows = rows_of(600, 8).astype(np.float64) / 1000
    rows = np.clip(rows, -100, 100).astype(dtype)
    good = np.ones(600, bool)
    for index, value in ((3, np.nan), (4, np.inf), (520, -np.inf)):
        rows[index, index % 8] = value
        good[index] = False
    if dtype is not np.float16:
        rows[599, 0] = 1e19 if dtype is np.float32 else 1e300  # finite, but its square is not
        good[599] = False
    total = HessianSum(8)
    assert total.accumulate(rows) == np.count_nonzero(~good)
    assert total.accumulate(rows[:1]) == 0
    found = total.finish()
    assert (found.rows, found.dropped) == (np.count_nonzero(good) + 1, np.count_nonzero(~good))
    truth = exact(np.concatenate([rows[good], rows[:1]]).astype(np.float32))
    np.testing.assert_allclose(found.matrix, truth, rtol=0, atol=2 * error_bound() * np.diagonal(truth).max())


def test_a_weight_of_zero_hides_a_row() -> None:
    rows = rows_of(50, 6)
    weights = np.ones(50)
    weights[7] = 0
    kept = np.delete(rows, 7, axis=0)
    np.testing.assert_allclose(summed(rows, weights).matrix * 50, summed(kept).matrix * 49, rtol=1e-4)


def test_dead_inputs_get_the_mean_and_no_feedback() -> None:
    rows = rows_of(100, 5)
    rows[:, 2] = 0
    found = summed(rows)
    assert found.dead.tolist() == [False, False, True, False, False]
    damped = found.damped(0.5)
    mean = np.diagonal(found.matrix)[[0, 1, 3, 4]].mean()
    assert damped[2, 2] == pytest.approx(1.5 * mean)
    assert np.count_nonzero(damped[2]) == 1
    np.testing.assert_allclose(np.diagonal(damped)[[0, 1, 3, 4]], np.diagonal(found.matrix)[[0, 1, 3, 4]] + 0.5 * mean)
    assert found.matrix[2, 2] == 0  # a copy was damped


def test_refusals() -> None:
    total = HessianSum(4)
    with pytest.raises(NumericalError, match="no finite calibration row"):
        total.finish()
    with pytest.raises(NumericalError, match=r"expected \[n, 4\]"):
        total.accumulate(np.zeros((3, 5), np.float32))
    with pytest.raises(NumericalError, match="2 calibration rows"):
        total.accumulate(np.zeros((2, 4), np.float32), np.ones(3))
    for bad in (-1.0, np.nan, np.inf):
        with pytest.raises(NumericalError, match="negative or not finite"):
            total.accumulate(np.zeros((2, 4), np.float32), np.array([1.0, bad]))
    with pytest.raises(NumericalError, match="cannot be added"):
        total.merge(HessianSum(5))
    with pytest.raises(NumericalError, match="is zero"):
        Hessian(matrix=np.zeros((3, 3)), rows=9).damped(0.01)
    with pytest.raises(NumericalError, match="is square"):
        Hessian(matrix=np.zeros((3, 4)), rows=9)
    with pytest.raises(NumericalError, match="not finite"):
        Hessian(matrix=np.full((2, 2), np.nan), rows=9)
    with pytest.raises(NumericalError, match="negative diagonal"):
        Hessian(matrix=-np.eye(2), rows=9)
