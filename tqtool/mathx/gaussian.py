"""What a unit Gaussian can be coded to: the distortion bound, Lloyd-Max, and published trellis figures."""

from __future__ import annotations

import numpy as np
from scipy.special import ndtr, ndtri

# QTIP (arXiv 2406.11235), Table 2: L=12, V=1, T=256, tail-biting by Algorithm 4 and by exhaustive search.
QTIP_TABLE_2 = {1: (0.2803, 0.2798), 2: (0.0733, 0.0733), 3: (0.0198, 0.0198), 4: (0.0055, 0.0055)}


def distortion_bound(bits: int) -> float:
    """Distortion-rate function of a unit Gaussian: the mean squared error no code can go below."""
    return 4.0**-bits


def lloyd_max_error(bits: int) -> float:
    """Mean squared error of the best scalar quantizer of a unit Gaussian with ``2^bits`` levels."""
    centre = ndtri((np.arange(2**bits) + 0.5) / 2**bits)
    for _ in range(20_000):
        edge = np.concatenate([[-np.inf], (centre[1:] + centre[:-1]) / 2, [np.inf]])
        density = np.exp(-0.5 * edge**2) / np.sqrt(2 * np.pi)
        mass = np.diff(ndtr(edge))
        moved = (density[:-1] - density[1:]) / mass
        if np.max(np.abs(moved - centre)) < 1e-12:
            break
        centre = moved
    # At the fixed point E[x·q(x)] = E[q(x)²], so the error is 1 − E[q²].
    return float(1.0 - np.sum(mass * centre**2))
