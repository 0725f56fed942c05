"""GPTQ for MLX's affine format: rounding to nearest, each error pushed onto the columns that are still to come.

Paper: arXiv 2210.17323. The algebra is that of ``mathx.ldl`` with blocks of one group: a group is asked for its updated
weights, finds its scale and bias on *them*, and rounds column by column under its own curvature, so the result is that
of the paper's column loop. Scales and biases are rounded to the stored dtype before anything is rounded with them:
the error that is fed back is the error of what a decoder serves.

Sound or not at all: a matrix whose largest scale grows beyond 4 times round-to-nearest's, or whose proxy loss ends
above it, is tried again with more damping and at last rounded to nearest; every attempt is in the result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tqtool import native
from tqtool.errors import NumericalError, UserError
from tqtool.formats.affine import AffineSpec, dequantize, pack
from tqtool.formats.dtypes import DType
from tqtool.mathx.ldl import UpperFactor, proxy_loss
from tqtool.solve.feedback import (
    DAMPINGS,
    Attempt,
    Piece,
    Step,
    Trial,
    accepted_damping,
    code_with_feedback,
    describe,
    first_sound,
)
from tqtool.solve.hessian import Hessian
from tqtool.solve.quantizer import ConfigEntry, QuantResult, StoredTensor, module_of
from tqtool.solve.rtn import AffineRtn

GridRule = Literal["mlx", "search"]

SHRINK = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6)
"""Fractions of a group's range tried by the search: fewer bits want less of it."""

REFITS = 2
"""Rounds of least squares after the shrink search; more change nothing that shows."""

ORDERED_BLOCK = 128
PACK_ROWS = 1024

Array = NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class GptqOptions:
    """How to quantize.

    Attributes:
        bits: 1–6 or 8.
        group_size: 32, 64 or 128; divides the layer's inputs.
        dtype: Of the stored scales and biases.
        grid: ``mlx`` takes a group's scale by the rule of ``mx.quantize``; ``search`` shrinks the range and refits by
            least squares, weighted by the group's curvature.
        static_groups: Scales from the unchanged weight, all before the first column.
        act_order: Columns by falling diagonal of the Hessian; needs ``static_groups``, because groups are contiguous.
        dampings: Tried in order.
        work: Arithmetic of the feedback; float64 is for comparisons.
    """

    bits: int
    group_size: int
    dtype: DType = DType.BF16
    grid: GridRule = "mlx"
    static_groups: bool = False
    act_order: bool = False
    dampings: tuple[float, ...] = DAMPINGS
    work: Literal["float32", "float64"] = "float32"

    def __post_init__(self) -> None:
        try:
            AffineSpec(bits=self.bits, group_size=self.group_size)
        except ValueError as error:
            raise UserError(str(error)) from error
        if self.act_order and not self.static_groups:
            raise UserError(
                "act-order needs static groups: the format's groups are contiguous columns", hint="set static_groups"
            )

    @property
    def plain(self) -> AffineRtn:
        """The quantizer to be compared with and to fall back to."""
        return AffineRtn(bits=self.bits, group_size=self.group_size, dtype=self.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class GptqMatrix:
    """One quantized weight.

    Attributes:
        words: uint32 ``[out, in·bits/32]``.
        scales: ``[out, in/group]`` in the stored dtype.
        biases: As scales.
        method: ``gptq``, or ``rtn`` where no attempt was sound.
        loss: Proxy loss ``tr(E·H·Eᵀ)`` of what is stored, on the undamped Hessian.
        plain_loss: The same of round-to-nearest.
        attempts: All that were made, in order.
    """

    words: NDArray[np.uint32]
    scales: Array
    biases: Array
    method: Literal["gptq", "rtn"]
    loss: float
    plain_loss: float
    attempts: tuple[Attempt, ...]


def gptq_quantize(name: str, weight: NDArray[np.float32], hessian: Hessian, options: GptqOptions) -> GptqMatrix:
    """Quantize ``weight [out, in]`` (float32, not written) under ``hessian [in, in]``.

    Memory beyond the arguments: about four arrays like the weight and three float64 ones like the Hessian.

    Raises:
        UserError: The width is not a multiple of the group, or not the Hessian's.
        NumericalError: A group's range does not fit the stored dtype.
    """
    plain = options.plain
    plain.outputs(name, weight.shape)  # the same refusal
    if weight.ndim != 2 or weight.shape[1] != hessian.width:
        raise UserError(f"{name}: {list(weight.shape)} and a Hessian of width {hessian.width} do not fit")
    words, scales, biases = plain.run(name, weight).tensors.values()
    spec = AffineSpec(bits=options.bits, group_size=options.group_size)
    plain_loss = proxy_loss(dequantize(words, scales, biases, spec) - weight, hessian.matrix)
    ceiling = float(np.abs(scales.astype(np.float32)).max())
    diagonal = np.diagonal(hessian.matrix)
    order = np.argsort(-diagonal, kind="stable") if options.act_order else None
    if order is not None:
        hessian = Hessian(matrix=hessian.matrix[np.ix_(order, order)], rows=hessian.rows, dropped=hessian.dropped)

    def run(factor: UpperFactor) -> Trial:
        coder = AffineCoder(weight, options, diagonal, order)
        source = weight if order is None else weight[:, order]
        done = code_with_feedback(source.astype(options.work, copy=False), factor, coder)
        if not done.finished:
            return Trial(result=coder, growth=np.inf, loss=np.nan)
        growth = float(np.abs(coder.scales.astype(np.float32)).max()) / ceiling
        return Trial(result=coder, growth=growth, loss=proxy_loss(done.error, hessian.matrix))

    trial, attempts = first_sound(hessian, run, dampings=options.dampings, plain_loss=plain_loss)
    if trial is None:
        method: Literal["gptq", "rtn"] = "rtn"
    else:
        coder: AffineCoder = trial.result
        words, scales, biases, method = coder.words(), coder.scales, coder.biases, "gptq"
        for part, values in (("scales", scales), ("biases", biases)):
            if not np.isfinite(values.astype(np.float32)).all():
                raise NumericalError(
                    f"{module_of(name)}.{part}: a group's range does not fit {options.dtype.value}",
                    hint="keep the module dense: --rule 'GLOB=float', or take a wider --dtype",
                )
    return GptqMatrix(
        words=words,
        scales=scales,
        biases=biases,
        method=method,
        loss=plain_loss if trial is None else trial.loss,
        plain_loss=plain_loss,
        attempts=attempts,
    )


class AffineCoder:
    """The column coder of one weight ``[out, in]``: groups, or blocks of ordered columns with static grids."""

    def __init__(self, weight: Array, options: GptqOptions, diagonal: Array, order: NDArray[np.intp] | None) -> None:
        rows, self._width = weight.shape
        self._options = options
        self._order = order
        groups = self._width // options.group_size
        self.scales: Array = np.empty((rows, groups), options.dtype.numpy)
        self.biases: Array = np.empty((rows, groups), options.dtype.numpy)
        self._codes = np.empty((self._width, rows), np.uint8)  # by column, as they are made
        if options.static_groups:
            for group in range(groups):
                columns = slice(group * options.group_size, (group + 1) * options.group_size)
                self._set_grid(group, weight[:, columns], diagonal[columns].astype(np.float64))

    def steps(self) -> Iterator[Step]:
        """Groups in order, or blocks of ordered columns, the last one ragged."""
        size = self._options.group_size if self._order is None else ORDERED_BLOCK
        for index, start in enumerate(range(0, self._width, size)):
            piece = Piece(slice(None), start, min(start + size, self._width))
            yield Step(index=index, pieces=(piece,), complete=start)

    def encode(self, step: Step, targets: Sequence[Array], factor: UpperFactor) -> tuple[Array]:
        """Round one block column by column; in a group, find its grid first."""
        (piece,), (target,) = step.pieces, targets
        span = np.arange(piece.start, piece.stop)
        columns = span if self._order is None else self._order[span]
        groups = columns // self._options.group_size
        corner = factor.corner(piece.start, piece.stop)
        if not self._options.static_groups:
            self._set_grid(int(groups[0]), target, np.square(np.diagonal(corner)))
        codes, served = _round_columns(
            np.ascontiguousarray(target.T),
            corner,
            self.scales.T[groups].astype(target.dtype),
            self.biases.T[groups].astype(target.dtype),
            levels=(1 << self._options.bits) - 1,
        )
        self._codes[columns] = codes
        return (served.T,)

    def words(self) -> NDArray[np.uint32]:
        """Packed codes ``[out, in·bits/32]``."""
        rows, bits = self._codes.shape[1], self._options.bits
        packed = np.empty((rows, self._width * bits // 32), np.uint32)
        for start in range(0, rows, PACK_ROWS):
            packed[start : start + PACK_ROWS] = pack(
                np.ascontiguousarray(self._codes[:, start : start + PACK_ROWS].T), bits
            )
        return packed

    def _set_grid(self, group: int, values: Array, weights: NDArray[np.float64]) -> None:
        options = self._options
        block = np.ascontiguousarray(values, np.float32)
        _, scales, biases = native.affine_quantize(block, bits=options.bits, group_size=options.group_size)
        with np.errstate(over="ignore"):  # an infinite one is looked for at the end
            stored = scales[:, 0].astype(options.dtype.numpy), biases[:, 0].astype(options.dtype.numpy)
        if options.grid == "search":
            stored = search_grid(block, weights, *stored, bits=options.bits)
        self.scales[:, group], self.biases[:, group] = stored


def _round_columns(
    target: Array, corner: NDArray[np.float64], scales: Array, biases: Array, *, levels: int
) -> tuple[NDArray[np.uint8], Array]:
    """GPTQ inside a block: codes and values ``[b, rows]`` of a target ``[b, rows]`` with grids of the same shape.

    ``corner`` is upper triangular and ``corner·cornerᵀ`` the block's curvature; value = code·scale + bias with both
    operations rounded, as the decoder does.
    """
    unit = (corner / np.diagonal(corner)).astype(target.dtype)
    error = np.empty_like(target)
    served = np.empty_like(target)
    codes = np.empty(target.shape, np.uint8)
    for j in range(len(target)):
        wanted = target[j] - unit[:j, j] @ error[:j] if j else target[0]
        rounded = _nearest(wanted, scales[j], biases[j], levels)
        codes[j] = rounded
        served[j] = rounded * scales[j] + biases[j]
        error[j] = served[j] - target[j]
    return codes, served


def _nearest(values: Array, scales: Array, biases: Array, levels: int) -> Array:
    """Codes as floats; 0 where the grid is not finite, so that the pass can end and be judged."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        rounded = np.rint((values - biases) / scales)
    clipped: Array = np.clip(np.nan_to_num(rounded, copy=False), 0, levels)
    return clipped


def search_grid(
    values: NDArray[np.float32], weights: NDArray[np.float64], scales: Array, biases: Array, *, bits: int
) -> tuple[Array, Array]:
    """Better scales and biases ``[rows]`` for groups ``[rows, group]``, errors weighted by ``weights [group]``.

    Tries fractions of the range about its middle, then refits scale and bias by least squares on the codes found. A row
    keeps what it came with unless the weighted error, after rounding to the stored dtype, falls.
    """
    total = float(weights.sum())
    weight = (weights / total if total > 0 else np.full(len(weights), 1 / len(weights))).astype(np.float32)
    levels = (1 << bits) - 1
    low, high = values.min(axis=1), values.max(axis=1)
    middle, half = (low + high) / 2, (high - low) / 2
    best = _Best(values, weight, levels, scales, biases)
    for shrink in SHRINK:
        best.offer(2 * shrink * half / levels, middle - shrink * half)
    for _ in range(REFITS):
        codes = best.codes
        mean_code, mean_value = codes @ weight, values @ weight
        centred = codes - mean_code[:, None]
        with np.errstate(divide="ignore", invalid="ignore"):
            slope = ((centred * values) @ weight) / ((centred * centred) @ weight)
            best.offer(slope, mean_value - slope * mean_code)
    return best.scales, best.biases


class _Best:
    """Row by row the best grid offered so far."""

    def __init__(
        self, values: NDArray[np.float32], weight: NDArray[np.float32], levels: int, scales: Array, biases: Array
    ) -> None:
        self._values, self._weight, self._levels = values, weight, levels
        self.scales, self.biases = scales.copy(), biases.copy()
        self.codes, self._loss = self._rounded(scales, biases)

    def offer(self, scales: Array, biases: Array) -> None:
        """Take the rows where the stored form of this grid has less weighted error; never a scale of zero."""
        with np.errstate(over="ignore", invalid="ignore"):
            scales, biases = scales.astype(self.scales.dtype), biases.astype(self.biases.dtype)
        codes, loss = self._rounded(scales, biases)
        better = (loss < self._loss) & (scales != 0)
        self.scales, self.biases = np.where(better, scales, self.scales), np.where(better, biases, self.biases)
        self.codes = np.where(better[:, None], codes, self.codes)
        self._loss = np.where(better, loss, self._loss)

    def _rounded(self, scales: Array, biases: Array) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        scale, bias = scales.astype(np.float32)[:, None], biases.astype(np.float32)[:, None]
        codes: NDArray[np.float32] = _nearest(self._values, scale, bias, self._levels)
        with np.errstate(invalid="ignore", over="ignore"):
            loss: NDArray[np.float32] = np.square(codes * scale + bias - self._values) @ self._weight
        return codes, loss


@dataclass(frozen=True, slots=True, kw_only=True)
class AffineGptq:
    """The ``Quantizer`` of one module: affine by GPTQ under its Hessian."""

    options: GptqOptions
    hessian: Hessian

    @property
    def label(self) -> str:
        """``gptq affine4 g64``."""
        return f"gptq {self.options.plain.label}"

    @property
    def scratch_bytes(self) -> int:
        """The factor and two copies of the Hessian; the weight's share is the caller's to add."""
        return 24 * self.hessian.width**2 + (64 << 20)

    def outputs(self, name: str, shape: tuple[int, ...]) -> tuple[StoredTensor, ...]:
        """As round-to-nearest."""
        return self.options.plain.outputs(name, shape)

    def config_entry(self) -> ConfigEntry:
        """As round-to-nearest."""
        return self.options.plain.config_entry()

    def run(self, name: str, weight: NDArray[np.float32]) -> QuantResult:
        """Quantize ``weight [out, in]``."""
        matrix = gptq_quantize(name, weight, self.hessian, self.options)
        module = module_of(name)
        return QuantResult(
            tensors={name: matrix.words, f"{module}.scales": matrix.scales, f"{module}.biases": matrix.biases},
            stats={
                "proxy_loss": matrix.loss,
                "proxy_loss_rtn": matrix.plain_loss,
                **accepted_damping(matrix.attempts),
                "calibration_rows": float(self.hessian.rows),
                "dead_inputs": float(np.count_nonzero(self.hessian.dead)),
            },
            notes=describe(matrix.attempts, "round-to-nearest"),
        )
