"""A mean with its standard errors."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tqtool.errors import NumericalError


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Mean of a quantity over scored tokens.

    Tokens of one window are not independent, so ``se_windows`` (spread of the window means) is the one to quote
    when there are enough windows. An error that one value cannot have is None.
    """

    mean: float
    se_tokens: float | None
    se_windows: float | None

    @property
    def se(self) -> float | None:
        """The larger of the two, the honest one to print."""
        known = [error for error in (self.se_tokens, self.se_windows) if error is not None]
        return max(known) if known else None


def estimate(values: NDArray[np.float64]) -> Estimate:
    """Estimate from ``values`` [windows, positions]."""
    return Estimate(
        mean=float(values.mean()),
        se_tokens=_standard_error(values.reshape(-1)),
        se_windows=_standard_error(values.mean(axis=1)),
    )


def perplexity(nll: float) -> float:
    """exp(nll); NumericalError where that is no float64."""
    try:
        value = math.exp(nll)
    except OverflowError:
        value = math.inf
    if not math.isfinite(value):
        raise NumericalError(f"mean NLL {nll:.6g} nats per token: its perplexity is not finite")
    return value


def _standard_error(values: NDArray[np.float64]) -> float | None:
    return float(values.std(ddof=1) / math.sqrt(values.size)) if values.size > 1 else None
