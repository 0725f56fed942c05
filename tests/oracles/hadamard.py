"""Hadamard matrices and sign streams the slow, obvious way. Imports nothing of tqtool."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def legendre(a: int, p: int) -> int:
    """Quadratic character of a modulo an odd prime, by Euler's criterion."""
    a %= p
    return 0 if a == 0 else (1 if pow(a, (p - 1) // 2, p) == 1 else -1)


def paley_of_prime(order: int, p: int) -> NDArray[np.int64]:
    """Paley I (order p + 1) or II (order 2(p + 1)) entry by entry, for prime p."""
    n = p + 1
    core = np.zeros((n, n), dtype=np.int64)
    for i in range(n):
        for j in range(n):
            if i == 0 and j > 0:
                core[i, j] = 1
            elif j == 0 and i > 0:
                core[i, j] = -1 if p % 4 == 3 else 1
            elif i and j:
                core[i, j] = legendre(i - j, p)
    if order == n:
        return core + np.eye(n, dtype=np.int64)
    matrix = np.zeros((2 * n, 2 * n), dtype=np.int64)
    for i in range(n):
        for j in range(n):
            block = np.array([[1, -1], [-1, -1]]) if i == j else core[i, j] * np.array([[1, 1], [1, -1]])
            matrix[2 * i : 2 * i + 2, 2 * j : 2 * j + 2] = block
    return matrix


def splitmix32_signs(seed: int, n: int, lane: int) -> list[int]:
    """±1 from splitmix32, one Python integer at a time."""
    mask = 0xFFFFFFFF
    state = seed ^ (((lane + 1) * 0x9E3779B9) & mask)
    signs = []
    for _ in range(n):
        state = (state + 0x9E3779B9) & mask
        z = state
        z = ((z ^ (z >> 16)) * 0x21F0AAAD) & mask
        z = ((z ^ (z >> 15)) * 0x735A2D97) & mask
        z ^= z >> 15
        signs.append(-1 if z & 1 else 1)
    return signs
