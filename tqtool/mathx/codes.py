"""Trellis codes: the value that each of the 2^L states stands for.

A *computed* code is a few integer instructions on the state, so a decoder needs no table; a *table* code exists to
measure against.
Sources: 1mad, 3inst and the permuted Gaussian table from QTIP (arXiv 2406.11235, §3.1); mul1 from EXL3 (exllamav3,
``quant/codebook.cuh``, cb2: one multiply, no addend).

Two views of one code:

* ``values(code, window)``: float32 ``[2^L]``, what a decoder serves before the row scale;
* ``levels(code, window)``: int16 ``[2^L]``, integers in units of ``1 / UNIT[code]``: what every encoder searches
with, so that all
  backends agree to the state. For the byte-sum codes a level *is* the byte sum minus 510, nothing is rounded; for the
  others it is
  the value rounded to 1/147.7, which costs less than 0.1 % in mean squared error.
"""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from tqtool.errors import UserError
from tqtool.mathx.signs import splitmix32

Code = Literal["mul1", "1mad", "3inst", "rptc", "random"]
CODES: tuple[Code, ...] = get_args(Code)
COMPUTED_CODES: tuple[Code, ...] = ("mul1", "1mad", "3inst")

MUL1_MULTIPLIER = 0x83DCD12D
ONE_MAD_MULTIPLIER, ONE_MAD_ADDEND = 34038481, 76625530
THREE_INST_MULTIPLIER, THREE_INST_ADDEND = 89226354, 64248484
THREE_INST_MASK, THREE_INST_XOR = 0x8FFF8FFF, 0x3B603B60
BYTE_SUM_MEAN = 510  # 4 bytes, each uniform on 0..255
# Byte-sum units per unit of the code: 147.80… is sqrt(4·(256² − 1)/12), QTIP's; 147.7 is EXL3's.
UNIT: dict[Code, float] = {"mul1": 147.7, "1mad": 147.800537109375, "3inst": 147.7, "rptc": 147.7, "random": 147.7}
# Root mean square of 3inst over 2^16 states; EXL3 carries the same constant.
THREE_INST_RMS = 1.24371088
# Multiply a unit-variance source by this before coding, per k: the code's tails are then used as the rate allows.
# Worth 0.3 % of the
# error at k=2, 2.7 % at k=3, 8.8 % at k=4, and free at decode (the row scale absorbs it).
CODE_SCALE: dict[int, float] = {1: 1.12, 2: 0.97, 3: 0.91, 4: 0.88}

CODE_ERROR: dict[int, float] = {1: 0.28, 2: 0.0725, 3: 0.0189, 4: 0.0050}
"""Mean squared error per k at unit variance (``codec validate``, mul1, L = 12), where an estimate will do."""

_TABLE_SEED = {"rptc": 0x51545045, "random": 0x52414E44}
_TABLE_STEP = 4096.0  # table values are multiples of 1/4096: no library's last-digit difference can move one


def parse_code(text: str) -> Code:
    """The code named ``text``; UserError otherwise."""
    for code in CODES:
        if code == text:
            return code
    raise UserError(f"trellis code {text!r} is unknown", hint=f"codes: {', '.join(CODES)}")


def check_window(window: int) -> None:
    """Raise UserError unless ``window`` (L) is one the format knows."""
    if window not in (12, 14, 16):
        raise UserError(
            f"trellis window {window}: expected 12, 14 or 16", hint="12 is the default; 14 and 16 code better, slower"
        )


def values(code: Code, window: int) -> NDArray[np.float32]:
    """Float32 values of all states, ``[2^window]``, variance about 1."""
    if code == "mul1" or code == "1mad":
        return byte_sums(code, window).astype(np.float32) * inverse_unit(code)
    if code == "3inst":
        return _three_inst(window) * np.float32(1.0 / THREE_INST_RMS)
    return _table(code, window)


def levels(code: Code, window: int) -> NDArray[np.int16]:
    """Integer levels of all states, ``[2^window]``, in units of 1/UNIT[code]."""
    if code == "mul1" or code == "1mad":
        return byte_sums(code, window).astype(np.int16)
    return np.rint(values(code, window).astype(np.float64) * UNIT[code]).astype(np.int16)


def inverse_unit(code: Code) -> np.float32:
    """Float32 factor from levels to values; decoders multiply, they never divide."""
    return np.float32(1.0 / UNIT[code])


def byte_sums(code: Code, window: int) -> NDArray[np.int64]:
    """Sum of the four bytes of the state's 32-bit hash, minus 510; ``[2^window]``."""
    state = np.arange(1 << window, dtype=np.uint64)
    if code == "mul1":
        hashed = state * np.uint64(MUL1_MULTIPLIER)
    else:
        hashed = state * np.uint64(ONE_MAD_MULTIPLIER) + np.uint64(ONE_MAD_ADDEND)
    hashed &= np.uint64(0xFFFFFFFF)
    total = sum((hashed >> np.uint64(8 * byte)) & np.uint64(255) for byte in range(4))
    return np.asarray(total, np.int64) - BYTE_SUM_MEAN


def _three_inst(window: int) -> NDArray[np.float32]:
    state = np.arange(1 << window, dtype=np.uint64)
    hashed = (state * np.uint64(THREE_INST_MULTIPLIER) + np.uint64(THREE_INST_ADDEND)) & np.uint64(0xFFFFFFFF)
    halves = ((hashed & np.uint64(THREE_INST_MASK)) ^ np.uint64(THREE_INST_XOR)).astype(np.uint32)
    high = (halves >> np.uint32(16)).astype(np.uint16).view(np.float16)
    low = (halves & np.uint32(0xFFFF)).astype(np.uint16).view(np.float16)
    total: NDArray[np.float32] = high.astype(np.float32) + low.astype(np.float32)
    return total


def _table(code: Code, window: int) -> NDArray[np.float32]:
    """Gaussian quantiles in a seeded order (rptc), or seeded Gaussian draws (random)."""
    # Not at the top: it takes 0.2 s and loads an OpenBLAS before tqtool.runtime.blas can configure it.
    from scipy.special import ndtri

    count = 1 << window
    draw = splitmix32(_TABLE_SEED[code] + window, count)
    if code == "rptc":
        order = np.argsort(draw, kind="stable")
        table = ndtri((np.arange(count) + 0.5) / count)[order]
    else:
        table = ndtri((draw.astype(np.float64) + 0.5) / 2.0**32)
    return np.asarray(np.rint(table * _TABLE_STEP) / _TABLE_STEP, np.float32)
