"""Trellis layers on a GPU: words stay packed, products go through the kernels of ``tqtool.kernels``.

What no kernel does (``Choice.reason`` says why) is expanded by one and multiplied; that product is evaluated at once,
so at most one expanded weight is alive at any time, however deep the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import mlx.core as mx

from tqtool.formats.trellis import TrellisSpec
from tqtool.kernels.backend import Backend, Packed, Product, problem_of
from tqtool.kernels.problem import Choice, Problem
from tqtool.runtime.stock_model import TrellisLinear


class Products:
    """Products by kernels, made ready once for each shape and dtype of x: decoding asks for the same ones all the time.

    Args:
        bind: The kernel's product for an x, or None if there is no kernel.
        otherwise: The product then.
    """

    def __init__(self, bind: Callable[[mx.array], Product | None], otherwise: Product) -> None:
        self._bind, self._otherwise = bind, otherwise
        self._ready: dict[tuple[tuple[int, ...], mx.Dtype], Product] = {}

    def __call__(self, x: mx.array) -> mx.array:
        """The product of ``x``."""
        product = self._ready.get((x.shape, x.dtype))
        if product is None:
            product = self._bind(x)
            if product is None:
                return self._otherwise(x)
            self._ready[x.shape, x.dtype] = product
        return product(x)


class Joint(Protocol):
    """A product that several layers share (tqtool/runtime/joint_products.py)."""

    def take(self, place: int, x: mx.array) -> mx.array | None:
        """The part of the layer at ``place``, or None."""


class KernelTrellisLinear(TrellisLinear):
    """``TrellisLinear`` through the kernels of ``backend``: same parameters, the same values in float32 sums.

    With ``int8``, x is rounded to 8 bits where a kernel takes it so.
    """

    backend: Backend
    int8: bool

    def __init__(self, spec: dict[str, Any], *, bias: bool, codes: mx.array | None):
        super().__init__(spec, bias=bias, codes=codes)
        self.kernel_spec = TrellisSpec(**spec)
        self._packed: Packed | None = None
        self._product = Products(self._by_kernel, self._by_expansion)
        self.joint: Joint | None = None
        self._place = 0

    def join(self, joint: Joint, place: int) -> None:
        """Take products from ``joint`` from now on, where it has them; the weights have become parts of its own."""
        self.joint, self._place, self._packed = joint, place, None

    def __call__(self, x: mx.array) -> mx.array:
        """[..., in] → [..., out] in the type of ``x``."""
        y = None if self.joint is None else self.joint.take(self._place, x)
        if y is None:
            y = self._product(x)
        return y + self.bias.astype(y.dtype) if "bias" in self else y

    def _by_kernel(self, x: mx.array) -> Product | None:
        choice = choose(self.backend, problem_of(x, self.packed(), int8=self.int8))
        return None if choice.kernel is None else self.backend.bind(choice, x.shape, self.packed())

    def _by_expansion(self, x: mx.array) -> mx.array:
        weight = self.dense(x.dtype)
        y = x @ (weight if self.spec["axis"] == 0 else weight.T)
        mx.eval(y)
        return y

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


def kernel_layer(backend: Backend, *, int8: bool = False) -> type[KernelTrellisLinear]:
    """The layer class whose products go through ``backend``."""
    return type(f"{backend.name}TrellisLinear", (KernelTrellisLinear,), {"backend": backend, "int8": int8})


def choose(backend: Backend, problem: Problem) -> Choice:
    """The kernel for ``problem``; where none takes int8 activations, that for x as it is."""
    choice = backend.choose(problem)
    if choice.kernel is None and problem.int8:
        return backend.choose(replace(problem, int8=False))
    return choice
