"""The sign stream: ±1 per index from (seed, lane), integer arithmetic only, the same on every machine.

Word i of a stream is the splitmix32 mixer at ``(seed xor (lane + 1)·G) + (i + 1)·G`` modulo 2^32, G = 0x9E3779B9 (the
golden ratio). The sign is +1 if the word's lowest bit is 0, else -1. R1 takes lane 0, layer i's R2 lane i + 1.
Being counter based, it needs no state: any slice of a stream can be computed alone.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tqtool.errors import UserError

_GOLDEN = 0x9E3779B9
_MASK = 0xFFFFFFFF


def require_seed(seed: int) -> None:
    """Raise UserError unless ``seed`` is one a stream can start from."""
    if not 0 <= seed <= _MASK:
        raise UserError(f"rotation seed {seed}: expected 0 … {_MASK}")


def sign_vector(seed: int, n: int, *, lane: int) -> NDArray[np.int8]:
    """The first ``n`` signs of a lane.

    Args:
        seed: 0 … 2**32 - 1.
        n: Length.
        lane: 0 … 2**32 - 2; different lanes give different signs.

    Returns:
        int8 ``[n]``, every element +1 or -1.

    Raises:
        UserError: ``seed`` or ``lane`` is out of range.
    """
    require_seed(seed)
    if not 0 <= lane < _MASK:
        raise UserError(f"sign lane {lane}: expected 0 … {_MASK - 1}")
    start = seed ^ ((lane + 1) * _GOLDEN & _MASK)
    return (1 - 2 * (splitmix32(start, n) & np.uint32(1)).astype(np.int8)).astype(np.int8)


def splitmix32(start: int, count: int) -> NDArray[np.uint32]:
    """``count`` words of the stream that begins at ``start``, uint32 ``[count]``."""
    # uint64 holds any product of two 32-bit numbers, so the wrap-around is an explicit mask and never an overflow.
    mask = np.uint64(_MASK)
    word = (np.uint64(start) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN)) & mask
    word = (word ^ (word >> np.uint64(16))) * np.uint64(0x21F0AAAD) & mask
    word = (word ^ (word >> np.uint64(15))) * np.uint64(0x735A2D97) & mask
    return np.asarray(word ^ (word >> np.uint64(15)), np.uint32)
