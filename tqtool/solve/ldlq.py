"""LDLQ × trellis: a trellis-coded weight whose errors are fed forward under the layer's Hessian.

QuIP# (arXiv 2402.04396) and QTIP (arXiv 2406.11235); the algebra is ``mathx.ldl``, the loop ``solve.feedback``.

Along inputs (axis 1) a step codes one block of every row group: feedback every 256 inputs. Where a row is no whole
number of blocks, blocks run on into the next row; groups of ``256 / gcd(stride, 256)`` rows then start on a block, and
step t codes block t of every group, some of its columns for one row and some for the next. Rows do not influence one
another and each sees its inputs in order, so this is exact LDLQ with cuts that differ from row to row.

Along outputs (axis 0) a row of the stored matrix is one *input*: feedback may come after any number of inputs, one
included. Steps are whole blocks of the stream. A block that runs on into the next row covers different outputs there as
long as the layer has 256 of them, so feedback after every input survives that too.

Scales. Along inputs a row's scale is set before the first step and holds for all of it; afterwards it may be refitted
under H. Along outputs a row's scale is set when the row comes up, from its targets, and if the step holds the whole row
it is refitted under D before the error is passed on.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tqtool import native
from tqtool.errors import UserError
from tqtool.formats.trellis import TrellisSpec, pack
from tqtool.mathx import codes
from tqtool.mathx.ldl import UpperFactor, proxy_loss, row_losses
from tqtool.solve.feedback import (
    DAMPINGS,
    GROWTH_LIMIT,
    Attempt,
    ColumnCoder,
    Piece,
    Step,
    Trial,
    code_with_feedback,
    first_sound,
)
from tqtool.solve.hessian import Hessian
from tqtool.solve.trellis import TrellisMatrix, TrellisOptions, encode_weight, row_scales

Floats = NDArray[np.float32]

LEVEL_LIMIT = np.float32(560)
"""Largest input of the encoder, in level units."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LdlqOptions:
    """How to code.

    Attributes:
        trellis: The code.
        columns: Inputs between two feedbacks along outputs (axis 0); the step is rounded down to whole blocks. Along
            inputs a step is a block.
        dampings: Tried in order.
        headroom: Along inputs, factor on the row scales: targets are wider than the weight by what is fed to them.
    """

    trellis: TrellisOptions
    columns: int = 1
    dampings: tuple[float, ...] = DAMPINGS
    headroom: float = 1.0

    def __post_init__(self) -> None:
        if self.columns < 1:
            raise UserError(f"LDLQ feedback every {self.columns} columns: expected at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class LdlqMatrix:
    """One coded weight.

    Attributes:
        matrix: Words and scales; its errors are unweighted.
        method: ``ldlq``, or ``plain`` where no attempt was sound.
        loss: Proxy loss ``tr(E·H·Eᵀ)`` of what is stored, on the undamped Hessian.
        plain_loss: The same of the trellis without feedback.
        refitted: Stored rows whose scale was changed by the refit under H.
        attempts: All that were made, in order.
    """

    matrix: TrellisMatrix
    method: Literal["ldlq", "plain"]
    loss: float
    plain_loss: float
    refitted: int
    attempts: tuple[Attempt, ...]


def ldlq_encode(name: str, weight: Floats, hessian: Hessian, spec: TrellisSpec, options: LdlqOptions) -> LdlqMatrix:
    """Code ``weight [out, in]`` (not written) as ``spec`` says under ``hessian [in, in]``.

    The plain trellis is coded first: it is what the result must beat and what it falls back to. An attempt whose
    targets reach 4 times the weight's own peak has diverged.

    Raises:
        UserError: The Hessian has another width.
        NumericalError: A row's scale does not fit float16.
    """
    if weight.shape != spec.weight_shape or spec.weight_shape[1] != hessian.width:
        raise UserError(f"{name}: {list(weight.shape)} and a Hessian of width {hessian.width} do not fit")
    plain = encode_weight(name, weight, spec, options.trellis)
    plain_loss = proxy_loss(_served(plain.words, plain.scales, spec) - weight, hessian.matrix)
    ceiling = float(np.abs(weight).max(initial=0.0))

    def run(factor: UpperFactor) -> Trial:
        coder = trellis_coder(name, weight, spec, options)
        done = code_with_feedback(weight, factor, coder, peak_limit=GROWTH_LIMIT * ceiling)
        growth = done.peak / ceiling if ceiling else 0.0
        if not done.finished:
            return Trial(result=None, growth=growth, loss=np.nan)
        words, scales = coder.words.reshape(spec.words_shape), coder.scales
        loss, refitted = proxy_loss(done.error, hessian.matrix), 0
        if options.trellis.refit:
            fitted = refit_under(weight, words, scales, spec, hessian.matrix)
            fitted_loss = proxy_loss(_served(words, fitted, spec) - weight, hessian.matrix)
            if fitted_loss < loss:
                refitted, scales, loss = int(np.count_nonzero(fitted != scales)), fitted, fitted_loss
        return Trial(result=(words, scales, refitted), growth=growth, loss=loss)

    trial, attempts = first_sound(hessian, run, dampings=options.dampings, plain_loss=plain_loss)
    if trial is None:
        return LdlqMatrix(
            matrix=plain, method="plain", loss=plain_loss, plain_loss=plain_loss, refitted=0, attempts=attempts
        )
    words, scales, refitted = trial.result
    error = _served(words, scales, spec) - weight
    matrix = TrellisMatrix(
        spec=spec,
        words=words,
        scales=scales,
        squared_error=float(np.sum(np.square(error), dtype=np.float64)),
        squared_norm=plain.squared_norm,
    )
    return LdlqMatrix(
        matrix=matrix, method="ldlq", loss=trial.loss, plain_loss=plain_loss, refitted=refitted, attempts=attempts
    )


def trellis_coder(name: str, weight: Floats, spec: TrellisSpec, options: LdlqOptions) -> _TrellisCoder:
    """The column coder of one weight, along inputs or along outputs as ``spec`` says."""
    return (AlongInputs if spec.axis == 1 else AlongOutputs)(name, weight, spec, options)


class _TrellisCoder(ColumnCoder):
    """What both directions share: inputs in level units, one call of the encoder a step, packed words kept."""

    def __init__(self, name: str, weight: Floats, spec: TrellisSpec, options: LdlqOptions) -> None:
        self._name, self._weight, self._spec, self._options = name, weight, spec, options
        self._code = options.trellis
        self._levels = codes.levels(self._code.code, self._code.window)
        self._values = codes.values(self._code.code, self._code.window)
        self.words = np.empty((spec.n_blocks, spec.words_per_block), np.uint32)
        self.scales = np.zeros(spec.rows, np.float16)

    def _inputs(self, values: Floats, scales: NDArray[np.float16]) -> NDArray[np.int16]:
        """Rows ``[n, c]`` in level units, with the arithmetic of the plain trellis."""
        with np.errstate(divide="ignore"):
            factor = np.float32(codes.UNIT[self._code.code]) / scales.astype(np.float32)
        factor[scales == 0] = 0
        return np.clip(np.rint(values * factor[:, None]), -LEVEL_LIMIT, LEVEL_LIMIT).astype(np.int16)

    def _search(self, blocks: NDArray[np.int16], numbers: NDArray[np.intp]) -> Floats:
        """Code blocks ``[n, T]``, keep the words of those that are stored, return code values ``[n, T]``."""
        code = self._code
        states, _ = native.viterbi_encode(
            blocks, self._levels, window=code.window, k=code.k, warmup=code.warmup, threads=code.threads
        )
        stored = numbers < self._spec.n_blocks
        self.words[numbers[stored]] = pack(states[stored], code.k)
        return self._values[states]


class AlongInputs(_TrellisCoder):
    """Axis 1: step t codes block t of every row group."""

    def __init__(self, name: str, weight: Floats, spec: TrellisSpec, options: LdlqOptions) -> None:
        super().__init__(name, weight, spec, options)
        self._phases = spec.block // math.gcd(spec.stride, spec.block)  # rows of a group
        self._per_group = self._phases * spec.stride // spec.block
        self._groups = -(-spec.rows // self._phases)
        self.scales = row_scales(name, weight * np.float32(options.headroom), self._code.k)

    def steps(self) -> Iterator[Step]:
        """Block t covers positions ``t·T … (t+1)·T`` of each group's rows laid end to end."""
        spec = self._spec
        for index in range(self._per_group):
            pieces = []
            for phase in range(min(self._phases, spec.rows)):
                start = max(index * spec.block - phase * spec.stride, 0)
                stop = min((index + 1) * spec.block - phase * spec.stride, spec.cols)
                if start < stop:
                    pieces.append(Piece(slice(phase, None, self._phases), start, stop))
            yield Step(index=index, pieces=tuple(pieces))

    def encode(self, step: Step, targets: Sequence[Floats], factor: UpperFactor) -> tuple[Floats, ...]:
        """One block of every group; a last group that lacks rows is padded with zeros, as the format pads."""
        del factor
        spec = self._spec
        blocks = np.zeros((self._groups, spec.block), np.int16)
        places = []
        for piece, target in zip(step.pieces, targets, strict=True):
            offset = piece.outputs.start * spec.stride - step.index * spec.block
            place = (slice(0, len(target)), slice(offset + piece.start, offset + piece.stop))
            blocks[place] = self._inputs(target, self.scales[piece.outputs])
            places.append(place)
        decoded = self._search(blocks, np.arange(self._groups) * self._per_group + step.index)
        return tuple(
            decoded[place] * self.scales[piece.outputs, None].astype(np.float32)
            for piece, place in zip(step.pieces, places, strict=True)
        )


class AlongOutputs(_TrellisCoder):
    """Axis 0: steps are runs of whole blocks of the stream, about ``columns`` inputs long."""

    def steps(self) -> Iterator[Step]:
        """A step covers positions ``first … last`` of the stream; an output's inputs there are one interval."""
        spec = self._spec
        length = max(self._options.columns * spec.stride // spec.block, 1) * spec.block
        for index, first in enumerate(range(0, spec.rows * spec.stride, length)):
            row, begin = divmod(first, spec.stride)
            end_row, end = divmod(min(first + length, spec.rows * spec.stride), spec.stride)
            pieces = []
            edges = sorted({0, min(begin, spec.cols), min(end, spec.cols), spec.cols})
            for low, high in itertools.pairwise(edges):
                start, stop = row + (low < begin), end_row + (low < end)
                if start < stop:
                    pieces.append(Piece(slice(low, high), start, stop))
            yield Step(index=index, pieces=tuple(pieces), complete=row)

    def encode(self, step: Step, targets: Sequence[Floats], factor: UpperFactor) -> tuple[Floats, ...]:
        """The step's blocks; rows that begin in it get their scales, rows that lie in it whole get them refitted."""
        spec = self._spec
        top = step.complete
        bottom = max(piece.stop for piece in step.pieces)
        stored = np.zeros((bottom - top, spec.stride), np.float32)
        stored[:, : spec.cols] = self._weight[:, top:bottom].T  # stands for targets of steps to come
        for piece, target in zip(step.pieces, targets, strict=True):
            stored[piece.start - top : piece.stop - top, piece.outputs] = target.T
        begins = step.pieces[0].start  # output 0 is the first of a row
        if begins < bottom:
            fresh = np.ascontiguousarray(stored[begins - top :, : spec.cols])
            self.scales[begins:bottom] = row_scales(self._name, fresh, self._code.k)
        inputs = self._inputs(stored, self.scales[top:bottom]).reshape(-1)
        length = max(self._options.columns * spec.stride // spec.block, 1) * spec.block
        offset = step.index * length - top * spec.stride
        part = inputs[offset : min(offset + length, (spec.rows - top) * spec.stride)]
        blocks = np.pad(part, (0, -part.size % spec.block)).reshape(-1, spec.block)
        decoded = self._search(blocks, step.index * length // spec.block + np.arange(len(blocks)))
        flat = np.zeros(stored.size, np.float32)
        flat[offset : offset + part.size] = decoded.reshape(-1)[: part.size]
        values = flat.reshape(stored.shape)
        if self._code.refit and len(step.pieces) == 1 and step.pieces[0].outputs == slice(0, spec.cols):
            curvature = factor.curvature(top, bottom)
            self.scales[top:bottom] = fit_stored_scales(
                values[:, : spec.cols], targets[0].T, self.scales[top:bottom], curvature
            )
        served = values * self.scales[top:bottom, None].astype(np.float32)
        return tuple(served[piece.start - top : piece.stop - top, piece.outputs].T for piece in step.pieces)


def fit_stored_scales(
    values: Floats, wanted: Floats, scales: NDArray[np.float16], metric: NDArray[np.floating]
) -> NDArray[np.float16]:
    """Scales of rows ``[n, c]`` of code values that minimize ``Σ_c (s∘v − w)_c·M·(s∘v − w)_c`` jointly, M ``[n, n]``.

    The minimum solves ``(M ∘ V·Vᵀ)·s = diag(M·W·Vᵀ)``. Rows of zeros keep their scale; where a solution is not positive
    and finite in float16 all keep theirs.
    """
    live = np.flatnonzero(scales > 0)
    v, w = values[live].astype(np.float64), wanted.astype(np.float64)
    right = np.einsum("ij,ji->i", metric[live], w @ v.T)
    left = metric[np.ix_(live, live)] * (v @ v.T)
    fitted = scales.copy()
    try:
        solution = np.linalg.solve(left, right)
    except np.linalg.LinAlgError:
        return scales
    with np.errstate(over="ignore"):
        fitted[live] = solution.astype(np.float16)
    return fitted if (np.isfinite(fitted) & (fitted > 0))[live].all() else scales


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
