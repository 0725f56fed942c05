"""One artifact by a method of stock mlx-lm, with calibration tokens given instead of fetched.

    python benchmarks/quality_peers.py METHOD SRC OUT --rows rows.npy --settings '{"bits": 4}'

A child of ``bench_quality.py``. The methods are mlx-lm's own functions with its own defaults, unless a setting says
otherwise. Three things differ from its commands, none of which changes what is computed: tokens come from ``--rows``;
arithmetic is float32, and scales are rounded to the source's type at the end, as the commands do on a bf16 model; and
where the CPU build of MLX is slow, the same function goes through a BLAS (quantized layers as dequantize and product,
Cholesky through LAPACK).

Prints one JSON object with what the method said about itself.
"""

from __future__ import annotations

import argparse
import json
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import scipy.linalg

from tqtool.runtime.blas import ensure_blas

ensure_blas()  # before the first import of mlx

import mlx.core as mx  # noqa: E402
import mlx.nn as nn  # noqa: E402
from mlx_lm.utils import load, save  # noqa: E402

Settings = dict[str, Any]
Facts = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("method", choices=METHODS)
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", type=Path, required=True, help="uint32 [rows, context], .npy")
    parser.add_argument("--settings", type=json.loads, default={})
    arguments = parser.parse_args()
    mx.random.seed(123)
    if mx.default_device().type == mx.cpu:
        use_blas()
    facts = METHODS[arguments.method](arguments.source, arguments.out, np.load(arguments.rows), arguments.settings)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({**facts, "peak_memory_bytes": peak}))


# ------------------------------------------------------------------------------------------------- methods
def rtn(source: Path, out: Path, rows: np.ndarray, settings: Settings) -> Facts:
    """``mlx_lm.convert -q``; with ``head_bits``, embedding and head at those, through its ``quant_predicate``."""
    from mlx_lm.convert import convert

    head, group_size = settings.get("head_bits"), settings["group_size"]

    def choose(path: str, module: nn.Module) -> bool | dict[str, int]:
        is_head = path.endswith(("embed_tokens", "lm_head"))
        return {"bits": head, "group_size": group_size} if is_head else hasattr(module, "to_quantized")

    convert(
        str(source),
        str(out),
        quantize=True,
        q_bits=settings["bits"],
        q_group_size=group_size,
        quant_predicate=choose if head else None,
    )
    return {}


def gptq(source: Path, out: Path, rows: np.ndarray, settings: Settings) -> Facts:
    """``mlx_lm.quant.gptq``; ``head_bits`` is its ``--fallback-bits``."""
    from mlx_lm.quant.gptq import gptq_quantize

    model, tokenizer, config, dtype = open_float32(source)
    bits, group_size = settings["bits"], settings["group_size"]
    model, config["quantization"] = gptq_quantize(
        model, mx.array(rows), bits, group_size, settings["head_bits"], group_size, batch_size=1
    )
    config["quantization_config"] = config["quantization"]
    close(source, out, model, tokenizer, config, dtype)
    return {}


def awq(source: Path, out: Path, rows: np.ndarray, settings: Settings) -> Facts:
    """``mlx_lm.quant.awq``; ``head_bits`` is its ``--embed-bits``."""
    from mlx_lm.quant.awq import AWQ_MODEL_CONFIGS, awq_quantize, update_config

    model, tokenizer, config, dtype = open_float32(source)
    if config["model_type"] not in AWQ_MODEL_CONFIGS:
        raise SystemExit(f"mlx_lm.quant.awq has no entry for {config['model_type']}")
    awq_quantize(
        model,
        mx.array(rows),
        AWQ_MODEL_CONFIGS[config["model_type"]],
        bits=settings["bits"],
        group_size=settings["group_size"],
        embed_bits=settings["head_bits"],
        embed_group_size=settings["group_size"],
        n_grid=settings["n_grid"],
    )
    close(source, out, model, tokenizer, update_config(model, config), dtype)
    return {}


def dwq(source: Path, out: Path, rows: np.ndarray, settings: Settings) -> Facts:
    """``mlx_lm.quant.dwq`` from the quantized model ``student``: its scales and offsets trained towards the source.

    ``passes`` over the first ``train_rows`` rows, the last ``valid_rows`` held back for its own validation loss, all of
    them cut at ``context`` tokens.
    """
    import mlx.optimizers as optimizers
    from mlx_lm.quant.dwq import dwq_quantize

    teacher, _, _, dtype = open_float32(source)
    model, tokenizer, config, _ = open_float32(Path(settings["student"]))
    samples = [(row[: settings["context"]].tolist(), 0) for row in rows]
    train, valid = samples[: -settings["valid_rows"]][: settings["train_rows"]], samples[-settings["valid_rows"] :]
    dwq_quantize(
        model,
        lambda batch, index, split: teacher(batch),
        optimizers.Adam(learning_rate=settings["learning_rate"], bias_correction=True),
        train * settings["passes"],
        valid,
        batch_size=1,
        max_seq_length=settings["context"],
        seed=123,
        dtype=mx.float32,
    )
    close(source, out, model, tokenizer, config, dtype)
    return {}


def dynamic(source: Path, out: Path, rows: np.ndarray, settings: Settings) -> Facts:
    """``mlx_lm.quant.dynamic_quant``: the more sensitive modules at ``high_bits``, as many as ``target_bpw`` allows."""
    from mlx_lm.quant.dynamic_quant import estimate_sensitivities, estimate_threshold
    from mlx_lm.utils import quantize_model

    model, tokenizer, config, dtype = open_float32(source)
    group_size = settings["group_size"]
    rates = (settings["low_bits"], group_size, settings["high_bits"], group_size)
    sensitivities = dict(estimate_sensitivities(model, mx.array(rows), *rates, batch_size=1))
    model.set_dtype(dtype)  # bits per weight are counted in it
    threshold = estimate_threshold(model, sensitivities, settings["target_bpw"], *rates)

    def choose(path: str, module: nn.Module) -> bool | dict[str, int]:
        if not hasattr(module, "to_quantized"):
            return False
        high = {"bits": settings["high_bits"], "group_size": group_size}
        return high if sensitivities[path] > threshold else True

    model, config = quantize_model(model, config, group_size, settings["low_bits"], quant_predicate=choose)
    close(source, out, model, tokenizer, config, dtype)
    chosen = [path for path, value in sensitivities.items() if value > threshold]
    return {"high": len(chosen), "modules": len(sensitivities)}


METHODS: dict[str, Callable[[Path, Path, np.ndarray, Settings], Facts]] = {
    "rtn": rtn,
    "gptq": gptq,
    "awq": awq,
    "dwq": dwq,
    "dynamic": dynamic,
}


def open_float32(folder: Path) -> tuple[nn.Module, Any, dict[str, Any], mx.Dtype]:
    """Model in float32, tokenizer, config, and the type the folder stores."""
    from mlx.utils import tree_flatten

    model, tokenizer, config = load(str(folder), return_config=True)
    floating = [value.dtype for _, value in tree_flatten(model.parameters()) if mx.issubdtype(value.dtype, mx.floating)]
    model.set_dtype(mx.float32)
    mx.eval(model.parameters())
    return model, tokenizer, config, floating[0]


def close(source: Path, out: Path, model: nn.Module, tokenizer: Any, config: dict[str, Any], dtype: mx.Dtype) -> None:
    """Round to ``dtype`` and write, as mlx-lm's commands end."""
    model.set_dtype(dtype)
    mx.eval(model.parameters())
    save(str(out), str(source), model, tokenizer, config)


# ------------------------------------------------------------------------------------------ the same, faster
def use_blas() -> None:
    """Send what MLX's CPU build computes slowly through BLAS and LAPACK, in this process."""
    nn.QuantizedLinear.__call__ = _linear
    nn.QuantizedEmbedding.as_linear = _linear
    nn.QuantizedEmbedding.__call__ = _embed
    mx.linalg.cholesky = _cholesky
    mx.linalg.cholesky_inv = _cholesky_inv


def dequantized(layer: nn.Module, words: mx.array, scales: mx.array, biases: mx.array) -> mx.array:
    """``scales`` · codes + ``biases`` as products and sums, so that both have gradients."""
    ones, zeros = mx.ones_like(scales), mx.zeros_like(scales)
    codes = mx.dequantize(words, ones, zeros, group_size=layer.group_size, bits=layer.bits)
    groups = codes.reshape(*scales.shape, layer.group_size)
    return (groups * scales[..., None] + biases[..., None]).reshape(codes.shape)


def _linear(self: nn.Module, x: mx.array) -> mx.array:
    y = x @ dequantized(self, self["weight"], self["scales"], self["biases"]).astype(x.dtype).T
    return y + self["bias"] if "bias" in self else y


def _embed(self: nn.Module, x: mx.array) -> mx.array:
    return dequantized(self, self["weight"][x], self["scales"][x], self["biases"][x])


def _cholesky(matrix: mx.array, upper: bool = False, **_: Any) -> mx.array:
    return mx.array(scipy.linalg.cholesky(np.array(matrix), lower=not upper))


def _cholesky_inv(factor: mx.array, upper: bool = False, **_: Any) -> mx.array:
    inverse, info = scipy.linalg.lapack.spotri(np.array(factor), lower=not upper)
    if info:
        raise ValueError(f"spotri: info {info}")
    triangle = np.triu(inverse) if upper else np.tril(inverse)
    return mx.array(triangle + triangle.T - np.diag(np.diag(triangle)))


if __name__ == "__main__":
    main()
