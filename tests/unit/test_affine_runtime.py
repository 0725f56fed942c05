"""Quantized layers on a CPU: chunk by chunk the same values as MLX's own, in bounded memory."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

from tests.support.memory import added_peak_bytes
from tqtool.runtime import affine
from tqtool.runtime.affine import PromptLinear, dequantize

PREPARE = """
from tqtool.runtime.blas import ensure_blas
ensure_blas()
import mlx.core as mx, mlx.nn as nn
from tqtool.runtime.affine import PromptLinear
layer = nn.QuantizedLinear(512, 60_000, False, 64, 6)
layer.set_dtype(mx.float32)
layer = PromptLinear.of(layer)
x = mx.random.normal((8, 512))
mx.eval(layer.parameters(), x)
layer.of(nn.QuantizedLinear(512, 64, False, 64, 6))(x)
"""


@pytest.mark.parametrize(("bits", "group_size", "mode"), [(3, 64, "affine"), (6, 32, "affine"), (4, 32, "mxfp4")])
@pytest.mark.parametrize("bias", [False, True])
def test_chunks_change_nothing(monkeypatch, bits, group_size, mode, bias):
    """Three chunks and a ragged one; what MLX dequantizes whole, and its product up to float32 summation order."""
    dense = nn.Linear(192, 112, bias=bias)
    layer = nn.QuantizedLinear.from_linear(dense, group_size=group_size, bits=bits, mode=mode)
    biases = layer.get("biases")
    options = {"group_size": group_size, "bits": bits, "mode": mode, "dtype": mx.float32}
    whole = np.array(mx.dequantize(layer.weight, layer.scales, biases, **options))
    monkeypatch.setattr(affine, "CHUNK", 192 * 32)
    assert np.array_equal(np.array(dequantize(layer, mx.float32)), whole)
    x = np.random.default_rng(0).standard_normal((9, 192)).astype(np.float32)
    expected = x.astype(np.float64) @ whole.T.astype(np.float64)
    # A float32 dot product of n terms errs by at most n·ε·Σ|x·w|.
    allowed = 192 * 2.0**-24 * (np.abs(x).astype(np.float64) @ np.abs(whole).T.astype(np.float64)) + 1e-6
    if bias:
        expected = expected + np.array(layer.bias)
    assert (np.abs(np.array(PromptLinear.of(layer)(mx.array(x))) - expected) <= allowed).all()


def test_experts_are_cut_along_their_first_axis(monkeypatch):
    layer = QuantizedSwitchLinear(64, 32, 5, bias=False, group_size=32, bits=4)
    whole = np.array(
        mx.dequantize(layer.weight, layer.scales, layer.biases, group_size=32, bits=4, mode="affine", dtype=mx.float32)
    )
    monkeypatch.setattr(affine, "CHUNK", 2 * 32 * 64)
    assert np.array_equal(np.array(dequantize(layer, mx.float32)), whole)


def test_a_wide_head_does_not_multiply_its_size():
    """123 MB in float32; MLX alone takes seven times that. A chunk is 16 MiB, so 8 × that, and 8 MiB."""
    added = added_peak_bytes(PREPARE, "mx.eval(layer(x))")
    assert added < 8 * 4 * affine.CHUNK + (8 << 20)
