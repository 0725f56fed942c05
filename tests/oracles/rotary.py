"""Rotary positions in float64 numpy, written out plainly from the papers and the authors' code.

Halves convention; plain, partial (the first ``int(d · factor)`` channels of a head), LongRoPE (arXiv 2402.13753 as
Phi-3 uses it) and Llama 3's. Settings in the words of transformers 4. Imports nothing of tqtool.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def rotate(x: Array, config: dict[str, Any]) -> Array:
    """x ``[heads, T, d]`` with its first channels turned by position."""
    length, d = x.shape[1:]
    n = int(d * config.get("partial_rotary_factor", 1.0))
    periods, scale = turns(n, length, config)
    angle = np.arange(length)[:, None] / periods
    a, b, rest = x[..., : n // 2], x[..., n // 2 : n], x[..., n:]
    turned = (a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle))
    return np.concatenate([scale * turned[0], scale * turned[1], rest], axis=-1)


def turns(n: int, length: int, config: dict[str, Any]) -> tuple[Array, float]:
    """Positions per radian of each of the ``n / 2`` pairs, and the factor on what is turned."""
    base = config.get("rope_theta", 10000.0) ** (2 * np.arange(n // 2) / n)
    scaling = config.get("rope_scaling") or {}
    kind = scaling.get("type", scaling.get("rope_type", "default"))
    if kind == "longrope":
        trained, most = config["original_max_position_embeddings"], config["max_position_embeddings"]
        factors = scaling["long_factor" if length > trained else "short_factor"]
        scale = math.sqrt(1 + math.log(most / trained) / math.log(trained)) if most > trained else 1.0
        return base * np.array(factors), scale
    if kind == "llama3":
        return np.array([_llama3(period, scaling) for period in base]), 1.0
    assert kind == "default", kind
    return base, 1.0


def _llama3(period: float, scaling: dict[str, Any]) -> float:
    """Short waves stay, long ones are stretched by the factor, those between are a mean of both frequencies."""
    wavelength, trained = 2 * math.pi * period, scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    if wavelength < trained / high:
        return period
    if wavelength > trained / low:
        return float(period * scaling["factor"])
    share = (trained / wavelength - low) / (high - low)
    return float(1 / ((1 - share) / (period * scaling["factor"]) + share / period))
