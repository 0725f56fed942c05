"""The part of ``bench_encode.py`` that needs a GPU: kernel rates, a whole MLP, LDLQ. Inputs are made on the device."""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable

import mlx.core as mx
import numpy as np

from tqtool import native
from tqtool.formats.trellis import BLOCK, spec_for
from tqtool.kernels.cuda import SEARCH_SOURCES
from tqtool.kernels.encoding import LEVEL_LIMIT, encode_problem
from tqtool.kernels.sources import digest
from tqtool.mathx import codes
from tqtool.mathx.ldl import upper_factor
from tqtool.solve.ldlq_device import TileJob, _pack, code_tiles
from tqtool.solve.search import gpu_encoder
from tqtool.solve.trellis import TrellisOptions
from tqtool.solve.trellis_rows import row_scales

MLP_WEIGHTS = 64 * 3 * 17408 * 5120
"""Gate, up and down of 64 layers of 5120 and 17408: the MLP of a 27B model."""
AT_ONCE = 1 << 18
"""Blocks made, searched and packed at a time: 67 M weights."""
# Scales at which a Gaussian source is coded best at L = 16 and 14; at 12 the product's own.
BEST_SCALE = {14: {2: 0.98, 3: 0.925, 4: 0.89}, 16: {2: 0.99, 3: 0.9375, 4: 0.906}}


def seconds_of(work: Callable[[], object], repeats: int) -> list[float]:
    """Wall time of each repeat after one that compiles."""
    work()
    found = []
    for _ in range(repeats):
        mx.synchronize()
        started = time.perf_counter()
        work()
        mx.synchronize()
        found.append(time.perf_counter() - started)
    return found


def spread(weights: int, seconds: list[float]) -> dict[str, float]:
    rates = [weights / value / 1e6 for value in seconds]
    return {"mw_per_s": statistics.median(rates), "mw_per_s_min": min(rates), "mw_per_s_max": max(rates)}


class Source:
    """Gaussian blocks on the device, the trellis that codes them, and its encoder."""

    def __init__(self, args: argparse.Namespace, k: int) -> None:
        window, self.k, self.code = args.window, k, args.code
        self.scale = BEST_SCALE.get(window, {}).get(k, codes.CODE_SCALE[k])
        self.encoder = gpu_encoder(args.backend)
        table = codes.levels(args.code, window)
        self.table, self.levels = table, mx.array(table)
        self.values = mx.array(codes.values(args.code, window))
        self.problem = encode_problem(args.blocks, table, window=window, k=k, warmup=args.warmup)
        reason = self.encoder.supports(self.problem)
        if reason is not None:
            raise SystemExit(f"{args.backend}: {reason}")

    def draw(self, blocks: int) -> tuple[mx.array, mx.array]:
        """Gaussians ``[blocks, 256]`` and the same in level units."""
        source = mx.random.normal((blocks, BLOCK))
        scaled = mx.round(source * (codes.UNIT[self.code] * self.scale))
        return source, mx.clip(scaled, -LEVEL_LIMIT, LEVEL_LIMIT).astype(mx.int16)

    def states(self, x: mx.array) -> mx.array:
        """The kernel's states of ``x``."""
        return self.encoder.states(x, self.levels, self.problem)


def kernel_row(args: argparse.Namespace, k: int) -> dict[str, object]:
    """The kernel alone; the first blocks against the CPU's states."""
    source = Source(args, k)
    drawn, x = source.draw(args.blocks)
    mx.eval(drawn, x)
    states = source.states(x)
    error = mx.square(drawn - source.values[states] / source.scale).mean()
    options = {"window": args.window, "k": k, "warmup": args.warmup}
    compared = min(args.compare, args.blocks)
    expected, _ = native.viterbi_encode(np.array(x[:compared]), source.table, **options)
    differing = int((np.array(states[:compared]) != expected).any(axis=1).sum())
    seconds = seconds_of(lambda: mx.eval(source.states(x)), args.repeats)
    return {
        "what": "kernel",
        **options,
        "weights": x.size,
        "scale": source.scale,
        "mse": float(error),
        "texts": digest(SEARCH_SOURCES),
        "blocks_compared": compared,
        "blocks_differing": differing,
        **spread(x.size, seconds),
    }


def mlp_row(args: argparse.Namespace, k: int) -> dict[str, object]:
    """All of an MLP: drawn, searched and packed, 67 M weights at a time; nothing but a sum comes back."""
    source = Source(args, k)
    weights = args.mlp or MLP_WEIGHTS
    whole, rest = divmod(weights // BLOCK, AT_ONCE)

    def part(blocks: int) -> mx.array:
        drawn, x = source.draw(blocks)
        states = source.states(x)
        wrong = mx.square(drawn - source.values[states] / source.scale).sum()
        return mx.stack([wrong, _pack(states, k).sum().astype(mx.float32)])

    mx.eval(part(AT_ONCE))
    mx.synchronize()
    started, wrong = time.perf_counter(), 0.0
    for blocks in [AT_ONCE] * whole + [rest] * (rest > 0):
        wrong += float(part(blocks)[0])
    seconds = time.perf_counter() - started
    return {
        "what": "whole MLP",
        "window": args.window,
        "k": k,
        "warmup": args.warmup,
        "weights": weights,
        "seconds": seconds,
        "mw_per_s": weights / seconds / 1e6,
        "mse": wrong / (weights // BLOCK * BLOCK),
    }


def ldlq_row(args: argparse.Namespace, k: int, shape: tuple[int, int], batch: int) -> dict[str, object]:
    """LDLQ in tiles: feedback, search and packing of ``batch`` weights; the factor of the Hessian is made before."""
    rng = np.random.default_rng(k)
    rows, cols = shape
    options = TrellisOptions(k=k, window=args.window, code=args.code, warmup=args.warmup, device=args.backend)
    spec = spec_for(shape, k=k, axis=1, window=args.window, code=args.code, tile=True)
    x = rng.standard_normal((cols + 64, cols), np.float32) * np.exp(rng.normal(0, 0.5, cols)).astype(np.float32)
    started = time.perf_counter()
    factor = upper_factor((x.T @ x / len(x)).astype(np.float64) + 0.03 * np.eye(cols))
    factored = time.perf_counter() - started
    jobs = []
    for _ in range(batch):
        weight = rng.standard_normal(shape, np.float32)
        jobs.append(TileJob(weight=weight, factor=factor, scales=row_scales("bench", weight, k), order=np.arange(cols)))
    marks: list[float] = []
    whole = seconds_of(
        lambda: code_tiles(jobs, spec, options, peak_limits=[math.inf] * batch, mark=marks.append), args.repeats
    )
    pairs = list(zip(marks[2::2], marks[3::2], strict=True))  # the first call compiles
    weights = batch * rows * cols
    return {
        "what": "LDLQ",
        "shape": list(shape),
        "batch": batch,
        "k": k,
        "window": args.window,
        "warmup": args.warmup,
        "weights": weights,
        "factor_s": factored,
        "with_copies_mw_per_s": spread(weights, whole)["mw_per_s"],
        **spread(weights, [done - begun for begun, done in pairs]),
    }


def measure(args: argparse.Namespace) -> list[dict[str, object]]:
    """Rows for every k: the kernel, and what else was asked for."""
    rows = []
    for k in args.k:
        rows.append(kernel_row(args, k))
        if args.mlp is not None:
            rows.append(mlp_row(args, k))
        for text in args.ldlq:
            height, width, batch = (int(part) for part in text.split("x"))
            rows.append(ldlq_row(args, k, (height, width), batch))
    return rows
