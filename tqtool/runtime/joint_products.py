"""Queries, keys and values in one product on a GPU: their matrices read the same x and lie one after another.

A launch costs a small layer more than its weights do. In tiles, matrices of whole squares put one after another are
a matrix; its product is to the bit what the three are (kernels/README.md). The layers stay where they are and keep
their parameters, as views of the joint arrays: the first that is called computes for all of them, the others take
their parts. So it is for attention that calls all three with one and the same array, which ``ATTENTIONS`` do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from tqtool.kernels.backend import Packed, Product, problem_of
from tqtool.kernels.problem import Choice, Problem
from tqtool.kernels.rules import MATVEC_ROWS
from tqtool.runtime.gpu_linear import KernelTrellisLinear, choose

ATTENTIONS = (
    *(f"mlx_lm.models.{name}.Attention" for name in ("llama", "qwen2", "qwen3", "qwen3_moe", "granite", "gemma3_text")),
    "mlx_lm.models.mixtral.MixtralAttention",
)
"""mlx-lm's classes that call q_proj, k_proj and v_proj with one array that nobody changes in between."""
NAMES = ("q_proj", "k_proj", "v_proj")


class JointProducts:
    """The product that layers share.

    Args:
        layers: In the order of their rows; ``why_not`` has nothing against them. Their parameters become views.
    """

    def __init__(self, layers: Sequence[KernelTrellisLinear]) -> None:
        first = layers[0]
        self.backend, self.int8 = first.backend, first.int8
        self.spec = replace(first.kernel_spec, rows=sum(layer.kernel_spec.rows for layer in layers))
        words = mx.concatenate([layer.weight for layer in layers], axis=0)
        scales = mx.concatenate([layer.scales for layer in layers])
        mx.eval(words, scales)
        self._packed = Packed(words, scales, self.spec)
        self._ends = list(accumulate(layer.kernel_spec.rows for layer in layers))[:-1]
        for place, layer in enumerate(layers):
            begin = self._ends[place - 1] if place else 0
            end, tile = begin + layer.kernel_spec.rows, layer.kernel_spec.tile
            layer.weight, layer.scales = words[begin // tile : -(-end // tile)], scales[begin:end]
            layer.join(self, place)
        self._ready: dict[tuple[tuple[int, ...], mx.Dtype], Product] = {}
        self._x: mx.array | None = None
        self._parts: list[mx.array | None] = [None] * len(layers)

    def take(self, place: int, x: mx.array) -> mx.array | None:
        """The product of ``x`` with the layer at ``place``; None where that layer has to compute it alone."""
        if self._x is not x or self._parts[place] is None:
            product = self._product(x)
            if product is None:
                return None
            self._x, self._parts = x, list(mx.split(product(x), self._ends, axis=-1))
        part, self._parts[place] = self._parts[place], None
        if not any(left is not None for left in self._parts):
            self._x = None  # nothing is kept alive
        return part

    def choice(self, problem: Problem) -> Choice:
        """The kernel for the joint product, or why there is none."""
        return choose(self.backend, problem)

    def _product(self, x: mx.array) -> Product | None:
        if x.size > MATVEC_ROWS * x.shape[-1]:
            return None
        product = self._ready.get((x.shape, x.dtype))
        if product is None:
            choice = self.choice(problem_of(x, self._packed, int8=self.int8))
            if choice.kernel is None:
                return None
            product = self._ready[x.shape, x.dtype] = self.backend.bind(choice, x.shape, self._packed)
        return product


def why_not(layers: Sequence[Any]) -> str | None:
    """Why ``layers`` have no joint product, or None."""
    if not all(isinstance(layer, KernelTrellisLinear) for layer in layers):
        return "not all of them are trellis layers with kernels"
    specs = [layer.kernel_spec for layer in layers]
    if len({replace(spec, rows=1) for spec in specs}) > 1:
        return "they differ in more than their rows"
    tile = specs[0].tile
    return None if tile and all(spec.rows % tile == 0 for spec in specs) else "they are not made of whole squares"


def join_projections(model: nn.Module) -> int:
    """Join queries, keys and values of every attention of ``ATTENTIONS`` where they can be; how many attentions."""
    joined = 0
    for _, module in model.named_modules():
        if f"{type(module).__module__}.{type(module).__name__}" not in ATTENTIONS:
            continue
        layers = [getattr(module, name) for name in NAMES]
        if why_not(layers) is None:
            JointProducts(layers)
            joined += 1
    return joined
