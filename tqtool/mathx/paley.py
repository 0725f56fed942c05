"""Hadamard matrices by Paley's two constructions, over any finite field of odd order.

With χ the quadratic character of GF(q) and Q[a, b] = χ(a - b):

* Paley I, q ≡ 3 (mod 4): order q + 1, ``H = I + [[0, 1ᵀ], [-1, Q]]``;
* Paley II, q ≡ 1 (mod 4): order 2(q + 1), ``C = [[0, 1ᵀ], [1, Q]]``,
  ``H = C ⊗ [[1, 1], [1, -1]] + I ⊗ [[1, -1], [-1, -1]]``.

Every matrix is checked orthogonal, in integers, when it is built.
"""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

from tqtool.errors import NumericalError

Polynomial = tuple[int, ...]  # coefficients over GF(p), lowest degree first


def paley_order_field(order: int) -> int | None:
    """The q whose Paley matrix has this order: I before II; None if there is none."""
    if order % 4:
        return None
    for q, residue in ((order - 1, 3), (order // 2 - 1, 1)):
        if q % 4 == residue and prime_power(q) is not None:
            return q
    return None


def paley_matrix(order: int) -> NDArray[np.int8]:
    """The Paley matrix of an order for which ``paley_order_field`` finds a field.

    Returns:
        int8 ``[order, order]`` of ±1, ``H @ H.T = order · I``; not symmetric in general.

    Raises:
        ValueError: There is no such Paley matrix.
        NumericalError: The matrix is not orthogonal (a programming error).
    """
    q = paley_order_field(order)
    if q is None:
        raise ValueError(f"no Paley matrix of order {order}")
    core = np.zeros((q + 1, q + 1), dtype=np.int8)
    core[0, 1:] = 1
    core[1:, 0] = -1 if q % 4 == 3 else 1
    core[1:, 1:] = _character_matrix(q)
    identity = np.eye(q + 1, dtype=np.int8)
    if q % 4 == 3:
        matrix = core + identity
    else:
        on, off = np.array([[1, 1], [1, -1]], dtype=np.int8), np.array([[1, -1], [-1, -1]], dtype=np.int8)
        matrix = np.kron(core, on) + np.kron(identity, off)
    require_orthogonal(matrix)
    return matrix


def require_orthogonal(matrix: NDArray[np.int8]) -> None:
    """Raise NumericalError unless ``matrix`` is ±1 with ``H Hᵀ = order · I``, computed in integers."""
    order = matrix.shape[0]
    wide = matrix.astype(np.int32)
    if not (np.all(np.abs(wide) == 1) and np.array_equal(wide @ wide.T, order * np.eye(order, dtype=np.int32))):
        raise NumericalError(f"the Hadamard matrix of order {order} is not orthogonal")


def prime_power(q: int) -> tuple[int, int] | None:
    """(p, k) with p prime and ``p**k == q``, or None."""
    if q < 2:
        return None
    p = next((d for d in range(2, int(q**0.5) + 2) if q % d == 0 and d < q), q)
    k, rest = 0, q
    while rest % p == 0:
        k, rest = k + 1, rest // p
    return (p, k) if rest == 1 else None


def _character_matrix(q: int) -> NDArray[np.int8]:
    """χ(a - b) for all a, b in GF(q): int8 ``[q, q]``. Element i has the base-p digits of i as its coefficients."""
    found = prime_power(q)
    assert found is not None
    p, k = found
    digits = np.arange(q)[:, None] // p ** np.arange(k) % p  # [q, k]
    difference = ((digits[:, None, :] - digits[None, :, :]) % p) @ p ** np.arange(k)  # [q, q], as element numbers
    character = np.full(q, -1, dtype=np.int8)
    character[0] = 0
    character[_squares(digits, p, k)] = 1
    return character[difference]


def _squares(digits: NDArray[np.int_], p: int, k: int) -> NDArray[np.int_]:
    """Numbers of the non-zero squares of GF(p**k)."""
    modulus = _first_irreducible(p, k)
    powers = p ** np.arange(k)
    return np.unique(
        [int(np.array(_square_modulo(tuple(int(c) for c in element), modulus, p)) @ powers) for element in digits[1:]]
    )


def _square_modulo(element: Polynomial, modulus: Polynomial, p: int) -> Polynomial:
    """``element²`` modulo a monic polynomial of degree ``len(element)``."""
    k = len(element)
    product = [0] * (2 * k - 1)
    for i, a in enumerate(element):
        for j, b in enumerate(element):
            product[i + j] = (product[i + j] + a * b) % p
    return _remainder(tuple(product), modulus, p)


def _remainder(dividend: Polynomial, divisor: Polynomial, p: int) -> Polynomial:
    """``dividend`` modulo a monic ``divisor``, padded to its degree."""
    degree = len(divisor) - 1
    rest = list(dividend) + [0] * max(0, degree - len(dividend))
    for top in range(len(rest) - 1, degree - 1, -1):
        factor = rest[top]
        for i in range(degree + 1):
            rest[top - degree + i] = (rest[top - degree + i] - factor * divisor[i]) % p
    return tuple(rest[:degree])


def _first_irreducible(p: int, k: int) -> Polynomial:
    """The first monic irreducible polynomial of degree k over GF(p), constant term counting fastest.

    Which one is taken only renames the field's elements; taking the first one fixes the matrix.
    """
    for low in itertools.product(range(p), repeat=k):
        candidate = (*reversed(low), 1)
        if not any(
            not any(_remainder(candidate, (*divisor, 1), p))
            for degree in range(1, k // 2 + 1)
            for divisor in itertools.product(range(p), repeat=degree)
        ):
            return candidate
    raise NumericalError(f"no irreducible polynomial of degree {k} over GF({p})")  # one exists for every k
