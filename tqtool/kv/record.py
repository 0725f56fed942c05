"""The record of one token of one KV head: where its bytes lie. The only place that knows (docs/formats/kv.md).

A record is a row of little-endian uint32 words in four parts: codes of the key, one word a group with the key's scale
(low half) and zero (high half), codes of the value, and the value's scales, two groups a word, the earlier one low.
Codes are a bitstream: element i has the bits [i·b, i·b + b), bit j of the stream is bit j mod 32 of word j // 32.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tqtool.errors import BackendError
from tqtool.kv.scheme import GROUP, HEAD_DIMS, KVScheme

if sys.byteorder != "little":  # pragma: no cover - words are viewed as bytes and halves
    raise BackendError("KV records are little-endian, this machine is not")


@dataclass(frozen=True, slots=True)
class RecordLayout:
    """Word offsets of the parts of a record.

    Attributes:
        head_dim: Elements of a key, and of a value.
        k_bits: Of a key's code.
        v_bits: Of a value's code.
    """

    head_dim: int
    k_bits: int
    v_bits: int

    def __post_init__(self) -> None:
        if self.head_dim not in HEAD_DIMS:
            raise BackendError(f"KV record: head dimension {self.head_dim}: expected one of {HEAD_DIMS}")

    @property
    def groups(self) -> int:
        """Groups of a key, and of a value."""
        return self.head_dim // GROUP

    @property
    def affine_at(self) -> int:
        """First word of the key's scales and zeros; its codes begin at 0."""
        return self.head_dim * self.k_bits // 32

    @property
    def values_at(self) -> int:
        """First word of the value's codes."""
        return self.affine_at + self.groups

    @property
    def scales_at(self) -> int:
        """First word of the value's scales."""
        return self.values_at + self.head_dim * self.v_bits // 32

    @property
    def words(self) -> int:
        """Words of a record."""
        return self.scales_at + self.groups // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What records hold, before packing.

    Attributes:
        k_codes: uint8 ``[..., d]``; of 8 bits the bytes of int8.
        k_scales: float16 ``[..., d/32]``.
        k_zeros: float16 ``[..., d/32]``.
        v_codes: uint8 ``[..., d]``.
        v_scales: float16 ``[..., d/32]``.
    """

    k_codes: NDArray[np.uint8]
    k_scales: NDArray[np.float16]
    k_zeros: NDArray[np.float16]
    v_codes: NDArray[np.uint8]
    v_scales: NDArray[np.float16]


def layout_of(scheme: KVScheme, head_dim: int) -> RecordLayout:
    """The layout of records of a turbo ``scheme``."""
    return RecordLayout(head_dim, scheme.k_bits, scheme.v_bits)


def join(parts: Parts, layout: RecordLayout) -> NDArray[np.uint32]:
    """Records ``[..., words]`` of ``parts``."""
    affine = np.stack([parts.k_scales, parts.k_zeros], axis=-1)
    lead = parts.k_codes.shape[:-1]
    pieces = [
        pack(parts.k_codes, layout.k_bits),
        np.ascontiguousarray(affine).reshape(*lead, 2 * layout.groups).view(np.uint32),
        pack(parts.v_codes, layout.v_bits),
        np.ascontiguousarray(parts.v_scales).view(np.uint32),
    ]
    return np.concatenate(pieces, axis=-1)


def split(records: NDArray[np.uint32], layout: RecordLayout) -> Parts:
    """What ``records [..., words]`` hold."""

    def part(begin: int, end: int) -> NDArray[np.uint32]:
        return np.ascontiguousarray(records[..., begin:end])

    affine = part(layout.affine_at, layout.values_at).view(np.float16).reshape(*records.shape[:-1], layout.groups, 2)
    return Parts(
        k_codes=unpack(part(0, layout.affine_at), layout.k_bits),
        k_scales=affine[..., 0],
        k_zeros=affine[..., 1],
        v_codes=unpack(part(layout.values_at, layout.scales_at), layout.v_bits),
        v_scales=part(layout.scales_at, layout.words).view(np.float16),
    )


def pack(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint32]:
    """Codes ``[..., d]`` below 2^bits → words ``[..., d·bits/32]``; d is a multiple of 32."""
    flags = np.unpackbits(codes[..., None], axis=-1, count=bits, bitorder="little")
    stream = np.packbits(flags.reshape(*codes.shape[:-1], -1), axis=-1, bitorder="little")
    return stream.view(np.uint32)


def unpack(words: NDArray[np.uint32], bits: int) -> NDArray[np.uint8]:
    """Words ``[..., d·bits/32]`` → codes ``[..., d]``."""
    flags = np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little")
    return np.packbits(flags.reshape(*words.shape[:-1], -1, bits), axis=-1, bitorder="little")[..., 0]
