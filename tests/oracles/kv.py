"""A decoder of packed KV records written from docs/formats/kv.md alone, one element at a time, constants from that
page.

And what attention over decoded keys and values is, in float64.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

PAGE = (Path(__file__).parents[2] / "docs/formats/kv.md").read_text()


def _table(name: str) -> list[str]:
    return re.search(rf"```{name}\n(.*?)```", PAGE, re.DOTALL).group(1).splitlines()


def page_signs(head_dim: int) -> np.ndarray:
    numbers = dict(line.split() for line in _table("signs"))
    number = int(numbers[str(head_dim)], 16)
    return np.array([-1.0 if number >> i & 1 else 1.0 for i in range(head_dim)])


def page_levels(bits: int) -> np.ndarray:
    found: dict[int, list[str]] = {}
    for line in _table("levels"):
        if not line.startswith(" "):
            current, line = line.split(" ", 1)
        found.setdefault(int(current), []).extend(line.split())
    half = np.array(found[bits], np.float32)
    return np.concatenate([-half[::-1], half])


def hadamard(head_dim: int) -> np.ndarray:
    """Sylvester's matrix, from the definition by popcount."""
    return np.array([[(-1.0) ** bin(i & j).count("1") for j in range(head_dim)] for i in range(head_dim)])


def decode(record: np.ndarray, head_dim: int, k_bits: int, v_bits: int, levels: np.ndarray | None = None):
    """Key, value and rotated value, float64, of one record of uint32 words."""
    stream = b"".join(int(word).to_bytes(4, "little") for word in record)
    bits = [stream[j // 8] >> (j % 8) & 1 for j in range(8 * len(stream))]

    def codes(first_word: int, width: int) -> list[int]:
        at = 32 * first_word
        return [sum(bits[at + i * width + j] << j for j in range(width)) for i in range(head_dim)]

    def half(byte: int) -> float:
        return float(np.frombuffer(stream[byte : byte + 2], "<f2")[0])

    groups = head_dim // 32
    affine = groups * k_bits
    k_codes, v_codes = codes(0, k_bits), codes(affine + groups, v_bits)
    if k_bits == 8:
        k_codes = [code - 256 if code > 127 else code for code in k_codes]
    scales_at = 4 * (affine + groups + groups * v_bits)
    table = page_levels(v_bits) if levels is None else levels
    key = [(code + half(4 * (affine + i // 32) + 2)) * half(4 * (affine + i // 32)) for i, code in enumerate(k_codes)]
    rotated = np.array([float(table[code]) * half(scales_at + 2 * (i // 32)) for i, code in enumerate(v_codes)])
    value = page_signs(head_dim) * (hadamard(head_dim) @ rotated) / np.sqrt(head_dim)
    return np.array(key), value, rotated


def attention(queries: np.ndarray, keys: np.ndarray, values: np.ndarray, scale: float) -> np.ndarray:
    """``queries [heads, d]`` over ``keys``, ``values [KV heads, tokens, d]``: float64 ``[heads, d]``."""
    repeats = len(queries) // len(keys)
    output = []
    for head, query in enumerate(queries.astype(np.float64)):
        scores = scale * keys[head // repeats].astype(np.float64) @ query
        weights = np.exp(scores - scores.max())
        output.append(weights @ values[head // repeats].astype(np.float64) / weights.sum())
    return np.array(output)
