"""Error feedback: one path for GPTQ × affine, LDLQ × trellis, and whatever codes columns in some order.

The weight ``[out, in]`` is coded in *steps*. A step is one or more rectangles (``Piece``) of it; each output sees its
inputs first to last, and rows of the weight never influence one another. A coder is asked for

    target = W[outputs, inputs] − E[outputs, :start] · U[:start, inputs],     E = served − W

(``mathx.ldl``), so that the proxy loss is the sum over pieces of the coder's own errors in the metric D. A coder that
can do better inside a piece (GPTQ, column by column) finds the factor of D in ``factor.corner``.

The sum runs left-looking: nothing but E is kept, one product a piece. Pieces narrower than ``NARROW`` columns would
read all of E for a few columns; they share one product per ``WINDOW`` columns (GPTQ's lazy batch).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from tqtool.errors import NumericalError
from tqtool.mathx.ldl import UpperFactor, upper_factor
from tqtool.solve.hessian import Hessian

NARROW = 16
WINDOW = 128

DAMPINGS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
"""Tried in this order, as fractions of the mean diagonal; then the plain coder."""

GROWTH_LIMIT = 4.0
"""Largest scale or target allowed, in units of what the plain coder has."""

SPREAD_LIMIT = 8.0
"""Largest unweighted squared error allowed, in units of what the plain coder has. Feedback scatters errors into inputs
that H hardly knows: SmolLM2's layers stay below 3. Where the plain coder clips outliers, the loss falls while the
weight is lost (Qwen2.5-Coder-0.5B, down_proj of layer 3, before its outlier columns were tamed)."""

Array = NDArray[Any]
Verdict = Literal["accepted", "indefinite", "diverged", "scattered", "worse than plain"]
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Piece:
    """A rectangle of the weight that is coded at once: ``weight[outputs, start:stop]``."""

    outputs: slice
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one call of the coder codes.

    Attributes:
        index: Number of the step.
        pieces: Disjoint rectangles.
        complete: Every output has all its inputs before this one coded by earlier steps.
    """

    index: int
    pieces: tuple[Piece, ...]
    complete: int = 0

    def __post_init__(self) -> None:
        if any(piece.start < self.complete for piece in self.pieces):
            raise ValueError(f"step {self.index} codes columns before {self.complete}, which are complete")


class ColumnCoder(Protocol):
    """Codes one weight, once: it keeps the codes, the caller gets what they decode to."""

    def steps(self) -> Iterable[Step]:
        """The order of work; covers every element of the weight once."""

    def encode(self, step: Step, targets: Sequence[Array], factor: UpperFactor) -> Sequence[Array]:
        """Code ``targets`` (one ``[outputs, inputs]`` per piece) and return the values that will be served."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedbackResult:
    """One pass over a weight.

    Attributes:
        error: Served minus wanted, ``[out, in]``; meaningless unless ``finished``.
        loss: ``tr(E·H·Eᵀ)`` for the H that was factored (damping included), summed from the coder's own errors.
        peak: Largest magnitude of a target.
        finished: False if the peak passed the limit or was not finite; the pass stops there.
    """

    error: Array
    loss: float
    peak: float
    finished: bool


def code_with_feedback(
    weight: Array, factor: UpperFactor, coder: ColumnCoder, *, peak_limit: float = np.inf
) -> FeedbackResult:
    """Run ``coder`` over ``weight [out, in]``; arithmetic in the weight's dtype, float32 or float64.

    Args:
        weight: Not written.
        factor: Of the damped Hessian ``[in, in]``.
        coder: What turns targets into codes.
        peak_limit: Stop once a target is larger than this.

    Returns:
        Errors, loss and peak. Memory: two arrays like the weight, one like the Hessian in the weight's dtype.
    """
    error = np.zeros_like(weight)
    source = _Source(error, factor)
    loss = peak = 0.0
    for step in coder.steps():
        views = [(piece.outputs, slice(piece.start, piece.stop)) for piece in step.pieces]
        targets = [
            weight[view] - source.pull(piece, step.complete) for piece, view in zip(step.pieces, views, strict=True)
        ]
        largest = max(float(np.abs(target).max(initial=0.0)) for target in targets)
        peak = largest if np.isnan(largest) else max(peak, largest)
        if not (np.isfinite(peak) and peak <= peak_limit):
            return FeedbackResult(error=error, loss=loss, peak=peak, finished=False)
        served = coder.encode(step, targets, factor)
        for piece, view, target, values in zip(step.pieces, views, targets, served, strict=True):
            error[view] = values - weight[view]
            own = (values - target) @ factor.corner(piece.start, piece.stop).astype(weight.dtype)
            loss += float(np.sum(np.square(own), dtype=np.float64))
    return FeedbackResult(error=error, loss=loss, peak=peak, finished=True)


class _Source:
    """Feedback for a piece from the errors so far."""

    def __init__(self, error: Array, factor: UpperFactor) -> None:
        self._error = error
        self._factor = factor
        self._window = (0, 0, 0)  # first and last column of the shared product, and the inputs it has summed
        self._shared: Array = np.empty(0)
        self._root: Array | None = None

    def pull(self, piece: Piece, complete: int) -> Array:
        """``E[outputs, :start] · U[:start, start:stop]``."""
        start, stop, dtype = piece.start, piece.stop, self._error.dtype
        if start == 0:
            return np.zeros((1, stop), dtype)
        if stop - start >= NARROW:
            feedback = self._factor.feedback(start, stop).astype(dtype)
            return np.asarray(self._error[piece.outputs, :start] @ feedback)
        corner = self._factor.corner(start, stop)
        total = self._summed(piece, complete)
        if stop - start == 1:
            return np.asarray(total / corner.astype(dtype))
        return np.asarray(total @ np.linalg.inv(corner).astype(dtype))

    def _summed(self, piece: Piece, complete: int) -> Array:
        """``E[outputs, :start] · R[:start, start:stop]``: unlike U's, the columns of R do not depend on the cuts."""
        if self._root is None:
            self._root = self._factor.root.astype(self._error.dtype)
        first, last, done = self._window
        if piece.stop > last:
            # Pieces of this step may still need columns from `complete` on, so the new window starts there.
            first, last = complete, min(max(complete + WINDOW, piece.stop), self._factor.width)
            done = complete
            self._shared = self._error[:, :done] @ self._root[:done, first:last]
            self._window = (first, last, done)
        near = self._error[piece.outputs, done : piece.start] @ self._root[done : piece.start, piece.start : piece.stop]
        return np.asarray(self._shared[piece.outputs, piece.start - first : piece.stop - first] + near)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One try at a damping; the manifest shows all of them.

    Attributes:
        damping: Fraction of the mean diagonal.
        verdict: Why it was taken or not.
        growth: Largest scale (affine) or target (trellis) over that of the plain coder; NaN if there was none.
        loss: Proxy loss on the undamped Hessian; NaN if the pass did not finish.
    """

    damping: float
    verdict: Verdict
    growth: float
    loss: float


def accepted_damping(attempts: Sequence[Attempt]) -> dict[str, float]:
    """``damping`` for the manifest, whose numbers are finite: nothing where every attempt was given up."""
    accepted = [attempt.damping for attempt in attempts if attempt.verdict == "accepted"]
    return {"damping": accepted[0]} if accepted else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What one pass gave, before it is judged.

    Attributes:
        result: Whatever the caller wants of it.
        growth: As in ``Attempt``.
        loss: Proxy loss on the undamped Hessian.
        spread: Unweighted squared error over that of the plain coder.
    """

    result: Any
    growth: float
    loss: float
    spread: float = 1.0


def first_sound(
    hessian: Hessian,
    run: Callable[[UpperFactor], Trial],
    *,
    dampings: Sequence[float],
    plain_loss: float,
) -> tuple[Trial | None, tuple[Attempt, ...]]:
    """Try ``run`` at each damping until growth and spread are within limits and the loss not above ``plain_loss``.

    Returns:
        The trial taken, None if none was sound, and every attempt in order.
    """
    attempts: list[Attempt] = []
    for damping in dampings:
        try:
            factor = upper_factor(hessian.damped(damping), overwrite=True)
        except NumericalError:
            attempts.append(Attempt(damping=damping, verdict="indefinite", growth=np.nan, loss=np.nan))
            continue
        trial = run(factor)
        verdict: Verdict = "accepted"
        if not trial.growth <= GROWTH_LIMIT:
            verdict = "diverged"
        elif trial.spread > SPREAD_LIMIT:
            verdict = "scattered"
        elif trial.loss > plain_loss:
            verdict = "worse than plain"
        attempts.append(Attempt(damping=damping, verdict=verdict, growth=trial.growth, loss=trial.loss))
        if verdict == "accepted":
            return trial, tuple(attempts)
    return None, tuple(attempts)


def describe(attempts: Sequence[Attempt], fallback: str) -> tuple[str, ...]:
    """One line per attempt that was not taken, and one if the plain coder had to do."""
    lines = [
        f"damping {attempt.damping:g}: {attempt.verdict} (growth {attempt.growth:.3g})"
        for attempt in attempts
        if attempt.verdict != "accepted"
    ]
    if not any(attempt.verdict == "accepted" for attempt in attempts):
        lines.append(f"fell back to {fallback}")
    return tuple(lines)
