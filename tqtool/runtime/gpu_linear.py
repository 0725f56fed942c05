"""Trellis layers on a GPU: words stay packed, products go through the kernels of ``tqtool.kernels``.

What no kernel does (``Choice.reason`` says why) is expanded by one and multiplied; that product is evaluated at once,
so at most one expanded weight is alive at any time, however deep the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from tqtool.formats.trellis import TrellisSpec
from tqtool.kernels.backend import Backend, Packed, problem_of
from tqtool.kernels.problem import Problem
from tqtool.runtime.stock_model import TrellisLinear


class KernelTrellisLinear(TrellisLinear):
    """``TrellisLinear`` through the kernels of ``backend``: same parameters, the same values in float32 sums."""

    backend: Backend

    def __init__(self, spec: dict[str, Any], *, bias: bool, codes: mx.array | None):
        super().__init__(spec, bias=bias, codes=codes)
        self.kernel_spec = TrellisSpec(**spec)
        self._packed: Packed | None = None

    def __call__(self, x: mx.array) -> mx.array:
        """[..., in] → [..., out] in the type of ``x``."""
        packed = self.packed()
        choice = self.backend.choose(problem_of(x, packed))
        if choice.kernel is not None:
            y = self.backend.product(choice, x, packed)
        else:
            weight = self.dense(x.dtype)
            y = x @ (weight if self.spec["axis"] == 0 else weight.T)
            mx.eval(y)
        return y + self.bias.astype(y.dtype) if "bias" in self else y

    def stored_weight(self) -> mx.array:
        """The whole stored matrix, float32 [rows, cols]."""
        return self.dense(mx.float32)

    def dense(self, dtype: mx.Dtype) -> mx.array:
        """The stored matrix in ``dtype``; a code without formula by MLX's own operations."""
        packed = self.packed()
        if self.backend.choose(Problem(op="expand", spec=packed.spec, m=0, dtype="float32")).kernel is None:
            return super().stored_weight().astype(dtype)
        return self.backend.expand(packed, dtype)

    def packed(self) -> Packed:
        """Words and scales as kernels take them, checked once the weights are loaded."""
        if self._packed is None:
            self._packed = Packed(self.weight, self.scales, self.kernel_spec)
        return self._packed


def kernel_layer(backend: Backend) -> type[KernelTrellisLinear]:
    """The layer class whose products go through ``backend``."""
    return type(f"{backend.name}TrellisLinear", (KernelTrellisLinear,), {"backend": backend})


@dataclass(frozen=True, slots=True)
class LayerPath:
    """How one trellis layer computes a product of ``m`` rows: ``path`` names the kernel or what is done instead."""

    module: str
    m: int
    path: str
    reason: str


def explain(model: nn.Module, rows: tuple[int, ...]) -> list[LayerPath]:
    """Every trellis layer of ``model`` for each number of rows of x, in bfloat16."""
    found = []
    for module, layer in model.named_modules():
        if not isinstance(layer, TrellisLinear):
            continue
        for m in rows:
            if not isinstance(layer, KernelTrellisLinear):
                found.append(LayerPath(module, m, type(layer).__name__, "no GPU kernels in use"))
                continue
            choice = layer.backend.choose(Problem(spec=layer.kernel_spec, m=m, dtype="bfloat16"))
            found.append(LayerPath(module, m, choice.path, choice.reason))
    return found
