"""LDLQ in tiles with search and products on a GPU: as ``ldlq_coder.InTiles`` in ``feedback.code_with_feedback``.

A step codes one column of tiles of all outputs, and of all weights of a batch: weights of one shape, each under its own
Hessian, so that small layers fill the device. Nothing comes back to the host before a window of steps is done.

Sums are float32 in the device's order and run right-looking, inside a window after every step, beyond it after the
window (GPTQ's lazy batch): targets agree with the CPU's to the rounding of float32, states where no input is rounded to
another level for it. The search itself is exact, as everywhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tqtool.formats.trellis import TrellisSpec
from tqtool.kernels.encoding import LEVEL_LIMIT, encode_problem
from tqtool.mathx import codes
from tqtool.mathx.ldl import UpperFactor
from tqtool.solve.feedback import WINDOW, FeedbackResult
from tqtool.solve.search import gpu_encoder
from tqtool.solve.trellis import TrellisOptions
from tqtool.solve.trellis_rows import level_factors

if TYPE_CHECKING:
    import mlx.core as mx

    from tqtool.kernels.encoder import Encoder

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class TileJob:
    """One weight of a batch.

    Attributes:
        weight: ``[out, in]``, inputs in the order they are coded.
        factor: Of its damped Hessian, in the same order.
        scales: float16 ``[out]``.
        order: Where the inputs are stored.
    """

    weight: Floats
    factor: UpperFactor
    scales: NDArray[np.float16]
    order: NDArray[np.intp]


@dataclass(frozen=True, slots=True, kw_only=True)
class TilesCoded:
    """What became of a job: the words ``[blocks, words]`` as they are stored, and the pass."""

    words: NDArray[np.uint32]
    result: FeedbackResult


def code_tiles(
    jobs: Sequence[TileJob],
    spec: TrellisSpec,
    options: TrellisOptions,
    *,
    peak_limits: Sequence[float],
    encoder: Encoder | None = None,
    mark: Callable[[float], None] = lambda seconds: None,
) -> list[TilesCoded]:
    """Code weights of one ``spec`` together.

    Args:
        jobs: At least one.
        spec: In tiles.
        options: The code; ``device`` names the encoder.
        peak_limits: A job with a target above its own is not finished.
        encoder: In place of that of ``options.device``.
        mark: Told the time when all is on the device, and when it is done there.

    Returns:
        One result a job. Device memory: five arrays like the weights, one like each Hessian, in float32.
    """
    import mlx.core as mx

    batch = _Batch(jobs, spec, options, encoder or gpu_encoder(options.device))
    cols, tile = spec.stride, spec.tile
    rest = batch.weights
    batch.settle(rest, peak_limits)
    mark(time.perf_counter())
    for first in range(0, cols, WINDOW):
        last = min(first + WINDOW, cols)
        part = rest[:, :, : last - first]
        errors = []
        for start in range(first, last, tile):
            error = batch.code(start, part[:, :, :tile])
            errors.append(error)
            if start + tile < last:
                part = part[:, :, tile:] - error @ batch.upper[:, start : start + tile, start + tile : last]
        if last < cols:
            window = mx.concatenate(errors, axis=2)
            rest = rest[:, :, last - first :] - window @ batch.upper[:, first:last, last:]
        if not batch.settle(rest, peak_limits):
            break
    mark(time.perf_counter())
    return list(batch.results(peak_limits))


class _Batch:
    """The arrays of a batch, padded to whole tiles, and what the steps so far have left."""

    def __init__(self, jobs: Sequence[TileJob], spec: TrellisSpec, options: TrellisOptions, encoder: Encoder) -> None:
        import mlx.core as mx

        self._jobs, self._spec, self._options, self._encoder = jobs, spec, options, encoder
        tile, down = spec.tile, -(-spec.rows // spec.tile) * spec.tile
        self._tiles = (down // tile, spec.stride // tile)
        weights = np.zeros((len(jobs), down, spec.stride), np.float32)
        scales = np.zeros((len(jobs), down, 1), np.float32)
        factors = np.zeros_like(scales)
        for job, weight, scale, factor in zip(jobs, weights, scales, factors, strict=True):
            weight[: spec.rows, : spec.cols] = job.weight
            scale[: spec.rows, 0] = job.scales
            factor[: spec.rows, 0] = level_factors(job.scales, options.code)
        uppers, corners = zip(*(_upper(job.factor, spec) for job in jobs), strict=True)
        self.weights, self._scales, self._factors = mx.array(weights), mx.array(scales), mx.array(factors)
        self.upper, self._corners = mx.array(np.stack(uppers)), mx.array(np.stack(corners))
        levels = codes.levels(options.code, options.window)
        self._levels, self._values = mx.array(levels), mx.array(codes.values(options.code, options.window))
        self._problem = encode_problem(
            len(jobs) * self._tiles[0], levels, window=options.window, k=options.k, warmup=options.warmup
        )
        self._errors: list[mx.array] = []
        self._words: list[mx.array] = []
        self._peak, self._loss = mx.zeros(len(jobs)), mx.zeros(len(jobs))

    def code(self, start: int, target: mx.array) -> mx.array:
        """Code the targets ``[jobs, out, 16]`` of the inputs from ``start`` on; served minus wanted."""
        import mlx.core as mx

        tile, shape = self._spec.tile, target.shape
        inputs = mx.clip(mx.round(target * self._factors), -LEVEL_LIMIT, LEVEL_LIMIT).astype(mx.int16)
        # A tile is sixteen rows of sixteen, path and memory alike.
        states = self._encoder.states(inputs.reshape(-1, self._spec.block), self._levels, self._problem)
        self._words.append(_pack(states, self._options.k))
        served = self._values[states].reshape(shape) * self._scales
        error = served - self.weights[:, :, start : start + tile]
        own = (served - target) @ self._corners[:, start // tile]
        self._loss = self._loss + mx.square(own).sum(axis=(1, 2))
        self._peak = mx.maximum(self._peak, mx.abs(target).max(axis=(1, 2)))
        self._errors.append(error)
        return error

    def settle(self, rest: mx.array, limits: Sequence[float]) -> bool:
        """Wait for the device; False once no job is within its limit."""
        import mlx.core as mx

        mx.eval(rest, self.upper, self._loss, self._peak, *self._errors, *self._words)
        return bool(self._within(limits).any())

    def _within(self, limits: Sequence[float]) -> NDArray[np.bool_]:
        peaks = np.array(self._peak)
        return np.asarray(np.isfinite(peaks) & (peaks <= np.asarray(limits)))

    def results(self, limits: Sequence[float]) -> Iterator[TilesCoded]:
        """Words in the order they are stored, errors as the weights; one copy of each to the host."""
        import mlx.core as mx

        spec, (down, across), within = self._spec, self._tiles, self._within(limits)
        jobs, steps = len(self._jobs), len(self._words)
        words = np.array(mx.stack(self._words, axis=1)).reshape(jobs, down, steps, -1)
        errors = np.array(mx.concatenate(self._errors, axis=2))
        losses, peaks = np.array(self._loss), np.array(self._peak)
        for number, job in enumerate(self._jobs):
            stored = np.zeros((down, across, spec.words_per_block), np.uint32)
            stored[:, job.order[: steps * spec.tile : spec.tile] // spec.tile] = words[number]
            result = FeedbackResult(
                error=errors[number, : spec.rows, : spec.cols],
                loss=float(losses[number]),
                peak=float(peaks[number]),
                finished=bool(within[number]) and steps == across,
            )
            yield TilesCoded(words=stored.reshape(spec.n_blocks, -1), result=result)


def _upper(factor: UpperFactor, spec: TrellisSpec) -> tuple[Floats, Floats]:
    """U above its blocks ``[stride, stride]``, and the diagonal blocks of R ``[tiles, 16, 16]``; zeros in padding."""
    upper = np.zeros((spec.stride, spec.stride), np.float32)
    corners = np.zeros((spec.stride // spec.tile, spec.tile, spec.tile), np.float32)
    for step, start in enumerate(range(0, spec.cols, spec.tile)):
        stop = min(start + spec.tile, spec.cols)
        upper[:start, start:stop] = factor.feedback(start, stop)
        corners[step, : stop - start, : stop - start] = factor.corner(start, stop)
    return upper, corners


def _pack(states: mx.array, k: int) -> mx.array:
    """``formats.trellis.pack`` on the device: the k new bits of step t lie at bit ``(T - 1 - t)·k``, low bits first."""
    import mlx.core as mx

    symbols = (states[:, ::-1].astype(mx.uint32) & ((1 << k) - 1))[:, :, None]
    bits = (symbols >> mx.arange(k, dtype=mx.uint32)) & 1
    places = mx.left_shift(mx.array(1, mx.uint32), mx.arange(32, dtype=mx.uint32))
    return (bits.reshape(len(states), -1, 32) * places).sum(axis=2)
