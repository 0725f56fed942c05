"""LDLQ × trellis: a trellis-coded weight whose errors are fed forward under the layer's Hessian.

QuIP# (arXiv 2402.04396) and QTIP (arXiv 2406.11235). The algebra is ``mathx.ldl``, the loop ``solve.feedback``, what is
coded when ``solve.ldlq_coder``. Here is the judgement: the plain trellis is coded too, and whatever does not beat it,
or wanders off, is tried again with more damping and at last left; every attempt is in the result.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tqtool import native
from tqtool.errors import UserError
from tqtool.formats.trellis import TrellisSpec
from tqtool.mathx.codes import CODE_ERROR
from tqtool.mathx.ldl import UpperFactor, feedback_gain, proxy_loss, row_losses
from tqtool.solve.feedback import (
    GROWTH_LIMIT,
    Attempt,
    FeedbackResult,
    Trial,
    accepted_damping,
    code_with_feedback,
    describe,
    first_sound,
)
from tqtool.solve.hessian import Hessian
from tqtool.solve.ldlq_coder import Floats, LdlqOptions, coding_order, fit_stored_scales, trellis_coder
from tqtool.solve.ldlq_device import TileJob, code_tiles
from tqtool.solve.trellis import TrellisMatrix, encode_weight
from tqtool.solve.trellis_rows import row_scales

PLAIN_WARMUP = 16
"""The plain trellis is coded to compare with, in half the time and within half a percent; a fallback is coded fully."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LdlqMatrix:
    """One coded weight.

    Attributes:
        matrix: Words and scales; its errors are unweighted.
        method: ``ldlq``, or ``plain`` where no attempt was sound.
        loss: Proxy loss ``tr(E·H·Eᵀ)`` of what is stored, on the undamped Hessian.
        plain_loss: The same of the trellis without feedback (``PLAIN_WARMUP``, unless that is what is stored).
        headroom: Factor on the row scales that was taken; 1 along outputs.
        refitted: Stored rows whose scale was changed by the refit under H.
        attempts: All that were made, in order.
    """

    matrix: TrellisMatrix
    method: Literal["ldlq", "plain"]
    loss: float
    plain_loss: float
    headroom: float
    refitted: int
    attempts: tuple[Attempt, ...]

    def report(self) -> tuple[dict[str, float], tuple[str, ...]]:
        """Statistics and notes for the manifest, beside those of ``matrix``."""
        stats = {
            "proxy_loss": self.loss,
            "proxy_loss_plain": self.plain_loss,
            **accepted_damping(self.attempts),
            "headroom": self.headroom,
            "refitted_rows": float(self.refitted),
        }
        return stats, describe(self.attempts, "the trellis without feedback")


def ldlq_encode(name: str, weight: Floats, hessian: Hessian, spec: TrellisSpec, options: LdlqOptions) -> LdlqMatrix:
    """Code ``weight [out, in]`` (not written) as ``spec`` says under ``hessian [in, in]``.

    The plain trellis is coded first: it is what the result must beat. An attempt whose targets reach 4 times the
    weight's own peak has diverged; one whose unweighted error is 8 times the plain trellis's has scattered it.

    Raises:
        UserError: The Hessian has another width.
        NumericalError: A row's scale does not fit float16.
    """
    if weight.shape != spec.weight_shape or spec.weight_shape[1] != hessian.width:
        raise UserError(f"{name}: {list(weight.shape)} and a Hessian of width {hessian.width} do not fit")
    quick = min(PLAIN_WARMUP, options.trellis.warmup or PLAIN_WARMUP)
    plain = encode_weight(name, weight, spec, replace(options.trellis, warmup=quick))
    plain_loss = proxy_loss(_served(plain.words, plain.scales, spec) - weight, hessian.matrix)
    ceiling = float(np.abs(weight).max(initial=0.0))
    order = coding_order(spec, hessian, options)
    ordered = Hessian(matrix=hessian.matrix[np.ix_(order, order)], rows=hessian.rows)
    source = np.ascontiguousarray(weight[:, order])

    def run(factor: UpperFactor) -> Trial:
        headroom = _headroom(factor, spec, options)
        taken = replace(options, headroom=headroom)
        done, found, coded_scales = _coded(name, source, factor, spec, taken, order, GROWTH_LIMIT * ceiling)
        growth = done.peak / ceiling if ceiling else 0.0
        if not done.finished:
            return Trial(result=None, growth=growth, loss=np.nan)
        words, scales = found.reshape(spec.words_shape), coded_scales
        loss = proxy_loss(done.error, ordered.matrix)
        if options.trellis.refit:
            fitted = refit_under(weight, words, scales, spec, hessian.matrix)
            fitted_loss = proxy_loss(_served(words, fitted, spec) - weight, hessian.matrix)
            scales, loss = (fitted, fitted_loss) if fitted_loss < loss else (scales, loss)
        refitted = int(np.count_nonzero(scales != coded_scales))
        scattered = float(np.sum(np.square(done.error), dtype=np.float64))
        spread = scattered / plain.squared_error if plain.squared_error else 1.0
        return Trial(result=(words, scales, headroom, refitted), growth=growth, loss=loss, spread=spread)

    trial, attempts = first_sound(ordered, run, dampings=options.dampings, plain_loss=plain_loss)
    headroom, refitted = 1.0, 0
    if trial is None:
        matrix = encode_weight(name, weight, spec, options.trellis)
        plain_loss = proxy_loss(_served(matrix.words, matrix.scales, spec) - weight, hessian.matrix)
    else:
        words, scales, headroom, refitted = trial.result
        squared_error = float(np.sum(np.square(_served(words, scales, spec) - weight), dtype=np.float64))
        matrix = replace(plain, words=words, scales=scales, squared_error=squared_error)
    return LdlqMatrix(
        matrix=matrix,
        method="plain" if trial is None else "ldlq",
        loss=plain_loss if trial is None else trial.loss,
        plain_loss=plain_loss,
        headroom=headroom,
        refitted=refitted,
        attempts=attempts,
    )


def _coded(
    name: str,
    source: Floats,
    factor: UpperFactor,
    spec: TrellisSpec,
    options: LdlqOptions,
    order: NDArray[np.intp],
    peak_limit: float,
) -> tuple[FeedbackResult, NDArray[np.uint32], NDArray[np.float16]]:
    """One pass, its words and scales: in tiles where the paths are searched, else with the products on the CPU."""
    if spec.tile and options.trellis.device != "cpu":
        scales = row_scales(name, source * np.float32(options.headroom or 1.0), spec.k)
        job = TileJob(weight=source, factor=factor, scales=scales, order=order)
        (coded,) = code_tiles([job], spec, options.trellis, peak_limits=[peak_limit])
        return coded.result, coded.words, scales
    coder = trellis_coder(name, source, spec, options, order)
    return code_with_feedback(source, factor, coder, peak_limit=peak_limit), coder.words, coder.scales


def _headroom(factor: UpperFactor, spec: TrellisSpec, options: LdlqOptions) -> float:
    """The options' own, or what the feedback asks for; 1 along outputs, whose scales are set row by row."""
    if spec.axis == 0:
        return 1.0
    if options.headroom is not None:
        return options.headroom
    return math.sqrt(1 + CODE_ERROR[spec.k] * feedback_gain(factor, spec.tile or spec.block))


def refit_under(
    weight: Floats,
    words: NDArray[np.uint32],
    scales: NDArray[np.float16],
    spec: TrellisSpec,
    matrix: NDArray[np.floating],
) -> NDArray[np.float16]:
    """Scales that minimize the proxy loss for the codes found: of each output alone (axis 1), of all inputs (axis 0).

    Along inputs a row keeps its scale unless its own loss falls; along outputs the caller compares the whole.
    """
    values = native.trellis_expand(words, np.ones(spec.rows, np.float16), spec)
    if spec.axis == 0:
        return fit_stored_scales(values, weight.T, scales, np.asarray(matrix, np.float64))
    bottom = row_losses(values, matrix)
    crossed = np.einsum("rc,rc->r", values.astype(np.float64) @ np.asarray(matrix, np.float64), weight)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        fitted = (crossed / bottom).astype(np.float16)
    usable = np.isfinite(fitted) & (fitted > 0) & (scales > 0)
    fitted = np.where(usable, fitted, scales).astype(np.float16)
    before = row_losses(values * scales[:, None].astype(np.float32) - weight, matrix)
    after = row_losses(values * fitted[:, None].astype(np.float32) - weight, matrix)
    return np.where(after < before, fitted, scales).astype(np.float16)


def _served(words: NDArray[np.uint32], scales: NDArray[np.float16], spec: TrellisSpec) -> Floats:
    """The weight ``[out, in]`` a decoder serves."""
    stored = native.trellis_expand(words, scales, spec)
    return stored if spec.axis == 1 else np.ascontiguousarray(stored.T)
