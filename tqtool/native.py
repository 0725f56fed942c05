"""Typed face of ``tqtool._native``, the C++ compiled from ``kernels/cpu``. numpy in, numpy out, all cores.

``threads=0`` means one per core; results never depend on it. ``force`` names an instruction set (``avx512``,
``avx2``, ``neon``, ``scalar``) for tests; by default the best that the machine has is used.
"""

from __future__ import annotations

import math
from functools import lru_cache
from importlib import import_module
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from tqtool.errors import BackendError
from tqtool.formats.trellis import TrellisSpec
from tqtool.mathx import codes, hadamard

try:
    # By name: the module has no Python source, and `from tqtool import …` would tie this layer to the package's top.
    _native: Any = import_module("tqtool._native")
except ImportError as error:  # pragma: no cover - a broken installation
    raise BackendError(
        f"the compiled module tqtool._native cannot be loaded: {error}",
        hint="reinstall with a C++17 compiler present: pip install -e .",
    ) from error


# ------------------------------------------------------------------------------------------ rotation folds
Float = TypeVar("Float", np.float32, np.float64)


def hadamard_transform(
    x: NDArray[Float],
    *,
    axis: int,
    block: int | None = None,
    scale: NDArray[Float] | None = None,
    transpose: bool = False,
    out: NDArray[Float] | None = None,
    threads: int = 0,
    force: str = "",
) -> NDArray[Float]:
    """``(x ⊙ scale) · H_n / √n`` along one axis, in the order of ``mathx.hadamard.reference_transform``.

    Args:
        x: C-contiguous float32 or float64.
        axis: The axis that is transformed.
        block: n; the axis is cut into blocks of this length, each transformed alone. Default: the whole axis.
        scale: ``[n]``, multiplied in first (the signs of a rotation); same dtype as x.
        transpose: Use Hᵀ instead of H.
        out: Where to write, ``x`` itself for in place; default: a new array.
        threads: 0 for one per core.
        force: Instruction set, for tests.

    Returns:
        ``out``. Peak extra memory: 64 bytes · (n + 2m) per thread, twice that for float64; never a copy of x.

    Raises:
        UserError: There is no Hadamard matrix of order n.
        BackendError: Shapes, dtypes or memory layout do not fit.
    """
    n = x.shape[axis] if block is None else block
    m, _ = hadamard.require_size(n, what="transform size")
    if x.shape[axis] % n:
        raise BackendError(f"hadamard_transform: an axis of {x.shape[axis]} cannot be cut into blocks of {n}")
    axis %= x.ndim
    factor = hadamard.hadamard_factor(m)
    factor = np.ascontiguousarray(factor.T) if transpose else factor
    result = np.empty_like(x) if out is None else out
    outer, inner = math.prod(x.shape[:axis]) * (x.shape[axis] // n), math.prod(x.shape[axis + 1 :])
    run = _native.hadamard_f64 if x.dtype == np.float64 else _native.hadamard_f32
    try:
        run(x, result, outer, n, inner, factor, scale, threads, force)
    except (TypeError, ValueError) as error:
        raise BackendError(f"hadamard_transform: {x.dtype} {list(x.shape)}, axis {axis}, n {n}: {error}") from error
    return result


# ------------------------------------------------------------------------------------------ affine rounding
def affine_quantize(
    weight: NDArray[Any], *, bits: int, group_size: int, threads: int = 0, force: str = ""
) -> tuple[NDArray[np.uint32], NDArray[np.float32], NDArray[np.float32]]:
    """Round ``[rows, in]`` (float32 or bfloat16, finite) to the bits that ``mx.quantize`` gives in affine mode.

    Returns:
        Words uint32 ``[rows, in·bits/32]``; scales and biases ``[rows, in/group]`` in float32, not yet rounded to
        the weight's dtype as MLX stores them.

    Raises:
        BackendError: Shapes, dtypes or memory layout do not fit, or the instruction set is not available.
    """
    rows, width = weight.shape
    words = np.empty((rows, width * bits // 32), np.uint32)
    scales, biases = np.empty((2, rows, width // group_size), np.float32)
    is_float32 = weight.dtype == np.float32
    run = _native.affine_quantize_f32 if is_float32 else _native.affine_quantize_bf16
    source = weight if is_float32 else weight.view(np.uint16)
    try:
        run(source, words, scales, biases, bits, group_size, threads, force)
    except (TypeError, ValueError) as error:
        what = f"{weight.dtype} {list(weight.shape)}, group {group_size}"
        raise BackendError(f"affine_quantize: {what}: {error}") from error
    return words, scales, biases


# ---------------------------------------------------------------------------------------------- trellis
def viterbi_encode(
    x: NDArray[np.int16],
    levels: NDArray[np.int16],
    *,
    window: int,
    k: int,
    warmup: int | None = None,
    threads: int = 0,
    force: str = "",
) -> tuple[NDArray[np.uint16], str]:
    """Best tail-biting path of each block, by QTIP's Algorithm 4 or with a shorter first pass.

    Args:
        x: Inputs ``[n, T]`` in level units; values beyond ±560 are clipped.
        levels: Integer value of every state, ``[2^window]``.
        window: L, state bits.
        k: Bits per step.
        warmup: Steps on each side of the seam in the first pass; None is T/2, Algorithm 4.
        threads: 0 for one per core.
        force: Instruction set, for tests.

    Returns:
        States ``[n, T]`` and the name of the instruction set that ran.

    Raises:
        BackendError: shapes do not fit or the instruction set is not available.
    """
    states = np.empty(x.shape, np.uint16)
    steps = x.shape[1] // 2 if warmup is None else warmup
    try:
        name = _native.viterbi_encode(np.ascontiguousarray(x), levels, states, window, k, steps, threads, force)
    except ValueError as error:
        raise BackendError(f"viterbi_encode: {error} (L={window}, k={k}, T={x.shape[1]}, force={force!r})") from error
    return states, str(name)


def trellis_levels(
    rows: NDArray[np.float32], factors: NDArray[np.float32], *, limit: float, threads: int = 0
) -> NDArray[np.int16]:
    """Rows ``[n, c]`` times factors ``[n]``: float32 products, rounded half to even, within ± ``limit``, a whole."""
    out = np.empty(rows.shape, np.int16)
    try:
        _native.trellis_levels(np.ascontiguousarray(rows), factors, out, limit, threads)
    except ValueError as error:
        raise BackendError(f"trellis_levels: {error}") from error
    return out


def trellis_pack(
    states: NDArray[np.uint16], *, k: int, window: int, threads: int = 0
) -> tuple[NDArray[np.uint32], int | None]:
    """``formats.trellis.pack`` on all cores: words ``[n, T·k/32]`` of states ``[n, T]``.

    Returns:
        The words, and the first block that is no closed path (its words would be read back as other states), or None.

    Raises:
        BackendError: shapes do not fit.
    """
    words = np.empty((states.shape[0], states.shape[1] * k // 32), np.uint32)
    try:
        broken = int(_native.trellis_pack(np.ascontiguousarray(states), words, k, window, threads))
    except ValueError as error:
        raise BackendError(f"trellis_pack: {error}") from error
    return words, None if broken < 0 else broken


def row_products(weights: NDArray[np.float32], codes: NDArray[np.float32], *, threads: int = 0) -> NDArray[np.float64]:
    """Of each row of ``weights`` and ``codes`` ``[n, c]``: Σ w·c, Σ c², Σ w² as ``[n, 3]``, float64, in one order."""
    sums = np.empty((weights.shape[0], 3), np.float64)
    try:
        _native.row_products(np.ascontiguousarray(weights), np.ascontiguousarray(codes), sums, threads)
    except ValueError as error:
        raise BackendError(f"row_products: {error}") from error
    return sums


def trellis_expand(
    words: NDArray[np.uint32],
    scales: NDArray[np.float16],
    spec: TrellisSpec,
    *,
    threads: int = 0,
    force: str = "",
) -> NDArray[np.float32]:
    """Decode a stored matrix: float32 ``[rows, cols]``, each value ``f32(code) · f32(scale)``."""
    out = np.empty((spec.rows, spec.cols), np.float32)
    try:
        _native.trellis_expand(*_arguments(words, scales, spec), out, threads, force)
    except ValueError as error:
        raise BackendError(f"trellis_expand: {error}") from error
    return out


def trellis_matvec(
    words: NDArray[np.uint32],
    scales: NDArray[np.float16],
    spec: TrellisSpec,
    x: NDArray[np.float32],
    *,
    threads: int = 0,
    force: str = "",
) -> NDArray[np.float32]:
    """``x [m, in]`` times the transposed weight: float32 ``[m, out]``.

    A weight is decoded once for every four rows; where ``stride`` is no multiple of 16, once for all of them.
    """
    y = np.empty((x.shape[0], spec.weight_shape[0]), np.float32)
    try:
        _native.trellis_matvec(*_arguments(words, scales, spec), np.ascontiguousarray(x), y, threads, force)
    except ValueError as error:
        raise BackendError(f"trellis_matvec: {error}") from error
    return y


def _arguments(
    words: NDArray[np.uint32], scales: NDArray[np.float16], spec: TrellisSpec
) -> tuple[NDArray[np.uint32], NDArray[np.float32], NDArray[np.float32], int, int, int, int, int, int, str]:
    table = _table(spec.code, spec.window)
    flat = np.ascontiguousarray(words.reshape(-1))
    layout = (spec.stride, spec.axis, spec.tile)
    return flat, scales.astype(np.float32), table, *layout, spec.k, spec.window, spec.block, spec.code


@lru_cache(maxsize=8)
def _table(code: codes.Code, window: int) -> NDArray[np.float32]:
    """Values of a code the C++ looks up; empty for the byte-sum codes, which it computes."""
    return np.empty(0, np.float32) if code in ("mul1", "1mad") else codes.values(code, window)


# -------------------------------------------------------------------------------------------- packed KV
def kv_encode(
    keys: NDArray[np.float32],
    values: NDArray[np.float32],
    *,
    signs: NDArray[np.float32],
    boundaries: NDArray[np.float32],
    bits: tuple[int, int],
    words: int,
    threads: int = 0,
    force: str = "",
) -> NDArray[np.uint32]:
    """Keys and values ``[..., d]`` → records ``[..., words]``: the bytes of ``tqtool.kv.codec``'s rule ``exact``.

    Args:
        keys: C-contiguous, finite.
        values: Likewise.
        signs: ``[d]``.
        boundaries: Between levels of values, ascending.
        bits: Of keys and of values.
        words: Of a record (``RecordLayout.words``).
        threads: 0 for one per core.
        force: Instruction set, for tests.

    Raises:
        BackendError: Shapes or bits do not fit.
    """
    records = np.empty((*keys.shape[:-1], words), np.uint32)
    flat = [array.reshape(-1, array.shape[-1]) for array in (keys, values, records)]
    try:
        _native.kv_encode(flat[0], flat[1], signs, boundaries, *bits, flat[2], threads, force)
    except (TypeError, ValueError) as error:
        raise BackendError(f"kv_encode: keys {list(keys.shape)}, values {list(values.shape)}: {error}") from error
    return records


def kv_decode(
    records: NDArray[np.uint32],
    tokens: int,
    *,
    head_dim: int,
    levels: NDArray[np.float32],
    bits: tuple[int, int],
    threads: int = 0,
    force: str = "",
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Of records ``[heads, room, words]`` the first ``tokens``: keys and rotated values ``[heads, tokens, d]``.

    Raises:
        BackendError: Shapes or bits do not fit.
    """
    keys, rotated = np.empty((2, records.shape[0], tokens, head_dim), np.float32)
    try:
        _native.kv_decode(records, tokens, levels, *bits, keys, rotated, threads, force)
    except (TypeError, ValueError) as error:
        raise BackendError(f"kv_decode: records {list(records.shape)}, {tokens} tokens: {error}") from error
    return keys, rotated


def kv_attend(
    queries: NDArray[np.float32],
    records: NDArray[np.uint32],
    tokens: int,
    *,
    levels: NDArray[np.float32],
    signs: NDArray[np.float32],
    bits: tuple[int, int],
    scale: float,
    threads: int = 0,
    force: str = "",
) -> NDArray[np.float32]:
    """Attention of ``queries [heads, d]`` over the first ``tokens`` of ``records [KV heads, room, words]``.

    Values are summed rotated; each query's sum is rotated back.

    Raises:
        BackendError: Shapes or bits do not fit.
    """
    out = np.empty_like(queries)
    try:
        _native.kv_attend(queries, records, tokens, levels, signs, *bits, scale, out, threads, force)
    except (TypeError, ValueError) as error:
        what = f"queries {list(queries.shape)}, records {list(records.shape)}, {tokens} tokens"
        raise BackendError(f"kv_attend: {what}: {error}") from error
    return out
