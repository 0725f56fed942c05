"""Packing of new tokens and attention over records: which way each is computed, and that way.

Values are kept rotated, and attention is linear in them: each way sums rotated values and rotates the sum back, once
for each query, in place of every value (``Σ w·R⁻¹v = R⁻¹ Σ w·v``).

One query (decoding) goes over the records as they are: on a CPU through the compiled kernel, on cards that the kernels
have run on through two launches. More queries (a prompt), masks and attention sinks go through decoded arrays.
"""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from tqtool import native
from tqtool.kernels.device import is_metal_asked_for
from tqtool.kernels.kv_attention import KVAttention
from tqtool.kernels.kv_kernels import KVProblem, supports
from tqtool.kernels.metal import on_device as metal_device
from tqtool.kernels.problem import Dtype
from tqtool.kv import array_codec
from tqtool.kv.attention import stock_attention
from tqtool.kv.lloyd_max import boundaries, levels
from tqtool.kv.record import layout_of
from tqtool.kv.scheme import KVScheme
from tqtool.kv.signs import signs

_NAMES: dict[mx.Dtype, Dtype] = {mx.float32: "float32", mx.float16: "float16", mx.bfloat16: "bfloat16"}


def encode(keys: mx.array, values: mx.array, scheme: KVScheme) -> mx.array:
    """Keys and values ``[..., d]`` → records ``[..., words]``; on a CPU they are evaluated."""
    head_dim = keys.shape[-1]
    if scheme.rule != "exact":
        return array_codec.encode(keys, values, scheme)
    if not on_cpu():
        kernels = device_kernels()
        if kernels is None or keys.dtype != values.dtype or keys.dtype not in _NAMES:
            return array_codec.encode(keys, values, scheme)
        tables = array_codec.sign_array(head_dim), array_codec.edge_array(scheme.v_bits, scheme.rule)
        return kernels.encode(keys, values, *tables, (scheme.k_bits, scheme.v_bits))
    return mx.array(
        native.kv_encode(
            _floats(keys),
            _floats(values),
            signs=signs(head_dim),
            boundaries=boundaries(scheme.v_bits, scheme.rule),
            bits=(scheme.k_bits, scheme.v_bits),
            words=layout_of(scheme, head_dim).words,
        )
    )


def decode_rotated(
    records: mx.array, tokens: int, head_dim: int, scheme: KVScheme, dtype: mx.Dtype
) -> tuple[mx.array, mx.array]:
    """Of records ``[1, heads, room, words]`` the first ``tokens``: keys, rotated values ``[1, heads, tokens, d]``."""
    if not on_cpu():
        layout = layout_of(scheme, head_dim)
        return array_codec.decode_rotated(records[:, :, :tokens], layout, scheme.rule, dtype)
    table = levels(scheme.v_bits, scheme.rule)
    bits = scheme.k_bits, scheme.v_bits
    keys, rotated = native.kv_decode(_view(records)[0], tokens, head_dim=head_dim, levels=table, bits=bits)
    return mx.array(keys[None]).astype(dtype), mx.array(rotated[None]).astype(dtype)


def attend(
    records: mx.array,
    tokens: int,
    scheme: KVScheme,
    queries: mx.array,
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None,
) -> mx.array:
    """Attention of ``queries [1, heads, L, d]`` over the first ``tokens`` of ``records [1, KV heads, room, words]``."""
    if queries.shape[2] == 1 and mask is None and sinks is None:
        output = _by_kernel(records, tokens, scheme, queries, scale)
        if output is not None:
            return output
    return by_decoding(records, tokens, scheme, queries, scale, mask, sinks)


def by_decoding(
    records: mx.array,
    tokens: int,
    scheme: KVScheme,
    queries: mx.array,
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None,
) -> mx.array:
    """Keys and rotated values decoded to the queries' dtype, then MLX's attention: any mask, sinks, many queries."""
    keys, rotated = decode_rotated(records, tokens, queries.shape[-1], scheme, queries.dtype)
    output = stock_attention(queries, keys, rotated, scale, mask, sinks)
    return array_codec.unrotate(output.astype(mx.float32)).astype(queries.dtype)


def on_cpu() -> bool:
    """Whether MLX computes on a CPU."""
    return bool(mx.default_device().type == mx.cpu)


def _by_kernel(records: mx.array, tokens: int, scheme: KVScheme, queries: mx.array, scale: float) -> mx.array | None:
    """Attention of one token's queries by a kernel, or None where there is none."""
    _, heads, _, head_dim = queries.shape
    if on_cpu():
        found = native.kv_attend(
            _floats(queries).reshape(heads, head_dim),
            _view(records)[0],
            tokens,
            levels=levels(scheme.v_bits, scheme.rule),
            signs=signs(head_dim),
            bits=(scheme.k_bits, scheme.v_bits),
            scale=scale,
        )
        return mx.array(found.reshape(queries.shape)).astype(queries.dtype)
    kernels = device_kernels()
    if kernels is None or queries.dtype not in _NAMES:
        return None
    problem = KVProblem(
        head_dim=head_dim,
        k_bits=scheme.k_bits,
        v_bits=scheme.v_bits,
        queries=heads,
        heads=records.shape[1],
        room=records.shape[2],
        dtype=_NAMES[queries.dtype],
    )
    if supports(problem) is not None:
        return None
    output = kernels(
        problem,
        queries.reshape(heads, head_dim),
        records[0],
        array_codec.level_array(scheme.v_bits, scheme.rule),
        array_codec.sign_array(head_dim),
        tokens=tokens,
        scale=scale,
    )
    return output.reshape(queries.shape)


@lru_cache(maxsize=1)
def device_kernels() -> KVAttention | None:
    """The kernels of the card that is here, if they have run on its kind; Apple's GPUs if asked for (decision 0004)."""
    if mx.cuda.is_available():
        from tqtool.kernels.kv_cuda import CUDA_KV, is_kv_proven_here

        return CUDA_KV if is_kv_proven_here() else None
    if mx.metal.is_available() and is_metal_asked_for():
        return KVAttention(metal_device)
    return None


def _floats(array: mx.array) -> NDArray[np.float32]:
    """A C-contiguous float32 view or copy; evaluates it."""
    return np.ascontiguousarray(np.array(array.astype(mx.float32), copy=False))


def _view(records: mx.array) -> NDArray[np.uint32]:
    """Records as they lie in MLX's memory; evaluates them."""
    return np.array(records, copy=False)
