"""Affine, mxfp4, nvfp4 and mxfp8 layers on a CPU: their exact values, and products that do not crawl.

MLX's quantized matmul on a CPU is fine for one row and takes 27 times as long as a float32 product for many.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from tqtool.runtime.linear import MATVEC_ROWS


class PromptLinear(nn.QuantizedLinear):  # type: ignore[misc]
    """``nn.QuantizedLinear`` that, for more than ``MATVEC_ROWS`` rows, multiplies by the dequantized weight.

    That product is evaluated at once, so that one dequantized weight is alive at a time.
    """

    def __call__(self, x: mx.array) -> mx.array:
        """[..., in] → [..., out] in the type of ``x``."""
        if x.size // x.shape[-1] <= MATVEC_ROWS:
            y: mx.array = super().__call__(x)
            return y
        y = (x.astype(mx.float32) @ dequantize(self, mx.float32).T).astype(x.dtype)
        mx.eval(y)
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
    """The weight of a quantized layer, computed in float32 and rounded to ``dtype``.

    Scales and biases go to float32 *before* dequantization, otherwise every weight is rounded to bf16 on the way.
    """
    options: dict[str, Any] = {}
    if layer.get("global_scale") is not None:
        options["global_scale"] = layer.global_scale
    # The scales of the mx and nv modes are 8-bit codes; only those of the affine mode are numbers to widen.
    is_affine = layer.mode == "affine"
    weight = mx.dequantize(
        layer.weight,
        layer.scales.astype(mx.float32) if is_affine else layer.scales,
        layer.biases.astype(mx.float32) if is_affine else None,
        group_size=layer.group_size,
        bits=layer.bits,
        mode=layer.mode,
        dtype=mx.float32,
        **options,
    )
    return weight.astype(dtype)
