"""How the trellis layers of a loaded model are computed: what ``generate --explain`` says."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import mlx.nn as nn

from tqtool.kernels.problem import Problem
from tqtool.kernels.rules import MATVEC_ROWS
from tqtool.runtime.gated_mlp import GatedMLP
from tqtool.runtime.gpu_linear import KernelTrellisLinear, choose
from tqtool.runtime.joint_products import NAMES, JointProducts
from tqtool.runtime.stock_model import TrellisLinear


@dataclass(frozen=True, slots=True)
class LayerPath:
    """How one trellis layer computes a product of ``m`` rows: ``path`` names the kernel or what is done instead."""

    module: str
    m: int
    path: str
    reason: str


def explain(model: nn.Module, rows: tuple[int, ...]) -> list[LayerPath]:
    """Every trellis layer of ``model`` for each number of rows of x, in bfloat16."""
    modules = list(model.named_modules())
    fused = {f"{path}.{name}": module for path, module in modules if isinstance(module, GatedMLP) for name in _BOTH}
    return [
        _path(path, module, fused.get(path), m)
        for path, module in modules
        if isinstance(module, TrellisLinear)
        for m in rows
    ]


def counted_paths(model: nn.Module, rows: tuple[int, ...]) -> list[dict[str, Any]]:
    """``explain`` as rows to print: how many trellis layers go which way at how many rows of x, and why."""
    counted = Counter((each.m, each.path, each.reason) for each in explain(model, rows))
    return [{"rows": m, "layers": n, "path": path, "reason": reason} for (m, path, reason), n in counted.items()]


_BOTH = ("gate_proj", "up_proj")


def _path(path: str, layer: TrellisLinear, mlp: GatedMLP | None, m: int) -> LayerPath:
    if not isinstance(layer, KernelTrellisLinear):
        return LayerPath(path, m, type(layer).__name__, "no GPU kernels in use")
    if mlp is not None:
        gate, up = mlp.gate_proj, mlp.up_proj
        problem = Problem(op="swiglu", spec=gate.kernel_spec, m=m, dtype="bfloat16", up=up.kernel_spec, int8=gate.int8)
        choice = mlp.choice(problem)
        if choice.kernel is not None:
            return LayerPath(path, m, choice.path, choice.reason)
    if isinstance(layer.joint, JointProducts):
        joint = layer.joint
        choice = joint.choice(Problem(spec=joint.spec, m=m, dtype="bfloat16", int8=joint.int8))
        if choice.kernel is not None and m <= MATVEC_ROWS:
            return LayerPath(path, m, choice.path, f"{choice.reason}, {' '.join(NAMES)} at once")
    choice = choose(layer.backend, Problem(spec=layer.kernel_spec, m=m, dtype="bfloat16", int8=layer.int8))
    return LayerPath(path, m, choice.path, choice.reason)
