"""The signs that values are multiplied by before the Hadamard transform: one vector for each head dimension.

They are the draws ``1 - 2 * mx.random.randint(0, 2, (d,), key=mx.random.key(42))`` of MLX, as vllm-metal has them; kept
as constants, so that a stored cache decodes wherever it is read. A vector is no prefix of a longer one.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

NEGATIVE: dict[int, str] = {
    64: ("62de4802b769548e"),
    128: ("146059de4a8337d56a9c02506a39df0d"),
    256: ("fe8bc3575730d96bb2275d733a2ff29bd39c5ec9a96d146f10cd4a1162e63012"),
    512: (
        "296b9d6d520e4bef8ea79bc28a8214525d81721f3204a3c59a4c151811873e84"
        "77bacaba542ade30e9dd12439b477c8f5ccad261d439e46362fbe30d70364bbd"
    ),
}
"""Bit i, counted from the least significant of the hexadecimal number, is 1 where sign i is -1."""


@lru_cache(maxsize=8)
def signs(head_dim: int) -> NDArray[np.float32]:
    """Signs ±1 of ``head_dim`` elements, float32; read-only."""
    number = int(NEGATIVE[head_dim], 16)
    vector = np.array([-1.0 if number >> i & 1 else 1.0 for i in range(head_dim)], np.float32)
    vector.setflags(write=False)
    return vector
