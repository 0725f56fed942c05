"""Trellis layers of a loaded model through the kernels, against the CPU's compiled ones.

Metal's text under the executor stands for any backend: the layer knows no difference.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from tests.support.command import run
from tests.support.metal.device import Shim
from tests.support.stock_modules import stock_module
from tqtool.errors import UserError
from tqtool.formats.trellis import spec_for
from tqtool.kernels.cuda import CUDA
from tqtool.kernels.metal import METAL
from tqtool.runtime import linear
from tqtool.runtime.gated_mlp import SILU_MLPS, GatedMLP, fuse_gates
from tqtool.runtime.gpu_linear import kernel_layer
from tqtool.runtime.linear import NativeTrellisLinear
from tqtool.runtime.paths import explain
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


def mlp_of(name, layers):
    """mlx-lm's module ``name`` of sizes 32 → 48 → 32 with ``layers`` in it."""
    made = stock_module(name, hidden=32)
    made.gate_proj, made.up_proj, made.down_proj = layers
    return made


def layers_of(layer_class, *, bias=False, tile=True):
    """gate, up and down; the two matrices of other bits where kernels do both."""
    found = []
    for number, (shape, k) in enumerate((((48, 32), 3), ((48, 32), 2), ((32, 48), 3))):
        spec = spec_for(shape, k=k, axis=1, tile=tile)
        rng = np.random.default_rng(number)
        layer = layer_class(spec.to_config(), bias=bias, codes=code_values("mul1", 12))
        layer.weight = mx.array(rng.integers(0, 2**32, spec.words_shape, dtype=np.uint32))
        layer.scales = mx.array(rng.uniform(0.05, 0.1, spec.rows).astype(np.float16))
        found.append(layer)
    return found


@pytest.mark.parametrize("name", SILU_MLPS)
@pytest.mark.parametrize("rows", [1, 40])
def test_an_mlp_with_gate_and_up_at_once_is_the_stock_one(layer_class, name, rows):
    stock = mlp_of(name, layers_of(NativeTrellisLinear))
    model = nn.Module()
    model.mlp = mlp_of(name, layers_of(layer_class))
    assert fuse_gates(model) == 1
    assert type(model.mlp) is GatedMLP
    assert sorted(dict(tree_flatten(model.parameters()))) == [
        f"mlp.{layer}.{name}" for layer in ("down_proj", "gate_proj", "up_proj") for name in ("scales", "weight")
    ]
    x = mx.array(np.random.default_rng(9).standard_normal((1, rows, 32)).astype(np.float32))
    y, wanted = model.mlp(x), stock(x)
    assert y.shape == (1, rows, 32)
    # Hidden values are below (32 · .1 · 3.5 · 3)² = 1130 and 32 + 10 roundings wrong; 48 of them times .35 are summed.
    np.testing.assert_allclose(np.array(y), np.array(wanted), rtol=0, atol=48 * 0.35 * 1130 * 2 * 90 * 2.0**-24)
    paths = {path.module: path.path for path in explain(model, (rows,))}
    gate = "tile_swiglu" if rows == 1 else "expand + matmul"
    assert paths == {"mlp.gate_proj": gate, "mlp.up_proj": gate, "mlp.down_proj": paths["mlp.down_proj"]}


def test_mlps_that_are_left_as_they_are(layer_class):
    name = SILU_MLPS[0]
    model = nn.Module()
    model.cpu = mlp_of(name, layers_of(NativeTrellisLinear))
    model.biased = mlp_of(name, layers_of(layer_class, bias=True))
    model.other = nn.Module()
    model.other.gate_proj, model.other.up_proj, model.other.down_proj = layers_of(layer_class)
    assert fuse_gates(model) == 0


def test_gates_that_no_kernel_takes_together_are_two_products(layer_class):
    """Of other bits one kernel does them; of other layouts none."""
    gate, _, down = layers_of(layer_class)
    up = layers_of(layer_class, tile=False)[1]
    mlp = GatedMLP(gate, up, down)
    x = mx.array(np.random.default_rng(9).standard_normal((1, 1, 32)).astype(np.float32))
    wanted = down(nn.silu(gate(x)) * up(x))
    np.testing.assert_allclose(np.array(mlp(x)), np.array(wanted), rtol=1e-5, atol=1e-5)
    model = nn.Module()
    model.mlp = mlp
    assert {path.path for path in explain(model, (1,))} == {"tile", "reduce"}


def test_int8_activations_are_taken_where_a_kernel_does():
    layer = kernel_layer(CUDA, int8=True)
    tile, other = ({"axis": 1, "tile": True}, {"axis": 1})
    found = {}
    for options in (tile, other):
        made, _ = pair(layer, **options)
        found[made.kernel_spec.layout] = explain(_holder(made), (1, 4, 5))
    reasons = [path.reason for path in found["tile"]]
    assert ["int8 activations" in reason for reason in reasons] == [True, True, False]
    assert [path.path for path in found["axis1"]] == ["reduce", "reduce", "expand + matmul"]
    with pytest.raises(UserError, match="int8 activations: only the CUDA kernels"):
        linear.layer_class_for(mx.Device(mx.cpu), int8=True)


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
