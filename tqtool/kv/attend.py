"""One call of attention over records: which way it is computed, and that way.

Values are kept rotated, and attention is linear in them: each way sums rotated values and rotates the sum back, once
for each query, in place of every value (``Σ w·R⁻¹v = R⁻¹ Σ w·v``).
"""

from __future__ import annotations

import mlx.core as mx

from tqtool.kv import array_codec
from tqtool.kv.attention import stock_attention
from tqtool.kv.record import layout_of
from tqtool.kv.scheme import KVScheme


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
    layout = layout_of(scheme, queries.shape[-1])
    keys, rotated = array_codec.decode_rotated(records[:, :, :tokens], layout, scheme.rule, queries.dtype)
    output = stock_attention(queries, keys, rotated, scale, mask, sinks)
    return array_codec.unrotate(output.astype(mx.float32)).astype(queries.dtype)
