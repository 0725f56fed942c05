"""Trellis layers of a loaded model through the kernels, against the CPU's compiled ones.

Metal's text under the executor stands for any backend: the layer knows no difference.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from tests.support.command import run
from tests.support.metal.device import Shim
from tqtool.formats.trellis import spec_for
from tqtool.kernels.metal import METAL
from tqtool.runtime import linear
from tqtool.runtime.gpu_linear import explain, kernel_layer
from tqtool.runtime.linear import NativeTrellisLinear
from tqtool.runtime.stock_model import code_values


@pytest.fixture(scope="session")
def layer_class(tmp_path_factory):
    return kernel_layer(METAL.with_runner(Shim(tmp_path_factory.mktemp("layers"))))


def pair(layer_class, *, code="mul1", bias=True, **options):
    """Two layers with the same parameters."""
    spec = spec_for((48, 80), k=3, code=code, **options)
    rng = np.random.default_rng(0)
    values = {
        "weight": mx.array(rng.integers(0, 2**32, spec.words_shape, dtype=np.uint32)),
        "scales": mx.array(rng.uniform(0.5, 1, spec.rows).astype(np.float16)),
    }
    if code_values(code, 12) is None:
        values["table"] = mx.array(rng.standard_normal(4096).astype(np.float32))
    if bias:
        values["bias"] = mx.array(rng.standard_normal(48).astype(np.float32))
    layers = []
    for each in (layer_class, NativeTrellisLinear):
        layer = each(spec.to_config(), bias=bias, codes=code_values(code, 12))
        layer.update(values)
        layers.append(layer)
    return layers


@pytest.mark.parametrize("options", [{"axis": 1}, {"axis": 0}, {"axis": 1, "tile": True}], ids=str)
@pytest.mark.parametrize(("shape", "path"), [((1, 1, 80), "kernel"), ((2, 2, 80), "kernel"), ((1, 40, 80), "expand")])
def test_products_are_those_of_the_cpu(layer_class, options, shape, path):
    ours, native = pair(layer_class, **options)
    x = mx.array(np.random.default_rng(1).standard_normal(shape).astype(np.float32))
    y, wanted = ours(x), native(x)
    assert (y.shape, y.dtype) == ((*shape[:-1], 48), mx.float32)
    # Both sum 80 products of values below 4 x 1 x 3.5 in float32, in an order of their own.
    np.testing.assert_allclose(np.array(y), np.array(wanted), rtol=0, atol=2 * 80 * 80 * 14 * 2.0**-24)
    (found,) = [p for p in explain(_holder(ours), (shape[0] * shape[1],)) if p.module == "layer"]
    assert (found.path == "expand + matmul") == (path == "expand"), found


def test_a_code_without_formula_is_expanded_by_its_table(layer_class):
    spec = spec_for((16, 32), k=3, axis=1, code="rptc")
    layer = layer_class(spec.to_config(), bias=False, codes=None)
    rng = np.random.default_rng(0)
    layer.update(
        {
            "weight": mx.array(rng.integers(0, 2**32, spec.words_shape, dtype=np.uint32)),
            "scales": mx.ones((16,), mx.float16),
            "table": mx.array(rng.standard_normal(4096).astype(np.float32)),
        }
    )
    x = mx.array(rng.standard_normal((1, 32)).astype(np.float32))
    weight = layer.decode_rows(0, 16)
    np.testing.assert_allclose(np.array(layer(x)), np.array(x @ weight.T), rtol=1e-5, atol=1e-5)
    (found,) = explain(_holder(layer), (1,))
    assert (found.path, "rptc has no formula" in found.reason) == ("expand + matmul", True)


def test_which_class_a_device_gets(monkeypatch):
    assert linear.layer_class_for(mx.Device(mx.cpu)) is NativeTrellisLinear
    for has_cuda, generation, name in (
        (True, 9, "CUDATrellisLinear"),
        (True, 8, "TrellisLinear"),
        (False, 9, "TrellisLinear"),
    ):
        monkeypatch.setattr(mx.cuda, "is_available", lambda found=has_cuda: found)
        of_device = {mx.gpu: {"compute_capability_major": generation}, mx.cpu: {"architecture": "x86_64"}}
        monkeypatch.setattr(mx, "device_info", of_device.__getitem__)
        assert linear.layer_class_for(mx.Device(mx.gpu)).__name__ == name


def _holder(layer):
    import mlx.nn as nn

    holder = nn.Module()
    holder.layer = layer
    return holder


def test_generate_explains(tmp_path, capsys, monkeypatch):
    from tests.support.candidates import write_trellis
    from tests.support.tiny_models import Tiny, write_tiny

    write_trellis(write_tiny(tmp_path / "source", Tiny(layers=1)), tmp_path / "k3", k=3)
    answer = run(capsys, monkeypatch, "generate", tmp_path / "k3", "-p", "w5", "--raw", "-m", 2, "--explain")
    assert answer.code == 0, answer.err
    assert "3 trellis layers, one row: NativeTrellisLinear (no GPU kernels in use)" in answer.err
