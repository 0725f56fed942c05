"""What stands around the search for paths: row scales, inputs in level units, words of paths, the refit of scales."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tqtool import native
from tqtool.errors import ArtifactError, BackendError, NumericalError
from tqtool.formats.trellis import TrellisSpec, check_closed
from tqtool.mathx import codes

LEVEL_LIMIT = np.float32(560)
"""Largest input of the encoder, in level units (kMaxAbsX of kernels/cpu)."""


def row_scales(name: str, stored: NDArray[np.float32], k: int) -> NDArray[np.float16]:
    """Float16 scale of each row ``[rows, cols]``: root mean square over the code scale; 0 for a row of zeros."""
    mean_square = np.einsum("rc,rc->r", stored, stored, dtype=np.float64) / stored.shape[1]
    wanted = np.sqrt(mean_square) / codes.CODE_SCALE[k]
    with np.errstate(over="ignore"):
        scales = wanted.astype(np.float16)
    lost = ~np.isfinite(scales) | ((scales == 0) & (wanted > 0))
    if lost.any():
        row = int(np.argmax(lost))
        raise NumericalError(
            f"{name}: row {row} has scale {wanted[row]:.3g}, which float16 cannot hold (6e-8 … 65504)",
            hint="keep this module affine or dense with --rule",
        )
    return np.asarray(scales, np.float16)


def level_factors(scales: NDArray[np.float16], code: codes.Code) -> NDArray[np.float32]:
    """Level units per unit of each row ``[n]``; 0 for a row of zeros."""
    with np.errstate(divide="ignore"):
        factor: NDArray[np.float32] = np.float32(codes.UNIT[code]) / scales.astype(np.float32)
    factor[scales == 0] = 0
    return factor


def to_levels(
    rows: NDArray[np.float32], scales: NDArray[np.float16], code: codes.Code, *, threads: int = 0
) -> NDArray[np.int16]:
    """Rows ``[n, c]`` over their scales ``[n]``, in the encoder's integer level units.

    Rounding is float32, half to even: the same on every backend.
    """
    return native.trellis_levels(rows, level_factors(scales, code), limit=float(LEVEL_LIMIT), threads=threads)


def pack_closed(name: str, states: NDArray[np.uint16], spec: TrellisSpec, *, threads: int = 0) -> NDArray[np.uint32]:
    """Words ``[n, words]`` of states ``[n, T]``.

    Raises:
        BackendError: a block is no closed path. Packing keeps k bits of each state: it would be read back as others.
    """
    words, broken = native.trellis_pack(states, k=spec.k, window=spec.window, threads=threads)
    if broken is None:
        return words
    try:
        check_closed(states, spec.k, spec.window)  # says where
        problem = f"trellis block {broken} is no closed path"
    except ArtifactError as error:
        problem = error.message
    raise BackendError(f"{name}: the encoder is at fault: {problem}", hint="reinstall tqtool, or report it")


def refit_scales(products: NDArray[np.float64], scales: NDArray[np.float16]) -> NDArray[np.float16]:
    """Least-squares scale of each row, ``<w, c> / <c, c>`` of ``native.row_products``, where positive and finite."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        fitted = (products[:, 0] / products[:, 1]).astype(np.float16)
    keep = np.isfinite(fitted) & (fitted > 0) & (scales > 0)
    return np.where(keep, fitted, scales).astype(np.float16)


def squared_errors(products: NDArray[np.float64], scales: NDArray[np.float16]) -> NDArray[np.float64]:
    """``|w - s c|²`` of each row, from ``native.row_products``: in float64 what cancels costs a dozen bits of 53."""
    s = scales.astype(np.float64)
    errors: NDArray[np.float64] = products[:, 2] - 2 * s * products[:, 0] + s * s * products[:, 1]
    return np.maximum(errors, 0)
