"""Arrays of a case, what must come out in float64, and how far a kernel may be from it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from tests.oracles import trellis_stream
from tests.support.trellis_cases import Case
from tqtool.formats.trellis import TrellisSpec
from tqtool.kernels.problem import Dtype

NUMPY: dict[Dtype, Any] = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
U = 2.0**-24
"""Half the distance of float32 numbers around 1: what one rounding may cost."""
ROUNDING: dict[Dtype, float] = {"float32": U, "float16": 2.0**-11, "bfloat16": 2.0**-8}
SUBNORMAL: dict[Dtype, float] = {"float32": 0.0, "float16": 2.0**-25, "bfloat16": 0.0}


@dataclass(frozen=True, slots=True)
class Matrix:
    """A packed matrix: ``words`` uint32 in the shape of the tensor, ``scales`` float16 ``[rows]``."""

    spec: TrellisSpec
    words: NDArray[np.uint32]
    scales: NDArray[np.float16]


@dataclass(frozen=True, slots=True)
class Arrays:
    """Inputs of a case: ``x [m, in]`` in its dtype, one matrix, or gate and up."""

    x: NDArray[Any]
    matrices: tuple[Matrix, ...]


def arrays_of(case: Case) -> Arrays:
    """The same arrays every time; words are random bits, so every state occurs."""
    problem, rng = case.problem, np.random.default_rng(case.seed)
    matrices = []
    for spec in problem.specs:
        words = rng.integers(0, 2**32, spec.words_shape, dtype=np.uint32)
        scales = rng.uniform(0.25, 2.0, spec.rows).astype(np.float16)
        matrices.append(Matrix(spec, words, _special_scales(case.special, scales)))
    x = rng.standard_normal((problem.m, problem.spec.weight_shape[1])).astype(np.float32)
    return Arrays(_special_x(case.special, x).astype(NUMPY[problem.dtype]), tuple(matrices))


def _special_scales(special: str, scales: NDArray[np.float16]) -> NDArray[np.float16]:
    value = {
        "zero scales": 0.0,
        "inf meets zero scale": 0.0,
        "largest scale": 65504.0,
        "smallest scale": 2.0**-24,
        "negative scale": -1.0,
    }.get(special)
    if value is not None:
        scales[::3] = value
    return scales


def _special_x(special: str, x: NDArray[np.float32]) -> NDArray[np.float32]:
    if special in ("inf in x", "inf meets zero scale"):
        x[0, x.shape[1] // 2] = np.inf
    elif special == "nan in x":
        x[-1, 0] = np.nan
    elif special == "zero x":
        x[:] = 0.0
    elif special == "large x":
        x *= 2.0**10
    return x


@lru_cache(maxsize=512)
def _decoded(words: bytes, scales: bytes, spec: TrellisSpec) -> NDArray[np.float32]:
    flat = np.frombuffer(words, np.uint32), np.frombuffer(scales, np.float16)
    return trellis_stream.decode(*flat, spec.to_config())


def stored(matrix: Matrix) -> NDArray[np.float32]:
    """The stored matrix ``[rows, cols]``, by a decoder written from the format page."""
    return _decoded(matrix.words.tobytes(), matrix.scales.tobytes(), matrix.spec)


@dataclass(frozen=True, slots=True)
class Expected:
    """``value`` in float64 and the ``bound`` of a kernel's distance from it, elementwise; zero bound: equal bits."""

    value: NDArray[np.float64]
    bound: NDArray[np.float64]


def expected(case: Case, arrays: Arrays) -> Expected:
    """What the kernel of any backend has to give, whatever the order of its sums."""
    dtype = case.problem.dtype
    if case.problem.op == "expand":
        value = stored(arrays.matrices[0]).astype(NUMPY[dtype]).astype(np.float64)
        return Expected(value, np.zeros_like(value))
    products = [_product(arrays.x, matrix) for matrix in arrays.matrices]
    value, bound = products[0] if len(products) == 1 else _swiglu(*products)
    # The result is rounded to its dtype once; a second per cent stands for the products of errors.
    return Expected(value, 1.01 * bound + ROUNDING[dtype] * np.abs(value) + SUBNORMAL[dtype])


def _product(x: NDArray[Any], matrix: Matrix) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """x Wᵀ, and n + 8 roundings of Σ|x||w|.

    In any order: n products and n - 1 sums, the scale's way in (2) and the unit's (2), and the two roundings that the
    format itself puts into a weight but a kernel that multiplies by the scale last does not make.
    """
    weight = stored(matrix).astype(np.float64)
    weight = weight if matrix.spec.axis == 1 else weight.T
    wide = x.astype(np.float64)
    with np.errstate(invalid="ignore"):
        value = np.stack([(weight * row).sum(axis=1) for row in wide])
        bound = (weight.shape[1] + 8) * U * np.stack([(np.abs(weight) * np.abs(row)).sum(axis=1) for row in wide])
    return value, bound


def _swiglu(
    gate: tuple[NDArray[np.float64], NDArray[np.float64]], up: tuple[NDArray[np.float64], NDArray[np.float64]]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """silu(g) u. The slope of silu is below 1.1; exp, sum, quotient and product cost at most ten roundings."""
    (g, g_bound), (u, u_bound) = gate, up
    with np.errstate(over="ignore", invalid="ignore"):
        silu = g / (1 + np.exp(-g))
        value = silu * u
        bound = 1.1 * g_bound * (np.abs(u) + u_bound) + np.abs(silu) * u_bound + 10 * U * np.abs(value)
    return value, bound


def int8_rounded(arrays: Arrays) -> Arrays:
    """With x as the kernel rounds it: 127 steps to the largest of its row, ties to even, in float32."""
    x = arrays.x.astype(np.float32)
    largest = np.maximum(np.abs(x).max(axis=1, keepdims=True), np.float32(2.0**-100))
    with np.errstate(invalid="ignore", over="ignore"):
        steps = np.rint(x * (np.float32(127) / largest)).astype(np.float64)
        return replace(arrays, x=steps * (largest.astype(np.float64) / 127))


def check(case: Case, found: NDArray[Any], expected: Expected) -> None:
    """AssertionError unless ``found`` has the shape and dtype of the result and lies within the bound everywhere.

    Infinities and NaN must be where float64 has them; a number too large for the dtype must have become an infinity.
    """
    assert found.dtype == NUMPY[case.problem.dtype]
    assert found.shape == expected.value.shape
    result = found.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = expected.value.astype(np.float32).astype(found.dtype).astype(np.float64)
        special = ~np.isfinite(rounded)
        np.testing.assert_array_equal(result[special], rounded[special])
        distance = np.abs(result - expected.value)[~special]
    bad = ~(distance <= expected.bound[~special])
    assert not bad.any(), f"{bad.sum()} of {bad.size} results beyond the bound, first by {distance[bad][0]:.3g}"
