"""MLX's packed weights: how codes lie in uint32 words, and what they decode to. numpy reference, bit by bit.

Every mode packs a row of ``in`` codes of ``bits`` bits as one little-endian bit string, code i at bits
``[i·bits, (i+1)·bits)`` of the row's bytes; read as uint32 that is little-endian words. 3-bit codes, first word:

    bit   0     3     6     9  …  27    30  32
          │ c0  │ c1  │ c2  │  …  │ c9  │c10…      c10 goes on at bit 0 of the next word

Values: affine ``scale·code + bias`` per group; mxfp4/nvfp4 an E2M1 code times a group scale (E8M0 per 32 / E4M3 per
16); mxfp8 an E4M3 code times an E8M0 scale per 32. Prose and vectors: docs/formats/affine.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Mode = Literal["affine", "mxfp4", "nvfp4", "mxfp8"]

AFFINE_BITS: Final = (1, 2, 3, 4, 5, 6, 8)
AFFINE_GROUPS: Final = (32, 64, 128)
FP_MODES: Final[dict[str, tuple[int, int]]] = {"mxfp4": (4, 32), "nvfp4": (4, 16), "mxfp8": (8, 32)}
"""Bits and group size: each floating-point mode allows exactly one pair."""

E2M1: Final = np.array(
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0], np.float32
)
"""Values of the 4-bit float: sign, two exponent bits, one mantissa bit (OCP microscaling formats v1.0)."""

E8M0_BIAS: Final = 127


@dataclass(frozen=True, slots=True, kw_only=True)
class AffineSpec:
    """One packed weight's parameters. Raises ValueError for a combination MLX does not have."""

    bits: int
    group_size: int
    mode: Mode = "affine"

    def __post_init__(self) -> None:
        if self.mode == "affine":
            if self.bits not in AFFINE_BITS:
                raise ValueError(f"{self.bits} bits: affine has {_listed(AFFINE_BITS)}")
            if self.group_size not in AFFINE_GROUPS:
                raise ValueError(f"group size {self.group_size}: affine has {_listed(AFFINE_GROUPS)}")
        elif self.mode not in FP_MODES:
            raise ValueError(f"mode {self.mode!r} is not one of affine, {', '.join(FP_MODES)}")
        elif (self.bits, self.group_size) != FP_MODES[self.mode]:
            bits, group = FP_MODES[self.mode]
            raise ValueError(f"{self.mode} is {bits} bits in groups of {group} and nothing else")

    def words(self, width: int) -> int:
        """uint32 words of a row of ``width`` codes."""
        return width * self.bits // 32

    def groups(self, width: int) -> int:
        """Scales of a row of ``width`` codes."""
        return width // self.group_size


def pack(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint32]:
    """Codes ``[..., in]`` (each < 2**bits) to words ``[..., in·bits/32]``."""
    width = codes.shape[-1]
    planes = (codes[..., None] >> np.arange(bits, dtype=np.uint8)) & np.uint8(1)
    bytes_ = np.packbits(planes.reshape(*codes.shape[:-1], width * bits), axis=-1, bitorder="little")
    return np.ascontiguousarray(bytes_).view("<u4")


def unpack(words: NDArray[np.uint32], bits: int) -> NDArray[np.uint8]:
    """Words ``[..., in·bits/32]`` to codes ``[..., in]``."""
    bytes_ = np.ascontiguousarray(words, "<u4").view(np.uint8)
    planes = np.unpackbits(bytes_, axis=-1, bitorder="little")
    planes = planes.reshape(*words.shape[:-1], -1, bits)
    weights = (1 << np.arange(bits)).astype(np.uint8)
    codes: NDArray[np.uint8] = (planes * weights).sum(axis=-1, dtype=np.uint8)
    return codes


def dequantize(
    words: NDArray[np.uint32],
    scales: NDArray[Any],
    biases: NDArray[Any] | None,
    spec: AffineSpec,
) -> NDArray[np.float32]:
    """Decoded values ``[..., in]`` in float32, products and sums rounded once each.

    ``scales`` and ``biases`` are ``[..., in/group]``: floats for affine, raw uint8 codes (and no biases) otherwise.
    """
    codes = unpack(words, spec.bits)
    grouped = codes.reshape(*codes.shape[:-1], scales.shape[-1], spec.group_size)
    if spec.mode == "affine":
        if biases is None:
            raise ValueError("affine weights have biases")
        with np.errstate(invalid="ignore", over="ignore"):  # damaged scales decode to NaN, which callers look for
            values = grouped.astype(np.float32) * scales.astype(np.float32)[..., None]
            values += biases.astype(np.float32)[..., None]
    else:
        elements = _float8(grouped) if spec.mode == "mxfp8" else E2M1[grouped]
        values = elements * _fp_scales(scales, spec.mode)[..., None]
    return values.reshape(codes.shape)


def _fp_scales(codes: NDArray[np.uint8], mode: Mode) -> NDArray[np.float32]:
    if mode == "nvfp4":
        return _float8(codes)
    scales: NDArray[np.float32] = np.ldexp(np.float32(1), codes.astype(np.int32) - E8M0_BIAS)
    return scales


def _float8(codes: NDArray[np.uint8]) -> NDArray[np.float32]:
    values: NDArray[np.float32] = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    return values


def _listed(values: tuple[int, ...]) -> str:
    return ", ".join(map(str, values))
