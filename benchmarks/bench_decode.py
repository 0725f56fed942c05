"""Tokens per second of a packed model beside the stock affine 4-bit artifact of the same model, in one run.

    python benchmarks/bench_decode.py PACKED STOCK [--tokens 64] [--rounds 7] [--activations int8] [--json]
    python benchmarks/bench_decode.py --synthetic 5120x17408x8 [--k 3] …      # 576x1536x30x64: SmolLM2's shapes
    python benchmarks/bench_decode.py PACKED --int8-error TEXT [--positions 512]

Both models are loaded as ``tqtool generate`` loads them and decode greedily through mlx-lm's generation step, in turns,
on MLX's default device (``--device=cpu`` for the other). A round's rate is that of the tokens after the first; ratios
are those of a round. ``--synthetic HIDDENxWIDTHxLAYERS[xHEAD]`` is a llama of random weights that no disk has to hold:
trellis in all linear layers, table 4 bits, head 6 bits, as ``tqtool trellis --modules all`` writes, against 4 bits
everywhere.

``--int8-error`` reads TEXT token by token through the packed model with and without int8 activations, and prints the KL
divergence of the two predictions: what the mode costs, on top of what packing did.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqtool.runtime.blas import ensure_blas

ensure_blas()  # before mlx is imported

import mlx.core as mx  # noqa: E402

if "--device=cpu" in sys.argv:  # mlx-lm takes its stream from the default device when it is imported
    mx.set_default_device(mx.cpu)

import mlx.nn as nn  # noqa: E402
import numpy as np  # noqa: E402
from mlx.utils import tree_flatten, tree_unflatten  # noqa: E402
from mlx_lm.generate import generate_step  # noqa: E402
from mlx_lm.models import llama  # noqa: E402
from mlx_lm.models.cache import make_prompt_cache  # noqa: E402

from tqtool.formats.trellis import spec_for  # noqa: E402
from tqtool.runtime.gated_mlp import fuse_gates  # noqa: E402
from tqtool.runtime.joint_products import join_projections  # noqa: E402
from tqtool.runtime.linear import layer_class_for  # noqa: E402
from tqtool.runtime.load import load  # noqa: E402
from tqtool.runtime.paths import explain  # noqa: E402
from tqtool.runtime.stock_model import Model, ModelArgs  # noqa: E402

PROMPT = list(range(100, 116))
"""Token ids: which, changes no time; few, so that the prompt is short on a CPU."""
SYNTHETIC_VOCABULARY = 32_000
SYNTHETIC_HEAD = 128


@dataclass(frozen=True, slots=True)
class Arm:
    """One model, and the bytes that a token reads of it."""

    name: str
    model: nn.Module
    nbytes: int


def arm(name: str, model: nn.Module) -> Arm:
    """All parameters but the table, of which a token reads one row."""
    parameters = tree_flatten(model.parameters())
    return Arm(name, model, sum(value.nbytes for path, value in parameters if "embed_tokens" not in path))


def rate(model: nn.Module, tokens: int) -> float:
    """Tokens per second after the first."""
    steps: Iterator[Any] = generate_step(mx.array(PROMPT), model, max_tokens=tokens + 1)
    next(steps)
    started = time.perf_counter()
    count = sum(1 for _ in steps)
    return count / (time.perf_counter() - started)


def spread(values: list[float] | np.ndarray) -> tuple[float, float, float]:
    """Median, lowest, highest."""
    return float(np.median(values)), float(np.min(values)), float(np.max(values))


def synthetic_config(text: str) -> dict[str, Any]:
    """A llama with eight heads of keys and values, or the most below that which divide its heads."""
    hidden, width, layers, head = ([*map(int, text.split("x")), SYNTHETIC_HEAD])[:4]
    heads = hidden // head
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(count for count in range(1, 9) if heads % count == 0),
        "head_dim": head,
        "rms_norm_eps": 1e-5,
        "vocab_size": SYNTHETIC_VOCABULARY,
        "tie_word_embeddings": False,
    }


def stock_of(config: dict[str, Any]) -> nn.Module:
    """A model of ``config``, its weights random and small; linear layers dense."""
    model = llama.Model(llama.ModelArgs.from_dict(config))
    values = [
        (path, mx.random.normal(value.shape, mx.bfloat16, scale=0.01) if value.ndim > 1 else value.astype(mx.bfloat16))
        for path, value in tree_flatten(model.parameters())
    ]
    model.update(tree_unflatten(values))
    return model


def synthetic_stock(config: dict[str, Any]) -> nn.Module:
    """4 bits everywhere, groups of 64."""
    model = stock_of(config)
    nn.quantize(model, group_size=64, bits=4)
    mx.eval(model.parameters())
    return model


def synthetic_packed(config: dict[str, Any], k: int, *, int8: bool) -> nn.Module:
    """Trellis of k bits in tiles in all linear layers of the blocks; any words are a matrix."""
    frame = stock_of({**config, "num_hidden_layers": 1})
    shapes = {path: layer.weight.shape for path, layer in frame.named_modules() if isinstance(layer, nn.Linear)}
    modules = {
        path.replace("layers.0.", f"layers.{number}."): spec_for(shape, k=k, axis=1, tile=True).to_config()
        for path, shape in shapes.items()
        if path.startswith("model.layers.0.")
        for number in range(config["num_hidden_layers"])
    }
    full = {**config, "trellis": {"format_version": 2, "modules": modules}}
    model = Model(ModelArgs(full), layer_class=layer_class_for(mx.default_device(), int8=int8))
    rng = np.random.default_rng(0)
    for path, layer in model.named_modules():
        if path in modules:
            layer.weight = mx.array(rng.integers(0, 2**32, layer.weight.shape, dtype=np.uint32))
            layer.scales = mx.full(layer.scales.shape, 0.01, mx.float16)
    floats = [(p, v.astype(mx.bfloat16)) for p, v in tree_flatten(model.parameters()) if v.dtype == mx.float32]
    model.update(tree_unflatten(floats))
    nn.quantize(model, class_predicate=lambda path, _: {"bits": 6, "group_size": 64} if path == "lm_head" else False)
    nn.quantize(model, class_predicate=lambda path, _: path == "model.embed_tokens", bits=4, group_size=64)
    fuse_gates(model)
    join_projections(model)
    mx.eval(model.parameters())
    return model


def compare(packed: Arm, stock: Arm, arguments: argparse.Namespace) -> None:
    """Rounds in turns; one line for each arm and the ratio."""
    for path, count in _counted(packed.model):
        print(f"{count} trellis layers: {path}")
    for each in (packed, stock):
        rate(each.model, 4)  # kernels are compiled at their first call
    rounds = [[rate(each.model, arguments.tokens) for each in (packed, stock)] for _ in range(arguments.rounds)]
    ours, theirs = np.array(rounds).T
    row = {
        "device": str(mx.default_device()),
        "tokens": arguments.tokens,
        packed.name: spread(ours),
        stock.name: spread(theirs),
        "ratio": spread(ours / theirs),
        "mbytes": [packed.nbytes / 1e6, stock.nbytes / 1e6],
    }
    if arguments.json:
        print(json.dumps(row))
        return
    for each, rates in ((packed, ours), (stock, theirs)):
        print(f"{each.name}: {'{:.1f} ({:.1f} … {:.1f})'.format(*spread(rates))} tokens/s, {each.nbytes / 1e6:.1f} MB")
    print(f"ratio {'{:.3f} ({:.3f} … {:.3f})'.format(*row['ratio'])}, {arguments.rounds} rounds, {row['device']}")


def _counted(model: nn.Module) -> list[tuple[str, int]]:
    paths = [f"{path.path} ({path.reason})" for path in explain(model, (1,))]
    return sorted((path, paths.count(path)) for path in set(paths))


def int8_error(folder: str, arguments: argparse.Namespace) -> None:
    """KL of the predictions with int8 activations from those without, position by position."""
    exact, rounded = (load(folder, activations=kind) for kind in ("float", "int8"))
    ids = exact.tokenizer.encode(Path(arguments.int8_error).read_text())[: arguments.positions + 1]
    logs = []
    for loaded in (exact, rounded):
        cache, found = make_prompt_cache(loaded.model), []
        for token in ids[:-1]:
            logits = loaded.model(mx.array([[token]]), cache=cache)[0, 0].astype(mx.float32)
            found.append(logits - mx.logsumexp(logits))
            mx.eval(found[-1])
        logs.append(mx.stack(found))
    kl = np.array((mx.exp(logs[0]) * (logs[0] - logs[1])).sum(axis=-1))
    truth = mx.array(ids[1:])[:, None]
    nll = [-float(mx.take_along_axis(log, truth, axis=-1).mean()) for log in logs]
    top = float((logs[0].argmax(axis=-1) == logs[1].argmax(axis=-1)).astype(mx.float32).mean())
    error = kl.std(ddof=1) / len(kl) ** 0.5
    print(f"int8 activations, {len(kl)} positions: KL {kl.mean():.5f} ± {error:.5f}, top-1 agreement {top:.3f}")
    print(f"perplexity {np.exp(nll[0]):.3f} → {np.exp(nll[1]):.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packed", nargs="?", help="artifact of tqtool trellis")
    parser.add_argument("stock", nargs="?", help="of the same model, 4 bits")
    parser.add_argument("--synthetic", help="HIDDENxWIDTHxLAYERS[xHEAD] in place of artifacts")
    parser.add_argument("--k", type=int, default=3, help="of the synthetic model")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--activations", choices=("float", "int8"), default="float")
    parser.add_argument("--device", choices=("default", "cpu"), default="default")
    parser.add_argument("--int8-error", metavar="TEXT", help="file")
    parser.add_argument("--positions", type=int, default=512)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.device == "cpu" and mx.default_device().type != mx.cpu:
        parser.error("write --device=cpu")
    mx.random.seed(0)
    if arguments.int8_error:
        int8_error(arguments.packed, arguments)
        return
    if arguments.synthetic:
        config = synthetic_config(arguments.synthetic)
        packed = synthetic_packed(config, arguments.k, int8=arguments.activations == "int8")
        compare(arm(f"trellis {arguments.k}", packed), arm("stock 4 bits", synthetic_stock(config)), arguments)
        return
    if not (arguments.packed and arguments.stock):
        parser.error("two artifacts, or --synthetic")
    packed = load(arguments.packed, activations=arguments.activations).model
    compare(arm("packed", packed), arm("stock", load(arguments.stock).model), arguments)


if __name__ == "__main__":
    main()
