"""Affine, mxfp4, nvfp4 and mxfp8 layers on a CPU: their exact values, and products that do not crawl.

MLX's quantized matmul on a CPU is fine for one row and takes 27 times as long as a float32 product for many.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from tqtool.runtime.linear import MATVEC_ROWS

CHUNK = 1 << 22
"""Weights dequantized together: 16 MiB in float32."""


class PromptLinear(nn.QuantizedLinear):  # type: ignore[misc]
    """``nn.QuantizedLinear`` that, for more than ``MATVEC_ROWS`` rows, multiplies by the dequantized weight.

    It does so a chunk of outputs at a time and evaluates each: MLX dequantizes on a CPU through temporaries of seven
    times the size, which a head of 150 000 rows would pay in gigabytes.
    """

    def __call__(self, x: mx.array) -> mx.array:
        """[..., in] → [..., out] in the type of ``x``."""
        if x.size // x.shape[-1] <= MATVEC_ROWS:
            y: mx.array = super().__call__(x)
            return y
        wide = x.astype(mx.float32)
        parts = []
        for rows in _row_chunks(self):
            part = (wide @ _dequantize_rows(self, rows, mx.float32).T).astype(x.dtype)
            mx.eval(part)
            parts.append(part)
        y = mx.concatenate(parts, axis=-1)
        return y + self.bias if "bias" in self else y

    @classmethod
    def of(cls, layer: nn.QuantizedLinear) -> PromptLinear:
        """The same layer, sharing its arrays."""
        twin = cls(128, 8, "bias" in layer, layer.group_size, layer.bits, layer.mode)
        twin.update(dict(layer))
        return twin


def swap_prompt_layers(model: nn.Module) -> None:
    """Make every ``nn.QuantizedLinear`` of ``model`` a ``PromptLinear``."""
    layers = [(path, module) for path, module in model.named_modules() if type(module) is nn.QuantizedLinear]
    model.update_modules(tree_unflatten([(path, PromptLinear.of(layer)) for path, layer in layers]))


def dequantize(layer: Any, dtype: mx.Dtype) -> mx.array:
    """The weight of a quantized layer, computed in float32 and rounded to ``dtype``, a chunk of rows at a time."""
    parts = []
    for rows in _row_chunks(layer):
        part = _dequantize_rows(layer, rows, dtype)
        mx.eval(part)
        parts.append(part)
    return mx.concatenate(parts) if len(parts) > 1 else parts[0]


def _row_chunks(layer: Any) -> Iterator[slice]:
    """Slices of the first axis with about ``CHUNK`` weights each."""
    rows, *rest = layer.scales.shape
    step = max(1, CHUNK // (math.prod(rest) * layer.group_size))
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def _dequantize_rows(layer: Any, rows: slice, dtype: mx.Dtype) -> mx.array:
    """Rows of the weight.

    Scales and biases go to float32 *before* dequantization, otherwise every weight is rounded to bf16 on the way.
    """
    options: dict[str, Any] = {}
    if layer.get("global_scale") is not None:
        options["global_scale"] = layer.global_scale
    # The scales of the mx and nv modes are 8-bit codes; only those of the affine mode are numbers to widen.
    is_affine = layer.mode == "affine"
    scales = layer.scales[rows]
    weight = mx.dequantize(
        layer.weight[rows],
        scales.astype(mx.float32) if is_affine else scales,
        layer.biases[rows].astype(mx.float32) if is_affine else None,
        group_size=layer.group_size,
        bits=layer.bits,
        mode=layer.mode,
        dtype=mx.float32,
        **options,
    )
    return weight.astype(dtype)
