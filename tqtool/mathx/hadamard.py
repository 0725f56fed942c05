"""The Hadamard matrix of order n = m·2^k, and its fast transform.

``H_n = F ⊗ S``: F the factor of order m (1, or a Paley matrix), S the Sylvester matrix of order 2^k in natural order.
For n = o·2^j with o odd, m is 1 if o = 1, else the smallest of 4o, 8o, 16o, … that Paley's constructions reach and
that divides n. 576 = 36·16, 896 = 28·32, 5120 = 20·256, 17408 = 68·256. Small m is also the cheap choice: the
transform costs k + m additions per value. F is not symmetric in general (12, 20, 28 are not), so H and Hᵀ differ.

The transform has one fixed order of operations (``reference_transform``), the same in numpy and in C++.
"""

from __future__ import annotations

import math
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from tqtool.errors import UserError
from tqtool.mathx.paley import paley_matrix, paley_order_field

# The factor is applied as a dense m x m product; above this it would cost more than it could be worth.
LARGEST_FACTOR = 1024

Float = TypeVar("Float", np.float32, np.float64)


def split_size(n: int) -> tuple[int, int] | None:
    """(m, k) with n = m·2^k and a constructible factor of order m ≤ 1024, or None."""
    if n < 1:
        return None
    odd = n >> _twos(n)
    if odd == 1:
        return 1, _twos(n)
    m = _smallest_factor(odd, limit=min(n, LARGEST_FACTOR))
    return None if m is None else (m, _twos(n // m))


def require_size(n: int, *, what: str) -> tuple[int, int]:
    """(m, k) of ``split_size``.

    Args:
        n: Order wanted.
        what: Where n comes from, for the message (``"hidden_size"``).

    Raises:
        UserError: No Hadamard matrix of order n can be built; says which factor it would take and the nearest orders.
    """
    found = split_size(n)
    if found is not None:
        return found
    if n < 1:
        raise UserError(f"{what} {n}: expected a positive size")
    odd = n >> _twos(n)
    needed = _smallest_factor(odd, limit=odd << 16)
    reason = (
        f"{n} = {odd}·2^{_twos(n)}, and the smallest order known here with that odd part is "
        + (f"{needed}" if needed is not None else "out of reach")
        + (f", above the largest factor {LARGEST_FACTOR}" if needed and needed > LARGEST_FACTOR else "")
    )
    below = next((size for size in range(n - 1, 0, -1) if split_size(size)), None)
    above = next(size for size in range(n + 1, 2 * n + 2) if split_size(size))
    nearest = f"{above}" if below is None else f"{below} and {above}"
    raise UserError(
        f"{what} {n}: no Hadamard matrix of this order can be built: {reason}",
        hint=f"the nearest orders that can be built are {nearest}; convert without rotation",
    )


def hadamard_factor(m: int) -> NDArray[np.int8]:
    """The factor F of order m: int8 ``[m, m]`` of ±1, checked orthogonal in integers. Raises ValueError if none."""
    return np.ones((1, 1), dtype=np.int8) if m == 1 else paley_matrix(m)


def hadamard_matrix(n: int) -> NDArray[np.int8]:
    """H_n itself, int8 ``[n, n]``: for tests and small sizes. Raises UserError if it cannot be built."""
    m, k = require_size(n, what="order")
    matrix = hadamard_factor(m)
    for _ in range(k):
        matrix = np.kron(matrix, np.array([[1, 1], [1, -1]], dtype=np.int8))
    return matrix


def reference_transform(
    x: NDArray[Float], factor: NDArray[np.int8], scale: NDArray[Float] | None = None
) -> NDArray[Float]:
    """``(x ⊙ scale) · (F ⊗ S) / √n`` along the last axis, in plain numpy: the reading copy of the native one.

    Order, in the array's own precision: scale; butterflies ``(u, v) → (u + v, u - v)`` at distance 1, 2, 4, … inside
    each run of 2^k; sums over F's rows 0, 1, … m - 1, in that order; one multiply by 1/√n.
    ``tqtool.native.hadamard_transform`` gives the same bits, which is tested.
    """
    n, m = x.shape[-1], factor.shape[0]
    run = n // m
    y = x.copy() if scale is None else x * scale
    distance = 1
    while distance < run:
        pairs = y.reshape(-1, n // (2 * distance), 2, distance)
        y = np.stack((pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]), axis=2)
        distance *= 2
    if m > 1:
        runs, signs = y.reshape(-1, m, run), factor.astype(x.dtype)
        total = signs[0][None, :, None] * runs[:, :1]
        for row in range(1, m):
            total = total + signs[row][None, :, None] * runs[:, row : row + 1]
        y = total
    norm = x.dtype.type(1.0 / math.sqrt(n))
    return (y * norm).reshape(x.shape)


def _twos(n: int) -> int:
    return (n & -n).bit_length() - 1


def _smallest_factor(odd: int, *, limit: int) -> int | None:
    m = 4 * odd
    while m <= limit:
        if paley_order_field(m) is not None:
            return m
        m *= 2
    return None
