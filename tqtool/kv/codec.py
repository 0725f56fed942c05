"""Keys and values ↔ records, in numpy: float32 arithmetic in one fixed order, ties to even (docs/formats/kv.md).

Each operation below is one correctly rounded float32 operation, so MLX's operations and the compiled kernels, which do
the same ones, give the same bytes. Inputs must be finite: bytes of a group with NaN or infinity are not defined.

The rule ``exact`` divides by the scale as it is stored, and keeps a key's scale from getting smaller than the spacing
of float16 numbers at the group's largest magnitude: zeros are then integers below 2048, which float16 holds, and a
constant group of float16 or bfloat16 values decodes to itself. The rule ``vllm-metal`` is that project's arithmetic on
float32 inputs: no such floor (a constant group of more than 6.6e-4 gets an infinite zero, and decodes to NaN),
divisions by the unrounded scale plus 1e-8, tables from samples.
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from tqtool.kv import record
from tqtool.kv.lloyd_max import boundaries, levels
from tqtool.kv.record import Parts, RecordLayout
from tqtool.kv.scheme import GROUP, KVScheme, Rule
from tqtool.kv.signs import signs

Floats = NDArray[np.float32]
AnyFloats = TypeVar("AnyFloats", bound=Any)

EPSILON = np.float32(1e-8)
"""Added to scales by the rule ``vllm-metal``."""
LARGEST_HALF = np.float32(65504)
SMALLEST_HALF = np.float32(2.0**-24)
HALF_SPACING = np.float32(2.0**-10)
"""Of float16 numbers, relative to the power of two below them."""


def encode(keys: Floats, values: Floats, scheme: KVScheme) -> NDArray[np.uint32]:
    """Keys and values, float32 ``[..., d]`` → records ``[..., words]``."""
    layout = record.layout_of(scheme, keys.shape[-1])
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        k_codes, k_scales, k_zeros = encode_keys(keys, scheme.k_bits, scheme.rule)
        v_codes, v_scales = encode_rotated(rotate(values), scheme.v_bits, scheme.rule)
    parts = Parts(k_codes=k_codes, k_scales=k_scales, k_zeros=k_zeros, v_codes=v_codes, v_scales=v_scales)
    return record.join(parts, layout)


def decode(records: NDArray[np.uint32], head_dim: int, scheme: KVScheme) -> tuple[Floats, Floats]:
    """Records ``[..., words]`` → keys and values, float32 ``[..., d]``."""
    keys, rotated = decode_rotated(records, record.layout_of(scheme, head_dim), scheme.rule)
    return keys, unrotate(rotated)


def decode_rotated(records: NDArray[np.uint32], layout: RecordLayout, rule: Rule) -> tuple[Floats, Floats]:
    """Keys, and values as they are before ``unrotate``: attention is linear in them, so that can wait for its sum."""
    parts = record.split(records, layout)
    codes = parts.k_codes.view(np.int8) if layout.k_bits == 8 else parts.k_codes
    with np.errstate(invalid="ignore"):
        keys = (_grouped(codes.astype(np.float32)) + _wide(parts.k_zeros)) * _wide(parts.k_scales)
        rotated = _grouped(levels(layout.v_bits, rule)[parts.v_codes]) * _wide(parts.v_scales)
    return _whole(keys), _whole(rotated)


def encode_keys(
    keys: Floats, bits: int, rule: Rule
) -> tuple[NDArray[np.uint8], NDArray[np.float16], NDArray[np.float16]]:
    """Codes ``[..., d]``, scales and zeros ``[..., d/32]``: a key is (code + zero)·scale; 8-bit codes are signed."""
    x = _grouped(keys)
    low, high = x.min(axis=-1), x.max(axis=-1)
    steps, least, most = (254, -127, 127) if bits == 8 else ((1 << bits) - 1, 0, (1 << bits) - 1)
    scale = (high - low) / np.float32(steps)
    if rule == "exact":
        scale = np.minimum(np.maximum(scale, half_spacing(low, high)), LARGEST_HALF)
        stored = scale.astype(np.float16)
        divisor = stored.astype(np.float32)
    else:
        stored, divisor = scale.astype(np.float16), scale + EPSILON
    middle = high + low
    zero = np.rint(middle / (np.float32(2) * divisor)) if bits == 8 else np.rint(low / divisor)
    if rule == "exact":
        zero = zero + np.float32(0)  # no negative zero: which zero a minimum is depends on who looks for it
    codes = np.clip(np.rint(x / divisor[..., None] - zero[..., None]), least, most)
    # A group of infinite zero has codes that are not numbers; as bytes they are 0.
    bytes_ = np.nan_to_num(codes, nan=0.0).astype(np.int8 if bits == 8 else np.uint8).view(np.uint8)
    return bytes_.reshape(keys.shape), stored, zero.astype(np.float16)


def half_spacing(low: Floats, high: Floats) -> Floats:
    """The spacing of float16 numbers at the larger magnitude of ``low`` and ``high``."""
    largest = np.maximum(np.abs(low), np.abs(high))
    power = (largest.view(np.uint32) & np.uint32(0x7F800000)).view(np.float32)
    spacing: Floats = np.maximum(power * HALF_SPACING, SMALLEST_HALF)
    return spacing


def encode_rotated(rotated: Floats, bits: int, rule: Rule) -> tuple[NDArray[np.uint8], NDArray[np.float16]]:
    """Codes ``[..., d]`` and scales ``[..., d/32]`` of rotated values: a value is level(code)·scale."""
    x = _grouped(rotated)
    scale = np.sqrt(group_sums(x * x, rule) * np.float32(1 / GROUP))
    if rule == "exact":
        stored = np.minimum(scale, LARGEST_HALF).astype(np.float16)
        divisor = stored.astype(np.float32)[..., None]
        divided = x / np.where(divisor == 0, np.float32(1), divisor)  # a group of zeros, or so close that it is one
        normal = np.where(divisor == 0, np.float32(0), divided)
    else:
        stored, normal = scale.astype(np.float16), x / (scale + EPSILON)[..., None]
    codes = np.searchsorted(boundaries(bits, rule), normal, side="left").astype(np.uint8)
    return codes.reshape(rotated.shape), stored


def group_sums(x: AnyFloats, rule: Rule) -> AnyFloats:
    """Sums over the last axis of 32: halves added to halves, or (vllm-metal, on a CPU) one element after another.

    ``x`` is numpy's or MLX's: the order of additions, and so the bytes, are the same.
    """
    if rule == "exact":
        while x.shape[-1] > 1:
            half = x.shape[-1] // 2
            x = x[..., :half] + x[..., half:]
        first: AnyFloats = x[..., 0]
        return first
    total: AnyFloats = x[..., 0]
    for element in range(1, x.shape[-1]):
        total = total + x[..., element]
    return total


def rotate(values: Floats) -> Floats:
    """H·(signs ⊙ x)/√d over the last axis."""
    return _transform(values * signs(values.shape[-1]))


def unrotate(rotated: Floats) -> Floats:
    """The inverse of ``rotate``: signs ⊙ (H·x/√d)."""
    return _transform(rotated) * signs(rotated.shape[-1])


def _transform(x: Floats) -> Floats:
    """Sylvester's Hadamard matrix in butterflies of 1, 2, 4 … neighbours, then one multiplication by 1/√d."""
    d, shape, width = x.shape[-1], x.shape, 1
    while width < d:
        pairs = x.reshape(*shape[:-1], d // (2 * width), 2, width)
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        x = np.stack([first + second, first - second], axis=-2).reshape(shape)
        width *= 2
    return x * inverse_root(d)


def inverse_root(head_dim: int) -> np.float32:
    """1/√d, rounded once."""
    return np.float32(head_dim**-0.5)


def _grouped(x: NDArray[np.float32]) -> Floats:
    return x.reshape(*x.shape[:-1], -1, GROUP)


def _whole(x: Floats) -> Floats:
    return x.reshape(*x.shape[:-2], -1)


def _wide(halves: NDArray[np.float16]) -> Floats:
    return halves.astype(np.float32)[..., None]
