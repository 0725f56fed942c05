"""Block UDU factors of a Hessian, and the loss that error feedback minimizes.

For symmetric positive definite H ``[n, n]`` let ``H = R·Rᵀ`` with R upper triangular (a Cholesky factor from the last
row up). Cut the columns into blocks of any widths; R_kk is the diagonal block of block k. Then

    U[:, k] = R[:, k] · R_kk⁻¹        unit block upper triangular
    D_k     = R_kk · R_kkᵀ            so that H = U · diag(D) · Uᵀ, whatever the cuts

and for a matrix of errors E ``[rows, n]`` (served minus wanted)

    tr(E·H·Eᵀ) = Σ_k tr(e_k·D_k·e_kᵀ),   e_k = E_k + Σ_{j<k} E_j·U_jk.

So if the blocks are coded first to last and block k is asked for ``W_k − Σ_{j<k} E_j·U_jk``, then e_k is what the coder
itself got wrong, and nothing else is left of the loss. This is LDLQ (QuIP#, arXiv 2402.04396, §2; there from the last
block to the first, with H = L·D·Lᵀ) and, with blocks of one column, GPTQ (arXiv 2210.17323): its upper factor of H⁻¹ is
R⁻¹, and W minus the feedback is its updated weight. Within a block, R_kk is in turn the factor of D_k.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tqtool.errors import NumericalError

GAIN_PROBES = 32

FACTOR_WIDTH = 4096
"""Columns that LAPACK factors at once: at 17408 ``dpotrf`` of OpenBLAS 0.3.30 (SciPy 1.17.1, two threads) segfaults."""

LOSS_ROWS = 1024
"""Rows of errors whose loss is summed at once: bounds the temporary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpperFactor:
    """``H = root·rootᵀ``.

    Attributes:
        root: R, float64 ``[n, n]``, upper triangular, positive diagonal.
    """

    root: NDArray[np.float64]

    @property
    def width(self) -> int:
        """Columns, n."""
        return int(self.root.shape[0])

    def feedback(self, start: int, stop: int) -> NDArray[np.float64]:
        """U above the block of columns ``start:stop``, ``[start, stop - start]``."""
        above, corner = self.root[:start, start:stop], self.root[start:stop, start:stop]
        if stop - start == 1:
            return above / corner
        from scipy.linalg import solve_triangular  # when used: it loads an OpenBLAS before the runtime can bind one

        solved: NDArray[np.float64] = solve_triangular(corner, above.T, trans="T", check_finite=False).T
        return solved

    def corner(self, start: int, stop: int) -> NDArray[np.float64]:
        """R_kk of the block, ``[stop - start, stop - start]``: e·D·eᵀ is the squared norm of e·R_kk."""
        return self.root[start:stop, start:stop]

    def curvature(self, start: int, stop: int) -> NDArray[np.float64]:
        """D_k of the block, ``[stop - start, stop - start]``."""
        corner = self.corner(start, stop)
        return corner @ corner.T


def upper_factor(matrix: NDArray[np.floating], *, overwrite: bool = False) -> UpperFactor:
    """Factor a symmetric matrix ``[n, n]`` in float64; only the upper triangle is read.

    ``overwrite`` lets a float64 matrix become the factor, where nobody needs it any more: 2.4 GB at 17408 columns.

    Up to ``FACTOR_WIDTH`` columns by LAPACK at once, wider ones from the last block of as many up: memory is the factor
    and two panels of ``[n, FACTOR_WIDTH]``.

    Raises:
        NumericalError: The matrix is not positive definite, or not finite.
    """
    from scipy.linalg import solve_triangular  # imported when used, as above

    n = int(matrix.shape[0])
    root = np.asarray(matrix, np.float64) if overwrite else np.array(matrix, np.float64)
    try:
        for stop in range(n, 0, -FACTOR_WIDTH):
            start = max(0, stop - FACTOR_WIDTH)
            beside = root[start:stop, stop:]
            block = root[start:stop, start:stop]
            if stop < n:
                block -= beside @ beside.T
            block[...] = _corner_factor(block)
            if start:
                above = root[:start, start:stop]
                if stop < n:
                    above -= root[:start, stop:] @ beside.T
                above[...] = solve_triangular(block, above.T, check_finite=False).T
                root[start:stop, :start] = 0.0
    except np.linalg.LinAlgError as error:
        raise NumericalError(
            f"a Hessian of width {n} is not positive definite", hint="more damping or more data"
        ) from error
    if not np.isfinite(root).all():
        raise NumericalError(f"a Hessian of width {n} is not finite")
    return UpperFactor(root=root)


def _corner_factor(matrix: NDArray[np.float64]) -> NDArray[np.float64]:
    """The same by LAPACK."""
    from scipy.linalg import cholesky  # twice as fast as numpy's; imported when used, as above

    lower: NDArray[np.float64] = cholesky(matrix[::-1, ::-1], lower=True, check_finite=False)
    return lower[::-1, ::-1]


def feedback_gain(factor: UpperFactor, width: int) -> float:
    """Variance of what feedback adds to a weight, in units of the coder's own error, mean over columns.

    With blocks of ``width`` columns and a coder whose errors e are white, the errors that are fed forward are
    ``E = e·U⁻¹``, the feedback is ``E·(U − I) = e·(I − U⁻¹)``, and the gain is ``‖I − U⁻¹‖² / n = tr A / n`` with
    ``A = (I − U⁻¹)·(I − U⁻¹)ᵀ``. The trace is found with ``GAIN_PROBES`` vectors z of signs (Hutchinson): zᵀ·A·z has
    mean tr A and variance ``2·Σ_{i≠j} A_ij²``, since the diagonal meets z_i² = 1. The relative standard deviation is
    thus at most ``√(2 / probes)·‖A‖_F / tr A``, which is what Gaussian z would have: ``√(2 / probes / n)`` if all
    singular values were equal, more where few of them lead.
    """
    from scipy.linalg import solve_triangular  # when used, as above

    n = factor.width
    signs = np.where(np.random.default_rng(0).random((GAIN_PROBES, n)) < 0.5, -1.0, 1.0)
    scaled = np.empty_like(signs)
    for start in range(0, n, width):
        stop = min(start + width, n)
        scaled[:, start:stop] = signs[:, start:stop] @ factor.corner(start, stop)
    solved = solve_triangular(factor.root, scaled.T, trans="T", check_finite=False).T
    return float(np.square(signs - solved).mean())


def proxy_loss(error: NDArray[np.floating], matrix: NDArray[np.floating]) -> float:
    """``tr(E·H·Eᵀ)`` of errors ``[rows, n]``, in float64."""
    wide = np.asarray(matrix, np.float64)
    total = 0.0
    for start in range(0, error.shape[0], LOSS_ROWS):
        part = error[start : start + LOSS_ROWS].astype(np.float64)
        total += float(np.einsum("rc,rc->", part @ wide, part))
    return total


def row_losses(error: NDArray[np.floating], matrix: NDArray[np.floating]) -> NDArray[np.float64]:
    """``e·H·eᵀ`` of each row of errors ``[rows, n]``, in float64."""
    wide = np.asarray(matrix, np.float64)
    losses = np.empty(error.shape[0], np.float64)
    for start in range(0, error.shape[0], LOSS_ROWS):
        part = error[start : start + LOSS_ROWS].astype(np.float64)
        losses[start : start + LOSS_ROWS] = np.einsum("rc,rc->r", part @ wide, part)
    return losses
