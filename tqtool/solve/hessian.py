"""Hessians of linear layers: ``H = Σ w·x·xᵀ / n`` over calibration rows, summed in a stream.

A rule that weights positions (attention sinks) acts here and only here: ``accumulate(rows, weights)``. What comes out
is a plain matrix; solvers know nothing of tokens. H is in the order of the layer's inputs; whoever permutes does it to
a copy.

Error of the sum. Products are float32 over at most ``CHUNK_ROWS`` rows m, sums of products float64. With u = 2⁻²⁴ and
γ_m = m·u / (1 − m·u), a chunk's entry is off by at most γ_{m+4}·Σ|x_i·x_j|·w (4 for the square root of w and its
product with each factor), whatever order the BLAS sums in; by Cauchy-Schwarz, over all chunks,

    |ΔH_ij| ≤ γ_{m+4} · √(H_ii·H_jj) · (1 + 2·γ_{m+4})        3.1e-5 for 512 rows; about √m·u, 1.4e-6, in practice

to which N chunks add N·2⁻⁵³, nothing. In the scale of its own diagonal H is thus moved by at most ``width·error_bound``
in the spectral norm, 300 times less in practice than damping by 1 %.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tqtool.errors import NumericalError

CHUNK_ROWS = 512
"""Rows of one float32 product: more would be a little faster and lose digits."""

PANEL = 512
"""Columns of one product: only the upper triangle of panels is computed, and the temporary is ``[PANEL, width]``."""

_UNIT_ROUNDOFF = 2.0**-24
_LARGEST_NORM = float(np.finfo(np.float32).max) / CHUNK_ROWS


def error_bound(chunk_rows: int = CHUNK_ROWS) -> float:
    """Largest ``|ΔH_ij| / √(H_ii·H_jj)``; see the module docstring."""
    terms = (chunk_rows + 4) * _UNIT_ROUNDOFF
    gamma = terms / (1 - terms)
    return gamma * (1 + 2 * gamma)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hessian:
    """One layer's input statistics.

    Attributes:
        matrix: Symmetric ``[in, in]``, float64 as summed, or float32 as stored; units of the input squared.
        rows: Calibration rows in the sum (the n of H).
        dropped: Rows left out because they were not finite, or too large to square.
    """

    matrix: NDArray[np.floating]
    rows: int
    dropped: int = 0

    def __post_init__(self) -> None:
        if self.matrix.ndim != 2 or self.matrix.shape[0] != self.matrix.shape[1]:
            raise NumericalError(f"a Hessian is square, this one is {list(self.matrix.shape)}")
        if not np.isfinite(self.matrix).all():
            raise NumericalError(f"a Hessian of width {self.width} is not finite", hint="calibrate again")
        if (np.diagonal(self.matrix) < 0).any():
            raise NumericalError(f"a Hessian of width {self.width} has a negative diagonal", hint="calibrate again")

    @property
    def width(self) -> int:
        """Inputs of the layer."""
        return int(self.matrix.shape[0])

    @property
    def dead(self) -> NDArray[np.bool_]:
        """Inputs that were zero in every row, ``[in]``."""
        return np.asarray(np.diagonal(self.matrix) == 0)

    def damped(self, damping: float) -> NDArray[np.float64]:
        """A float64 copy with ``damping`` times the mean of the live diagonal added to the diagonal.

        A dead input gets that mean as its own entry: it neither gives nor takes feedback and is rounded to nearest.
        GPTQ's way, to set its weights to zero, would break the model on text unlike the calibration's.

        Raises:
            NumericalError: All inputs are dead: there is nothing to minimize.
        """
        matrix = self.matrix.astype(np.float64)
        dead = self.dead
        if dead.all():
            raise NumericalError(
                f"a Hessian of width {self.width} over {self.rows} rows is zero", hint="calibrate on text that uses it"
            )
        mean = float(np.diagonal(matrix)[~dead].mean())
        index = np.arange(self.width)
        matrix[index[dead], index[dead]] = mean
        matrix[index, index] += damping * mean
        return matrix


class HessianSum:
    """Sums rows into a Hessian; memory is ``8·in²`` bytes and a panel, whatever the number of rows."""

    def __init__(self, width: int) -> None:
        self._total = np.zeros((width, width), np.float64)  # upper triangle of panels
        self.rows = 0
        self.dropped = 0

    @property
    def width(self) -> int:
        """Inputs of the layer."""
        return self._total.shape[0]

    def accumulate(self, rows: NDArray[np.floating], weights: NDArray[np.floating] | None = None) -> int:
        """Add ``Σ w·x·xᵀ`` of ``rows [n, in]`` with ``weights [n]``, 1 by default.

        Returns:
            How many rows were dropped: not finite, or weighted square beyond ``float32 / CHUNK_ROWS``. They count in
            ``dropped``, not in ``rows``.

        Raises:
            NumericalError: Shapes do not fit, or a weight is negative or not finite.
        """
        if rows.ndim != 2 or rows.shape[1] != self.width:
            raise NumericalError(f"calibration rows {list(rows.shape)}: expected [n, {self.width}]")
        if weights is not None:
            if weights.shape != rows.shape[:1]:
                raise NumericalError(f"{list(weights.shape)} weights for {rows.shape[0]} calibration rows")
            if not (np.isfinite(weights).all() and (weights >= 0).all()):
                raise NumericalError("a weight of a calibration row is negative or not finite")
        dropped = 0
        for start in range(0, len(rows), CHUNK_ROWS):
            part = slice(start, start + CHUNK_ROWS)
            dropped += self._add(rows[part], None if weights is None else weights[part])
        self.dropped += dropped
        self.rows += len(rows) - dropped
        return dropped

    def _add(self, rows: NDArray[np.floating], weights: NDArray[np.floating] | None) -> int:
        with np.errstate(over="ignore", invalid="ignore"):
            part = np.ascontiguousarray(rows, np.float32)
            if weights is not None:
                part = part * np.sqrt(weights).astype(np.float32)[:, None]
            good = np.einsum("ri,ri->r", part, part) < _LARGEST_NORM  # False for NaN
        if not good.all():
            part = part[good]
        if len(part):
            for start in range(0, self.width, PANEL):
                left = part[:, start : start + PANEL]
                self._total[start : start + PANEL, start:] += left.T @ part[:, start:]
        return int(len(good) - np.count_nonzero(good))

    def merge(self, other: HessianSum) -> None:
        """Add another sum of the same width: shards of a calibration."""
        if other.width != self.width:
            raise NumericalError(f"Hessian sums of widths {self.width} and {other.width} cannot be added")
        self._total += other._total
        self.rows += other.rows
        self.dropped += other.dropped

    def finish(self) -> Hessian:
        """The mean over rows; exactly symmetric.

        Raises:
            NumericalError: No finite row was seen.
        """
        if self.rows == 0:
            raise NumericalError(
                f"no finite calibration row for a layer of width {self.width} ({self.dropped} dropped)",
                hint="calibrate on more text, or leave the module to round-to-nearest",
            )
        matrix = self._total / self.rows
        for start in range(0, self.width, PANEL):  # one copy: a temporary of 17408² is another 2.4 GB
            panel = slice(start, start + PANEL)
            corner = np.triu(matrix[panel, panel])
            matrix[panel, panel] = corner + np.triu(corner, 1).T
            matrix[start + PANEL :, panel] = matrix[panel, start + PANEL :].T
        return Hessian(matrix=matrix, rows=self.rows, dropped=self.dropped)
