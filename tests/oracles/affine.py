"""MLX's packed formats decoded one code at a time, from docs/formats/affine.md. Slow and obvious; numpy only."""

from __future__ import annotations

import math

import numpy as np

E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def code_at(words: np.ndarray, index: int, bits: int) -> int:
    """Code number ``index`` of a row: bits index*bits … of the row read as one little-endian integer."""
    number = int.from_bytes(np.asarray(words, "<u4").tobytes(), "little")
    return (number >> (index * bits)) & ((1 << bits) - 1)


def e4m3(code: int) -> float:
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code >> 3) & 0xF, code & 7
    if exponent == 0xF and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def e2m1(code: int) -> float:
    return (-1.0 if code & 8 else 1.0) * E2M1_MAGNITUDES[code & 7]


def decode(words, scales, biases, *, bits: int, group: int, mode: str) -> np.ndarray:
    """One row: words ``[in·bits/32]``, scales and biases ``[in/group]`` → float64 ``[in]``."""
    width = len(words) * 32 // bits
    row = np.empty(width, np.float64)
    for index in range(width):
        code, scale = code_at(words, index, bits), scales[index // group]
        if mode == "affine":
            row[index] = float(scale) * code + float(biases[index // group])
        elif mode == "mxfp8":
            row[index] = e4m3(code) * 2.0 ** (int(scale) - 127)
        elif mode == "mxfp4":
            row[index] = e2m1(code) * 2.0 ** (int(scale) - 127)
        else:
            row[index] = e2m1(code) * e4m3(int(scale))
    return row
