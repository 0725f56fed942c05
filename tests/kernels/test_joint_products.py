"""Queries, keys and values in one product: to the bit those of the layers alone, in mlx-lm's own attention too."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from tests.support.metal.device import Shim
from tests.support.stock_modules import stock_module
from tests.support.tiny_models import Tiny, write_tiny
from tqtool.formats.trellis import spec_for
from tqtool.kernels.metal import METAL
from tqtool.pipeline.trellis import TrellisRequest, plan_trellis
from tqtool.runtime import linear
from tqtool.runtime.gated_mlp import fuse_gates
from tqtool.runtime.gpu_linear import kernel_layer
from tqtool.runtime.joint_products import ATTENTIONS, NAMES, JointProducts, join_projections, why_not
from tqtool.runtime.linear import NativeTrellisLinear
from tqtool.runtime.load import load
from tqtool.runtime.paths import explain
from tqtool.runtime.stock_model import code_values
from tqtool.solve.trellis import TrellisOptions


@pytest.fixture(scope="session")
def layer_class(tmp_path_factory):
    return kernel_layer(METAL.with_runner(Shim(tmp_path_factory.mktemp("joint"))))


def layer_of(layer_class, rows, number, *, k=3, bias=False, tile=True):
    spec = spec_for((rows, 64), k=k, axis=1, tile=tile)
    rng = np.random.default_rng(number)
    layer = layer_class(spec.to_config(), bias=bias, codes=code_values("mul1", 12))
    layer.weight = mx.array(rng.integers(0, 2**32, spec.words_shape, dtype=np.uint32))
    layer.scales = mx.array(rng.uniform(0.05, 0.1, spec.rows).astype(np.float16))
    if bias:
        layer.bias = mx.array(rng.standard_normal(rows).astype(np.float32))
    return layer


def projections(layer_class, **options):
    return [layer_of(layer_class, rows, number, **options) for number, rows in enumerate((64, 32, 32))]


def inputs(rows, seed=9):
    return mx.array(np.random.default_rng(seed).standard_normal((1, rows, 64)).astype(np.float32))


@pytest.mark.parametrize("rows", [1, 3, 6])
@pytest.mark.parametrize("bias", [False, True])
def test_parts_are_the_products_of_the_layers(layer_class, rows, bias):
    layers, alone = projections(layer_class, bias=bias), projections(layer_class, bias=bias)
    JointProducts(layers)
    for x in (inputs(rows), inputs(rows, seed=10)):
        for layer, other in zip(layers, alone, strict=True):
            assert mx.array_equal(layer(x), other(x))
    for layer, other in zip(layers, alone, strict=True):  # prompts, and whoever asks for the weight
        assert mx.array_equal(layer.stored_weight(), other.stored_weight())
        assert mx.array_equal(layer.weight, other.weight)


def test_the_order_of_calls_and_other_inputs_between_change_nothing(layer_class):
    layers, alone = projections(layer_class), projections(layer_class)
    JointProducts(layers)
    x, z = inputs(1), inputs(1, seed=10)
    for place, given in ((2, x), (0, z), (1, x), (1, x), (0, x), (2, z), (1, z), (0, z), (0, z)):
        assert mx.array_equal(layers[place](given), alone[place](given)), (place, given is x)


def test_one_product_serves_three_layers_and_keeps_nothing(layer_class):
    layers = projections(layer_class)
    joint = JointProducts(layers)
    calls = []
    plain = joint._product

    def counting(x):
        calls.append(x)
        return plain(x)

    joint._product = counting
    x = inputs(1)
    for layer in layers:
        layer(x)
    assert len(calls) == 1
    assert (joint._x, joint._parts) == (None, [None] * 3)


def attention(name, layers):
    made = stock_module(name, hidden=64)
    for projection, layer in zip(NAMES, layers, strict=True):
        setattr(made, projection, layer)
    made.o_proj = nn.Linear(64, 64, bias=False)
    made.o_proj.weight = mx.eye(64)
    return made


@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention_is_the_stock_one(layer_class, name):
    model = nn.Module()
    model.attention = attention(name, projections(layer_class))
    names = sorted(path for path, _ in tree_flatten(model.parameters()))
    assert join_projections(model) == 1
    assert sorted(path for path, _ in tree_flatten(model.parameters())) == names
    x = inputs(1)
    y, alone = model.attention(x), attention(name, projections(layer_class))(x)
    assert mx.array_equal(y, alone)
    stock = attention(name, projections(NativeTrellisLinear))(x)
    # Of one position the result is v: 64 products below 4 · .1 · 3.5 in another order, and two sums of it.
    np.testing.assert_allclose(np.array(y), np.array(stock), rtol=0, atol=64 * 64 * 1.4 * 3 * 2.0**-24)
    paths = {path.module: path for path in explain(model, (1,))}
    assert all("q_proj k_proj v_proj at once" in paths[f"attention.{each}"].reason for each in NAMES)
    assert all("at once" not in path.reason for path in explain(model, (6,)))


def test_what_is_not_joined(layer_class):
    first, *rest = projections(layer_class)
    assert why_not([first, *rest]) is None
    assert why_not([first, nn.Linear(64, 32)]) == "not all of them are trellis layers with kernels"
    assert why_not([first, layer_of(layer_class, 32, 1, k=2)]) == "they differ in more than their rows"
    assert why_not(projections(layer_class, tile=False)) == "they are not made of whole squares"
    assert why_not([first, layer_of(layer_class, 24, 1)]) == "they are not made of whole squares"


def test_a_whole_model_with_all_that_can_be_joined(layer_class, tmp_path, monkeypatch):
    """Every trellis layer through the executor, gates and projections joined: the logits of the CPU's model."""
    options = TrellisOptions(k=3, warmup=16, threads=1)
    source = write_tiny(tmp_path / "source", Tiny(model_type="qwen2", layers=1))
    request = TrellisRequest(source=str(source), out=tmp_path / "k3", options=options, modules=("all",), layout="tile")
    plan_trellis(request).run()
    tokens = mx.array([[5, 6, 7]])
    wanted = load(tmp_path / "k3").model(tokens)
    monkeypatch.setattr(linear, "layer_class_for", lambda device, int8=False: layer_class)
    model = load(tmp_path / "k3").model
    assert (fuse_gates(model), join_projections(model)) == (1, 1)
    found = model(tokens)
    # Layers differ by roundings of float32, logits are around 1: far below what one wrong weight does.
    np.testing.assert_allclose(np.array(found), np.array(wanted), rtol=0, atol=1e-4)
    assert float(mx.abs(wanted).max()) > 0.1
    assert {path.path for path in explain(model, (3,))} == {"tile", "tile_swiglu"}
