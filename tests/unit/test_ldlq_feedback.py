"""The factor and the feedback loop against dense recursions with explicit inverses; planted faults show."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from tests.oracles import gptq as oracle
from tests.oracles.udu import block_udu
from tqtool.errors import NumericalError
from tqtool.mathx import ldl
from tqtool.mathx.ldl import UpperFactor, proxy_loss, row_losses, upper_factor
from tqtool.solve import feedback
from tqtool.solve.feedback import Piece, Step, code_with_feedback

# Explicit inverses of matrices with condition number below 1e4 in float64: 1e4 · 300 columns · 1e-16 < 1e-9.
CLOSE = 1e-9


def hessian(width: int, seed: int = 0) -> np.ndarray:
    """Well-conditioned enough for explicit inverses, correlated enough for feedback to matter."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((3 * width, width)) + 2 * rng.standard_normal((3 * width, 1))
    matrix = rows.T @ rows / len(rows)
    return matrix + 0.01 * np.diagonal(matrix).mean() * np.eye(width)


class Rounder:
    """Rounds to a multiple of 1/4: a coder whose answer for a target nobody can argue about."""

    def __init__(self, steps: list[Step]) -> None:
        self._steps = steps

    def steps(self) -> Iterator[Step]:
        return iter(self._steps)

    def encode(self, step: Step, targets: list[np.ndarray], factor: UpperFactor) -> list[np.ndarray]:
        return [np.rint(target * 4) / 4 for target in targets]


def uniform(width: int, block: int) -> list[Step]:
    cuts = [*range(0, width, block), width]
    return [
        Step(index=i, pieces=(Piece(slice(None), a, b),), complete=a)
        for i, (a, b) in enumerate(itertools.pairwise(cuts))
    ]


def by_oracle(weight: np.ndarray, matrix: np.ndarray, block: int) -> np.ndarray:
    width = weight.shape[1]
    return oracle.obq_blocks(weight, matrix, [*range(0, width, block), width], lambda t, _: np.rint(t * 4) / 4)


@pytest.mark.parametrize(("width", "block"), [(1, 1), (7, 1), (40, 16), (50, 16), (50, 7), (50, 50), (50, 64)])
def test_blocks_of_the_factor(width: int, block: int) -> None:
    matrix = hessian(width)
    factor = upper_factor(matrix)
    unit, blocks = block_udu(matrix, block)
    dense = np.zeros_like(matrix)
    for index, curvature in enumerate(blocks):
        start, stop = index * block, index * block + len(curvature)
        dense[start:stop, start:stop] = curvature
        np.testing.assert_allclose(factor.feedback(start, stop), unit[:start, start:stop], rtol=CLOSE, atol=CLOSE)
        np.testing.assert_allclose(factor.curvature(start, stop), curvature, rtol=CLOSE, atol=CLOSE)
        # The Schur complement of everything after the block: what an error there costs if all others move freely.
        np.testing.assert_allclose(curvature, schur(matrix, start, stop), rtol=CLOSE, atol=CLOSE)
    np.testing.assert_allclose(unit @ dense @ unit.T, matrix, rtol=0, atol=1e-12 * np.abs(matrix).max() * width)


def schur(matrix: np.ndarray, start: int, stop: int) -> np.ndarray:
    """Curvature of a block when the later columns are free to answer and the earlier ones are fixed."""
    block, later = slice(start, stop), slice(stop, None)
    if stop >= len(matrix):
        return matrix[block, block]
    return matrix[block, block] - matrix[block, later] @ np.linalg.inv(matrix[later, later]) @ matrix[later, block]


@pytest.mark.parametrize(("width", "block"), [(300, 1), (290, 4), (130, 16), (133, 40), (130, 64), (40, 40)])
def test_served_weights_are_the_oracles(width: int, block: int) -> None:
    """300 single columns are two windows of shared products and a ragged third; blocks end ragged as well."""
    matrix = hessian(width)
    weight = np.random.default_rng(1).standard_normal((5, width)) * 3
    result = code_with_feedback(weight, upper_factor(matrix), Rounder(uniform(width, block)))
    expected = by_oracle(weight, matrix, block)
    np.testing.assert_array_equal(np.rint((result.error + weight) * 4), np.rint(expected * 4))
    assert result.loss == pytest.approx(oracle.loss(weight, expected, matrix), rel=CLOSE)
    assert result.loss == pytest.approx(proxy_loss(result.error, matrix), rel=CLOSE)
    plain = np.rint(weight * 4) / 4
    assert result.loss < 0.8 * oracle.loss(weight, plain, matrix) or width == block


def test_rows_with_cuts_of_their_own() -> None:
    """Three kinds of rows cut at different columns, some pieces wide, some narrow: each as if it were alone."""
    width, matrix = 150, hessian(150)
    weight = np.random.default_rng(2).standard_normal((7, width)) * 3
    cuts = {0: [0, 64, 128, 150], 1: [0, 10, 74, 138, 150], 2: [0, 1, 2, 100, 150]}
    steps = []
    for phase, columns in cuts.items():  # rows after rows; complete stays 0 because later rows have not begun
        for start, stop in itertools.pairwise(columns):
            steps.append(Step(index=len(steps), pieces=(Piece(slice(phase, None, 3), start, stop),)))
    result = code_with_feedback(weight, upper_factor(matrix), Rounder(steps))
    for phase, columns in cuts.items():
        rows = weight[phase::3]
        expected = oracle.obq_blocks(rows, matrix, columns, lambda t, _: np.rint(t * 4) / 4)
        np.testing.assert_array_equal(np.rint((result.error[phase::3] + rows) * 4), np.rint(expected * 4))


def test_outputs_that_run_ahead() -> None:
    """Steps of the stream: some outputs are a column ahead of others, over several windows."""
    width, matrix = 300, hessian(300)
    weight = np.random.default_rng(3).standard_normal((6, width)) * 3
    steps = [Step(index=0, pieces=(Piece(slice(0, 2), 0, 1),))]
    for column in range(width - 1):
        pieces = (Piece(slice(2, 6), column, column + 1), Piece(slice(0, 2), column + 1, column + 2))
        steps.append(Step(index=column + 1, pieces=pieces, complete=column))
    steps.append(Step(index=width, pieces=(Piece(slice(2, 6), width - 1, width),), complete=width - 1))
    result = code_with_feedback(weight, upper_factor(matrix), Rounder(steps))
    np.testing.assert_array_equal(np.rint((result.error + weight) * 4), np.rint(by_oracle(weight, matrix, 1) * 4))


def test_float32_is_as_good() -> None:
    """Feedback in float32 is off by about √n·u of the target, 1e-6; a code flips where that crosses a tie: rarely."""
    width, matrix = 300, hessian(300)
    weight = (np.random.default_rng(4).standard_normal((40, width)) * 3).astype(np.float32)
    expected = by_oracle(weight, matrix, 1)
    result = code_with_feedback(weight, upper_factor(matrix), Rounder(uniform(width, 1)))
    assert result.error.dtype == np.float32
    same = np.mean((np.rint((result.error + weight) * 4) == np.rint(expected * 4)).all(axis=1))
    assert same >= 0.9
    assert result.loss == pytest.approx(oracle.loss(weight, expected, matrix), rel=5e-3)


def _negated(self: UpperFactor, start: int, stop: int) -> np.ndarray:
    return -_feedback(self, start, stop)


def _shifted(self: UpperFactor, start: int, stop: int) -> np.ndarray:
    return np.roll(_feedback(self, start, stop), 1, axis=0)


_feedback = UpperFactor.feedback


@pytest.mark.parametrize("fault", [_negated, _shifted])
def test_faults_of_the_feedback_show(fault: Callable[..., np.ndarray], monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = hessian(100)
    weight = np.random.default_rng(5).standard_normal((5, 100)) * 3
    monkeypatch.setattr(UpperFactor, "feedback", fault)
    result = code_with_feedback(weight, upper_factor(matrix), Rounder(uniform(100, 20)))
    assert np.abs(result.error + weight - by_oracle(weight, matrix, 20)).max() > 0.2
    assert proxy_loss(result.error, matrix) > 1.1 * result.loss  # a loss summed along the way that is no loss


def test_the_wrong_order_shows() -> None:
    """A lower factor belongs to coding last to first; used first to last its sum of losses is no loss at all."""
    matrix = hessian(100)
    weight = np.random.default_rng(6).standard_normal((5, 100)) * 3
    lower = UpperFactor(root=np.linalg.cholesky(matrix).T)
    result = code_with_feedback(weight, lower, Rounder(uniform(100, 20)))
    assert np.abs(result.error + weight - by_oracle(weight, matrix, 20)).max() > 0.2
    assert abs(proxy_loss(result.error, matrix) / result.loss - 1) > 0.05


def test_a_window_one_column_off_is_refused() -> None:
    with pytest.raises(ValueError, match="complete"):
        Step(index=0, pieces=(Piece(slice(None), 4, 8), Piece(slice(None), 5, 8)), complete=5)


def test_scaling_the_hessian_changes_nothing() -> None:
    """By a power of four: R scales by a power of two, so every digit stays."""
    matrix = hessian(60)
    weight = np.random.default_rng(8).standard_normal((4, 60))
    one = code_with_feedback(weight, upper_factor(matrix), Rounder(uniform(60, 7)))
    other = code_with_feedback(weight, upper_factor(4.0**9 * matrix), Rounder(uniform(60, 7)))
    np.testing.assert_array_equal(one.error, other.error)


def test_a_pass_that_runs_away_stops() -> None:
    weight = np.ones((2, 40))
    result = code_with_feedback(weight, upper_factor(hessian(40)), Rounder(uniform(40, 8)), peak_limit=0.5)
    assert not result.finished
    assert result.peak == 1
    weight[1, 20] = np.nan
    assert not code_with_feedback(weight, upper_factor(hessian(40)), Rounder(uniform(40, 8))).finished


@pytest.mark.parametrize("width", [1, 7, 8, 21, 40])
def test_a_wide_matrix_is_factored_in_blocks(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One, two and six blocks of 7, the first of them ragged; what stands below the diagonal is not read."""
    matrix = hessian(width)
    expected = upper_factor(matrix).root
    monkeypatch.setattr(ldl, "FACTOR_WIDTH", 7)
    other = np.triu(matrix) + 100 * np.tril(np.ones_like(matrix), -1)
    root = upper_factor(other).root
    assert np.array_equal(upper_factor(other.copy(), overwrite=True).root, root)
    assert np.array_equal(root, np.triu(root))
    np.testing.assert_allclose(root @ root.T, matrix, rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(root, expected, rtol=1e-8, atol=1e-10)


def test_a_block_that_is_not_positive_definite_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ldl, "FACTOR_WIDTH", 7)
    matrix = hessian(40)
    matrix[3, 3] = -1.0
    with pytest.raises(NumericalError, match="width 40 is not positive definite"):
        upper_factor(matrix)


def test_what_is_no_hessian() -> None:
    with pytest.raises(NumericalError, match="not positive definite"):
        upper_factor(np.diag([1.0, -1.0]))
    with pytest.raises(NumericalError, match=r"not positive definite|not finite"):
        upper_factor(np.full((3, 3), np.nan))


def test_losses_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ldl, "LOSS_ROWS", 3)
    matrix = hessian(9)
    error = np.random.default_rng(9).standard_normal((8, 9)).astype(np.float32)
    truth = np.einsum("ri,ij,rj->r", error.astype(np.float64), matrix, error.astype(np.float64))
    np.testing.assert_allclose(row_losses(error, matrix), truth, rtol=1e-12)
    assert proxy_loss(error, matrix) == pytest.approx(truth.sum(), rel=1e-12)


def test_verdicts() -> None:
    assert feedback.DAMPINGS[0] == 0.01
    assert feedback.DAMPINGS[-1] == 10
    assert list(feedback.DAMPINGS) == sorted(feedback.DAMPINGS)
    tried = feedback.Attempt(damping=0.01, verdict="diverged", growth=7.0, loss=np.nan)
    taken = feedback.Attempt(damping=0.03, verdict="accepted", growth=2.0, loss=1.0)
    assert feedback.describe([taken], "plain") == ()
    assert feedback.describe([tried, taken], "plain") == ("damping 0.01: diverged (growth 7)",)
    assert feedback.describe([tried], "plain")[-1] == "fell back to plain"
