"""Decoding over a packed KV cache on the card that is here: one token's attention, fused against what it replaces.

    python benchmarks/bench_kv_decode.py [--tokens 8192,32768] [--queries 32] [--heads 8] [--head-dim 128]
        [--schemes turbo:k8v3,turbo:k4v3] [--layers 16] [--repeats 9] [--json FILE] [--check | --no-check]

Arms, in turn in every repeat: *fused* (kernels/metal/kv_attend.metal, kv_merge.metal as CUDA); *op chain* (keys
decoded, QKᵀ, softmax, values decoded, PV, one inverse rotation, all in MLX's operations, float32); *decode + sdpa*
(decoded to the model's dtype, then MLX's attention: what runs without a kernel); *full* (MLX's attention over float
keys and values of the dtype); *affine8*, *affine4* (mlx-lm's quantized attention, if mlx-lm is there).

A repeat goes over --layers caches one behind the other, so that no cache is still in L2, evaluates all results together
and divides by their number. *eval* is the time from when the graph is built; *all* has building it too, which Python
does. First of all, unless --no-check, the table that all backends share is computed on the card, and each scheme at
each number of tokens, against float64; records of new tokens must be numpy's, to the byte. Needs an MLX with CUDA; on a
Mac the same texts run on Metal.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import mlx.core as mx
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.support.kv_cases import NUMPY, TABLE, KVArrays, KVCase, arrays_of, check, expected, scheme_of
from tests.support.mlx_backend import to_mlx, to_numpy
from tqtool.kernels import cuda, metal
from tqtool.kernels.kv_attention import KVAttention
from tqtool.kernels.kv_cuda import KV_THAT_RAN, kv_digest
from tqtool.kernels.kv_kernels import KVProblem
from tqtool.kv import array_codec, codec
from tqtool.kv.record import layout_of
from tqtool.kv.scheme import KVScheme, full_bytes_per_token, parse_scheme

Step = Callable[[], mx.array]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One arm: microseconds of one layer, median and extremes of the repeats; bytes of keys and values it reads."""

    tokens: int
    scheme: str
    arm: str
    eval_us: float
    eval_low: float
    eval_high: float
    all_us: float
    megabytes: float


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's caches: records of the scheme, floats, and queries."""

    queries: mx.array
    records: mx.array
    keys: mx.array
    values: mx.array


def kernels() -> KVAttention:
    if mx.cuda.is_available():
        return KVAttention(cuda.on_device)
    if mx.metal.is_available():
        return KVAttention(metal.on_device)
    raise SystemExit("no GPU: MLX has neither CUDA nor Metal here")


def fused(run: KVAttention, problem: KVProblem, tokens: int, layer: Layer) -> mx.array:
    return run(
        problem,
        layer.queries,
        layer.records,
        array_codec.level_array(problem.v_bits, "exact"),
        array_codec.sign_array(problem.head_dim),
        tokens=tokens,
        scale=problem.head_dim**-0.5,
    )


def op_chain(scheme: KVScheme, problem: KVProblem, layer: Layer) -> mx.array:
    """Every step an operation of its own, in float32; queries of a KV head in one product."""
    d, heads = problem.head_dim, problem.heads
    keys, rotated = array_codec.decode_rotated(layer.records, layout_of(scheme, d), "exact")
    queries = layer.queries.astype(mx.float32).reshape(heads, -1, d) * d**-0.5
    weights = mx.softmax(queries @ keys.swapaxes(1, 2), axis=-1)
    return array_codec.unrotate(weights @ rotated).reshape(-1, d).astype(layer.queries.dtype)


def decoded_sdpa(scheme: KVScheme, problem: KVProblem, layer: Layer) -> mx.array:
    d, dtype = problem.head_dim, layer.queries.dtype
    keys, rotated = array_codec.decode_rotated(layer.records, layout_of(scheme, d), "exact", dtype)
    queries = layer.queries[None, :, None]
    output = mx.fast.scaled_dot_product_attention(queries, keys[None], rotated[None], scale=d**-0.5)
    return array_codec.unrotate(output.astype(mx.float32)).astype(dtype).reshape(-1, d)


def full(problem: KVProblem, layer: Layer) -> mx.array:
    output = mx.fast.scaled_dot_product_attention(
        layer.queries[None, :, None], layer.keys[None], layer.values[None], scale=problem.head_dim**-0.5
    )
    return output.reshape(-1, problem.head_dim)


def affine(bits: int, problem: KVProblem, layers: list[Layer]) -> Callable[[int], mx.array]:
    """mlx-lm's attention over mx.quantize's keys and values, quantized before."""
    from mlx_lm.models.base import quantized_scaled_dot_product_attention

    packed = [
        [mx.quantize(array[None], group_size=64, bits=bits) for array in (layer.keys, layer.values)] for layer in layers
    ]
    mx.eval(packed)

    def step(index: int) -> mx.array:
        keys, values = packed[index]
        queries = layers[index].queries[None, :, None]
        output = quantized_scaled_dot_product_attention(
            queries, keys, values, scale=problem.head_dim**-0.5, mask=None, group_size=64, bits=bits
        )
        return output.reshape(-1, problem.head_dim)

    return step


def make_layers(count: int, problem: KVProblem, tokens: int, scheme: KVScheme) -> list[Layer]:
    """Random keys, values and queries; records of them."""
    dtype = getattr(mx, problem.dtype)
    layers = []
    for number in range(count):
        mx.random.seed(number)
        keys, values = (mx.random.normal((problem.heads, tokens, problem.head_dim)).astype(dtype) for _ in range(2))
        queries = mx.random.normal((problem.queries, problem.head_dim)).astype(dtype)
        layer = Layer(queries, mx.contiguous(array_codec.encode(keys, values, scheme)), keys, values)
        mx.eval(layer.queries, layer.records, layer.keys, layer.values)
        layers.append(layer)
    return layers


def time_arms(
    arms: dict[str, Callable[[int], mx.array]], layers: int, repeats: int
) -> dict[str, list[tuple[float, float]]]:
    """Microseconds of a layer, evaluation and everything, of each repeat; the arms in turn."""
    for step in arms.values():
        for _ in range(2):
            mx.eval([step(index) for index in range(layers)])
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in arms}
    for _ in range(repeats):
        for name, step in arms.items():
            mx.synchronize()
            begin = time.perf_counter()
            results = [step(index) for index in range(layers)]
            built = time.perf_counter()
            mx.eval(results)
            mx.synchronize()
            end = time.perf_counter()
            found[name].append(((end - built) / layers * 1e6, (end - begin) / layers * 1e6))
    return found


def bench(problem: KVProblem, tokens: int, scheme: KVScheme, options: argparse.Namespace) -> list[Timing]:
    layers, run = make_layers(options.layers, problem, tokens, scheme), kernels()
    arms: dict[str, Callable[[int], mx.array]] = {
        "fused": lambda index: fused(run, problem, tokens, layers[index]),
        "op chain": lambda index: op_chain(scheme, problem, layers[index]),
        "decode + sdpa": lambda index: decoded_sdpa(scheme, problem, layers[index]),
        "full": lambda index: full(problem, layers[index]),
    }
    packed = problem.heads * tokens * scheme.bytes_per_token(problem.head_dim) / 1e6
    floats = problem.heads * tokens * full_bytes_per_token(problem.head_dim) / 1e6
    sizes = dict.fromkeys(("fused", "op chain", "decode + sdpa"), packed) | {"full": floats}
    for text in ("affine8", "affine4"):
        reference = parse_scheme(text)
        assert reference is not None
        try:
            arms[text] = affine(reference.k_bits, problem, layers)
        except ImportError as error:
            print(f"{text}: left out, {error}")
            continue
        sizes[text] = problem.heads * tokens * reference.bytes_per_token(problem.head_dim) / 1e6
    timings = []
    for name, pairs in time_arms(arms, options.layers, options.repeats).items():
        evals, alls = zip(*pairs, strict=True)
        timings.append(
            Timing(
                tokens=tokens,
                scheme=scheme.name,
                arm=name,
                eval_us=statistics.median(evals),
                eval_low=min(evals),
                eval_high=max(evals),
                all_us=statistics.median(alls),
                megabytes=sizes[name],
            )
        )
    return timings


def check_case(run: KVAttention, case: KVCase, arrays: KVArrays) -> None:
    p = case.problem
    found = run(
        p,
        to_mlx(arrays.queries),
        mx.array(arrays.records),
        array_codec.level_array(p.v_bits, "exact"),
        array_codec.sign_array(p.head_dim),
        tokens=case.tokens,
        scale=arrays.scale,
    )
    check(case, to_numpy(found), expected(case, arrays))


def check_encoder(run: KVAttention, case: KVCase) -> None:
    """Records of 300 tokens by the kernel: the bytes of numpy; floats that the case's dtype holds, of many sizes."""
    p, rng = case.problem, np.random.default_rng(case.seed)
    sizes = 10.0 ** rng.uniform(-4, 3, (2, 300, 1))
    floats = (rng.standard_normal((2, 300, p.head_dim)) * sizes).astype(NUMPY[p.dtype])
    keys, values = floats[0], floats[1]
    keys[:3] = keys[:3, :1]  # constant groups
    tables = array_codec.sign_array(p.head_dim), array_codec.edge_array(p.v_bits, "exact")
    found = np.array(run.encode(to_mlx(keys), to_mlx(values), *tables, (p.k_bits, p.v_bits)))
    wanted = codec.encode(keys.astype(np.float32), values.astype(np.float32), scheme_of(p))
    differing = int((found != wanted).any(axis=1).sum())
    assert differing == 0, f"encoder: {differing} of 300 records differ"


def check_all(problems: list[tuple[KVProblem, int]]) -> int:
    """The shared table, then what is timed; the number of cases that are wrong."""
    run, wrong = kernels(), 0
    cases = [*TABLE, *(KVCase(problem, tokens, seed=77) for problem, tokens in problems)]
    for case in cases:
        try:
            check_case(run, case, arrays_of(case))
            check_encoder(run, case)
        except (AssertionError, RuntimeError) as error:
            wrong += 1
            print(f"WRONG {case}: {str(error)[:300]}", flush=True)
    print(f"{len(cases)} cases: attention against float64, records against numpy's bytes: {wrong} wrong", flush=True)
    print(f"texts {kv_digest()}, last ran {KV_THAT_RAN}", flush=True)
    return wrong


def show(timings: list[Timing]) -> None:
    base = next(timing for timing in timings if timing.arm == "fused")
    print(f"\n{base.scheme}, {base.tokens} tokens")
    print("| arm | MB | eval µs (low … high) | × fused | all µs | × fused | GB/s |")
    print("|---" * 7 + "|")
    for timing in timings:
        spread = f"{timing.eval_us:.1f} ({timing.eval_low:.1f} … {timing.eval_high:.1f})"
        rate = timing.megabytes / timing.eval_us * 1e3
        print(
            f"| {timing.arm} | {timing.megabytes:.1f} | {spread} | {timing.eval_us / base.eval_us:.2f} "
            f"| {timing.all_us:.1f} | {timing.all_us / base.all_us:.2f} | {rate:.0f} |"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = partial(map, int)
    parser.add_argument("--tokens", type=lambda text: list(numbers(text.split(","))), default=[8192])
    parser.add_argument("--queries", type=int, default=32)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--schemes", type=lambda text: text.split(","), default=["turbo:k8v3"])
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action=argparse.BooleanOptionalAction, default=True)
    options = parser.parse_args()

    runs = []
    for text in options.schemes:
        scheme = parse_scheme(text)
        if scheme is None or scheme.kind != "turbo" or scheme.rule != "exact":
            parser.error(f"--schemes {text}: expected turbo:k…v…")
        for tokens in options.tokens:
            problem = KVProblem(
                head_dim=options.head_dim,
                k_bits=scheme.k_bits,
                v_bits=scheme.v_bits,
                queries=options.queries,
                heads=options.heads,
                room=tokens,
                dtype=options.dtype,
            )
            assert scheme_of(problem) == scheme
            runs.append((problem, tokens, scheme))
    if options.check and check_all([(problem, tokens) for problem, tokens, _ in runs]):
        return 1
    print(f"{mx.device_info(mx.gpu)}, MLX {mx.__version__}")
    shape = f"{options.queries} queries, {options.heads} KV heads of {options.head_dim}"
    print(f"{shape}, {options.dtype}, {options.layers} layers")
    timings: list[list[Timing]] = []
    for problem, tokens, scheme in runs:
        timings.append(bench(problem, tokens, scheme, options))
        show(timings[-1])
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(timing) for each in timings for timing in each], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
