"""What packing the KV cache costs in quality: KL to the same model with its full cache, for every scheme.

    python benchmarks/bench_kv.py MODEL --text wiki.txt [--windows 4] [--context 512] [--schemes turbo:k8v3,affine4,…]
        [--out DIR]

Every window is scored in one pass in which each token reads keys and values as packed, its own included: what decoding
token by token gives, since a token's bytes depend on nothing else. ``--stepwise N`` shows it on the first N tokens of a
window. KL is over the whole vocabulary, in float64 from float32 logits; the model runs in float32 with its layers
dense. The first --skip positions of a window have little to attend to and are left out.

Writes kv.json and kv.png into DIR if given, and prints the table.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tqtool.evals.logits import window_logits
from tqtool.evals.text import read_windows
from tqtool.kv.scheme import KEY_BITS, VALUE_BITS, KVOptions, KVScheme, full_bytes_per_token, parse_scheme
from tqtool.runtime.load import LoadedModel, load, scoring_compute

ROWS = 64
SCHEMES = ["affine8", "affine4", *(f"turbo:k{k}v{v}" for k, v in itertools.product((8, 5, 4, 2), (8, 5, 4, 3, 2)))]
assert len(SCHEMES) == 2 + len(KEY_BITS) * len(VALUE_BITS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One scheme: nats a token, bytes a token and KV head."""

    scheme: str
    bytes_per_token: int
    ratio: float
    kl: float
    kl_se: float
    kl_p99: float
    top1: float
    seconds: float


def divergences(full: NDArray[np.float32], packed: NDArray[np.float32]) -> tuple[NDArray[np.float64], float]:
    """KL(full ‖ packed) of each position, and the share of positions with the same first token."""
    result = np.empty(len(full))
    for first in range(0, len(full), ROWS):
        rows = slice(first, first + ROWS)
        log_p, log_q = (_log_softmax(logits[rows]) for logits in (full, packed))
        result[rows] = np.sum(np.exp(log_p) * (log_p - log_q), axis=1)
    return result, float(np.mean(full.argmax(axis=1) == packed.argmax(axis=1)))


def _log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))


def score(
    model: LoadedModel, windows: list[Any], full: list[NDArray[np.float32]], scheme: KVScheme, head_dim: int, skip: int
) -> Arm:
    started = time.monotonic()
    found = [
        divergences(logits[skip:], packed[skip:])
        for logits, packed in zip(full, window_logits(model.model, windows, KVOptions(scheme=scheme)), strict=True)
    ]
    kl = np.stack([divergence for divergence, _ in found])
    means = kl.mean(axis=1)
    size = scheme.bytes_per_token(head_dim)
    return Arm(
        scheme=scheme.name,
        bytes_per_token=size,
        ratio=full_bytes_per_token(head_dim) / size,
        kl=float(kl.mean()),
        kl_se=float(means.std(ddof=1) / np.sqrt(len(means))) if len(means) > 1 else float("nan"),
        kl_p99=float(np.quantile(kl, 0.99)),
        top1=float(np.mean([share for _, share in found])),
        seconds=time.monotonic() - started,
    )


def stepwise(model: LoadedModel, window: NDArray[np.uint32], scheme: KVScheme, count: int) -> str:
    """Mean KL of ``count`` tokens in one pass and one by one."""
    import mlx.core as mx

    from tqtool.kv.cache import make_caches

    short = window[: count + 1]
    (full,) = window_logits(model.model, [short])
    (whole,) = window_logits(model.model, [short], KVOptions(scheme=scheme))
    caches = make_caches(model.model, scheme)
    single = []
    for token in short[:-1]:
        logits = model.model(mx.array([[int(token)]]), cache=caches)
        single.append(np.array(logits[0, 0].astype(mx.float32)))
    one, other = (divergences(full, logits)[0].mean() for logits in (whole, np.stack(single)))
    return f"{scheme.name}, {count} tokens: KL {one:.6f} in one pass, {other:.6f} token by token"


def draw(arms: list[Arm], target: Path, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5))
    for k_bits in sorted(KEY_BITS, reverse=True):
        line = sorted((a for a in arms if a.scheme.startswith(f"turbo:k{k_bits}")), key=lambda a: a.bytes_per_token)
        if line:
            axes.errorbar(
                [a.bytes_per_token for a in line],
                [a.kl for a in line],
                yerr=[a.kl_se for a in line],
                marker="o",
                label=f"turbo, {k_bits}-bit keys",
            )
    for arm in arms:
        label = arm.scheme.removeprefix("turbo:")
        axes.annotate(label, (arm.bytes_per_token, arm.kl), fontsize=7, xytext=(4, 3), textcoords="offset points")
    affine = [arm for arm in arms if arm.scheme.startswith("affine")]
    axes.plot(
        [a.bytes_per_token for a in affine], [a.kl for a in affine], "ks--", label="affine (mlx-lm), groups of 64"
    )
    axes.set(yscale="log", xlabel="bytes a token and KV head", ylabel="KL to the full cache, nats a token", title=title)
    axes.grid(visible=True, which="both", alpha=0.25)
    axes.legend()
    figure.savefig(target, dpi=150, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--skip", type=int, default=32)
    parser.add_argument("--schemes", type=lambda text: text.split(","), default=SCHEMES)
    parser.add_argument("--stepwise", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()

    model = load(options.model, compute=scoring_compute())
    from tqtool.kv.trace import facts_of

    head_dim = next(layer.k_dim for layer in facts_of(model.model).layers if layer.grows)
    source = read_windows(model.tokenizer, options.text, windows=options.windows, context=options.context)
    windows = list(source.tokens)
    full = list(window_logits(model.model, windows))
    print(f"{options.model}: {len(windows)} windows of {options.context} tokens, head dimension {head_dim}")
    print(f"| scheme | bytes | × less | KL | ± | 99 % | top-1 |\n|{'---|' * 7}")
    arms = []
    for text in options.schemes:
        scheme = parse_scheme(text)
        if scheme is None:
            raise SystemExit(f"{text}: the full cache is what all are compared with")
        arm = score(model, windows, full, scheme, head_dim, options.skip)
        arms.append(arm)
        figures = f"{arm.kl:.5f} | {arm.kl_se:.5f} | {arm.kl_p99:.4f} | {100 * arm.top1:.2f} %"
        print(f"| {arm.scheme} | {arm.bytes_per_token} | {arm.ratio:.2f} | {figures} |", flush=True)
    for text in ("turbo:k8v3", "affine4") if options.stepwise else ():
        scheme = parse_scheme(text)
        assert scheme is not None
        print(stepwise(model, windows[0], scheme, options.stepwise))
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        facts = {"model": options.model, "windows": options.windows, "context": options.context, "skip": options.skip}
        body = {**facts, "arms": [asdict(arm) for arm in arms]}
        (options.out / "kv.json").write_text(json.dumps(body, indent=1) + "\n")
        draw(arms, options.out / "kv.png", f"{Path(options.model).name}, {len(windows)} × {options.context} tokens")


if __name__ == "__main__":
    main()
