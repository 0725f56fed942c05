"""Decode a packed trellis stream with Python integers, one weight at a time, as docs/formats/trellis.md says."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def decode(words: NDArray[np.uint32], scales: NDArray[np.float16], spec: dict[str, Any]) -> NDArray[np.float32]:
    """Stored matrix [rows, cols]."""
    k, window, block, stride = spec["k"], spec["window"], spec["block"], spec["stride"]
    bits = block * k
    stream = words.reshape(-1).astype("<u4").tobytes()
    out = np.empty((spec["rows"], spec["cols"]), np.float32)
    for row in range(spec["rows"]):
        for col in range(spec["cols"]):
            if spec.get("tile", 0):
                number, t = row // 16 * (stride // 16) + col // 16, row % 16 * 16 + col % 16
            else:
                number, t = divmod(row * stride + col, block)
            ring = int.from_bytes(stream[number * bits // 8 : (number + 1) * bits // 8], "little")
            at = (block - 1 - t) * k
            state = (ring >> at | ring << (bits - at)) & ((1 << window) - 1)
            out[row, col] = np.float32(code(state, spec["code"])) * np.float32(scales[row])
    return out


def code(state: int, name: str) -> np.float32:
    """Value of a state: byte sum of its hash, centred, times float32(1 / unit); or the sum of two halves for 3inst."""
    if name == "3inst":
        pair = ((state * 89226354 + 64248484) & 0x8FFF8FFF) ^ 0x3B603B60
        high, low = (np.array([part], np.uint16).view(np.float16)[0] for part in (pair >> 16, pair & 0xFFFF))
        return (np.float32(high) + np.float32(low)) * np.float32(1 / 1.24371088)
    multiplier, addend, unit = {"mul1": (0x83DCD12D, 0, 147.7), "1mad": (34038481, 76625530, 147.800537109375)}[name]
    hashed = (state * multiplier + addend) % 2**32
    return np.float32(sum(hashed.to_bytes(4, "little")) - 510) * np.float32(1 / unit)
