"""Does error feedback pay on real Hessians?  ``python benchmarks/bench_solvers.py --model FOLDER --text FILE``.

Collects the inputs of a few layers of a real model (float32, stock mlx-lm graph) into Hessians, codes the layers with
and without feedback, and prints one table: proxy loss over ``tr(W·H·Wᵀ)`` (what a layer's output error is of its
output, squared), the ratio to the same code without feedback, and seconds. The Hessian is unweighted here.

``--rotate`` first turns each layer's inputs by a signed Hadamard matrix, weight and Hessian alike: the basis the
trellis is meant for.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from tqtool import native
from tqtool.formats.dtypes import DType
from tqtool.formats.trellis import spec_for
from tqtool.mathx.ldl import proxy_loss
from tqtool.mathx.signs import splitmix32
from tqtool.runtime.blas import ensure_blas
from tqtool.solve.feedback import Attempt
from tqtool.solve.gptq import GptqOptions, gptq_quantize
from tqtool.solve.hessian import Hessian, HessianSum
from tqtool.solve.ldlq import ldlq_encode
from tqtool.solve.ldlq_coder import LdlqOptions
from tqtool.solve.trellis import TrellisOptions

MODULES = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")


@dataclass(frozen=True)
class Layer:
    """One linear layer: weight ``[out, in]`` and the statistics of its inputs."""

    name: str
    weight: np.ndarray
    hessian: Hessian


@dataclass(frozen=True)
class Row:
    """One layer coded one way; losses over ``tr(W·H·Wᵀ)``."""

    layer: str
    arm: str
    plain: float
    loss: float
    seconds: float
    attempts: tuple[Attempt, ...]


def collect(args: argparse.Namespace) -> tuple[list[Layer], float]:
    """Weights and Hessians of the chosen layers, and seconds spent in the sums."""
    ensure_blas()
    import mlx.core as mx
    import mlx.nn as nn
    from mlx.utils import tree_map
    from mlx_lm import load

    model, tokenizer = load(str(args.model))
    model.update(tree_map(lambda a: a.astype(mx.float32), model.parameters()))
    spent = [0.0]

    class Watch(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner
            self.sum = HessianSum(inner.weight.shape[1])

        def __call__(self, x: mx.array) -> mx.array:
            rows = np.array(x.reshape(-1, x.shape[-1]))
            started = time.perf_counter()
            self.sum.accumulate(rows)
            spent[0] += time.perf_counter() - started
            return self.inner(x)

    watched = {}
    for index in args.layers:
        block = model.layers[index]
        for module in args.modules:
            parent, name = module.split(".")
            watch = Watch(getattr(getattr(block, parent), name))
            setattr(getattr(block, parent), name, watch)
            watched[f"{index}.{name}"] = watch
    tokens = tokenizer.encode(args.text.read_text()[args.skip : args.skip + args.rows * args.tokens * 8])
    for row in range(args.rows):
        part = tokens[row * args.tokens : (row + 1) * args.tokens]
        mx.eval(model(mx.array(part)[None]))
    layers = [
        Layer(name=name, weight=np.array(watch.inner.weight), hessian=watch.sum.finish())
        for name, watch in watched.items()
    ]
    return layers, spent[0]


def rotated(layer: Layer) -> Layer:
    """The same layer with its inputs turned by R = diag(signs)·H/√n."""
    n = layer.hessian.width
    signs = np.where(splitmix32(1, n) & 1, 1.0, -1.0)
    weight = native.hadamard_transform(layer.weight, axis=1, scale=signs.astype(np.float32))
    matrix = layer.hessian.matrix.astype(np.float64)
    for axis in (0, 1):
        matrix = native.hadamard_transform(np.ascontiguousarray(matrix), axis=axis, scale=signs)
    matrix = (matrix + matrix.T) / 2
    return Layer(name=layer.name, weight=weight, hessian=Hessian(matrix=matrix, rows=layer.hessian.rows))


def affine_arms(args: argparse.Namespace) -> Iterator[tuple[str, Callable[[Layer], object]]]:
    for bits in args.bits:
        for grid in ("mlx", "search"):
            options = GptqOptions(bits=bits, group_size=64, dtype=DType.BF16, grid=grid)
            yield f"gptq {bits}b g64 {grid}", lambda a, o=options: gptq_quantize(a.name, a.weight, a.hessian, o)
            ordered = replace(options, static_groups=True, act_order=True)
            yield (
                f"gptq {bits}b g64 {grid} act-order",
                lambda a, o=ordered: gptq_quantize(a.name, a.weight, a.hessian, o),
            )


def trellis_arms(args: argparse.Namespace) -> Iterator[tuple[str, Callable[[Layer], object]]]:
    for k in args.k:
        code = TrellisOptions(k=k)
        for axis, columns, order in (
            (1, 1, "natural"),
            *((0, b, o) for o in ("natural", "curvature") for b in (1, 16)),
        ):
            options = LdlqOptions(trellis=code, columns=columns, order=order)

            def run(layer: Layer, axis: int = axis, options: LdlqOptions = options) -> object:
                spec = spec_for(layer.weight.shape, k=options.trellis.k, axis=axis)
                return ldlq_encode(layer.name, layer.weight, layer.hessian, spec, options)

            yield f"ldlq k{k} axis{axis} b={256 if axis == 1 else columns} {order}", run


def measure(args: argparse.Namespace, layers: list[Layer]) -> Iterator[Row]:
    arms = [*(affine_arms(args) if args.bits else ()), *(trellis_arms(args) if args.k else ())]
    for arm, run in arms:
        for layer in layers:
            scale = proxy_loss(layer.weight, layer.hessian.matrix)
            started = time.perf_counter()
            result = run(layer)
            seconds = time.perf_counter() - started
            yield Row(layer.name, arm, result.plain_loss / scale, result.loss / scale, seconds, result.attempts)


def show(rows: list[Row], layers: list[str]) -> None:
    print("| arm | plain loss | loss | ratio | worst ratio | s | not first try |")
    print("|---|---|---|---|---|---|---|")
    for arm in dict.fromkeys(row.arm for row in rows):
        mine = [row for row in rows if row.arm == arm]
        ratios = [row.loss / row.plain for row in mine]
        retried = sum(len(row.attempts) > 1 for row in mine)
        plain, loss = (statistics.geometric_mean(getattr(row, what) for row in mine) for what in ("plain", "loss"))
        print(
            f"| {arm} | {plain:.5f} | {loss:.5f} | {loss / plain:.3f} | {max(ratios):.3f} "
            f"| {sum(row.seconds for row in mine):.1f} | {retried}/{len(mine)} |"
        )
    print("\nratio by layer: " + ", ".join(layers))
    for arm in dict.fromkeys(row.arm for row in rows):
        print(f"  {arm:24}", *(f"{row.loss / row.plain:.3f}" for row in rows if row.arm == arm))


def race(width: int, repeats: int) -> None:
    """Seconds for one 4-bit g64 layer ``[width, width]``, inputs to bytes, beside mlx-lm's GPTQ: A B A, interleaved."""
    ensure_blas()
    import mlx.core as mx
    import mlx.nn as nn
    from mlx_lm.quant.gptq import gptq_quantize as peer_quantize

    rng = np.random.default_rng(0)
    inputs = (rng.standard_normal((2 * width, width)) + rng.standard_normal((2 * width, 1))).astype(np.float32)
    weight = rng.standard_normal((width, width)).astype(np.float32)

    def ours() -> float:
        started = time.perf_counter()
        total = HessianSum(width)
        total.accumulate(inputs)
        gptq_quantize("race", weight, total.finish(), GptqOptions(bits=4, group_size=64, dtype=DType.F32))
        return time.perf_counter() - started

    def theirs() -> float:
        net = nn.Sequential(nn.Linear(width, width, bias=False))
        net.layers[0].weight = mx.array(weight)
        data = mx.array(inputs)[None]
        mx.eval(net.parameters(), data)
        started = time.perf_counter()
        peer_quantize(net, data, 4, 64, 4, 64)
        return time.perf_counter() - started

    pairs = []
    for _ in range(repeats):
        before, peer, after = ours(), theirs(), ours()
        pairs.append((peer / ((before + after) / 2), peer, before))
    ratios = sorted(pair[0] for pair in pairs)
    print(
        f"gptq 4b g64 [{width}, {width}]: {statistics.median(p[2] for p in pairs):.2f} s, mlx-lm "
        f"{statistics.median(p[1] for p in pairs):.2f} s; ratio {statistics.median(ratios):.2f} "
        f"({ratios[0]:.2f} … {ratios[-1]:.2f})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("build/models/smollm2-135m-instruct"))
    parser.add_argument("--text", type=Path, default=Path("build/models/wiki.txt"))
    parser.add_argument("--skip", type=int, default=1_000_000, help="characters before the calibration text")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--layers", type=int, nargs="+", default=[0, 14, 29])
    parser.add_argument("--modules", nargs="+", default=list(MODULES))
    parser.add_argument("--bits", type=int, nargs="*", default=[4, 3, 2])
    parser.add_argument("--k", type=int, nargs="*", default=[4, 3, 2])
    parser.add_argument("--rotate", action="store_true")
    parser.add_argument("--race", type=int, nargs=2, metavar=("WIDTH", "REPEATS"), help="time beside mlx-lm and stop")
    parser.add_argument("--json", action="store_true", help="one line a row and layer")
    args = parser.parse_args()
    if args.race:
        race(*args.race)
        return
    layers, spent = collect(args)
    print(f"{args.rows}x{args.tokens} tokens, {len(layers)} layers, Hessian sums {spent:.1f} s", flush=True)
    if args.rotate:
        layers = [rotated(layer) for layer in layers]
    rows = []
    for row in measure(args, layers):
        rows.append(row)
        print(f"{row.arm:32} {row.layer:14} {row.loss / row.plain:.3f} {row.seconds:.1f} s", file=sys.stderr)
    if args.json:
        for row in rows:
            print(json.dumps({"layer": row.layer, "arm": row.arm, "plain": row.plain, "loss": row.loss}))
    show(rows, [layer.name for layer in layers])


if __name__ == "__main__":
    main()
