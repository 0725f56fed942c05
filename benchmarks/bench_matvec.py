"""Time of one product with a packed matrix on a GPU, through MLX, beside stock affine weights of the same shape.

    python benchmarks/bench_matvec.py [--shape 17408x5120]… [--k 3]… [--m 1]… [--fused] [--json]

Needs MLX's CUDA build and a card. More matrices than its cache holds are taken in turn, else the cache is what is
measured. One evaluation of 256 calls is timed by the wall clock; what one call costs is that over 256. Ratios are to
`mx.quantized_matmul` at 4 bits, groups of 64, in the same run.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np

from tqtool.formats.trellis import spec_for
from tqtool.kernels.backend import Packed
from tqtool.kernels.cuda import CUDA
from tqtool.kernels.problem import Problem

CALLS, REPEATS, WARM = 256, 30, 4
CACHE_BYTES = 60 << 20
"""Second-level cache of an H200."""

Call = Callable[[], mx.array]


def timed(calls: Sequence[Call]) -> tuple[float, float, float]:
    """Median, 10 and 90 per cent of the microseconds of one call."""

    def once() -> float:
        results = [calls[index % len(calls)]() for index in range(CALLS)]
        mx.synchronize()
        started = time.perf_counter()
        mx.eval(results)
        mx.synchronize()
        return (time.perf_counter() - started) * 1e6 / CALLS

    for _ in range(WARM):
        once()
    found = [once() for _ in range(REPEATS)]
    low, median, high = np.percentile(found, [10, 50, 90])
    return float(median), float(low), float(high)


def matrices_for(nbytes: int) -> int:
    """Enough to be three times the cache, and six at least; an even number, for pairs."""
    return max(6, 2 * -(-3 * CACHE_BYTES // (2 * nbytes)))


def ours(rows: int, cols: int, k: int, m: int, *, fused: bool) -> tuple[str, list[Call]]:
    """Name of the kernel, and calls on matrices of random words in tiles."""
    spec = spec_for((rows, cols), k=k, axis=1, tile=True)
    rng = np.random.default_rng(0)

    def packed() -> Packed:
        words = mx.array(rng.integers(0, 2**32, spec.words_shape, dtype=np.uint32))
        scales = mx.array(rng.uniform(0.009, 0.011, rows).astype(np.float16))
        mx.eval(words, scales)
        return Packed(words, scales, spec)

    matrices = [packed() for _ in range(matrices_for(spec.n_words * 4))]
    x = mx.random.normal((m, cols)).astype(mx.bfloat16)
    mx.eval(x)
    if not fused:
        choice = CUDA.choose(Problem(spec=spec, m=m, dtype="bfloat16"))
        return choice.path, [lambda each=each: CUDA.product(choice, x, each) for each in matrices]
    both = CUDA.choose(Problem(op="swiglu", spec=spec, m=m, dtype="bfloat16", up=spec))
    pairs = zip(matrices[::2], matrices[1::2], strict=True)
    return both.path, [lambda gate=gate, up=up: CUDA.swiglu(both, x, gate, up) for gate, up in pairs]


def stock(rows: int, cols: int, bits: int, m: int) -> list[Call]:
    """Calls of MLX's own product with affine weights in groups of 64."""
    x = mx.random.normal((m, cols)).astype(mx.bfloat16)
    quantized = []
    for _ in range(matrices_for(rows * cols * bits // 8)):
        parts = mx.quantize(mx.random.normal((rows, cols)).astype(mx.bfloat16), group_size=64, bits=bits)
        mx.eval(*parts)
        quantized.append(parts)

    def call(weight: mx.array, scales: mx.array, biases: mx.array) -> mx.array:
        return mx.quantized_matmul(x, weight, scales, biases, transpose=True, group_size=64, bits=bits)

    return [lambda each=each: call(*each) for each in quantized]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", help="OUTxIN; repeatable")
    parser.add_argument("--k", type=int, action="append", help="repeatable; 3")
    parser.add_argument("--m", type=int, action="append", help="rows of x; repeatable; 1")
    parser.add_argument("--fused", action="store_true", help="gate and up with silu in one launch; times per matrix")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if not mx.cuda.is_available():
        raise SystemExit("no CUDA device here")
    for shape in arguments.shape or ["17408x5120", "5120x17408"]:
        rows, cols = map(int, shape.split("x"))
        for m in arguments.m or [1]:
            peer = timed(stock(rows, cols, 4, m))
            for k in arguments.k or [3]:
                path, calls = ours(rows, cols, k, m, fused=arguments.fused)
                share = 2 if arguments.fused else 1
                found = tuple(value / share for value in timed(calls))
                row = {"shape": shape, "k": k, "m": m, "kernel": path, "us": found, "stock_4_us": peer}
                if arguments.json:
                    print(json.dumps(row | {"ratio": found[0] / peer[0]}))
                    continue
                times = "{:.2f} ({:.2f} … {:.2f})"
                print(f"{shape} k={k} m={m} {path}: {times.format(*found)} µs, stock 4 bits {times.format(*peer)}")


if __name__ == "__main__":
    main()
