"""The MLP with silu of many models on a GPU: gate and up in one launch where a kernel does both.

mlx-lm's own module computes ``down(silu(gate(x)) · up(x))`` by three products and an activation. For few rows of x
the product kernels are bound by their launches, and x is read and made ready once instead of twice.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten
from mlx_lm.models.activations import swiglu

from tqtool.kernels.backend import Product, problem_of
from tqtool.kernels.problem import Choice, Problem
from tqtool.runtime.gpu_linear import KernelTrellisLinear, Products, choose

SILU_MLPS = tuple(f"mlx_lm.models.{name}.MLP" for name in ("llama", "qwen2", "qwen3", "qwen3_moe", "granite"))
"""mlx-lm's classes that compute just this, mistral's and smollm3's being llama's; a test holds each against
``GatedMLP``."""


class GatedMLP(nn.Module):  # type: ignore[misc]
    """Stands for one of ``SILU_MLPS``: the same layers under the same names."""

    def __init__(self, gate_proj: KernelTrellisLinear, up_proj: KernelTrellisLinear, down_proj: nn.Module):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = gate_proj, up_proj, down_proj
        self._hidden = Products(self._by_kernel, self._by_two_products)

    def __call__(self, x: mx.array) -> mx.array:
        """[..., hidden] → [..., hidden] in the type of ``x``."""
        y: mx.array = self.down_proj(self._hidden(x))
        return y

    def choice(self, problem: Problem) -> Choice:
        """The kernel for gate and up at once, or why there is none."""
        return choose(self.gate_proj.backend, problem)

    def _by_kernel(self, x: mx.array) -> Product | None:
        gate, up = self.gate_proj.packed(), self.up_proj.packed()
        choice = self.choice(problem_of(x, gate, up, int8=self.gate_proj.int8))
        return None if choice.kernel is None else self.gate_proj.backend.bind(choice, x.shape, gate, up)

    def _by_two_products(self, x: mx.array) -> mx.array:
        both: mx.array = swiglu(self.gate_proj(x), self.up_proj(x))
        return both


def fuse_gates(model: nn.Module) -> int:
    """Put a ``GatedMLP`` in the place of every MLP of ``SILU_MLPS`` whose gate and up kernels take; how many."""
    fused = [(path, _fused(module)) for path, module in model.named_modules() if _is_fusible(module)]
    model.update_modules(tree_unflatten(fused))
    return len(fused)


def _is_fusible(module: Any) -> bool:
    if f"{type(module).__module__}.{type(module).__name__}" not in SILU_MLPS:
        return False
    gate, up = module.gate_proj, module.up_proj
    both = isinstance(gate, KernelTrellisLinear) and isinstance(up, KernelTrellisLinear)
    return both and "bias" not in gate and "bias" not in up


def _fused(module: Any) -> GatedMLP:
    return GatedMLP(module.gate_proj, module.up_proj, module.down_proj)
