"""Quantized layers turned into dense ones once, for machines where a dense product is the fast one.

On a Linux CPU, MLX's quantized matmul takes 27 times as long as a float32 product through BLAS. The weights
are exactly those the quantized kernels serve.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from tqtool.runtime.affine import dequantize
from tqtool.runtime.stock_model import TrellisExperts, TrellisLinear


def expand_layers(model: nn.Module, dtype: mx.Dtype) -> tuple[int, tuple[str, ...]]:
    """Replace every quantized layer of ``model`` by a dense one of ``dtype``, one layer at a time.

    Returns:
        How many layers were expanded, and the paths of layers that hold packed weights but are of no class
        known here: those stay as they are.
    """
    expanded = 0
    left = []
    for path, module in model.named_modules():
        dense = dense_twin(module, dtype)
        if dense is not None:
            mx.eval(dense.parameters())
            model.update_modules(tree_unflatten([(path, dense)]))
            expanded += 1
        elif hasattr(module, "bits") and "scales" in module:
            left.append(path)
    return expanded, tuple(left)


def dense_twin(module: nn.Module, dtype: mx.Dtype) -> nn.Module | None:
    """The dense twin of a quantized layer; None for any other module."""
    if isinstance(module, TrellisLinear):
        return _with_weight(nn.Linear(1, 1, bias=False), module, _trellis_weight(module, dtype))
    if isinstance(module, TrellisExperts):
        weight = mx.stack([_trellis_weight(module.expert(e), dtype) for e in range(module.weight.shape[0])])
        return _with_weight(SwitchLinear(1, 1, 1, bias=False), module, weight)
    if isinstance(module, nn.QuantizedLinear):
        return _with_weight(nn.Linear(1, 1, bias=False), module, dequantize(module, dtype))
    if isinstance(module, nn.QuantizedEmbedding):
        return _with_weight(nn.Embedding(1, 1), module, dequantize(module, dtype))
    if isinstance(module, QuantizedSwitchLinear):
        return _with_weight(SwitchLinear(1, 1, 1, bias=False), module, dequantize(module, dtype))
    return None


def _with_weight(dense: nn.Module, packed: nn.Module, weight: mx.array) -> nn.Module:
    dense.weight = weight
    if "bias" in packed:
        dense.bias = packed.bias
    dense.freeze()
    return dense


def _trellis_weight(layer: TrellisLinear, dtype: mx.Dtype) -> mx.array:
    """[out, in] of ``dtype``."""
    weight = layer.stored_weight()
    return mx.contiguous(weight.T if layer.spec["axis"] == 0 else weight).astype(dtype)
