"""Time of one product with a packed matrix beside stock affine weights of the same shape, in one run.

    python benchmarks/bench_matvec.py [--shape 17408x5120]… [--k 3]… [--m 1]… [--fused] [--int8] [--json]
    python benchmarks/bench_matvec.py --backend cpu [--layout tile]… [--shape …]… [--k 3]… [--m 1]… [--json]

More matrices than a cache holds are taken in turn, else the cache is what is measured.

``cuda`` needs MLX's CUDA build and a card. Each product takes its x from the one before, as in a model: calls that do
not wait for each other overlap, which no decoding does. Evaluations of 256 and of 768 such calls are timed by the wall
clock, and what the second takes longer is the cost of 512: before the first hundred launches are put together the card
has nothing to do. Where a result is shorter than x, a product of the transposed shape follows each, and what that costs
alone is taken off. Ratios are to `mx.quantized_matmul` at 4 bits, groups of 64, timed the same way.

``cpu``: the layers that the packed runtime has, x and result in float32 MLX arrays, against `mx.quantized_matmul` at 3
and 4 bits, groups of 64, float32 scales. MLX computes that product on one thread; ours has every core, and one for
comparison. Each round times every arm once on the next matrix; a ratio is that of two neighbours in a round.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from tqtool.runtime.blas import ensure_blas

ensure_blas()  # before mlx is imported

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402

from tqtool import native  # noqa: E402
from tqtool.formats.trellis import TrellisSpec, spec_for  # noqa: E402
from tqtool.kernels.backend import Packed  # noqa: E402
from tqtool.kernels.cuda import CUDA  # noqa: E402
from tqtool.kernels.problem import Problem  # noqa: E402
from tqtool.runtime.linear import NativeTrellisLinear  # noqa: E402

CALLS, REPEATS, WARM = 256, 20, 3
CACHE_BYTES = 60 << 20
"""Second-level cache of an H200; the last-level cache of the CPUs that this ran on is smaller."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "tile": {"axis": 1, "tile": True},
    "axis1": {"axis": 1},
    "axis0": {"axis": 0},
}
CPU_ROUNDS = 24

Call = Callable[[], mx.array]
Product = Callable[[mx.array], mx.array]
Times = tuple[float, float, float]


def spread(values: Sequence[float]) -> Times:
    """Median, 10 and 90 per cent."""
    low, median, high = np.percentile(values, [10, 50, 90])
    return float(median), float(low), float(high)


def timed(steps: Sequence[Product], x: mx.array) -> list[float]:
    """Microseconds of a step, each repeat one: steps in turn, each with what the one before gave."""

    def seconds(count: int) -> float:
        value = x
        for index in range(count):
            value = steps[index % len(steps)](value)
        mx.synchronize()
        started = time.perf_counter()
        mx.eval(value)
        mx.synchronize()
        return time.perf_counter() - started

    for _ in range(WARM):
        seconds(3 * CALLS)
    return [(seconds(3 * CALLS) - seconds(CALLS)) * 1e6 / (2 * CALLS) for _ in range(REPEATS)]


def product_times(make: Callable[[int, int], Sequence[Product]], rows: int, cols: int, m: int) -> Times:
    """Microseconds of a product [rows, cols], whose calls ``make`` gives for a shape."""
    narrow = min(rows, cols)
    x = mx.random.normal((m, narrow)).astype(mx.bfloat16)
    mx.eval(x)

    def cut(y: mx.array) -> mx.array:  # rows of x out of the first numbers of y: no copy, as it would be of columns
        return y.reshape(-1)[: m * narrow].reshape(m, narrow)

    if rows >= cols:
        return spread(timed([lambda v, p=product: cut(p(v)) for product in make(rows, cols)], x))
    back = make(cols, rows)
    alone = float(np.median(timed([lambda v, p=product: cut(p(v)) for product in back], x)))
    pairs = zip(back, make(rows, cols), strict=True)
    return spread([both - alone for both in timed([lambda v, b=b, p=p: p(b(v)) for b, p in pairs], x)])


def matrices_for(nbytes: int) -> int:
    """Enough to be three times the cache, and six at least; an even number, for pairs."""
    return max(6, 2 * -(-3 * CACHE_BYTES // (2 * nbytes)))


def random_matrix(spec: TrellisSpec, rng: np.random.Generator) -> tuple[mx.array, mx.array]:
    """Words and scales; any words are a matrix."""
    words = mx.array(rng.integers(0, 2**32, spec.words_shape, dtype=np.uint32))
    scales = mx.array(rng.uniform(0.009, 0.011, spec.rows).astype(np.float16))
    mx.eval(words, scales)
    return words, scales


def ours(rows: int, cols: int, k: int, m: int, *, fused: bool, int8: bool = False) -> tuple[str, list[Product]]:
    """Name of the kernel, and products with matrices of random words in tiles."""
    spec = spec_for((rows, cols), k=k, axis=1, tile=True)
    rng = np.random.default_rng(0)
    matrices = [Packed(*random_matrix(spec, rng), spec) for _ in range(matrices_for(spec.n_words * 4))]
    if not fused:
        choice = CUDA.choose(Problem(spec=spec, m=m, dtype="bfloat16", int8=int8))
        ready = [CUDA.bind(choice, (m, cols), each) for each in matrices]
    else:
        choice = CUDA.choose(Problem(op="swiglu", spec=spec, m=m, dtype="bfloat16", up=spec, int8=int8))
        pairs = zip(matrices[::2], matrices[1::2], strict=True)
        ready = [CUDA.bind(choice, (m, cols), gate, up) for gate, up in pairs]
    return f"{choice.path} ({choice.reason})", ready


def stock(rows: int, cols: int, bits: int) -> list[Product]:
    """MLX's own products with affine weights in groups of 64."""
    quantized = []
    for _ in range(matrices_for(rows * cols * bits // 8)):
        weight = mx.random.normal((rows, cols), scale=cols**-0.5).astype(mx.bfloat16)
        parts = mx.quantize(weight, group_size=64, bits=bits)
        mx.eval(*parts)
        quantized.append(parts)

    def product(x: mx.array, weight: mx.array, scales: mx.array, biases: mx.array) -> mx.array:
        return mx.quantized_matmul(x, weight, scales, biases, transpose=True, group_size=64, bits=bits)

    return [lambda x, each=each: product(x, *each) for each in quantized]


def cpu_layers(shape: tuple[int, int], k: int, layout: str, x: mx.array) -> list[Call]:
    """Calls of the packed runtime's layers."""
    spec = spec_for(shape, k=k, **LAYOUTS[layout])
    rng = np.random.default_rng(0)
    layers = []
    for _ in range(matrices_for(spec.n_words * 4)):
        layer = NativeTrellisLinear(spec.to_config(), bias=False, codes=mx.zeros((1,)))
        layer.weight, layer.scales = random_matrix(spec, rng)
        layers.append(layer)
    return [lambda layer=layer: layer(x) for layer in layers]


def cpu_one_thread(shape: tuple[int, int], k: int, layout: str, x: mx.array) -> list[Call]:
    """The same products by the native call, on one thread."""
    spec = spec_for(shape, k=k, **LAYOUTS[layout])
    rng = np.random.default_rng(0)
    made = [random_matrix(spec, rng) for _ in range(matrices_for(spec.n_words * 4))]
    matrices = [(np.array(words), np.array(scales), spec) for words, scales in made]
    inputs = np.array(x)
    return [lambda m=matrix: mx.array(native.trellis_matvec(*m, inputs, threads=1)) for matrix in matrices]


def cpu_stock(shape: tuple[int, int], bits: int, x: mx.array) -> list[Call]:
    """Calls of MLX's own product; random words, as values change no time."""
    rows, cols = shape
    rng = np.random.default_rng(1)
    calls = []
    for _ in range(matrices_for(rows * cols * bits // 8)):
        words = mx.array(rng.integers(0, 2**32, (rows, cols * bits // 32), dtype=np.uint32))
        scales, biases = (mx.array(rng.standard_normal((rows, cols // 64)).astype(np.float32)) for _ in range(2))
        mx.eval(words, scales, biases)
        parts = (words, scales, biases)
        calls.append(lambda p=parts: mx.quantized_matmul(x, *p, transpose=True, group_size=64, bits=bits))
    return calls


def cpu_rounds(arms: dict[str, list[Call]]) -> dict[str, list[float]]:
    """Milliseconds of every arm, round by round."""

    def once(call: Call) -> float:
        started = time.perf_counter()
        mx.eval(call())
        return (time.perf_counter() - started) * 1e3

    found: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(-WARM, CPU_ROUNDS):
        for name, calls in arms.items():
            took = once(calls[number % len(calls)])
            if number >= 0:
                found[name].append(took)
    return found


def main_cpu(arguments: argparse.Namespace) -> None:
    """Every shape, layout, k and m beside MLX's 3 and 4 bits."""
    mx.set_default_device(mx.cpu)
    for shape in shapes_of(arguments):
        for m in arguments.m or [1]:
            x = mx.random.normal((m, shape[1]))
            mx.eval(x)
            arms = {f"stock {bits} bits": cpu_stock(shape, bits, x) for bits in (3, 4)}
            for layout in arguments.layout or ["tile"]:
                for k in arguments.k or [3]:
                    arms[f"{layout} k={k}"] = cpu_layers(shape, k, layout, x)
                    arms[f"{layout} k={k}, one thread"] = cpu_one_thread(shape, k, layout, x)
            found = cpu_rounds(arms)
            for name, times in found.items():
                to = {f"ratio_{bits}": spread(np.divide(times, found[f"stock {bits} bits"])) for bits in (3, 4)}
                row = {"shape": f"{shape[0]}x{shape[1]}", "m": m, "arm": name, "ms": spread(times), **to}
                if arguments.json:
                    print(json.dumps(row))
                    continue
                parts = ["{:.3f} ({:.3f} … {:.3f})".format(*row[key]) for key in ("ms", *to)]
                print(f"{row['shape']} m={m} {name}: {parts[0]} ms; to stock 3 bits {parts[1]}, to 4 {parts[2]}")


def shapes_of(arguments: argparse.Namespace) -> list[tuple[int, int]]:
    """[out, in] of every shape asked for."""
    pairs = (text.split("x") for text in arguments.shape or ["17408x5120", "5120x17408"])
    return [(int(rows), int(cols)) for rows, cols in pairs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--layout", action="append", choices=LAYOUTS, help="cpu only; repeatable; tile")
    parser.add_argument("--shape", action="append", help="OUTxIN; repeatable")
    parser.add_argument("--k", type=int, action="append", help="repeatable; 3")
    parser.add_argument("--m", type=int, action="append", help="rows of x; repeatable; 1")
    parser.add_argument("--fused", action="store_true", help="gate and up with silu in one launch; times per matrix")
    parser.add_argument("--int8", action="store_true", help="int8 activations")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.backend == "cpu":
        main_cpu(arguments)
        return
    if not mx.cuda.is_available():
        raise SystemExit("no CUDA device here: --backend cpu")
    for rows, cols in shapes_of(arguments):
        shape = f"{rows}x{cols}"
        for m in arguments.m or [1]:
            peer = product_times(lambda r, c: stock(r, c, 4), rows, cols, m)
            for k in arguments.k or [3]:
                paths: list[str] = []

                def make(r: int, c: int, k: int = k, m: int = m, paths: list[str] = paths) -> list[Product]:
                    path, products = ours(r, c, k, m, fused=arguments.fused, int8=arguments.int8)
                    paths.append(path)
                    return products

                share = 2 if arguments.fused else 1
                found = tuple(value / share for value in product_times(make, rows, cols, m))
                path = paths[-1]
                row = {"shape": shape, "k": k, "m": m, "kernel": path, "us": found, "stock_4_us": peer}
                if arguments.json:
                    print(json.dumps(row | {"ratio": found[0] / peer[0]}))
                    continue
                times = "{:.2f} ({:.2f} … {:.2f})"
                print(f"{shape} k={k} m={m} {path}: {times.format(*found)} µs, stock 4 bits {times.format(*peer)}")


if __name__ == "__main__":
    main()
