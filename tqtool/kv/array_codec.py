"""Keys and values ↔ records by MLX's operations, on any device: the arithmetic, and so the bytes, of ``codec``."""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx
import numpy as np

from tqtool.kv import lloyd_max
from tqtool.kv.codec import EPSILON, HALF_SPACING, LARGEST_HALF, SMALLEST_HALF, group_sums, inverse_root
from tqtool.kv.record import RecordLayout, layout_of
from tqtool.kv.scheme import GROUP, KVScheme, Rule
from tqtool.kv.signs import signs


def encode(keys: mx.array, values: mx.array, scheme: KVScheme) -> mx.array:
    """Keys and values ``[..., d]`` of any float dtype → records ``[..., words]`` uint32."""
    layout = layout_of(scheme, keys.shape[-1])
    k_codes, k_scales, k_zeros = _encode_keys(keys.astype(mx.float32), layout.k_bits, scheme.rule)
    v_codes, v_scales = _encode_rotated(rotate(values.astype(mx.float32)), layout.v_bits, scheme.rule)
    affine = mx.stack([k_scales, k_zeros], axis=-1).flatten(-2).view(mx.uint32)
    codes = (_pack(k_codes, layout.k_bits), _pack(v_codes, layout.v_bits))
    return mx.concatenate([codes[0], affine, codes[1], v_scales.view(mx.uint32)], axis=-1)


def decode_rotated(
    records: mx.array, layout: RecordLayout, rule: Rule, dtype: mx.Dtype = mx.float32
) -> tuple[mx.array, mx.array]:
    """Records ``[..., words]`` → keys, and values before ``unrotate``, ``[..., d]``: computed in float32."""
    affine = records[..., layout.affine_at : layout.values_at].view(mx.float16)
    affine = affine.reshape(*records.shape[:-1], layout.groups, 2).astype(mx.float32)
    k_codes = _unpack(records[..., : layout.affine_at], layout.k_bits)
    numbers = (k_codes.view(mx.int8) if layout.k_bits == 8 else k_codes).astype(mx.float32)
    keys = (_grouped(numbers) + affine[..., 1:]) * affine[..., :1]
    v_codes = _unpack(records[..., layout.values_at : layout.scales_at], layout.v_bits)
    scales = records[..., layout.scales_at :].view(mx.float16).astype(mx.float32)
    rotated = _grouped(level_array(layout.v_bits, rule)[v_codes]) * scales[..., None]
    return keys.flatten(-2).astype(dtype), rotated.flatten(-2).astype(dtype)


def rotate(values: mx.array) -> mx.array:
    """H·(signs ⊙ x)/√d over the last axis, float32."""
    return _transform(values * sign_array(values.shape[-1]))


def unrotate(rotated: mx.array) -> mx.array:
    """The inverse of ``rotate``."""
    return _transform(rotated) * sign_array(rotated.shape[-1])


@lru_cache(maxsize=16)
def level_array(bits: int, rule: Rule) -> mx.array:
    """Levels of values, float32 ``[2^bits]``."""
    return mx.array(lloyd_max.levels(bits, rule))


@lru_cache(maxsize=8)
def sign_array(head_dim: int) -> mx.array:
    """Signs, float32 ``[head_dim]``."""
    return mx.array(signs(head_dim))


def _encode_keys(keys: mx.array, bits: int, rule: Rule) -> tuple[mx.array, mx.array, mx.array]:
    x = _grouped(keys)
    low, high = x.min(axis=-1), x.max(axis=-1)
    steps, least, most = (254, -127, 127) if bits == 8 else ((1 << bits) - 1, 0, (1 << bits) - 1)
    scale = (high - low) / _number(steps)
    if rule == "exact":
        largest = mx.maximum(mx.abs(low), mx.abs(high))
        power = (largest.view(mx.uint32) & 0x7F800000).view(mx.float32)
        spacing = mx.maximum(power * _number(HALF_SPACING), _number(SMALLEST_HALF))
        stored = mx.minimum(mx.maximum(scale, spacing), _number(LARGEST_HALF)).astype(mx.float16)
        divisor = stored.astype(mx.float32)
    else:
        stored, divisor = scale.astype(mx.float16), scale + _number(EPSILON)
    zero = mx.round((high + low) / (_number(2) * divisor)) if bits == 8 else mx.round(low / divisor)
    if rule == "exact":
        zero = zero + _number(0)
    codes = mx.clip(mx.round(x / divisor[..., None] - zero[..., None]), least, most)
    if rule != "exact":
        codes = mx.where(mx.isnan(codes), _number(0), codes)
    bytes_ = codes.astype(mx.int8).view(mx.uint8) if bits == 8 else codes.astype(mx.uint8)
    return bytes_.flatten(-2), stored, zero.astype(mx.float16)


def _encode_rotated(rotated: mx.array, bits: int, rule: Rule) -> tuple[mx.array, mx.array]:
    x = _grouped(rotated)
    scale = mx.sqrt(group_sums(x * x, rule) * _number(1 / GROUP))
    if rule == "exact":
        stored = mx.minimum(scale, _number(LARGEST_HALF)).astype(mx.float16)
        divisor = stored.astype(mx.float32)[..., None]
        normal = mx.where(divisor == 0, _number(0), x / mx.where(divisor == 0, _number(1), divisor))
    else:
        stored, normal = scale.astype(mx.float16), x / (scale + _number(EPSILON))[..., None]
    return _cells(normal.flatten(-2), bits, rule), stored


def _cells(normal: mx.array, bits: int, rule: Rule) -> mx.array:
    """The number of boundaries below each element, by halving: as many steps as bits."""
    edges = edge_array(bits, rule)
    cell = mx.zeros(normal.shape, mx.uint32)
    for bit in reversed(range(bits)):
        upper = cell + (1 << bit)
        cell = mx.where(normal > edges[upper - 1], upper, cell)
    return cell.astype(mx.uint8)


@lru_cache(maxsize=16)
def edge_array(bits: int, rule: Rule) -> mx.array:
    """Boundaries between levels of values, float32 ``[2^bits - 1]``."""
    return mx.array(lloyd_max.boundaries(bits, rule))


def _transform(x: mx.array) -> mx.array:
    """Butterflies in the order of ``codec``; MLX's own transform has another order on each device."""
    d, shape, width = x.shape[-1], x.shape, 1
    while width < d:
        pairs = x.reshape(*shape[:-1], d // (2 * width), 2, width)
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        x = mx.stack([first + second, first - second], axis=-2).reshape(shape)
        width *= 2
    return x * _number(inverse_root(d))


def _pack(codes: mx.array, bits: int) -> mx.array:
    """Codes ``[..., d]`` uint8 → words: eight codes are ``bits`` bytes."""
    if bits == 8:
        return codes.view(mx.uint32)
    eights = codes.reshape(*codes.shape[:-1], -1, 8).astype(mx.uint64) << _shifts(bits, 8)
    stream = eights.sum(axis=-1, keepdims=True) >> _shifts(8, bits)
    return (stream & 0xFF).astype(mx.uint8).flatten(-2).view(mx.uint32)


def _unpack(words: mx.array, bits: int) -> mx.array:
    """Words → codes ``[..., d]`` uint8."""
    stream = mx.contiguous(words).view(mx.uint8)
    if bits == 8:
        return stream
    eights = stream.reshape(*stream.shape[:-1], -1, bits).astype(mx.uint64) << _shifts(8, bits)
    codes = eights.sum(axis=-1, keepdims=True) >> _shifts(bits, 8)
    return (codes & ((1 << bits) - 1)).astype(mx.uint8).flatten(-2)


@lru_cache(maxsize=32)
def _shifts(step: int, count: int) -> mx.array:
    return mx.array(np.arange(count, dtype=np.uint64) * step)


def _number(value: float | np.float32) -> mx.array:
    """A float32 constant: a Python number would take the type of the other operand."""
    return mx.array(float(value), mx.float32)


def _grouped(x: mx.array) -> mx.array:
    return x.reshape(*x.shape[:-1], -1, GROUP)
