"""Trellis coders for error feedback: which blocks are coded together, in which order, at which scale.

Along inputs (axis 1) a step codes one block of every row group: feedback every 256 inputs. Where a row is no whole
number of blocks, blocks run on into the next row; groups of ``256 / gcd(stride, 256)`` rows then start on a block, and
step t codes block t of every group, some of its columns for one row and some for the next. Rows do not influence one
another and each sees its inputs in order, so this is exact LDLQ with cuts that differ from row to row.

Along outputs (axis 0) a row of the stored matrix is one *input*: feedback may come after any number of inputs, one
included. Rows that share blocks form groups as above (with 576 outputs, of four). Where these are small, a step is
whole groups, and the groups are coded by falling curvature, wherever they are stored: inputs that matter most are
corrected by all others. That is GPTQ's act-order for free, and on unrotated layers it is worth more than anything else
here. Where groups are large, steps are runs of blocks in the order of the stream: a block that runs on into the next
row covers different outputs there as long as the layer has 256 of them, so feedback after every input survives that.

In tiles (16 × 16) a step codes one column of tiles: feedback every 16 inputs, whatever the shape. Columns of tiles are
coded by falling curvature too. Scales are as along inputs.

Scales. Along inputs a row's scale is set before the first step and holds for all of it; afterwards it may be refitted
under H. Along outputs a row's scale is set when the row comes up, from its targets, and if the step holds the whole row
it is refitted under D before the error is passed on.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tqtool.errors import UserError
from tqtool.formats.trellis import TrellisSpec
from tqtool.mathx import codes
from tqtool.mathx.ldl import UpperFactor
from tqtool.solve.feedback import DAMPINGS, ColumnCoder, Piece, Step
from tqtool.solve.hessian import Hessian
from tqtool.solve.trellis import TrellisOptions
from tqtool.solve.trellis_rows import pack_closed, row_scales, to_levels

Floats = NDArray[np.float32]

LARGEST_GROUP = 64
"""Stored rows coded together, at most, so that their blocks come out whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LdlqOptions:
    """How to code.

    Attributes:
        trellis: The code.
        columns: Inputs between two feedbacks along outputs (axis 0), rounded up to whole groups of rows that share
            blocks, or down to whole blocks if a group has more than ``LARGEST_GROUP``. Along inputs a step is a block.
        order: Along outputs, ``curvature`` codes groups by falling diagonal of H; ``natural`` as they are stored.
        dampings: Tried in order.
        headroom: Along inputs and in tiles, factor on the row scales: targets are wider than the weight by what is fed
            to them. None takes ``√(1 + error of the code · feedback_gain)``.
    """

    trellis: TrellisOptions
    columns: int = 1
    order: Literal["curvature", "natural"] = "curvature"
    dampings: tuple[float, ...] = DAMPINGS
    headroom: float | None = None

    def __post_init__(self) -> None:
        if self.columns < 1:
            raise UserError(f"LDLQ feedback every {self.columns} columns: expected at least 1")
        if self.headroom is not None and not 0 < self.headroom < math.inf:
            raise UserError(f"LDLQ headroom {self.headroom}: expected a positive factor")


def coding_order(spec: TrellisSpec, hessian: Hessian, options: LdlqOptions) -> NDArray[np.intp]:
    """The inputs ``[in]`` in the order they are coded: groups that share no block with others, as ``options`` say."""
    natural = np.arange(hessian.width)
    group = spec.row_group  # in tiles as many inputs as outputs
    if (spec.axis == 1 and not spec.tile) or options.order == "natural" or group > LARGEST_GROUP:
        return natural
    whole = natural[: hessian.width // group * group].reshape(-1, group)  # what is left of a group stays last
    curvature = np.diagonal(hessian.matrix)[whole].mean(axis=1)
    ordered = whole[np.argsort(-curvature, kind="stable")].reshape(-1)
    return np.concatenate([ordered, natural[whole.size :]])


def trellis_coder(
    name: str, weight: Floats, spec: TrellisSpec, options: LdlqOptions, order: NDArray[np.intp]
) -> TrellisCoder:
    """The column coder of one weight whose inputs are in ``order`` already, as spec stores it."""
    if spec.tile:
        return InTiles(name, weight, spec, options, order)
    return (
        AlongInputs(name, weight, spec, options) if spec.axis == 1 else AlongOutputs(name, weight, spec, options, order)
    )


class TrellisCoder(ColumnCoder):
    """What both directions share: inputs in level units, one call of the encoder a step, packed words kept."""

    def __init__(self, name: str, weight: Floats, spec: TrellisSpec, options: LdlqOptions) -> None:
        self._name, self._weight, self._spec, self._options = name, weight, spec, options
        self._code = options.trellis
        self._levels = codes.levels(self._code.code, self._code.window)
        self._values = codes.values(self._code.code, self._code.window)
        self.words = np.empty((spec.n_blocks, spec.words_per_block), np.uint32)
        self.scales = np.zeros(spec.rows, np.float16)

    def _inputs(self, values: Floats, scales: NDArray[np.float16]) -> NDArray[np.int16]:
        """Rows ``[n, c]`` in level units."""
        return to_levels(values, scales, self._code.code, threads=self._code.threads)

    def _search(self, blocks: NDArray[np.int16], numbers: NDArray[np.intp]) -> Floats:
        """Code blocks ``[n, T]``, keep the words of those that are stored, return code values ``[n, T]``."""
        states = self._code.search(blocks, self._levels)
        stored = numbers < self._spec.n_blocks
        self.words[numbers[stored]] = pack_closed(self._name, states[stored], self._spec, threads=self._code.threads)
        return self._values[states]


class AlongInputs(TrellisCoder):
    """Axis 1: step t codes block t of every row group."""

    def __init__(self, name: str, weight: Floats, spec: TrellisSpec, options: LdlqOptions) -> None:
        super().__init__(name, weight, spec, options)
        self._phases = spec.row_group
        self._per_group = self._phases * spec.stride // spec.block
        self._groups = -(-spec.rows // self._phases)
        self.scales = row_scales(name, weight * np.float32(options.headroom or 1.0), self._code.k)

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
            if pieces:  # fewer rows than a group has leave its last blocks without any
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


class InTiles(TrellisCoder):
    """Step t codes the t-th column of tiles, wherever it is stored."""

    def __init__(
        self, name: str, weight: Floats, spec: TrellisSpec, options: LdlqOptions, order: NDArray[np.intp]
    ) -> None:
        super().__init__(name, weight, spec, options)
        self._across = spec.stride // spec.tile
        self._column = replace(spec, cols=spec.tile, stride=spec.tile)
        self._order = order
        self.scales = row_scales(name, weight * np.float32(options.headroom or 1.0), self._code.k)

    def steps(self) -> Iterator[Step]:
        """Sixteen inputs of all outputs; fewer in a last column that the weight does not fill."""
        spec = self._spec
        for index, start in enumerate(range(0, spec.cols, spec.tile)):
            piece = Piece(slice(0, spec.rows), start, min(start + spec.tile, spec.cols))
            yield Step(index=index, pieces=(piece,), complete=start)

    def encode(self, step: Step, targets: Sequence[Floats], factor: UpperFactor) -> tuple[Floats, ...]:
        """The column's tiles, top to bottom."""
        del factor
        column = replace(self._column, cols=targets[0].shape[1])
        blocks = column.to_stream(self._inputs(targets[0], self.scales))
        place = self._order[step.pieces[0].start] // self._spec.tile
        decoded = column.from_stream(self._search(blocks, np.arange(len(blocks)) * self._across + place))
        return (decoded * self.scales[:, None].astype(np.float32),)


class AlongOutputs(TrellisCoder):
    """Axis 0: steps are runs of whole blocks, about ``columns`` inputs long; blocks are numbered as they are coded."""

    def __init__(
        self, name: str, weight: Floats, spec: TrellisSpec, options: LdlqOptions, order: NDArray[np.intp]
    ) -> None:
        super().__init__(name, weight, spec, options)
        self._order = order
        self._group = spec.row_group
        columns = options.columns
        if self._group <= LARGEST_GROUP:
            columns = -(-columns // self._group) * self._group
        self._length = max(columns * spec.stride // spec.block, 1) * spec.block  # weights of a step

    def steps(self) -> Iterator[Step]:
        """A step covers positions ``first … last`` of the stream; an output's inputs there are one interval."""
        spec, length = self._spec, self._length
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
            self.scales[self._order[begins:bottom]] = row_scales(self._name, fresh, self._code.k)
        rows = self._order[top:bottom]
        inputs = self._inputs(stored, self.scales[rows]).reshape(-1)
        length = self._length
        offset = step.index * length - top * spec.stride
        part = inputs[offset : min(offset + length, (spec.rows - top) * spec.stride)]
        blocks = np.pad(part, (0, -part.size % spec.block)).reshape(-1, spec.block)
        decoded = self._search(blocks, self._stored_blocks(step.index * length // spec.block + np.arange(len(blocks))))
        flat = np.zeros(stored.size, np.float32)
        flat[offset : offset + part.size] = decoded.reshape(-1)[: part.size]
        values = flat.reshape(stored.shape)
        if self._code.refit and len(step.pieces) == 1 and step.pieces[0].outputs == slice(0, spec.cols):
            curvature = factor.curvature(top, bottom)
            self.scales[rows] = fit_stored_scales(values[:, : spec.cols], targets[0].T, self.scales[rows], curvature)
        served = values * self.scales[rows, None].astype(np.float32)
        return tuple(served[piece.start - top : piece.stop - top, piece.outputs].T for piece in step.pieces)

    def _stored_blocks(self, coded: NDArray[np.intp]) -> NDArray[np.intp]:
        """Where blocks are stored, by the order in which they are coded: groups move, blocks in a group do not."""
        per_group = self._group * self._spec.stride // self._spec.block
        group, within = np.divmod(coded, per_group)
        stored: NDArray[np.intp] = self._order[group * self._group] // self._group * per_group + within
        return stored


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
