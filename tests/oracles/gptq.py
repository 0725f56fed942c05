"""Optimal brain quantization as the papers state it, one column at a time with an explicit inverse. numpy only.

arXiv 2208.11580 (OBQ), eq. 3, with GPTQ's fixed order (arXiv 2210.17323, eq. 2): after column q is served as
w_q − e, the columns F still free move by ``−(e / [H_F⁻¹]_qq)·[H_F⁻¹]_q,:``, and H_F⁻¹ is the inverse of the Hessian of
the free columns, inverted anew for every column. No Cholesky factor anywhere.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import lru_cache

import numpy as np


def mlx_grid(values: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Scale and bias ``[rows]`` of groups ``[rows, group]`` by the rule of mx.quantize, in float32."""
    one = np.float32(1)
    values = values.astype(np.float32)
    low, high = values.min(axis=1), values.max(axis=1)
    levels = np.float32((1 << bits) - 1)
    scale = np.maximum((high - low) / levels, np.float32(1e-7))
    if bits == 1:
        return scale, low
    low_is_edge = np.abs(low) > np.abs(high)
    scale = np.where(low_is_edge, scale, -scale)
    edge = np.where(low_is_edge, low, high)
    zero_code = np.rint(edge / scale)
    at_zero = zero_code == 0
    return np.where(at_zero, scale, edge / np.where(at_zero, one, zero_code)), np.where(at_zero, np.float32(0), edge)


@lru_cache(maxsize=8)
def _first_rows(hessian: bytes, order: tuple[int, ...]) -> list[np.ndarray]:
    """The first row of H_F⁻¹ for each column of ``order``: kept, as cases share Hessians."""
    matrix = np.frombuffer(hessian).reshape(len(order), len(order))
    free = [np.array(order[position:]) for position in range(len(order))]
    return [np.linalg.inv(matrix[np.ix_(columns, columns)])[0].copy() for columns in free]


def obq_columns(
    weight: np.ndarray,
    hessian: np.ndarray,
    *,
    bits: int,
    group: int,
    stored: type = np.float32,
    order: np.ndarray | None = None,
    grids: tuple[np.ndarray, np.ndarray] | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Codes ``[rows, n]``, scales and biases ``[rows, groups]``, served weights, all float64 but the grids.

    ``grids`` fixes scales and biases beforehand; otherwise each group takes them from its updated weights when its
    first column comes up. The last group may be ragged. ``hessian`` is damped already.
    """
    rows, width = weight.shape
    current = weight.astype(np.float64).copy()
    order = np.arange(width) if order is None else order
    count = -(-width // group)
    scales, biases = (np.zeros((rows, count)), np.zeros((rows, count))) if grids is None else grids
    codes, served = np.zeros((rows, width)), np.zeros((rows, width))
    inverses = _first_rows(hessian.astype(np.float64).tobytes(), tuple(order))
    for position, column in enumerate(order):
        g = column // group
        if grids is None and column % group == 0:
            found = mlx_grid(current[:, column : column + group], bits)
            scales[:, g], biases[:, g] = (part.astype(stored).astype(np.float64) for part in found)
        free = order[position:]
        inverse = inverses[position]
        rounded = np.rint((current[:, column] - biases[:, g]) / scales[:, g])
        codes[:, column] = np.clip(rounded, 0, 2**bits - 1)
        served[:, column] = codes[:, column] * scales[:, g] + biases[:, g]
        wrong = current[:, column] - served[:, column]
        current[:, free] -= np.outer(wrong / inverse[0], inverse)
    return codes, scales, biases, served


def obq_blocks(
    weight: np.ndarray, hessian: np.ndarray, cuts: list[int], code: Callable[[np.ndarray, int], np.ndarray]
) -> np.ndarray:
    """Served weights when blocks ``cuts[i]:cuts[i+1]`` are coded whole by ``code(target, start)``.

    After a block the free columns F move to the minimum of the loss given the errors so far: the least-squares
    solution ``E_F = −E_done·H_done,F·H_FF⁻¹``, from scratch each time.
    """
    width = weight.shape[1]
    wanted = weight.astype(np.float64)
    served = np.zeros_like(wanted)
    for start, stop in itertools.pairwise(cuts):
        done, free = np.arange(start), np.arange(start, width)
        target = wanted[:, free].copy()
        if start:
            errors = served[:, done] - wanted[:, done]
            target -= errors @ hessian[np.ix_(done, free)] @ np.linalg.inv(hessian[np.ix_(free, free)])
        served[:, start:stop] = code(target[:, : stop - start], start)
    return served


def loss(weight: np.ndarray, served: np.ndarray, hessian: np.ndarray) -> float:
    error = served.astype(np.float64) - weight
    return float(np.trace(error @ hessian @ error.T))
