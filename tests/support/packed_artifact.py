"""A packed trellis artifact made by hand from a tiny checkpoint, without the pipeline."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from tests.support.tiny_models import Tiny, write_tiny, write_weights
from tqtool import native
from tqtool.artifact.model_file import model_file
from tqtool.formats.trellis import spec_for
from tqtool.solve.trellis import TrellisOptions, encode_weight


def write_packed(folder: Path, tiny: Tiny, *, k: int | Sequence[int] = 3, bits: int = 6) -> Path:
    """Trellis in all linear layers (down_proj on axis 0, gate_proj in tiles), the embedding affine, the rest dense.

    Several ``k`` are taken in turn, a module each.

    Returns:
        The artifact; beside it ``<name>-fake`` is its twin with dense float32 weights of the same values.
    """
    write_tiny(folder, tiny)
    twin = folder.with_name(folder.name + "-fake")
    shutil.copytree(folder, twin)
    packed: dict[str, NDArray[Any]] = {}
    dense: dict[str, NDArray[Any]] = {}
    modules: dict[str, dict[str, Any]] = {}
    rates = cycle((k,) if isinstance(k, int) else k)
    quantization: dict[str, Any] = {"group_size": 64, "bits": bits, "mode": "affine"}
    for name, tensor in tiny.tensors().items():
        module = name.removesuffix(".weight")
        weight = tensor.astype(np.float32)
        if name.endswith("_proj.weight"):
            rate = next(rates)
            spec = spec_for(weight.shape, k=rate, axis=0 if "down" in name else 1, tile="gate" in name)
            matrix = encode_weight(name, weight, spec, TrellisOptions(k=rate, warmup=16))
            packed[name], packed[f"{module}.scales"] = matrix.words, matrix.scales
            modules[module] = spec.to_config()
            values = native.trellis_expand(matrix.words, matrix.scales, spec)
            dense[name] = np.ascontiguousarray(values if spec.axis == 1 else values.T)
        elif "embed" in name:
            parts = mx.quantize(mx.array(weight), group_size=64, bits=bits)
            packed |= {
                f"{module}.{part}": np.array(a) for part, a in zip(("weight", "scales", "biases"), parts, strict=True)
            }
            dense[name] = np.array(mx.dequantize(*parts, group_size=64, bits=bits))
            quantization[module] = {"group_size": 64, "bits": bits, "mode": "affine"}
        else:
            packed[name], dense[name] = tensor, weight
    write_weights(folder, packed)
    write_weights(twin, dense)
    (folder / "tqtool_model.py").write_bytes(model_file())
    config = tiny.config() | {
        "model_file": "tqtool_model.py",
        "trellis": {"format_version": 2, "modules": modules},
        "quantization": quantization,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder
