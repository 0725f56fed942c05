"""Trellis layers on a CPU: words stay packed, products go through the compiled kernels.

Up to ``MATVEC_ROWS`` input rows (decoding) the native matvec reads the words directly. More rows (a prompt)
expand the weight to float32 and multiply through BLAS; that product is evaluated at once, so at most one
expanded weight is alive at any time, however deep the model.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from tqtool import native
from tqtool.errors import UserError
from tqtool.formats.trellis import TrellisSpec
from tqtool.kernels.device import backend_of
from tqtool.runtime.stock_model import TrellisExperts, TrellisLinear

MATVEC_ROWS = 4
"""Up to this many rows the packed kernel beats expansion (the weight is decoded once for all of them)."""


def layer_class_for(device: mx.Device, *, int8: bool = False) -> type[TrellisLinear]:
    """The trellis layer to run on ``device``: compiled kernels on the CPU, CUDA kernels on cards that they ran on.

    Elsewhere, on Apple's GPUs too, MLX operations, until kernels have passed their tests there (decision 0004) or
    are asked for (``tqtool.kernels.device``).

    Raises:
        UserError: ``int8`` activations on a device whose layers do not take them.
    """
    backend = backend_of(device)
    if backend is not None and (backend.name == "CUDA" or not int8):
        from tqtool.runtime.gpu_linear import kernel_layer

        return kernel_layer(backend, int8=int8)
    if int8:
        raise UserError(
            "int8 activations: only the CUDA kernels take them, and they are not in use here",
            hint="drop --activations int8",
        )
    return NativeTrellisLinear if device.type == mx.cpu else TrellisLinear


def experts_class_for(device: mx.Device, *, int8: bool = False) -> type[TrellisExperts]:
    """Stacks of experts on ``device``: each expert as ``layer_class_for`` has it; errors as there."""
    layer_class = layer_class_for(device, int8=int8)
    if device.type == mx.cpu:
        return NativeTrellisExperts
    return type("TrellisExperts", (TrellisExperts,), {"layer_class": layer_class})


class NativeTrellisLinear(TrellisLinear):
    """``TrellisLinear`` through ``tqtool.native``; same parameters, same values, float32 arithmetic."""

    def __init__(self, spec: dict[str, Any], *, bias: bool, codes: mx.array | None):
        super().__init__(spec, bias=bias, codes=codes)
        self.native_spec = TrellisSpec(**spec)
        self._views: tuple[NDArray[np.uint32], NDArray[np.float16]] | None = None

    def __call__(self, x: mx.array) -> mx.array:
        """[..., in] → [..., out] in the type of ``x``; evaluates ``x`` and the product."""
        few = x.size <= MATVEC_ROWS * x.shape[-1]
        y = self._matvec(x) if few else self._product(x)
        y = y.astype(x.dtype)
        return y + self.bias.astype(y.dtype) if "bias" in self else y

    def stored_weight(self) -> mx.array:
        """The whole stored matrix, float32 [rows, cols]."""
        return mx.array(native.trellis_expand(*self._packed(), self.native_spec))

    def _matvec(self, x: mx.array) -> mx.array:
        # Shapes are numpy's business: an operation of MLX would have to be evaluated, which takes a third of the time.
        inputs = np.array(x.astype(mx.float32), copy=False)
        y = native.trellis_matvec(*self._packed(), self.native_spec, inputs.reshape(-1, x.shape[-1]))
        return mx.array(y.reshape(*x.shape[:-1], -1))

    def _product(self, x: mx.array) -> mx.array:
        weight = self.stored_weight()
        flat = x.astype(mx.float32).reshape(-1, x.shape[-1])
        y = flat @ (weight if self.spec["axis"] == 0 else weight.T)
        mx.eval(y)
        return y.reshape(*x.shape[:-1], -1)

    def hold(self, words: NDArray[np.uint32], scales: NDArray[np.float16]) -> None:
        """Serve these words and scales."""
        self._views = words, scales

    def _packed(self) -> tuple[NDArray[np.uint32], NDArray[np.float16]]:
        """Words and scales as numpy views of the MLX buffers, made once the weights are loaded."""
        if self._views is None:
            self._views = np.array(self.weight, copy=False), np.array(self.scales, copy=False)
        return self._views


class NativeTrellisExperts(TrellisExperts):
    """``TrellisExperts`` through ``tqtool.native``: an expert's words are a view of the stack's."""

    layer_class = NativeTrellisLinear

    def __init__(self, spec: dict[str, Any], *, codes: mx.array | None):
        super().__init__(spec, codes=codes)
        self._views: tuple[NDArray[np.uint32], NDArray[np.float16]] | None = None

    def product(self, index: int, x: mx.array) -> mx.array:
        """Rows ``x`` [n, in] through one expert: [n, out]; evaluates both."""
        if self._views is None:
            self._views = np.array(self.weight, copy=False), np.array(self.scales, copy=False)
        words, scales = self._views
        layer = NativeTrellisLinear(self.spec, bias=False, codes=self._codes)
        layer.hold(words[index], scales[index])
        return layer(x)
