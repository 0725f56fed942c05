"""Stacks of trellis matrices: every expert against the integer oracle, however mlx-lm hands the rows over."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.switch_layers import SwitchGLU, SwitchLinear

from tests.oracles import trellis_stream
from tqtool.errors import ArtifactError
from tqtool.formats.trellis import TrellisSpec, spec_for
from tqtool.runtime.expand import dense_twin
from tqtool.runtime.linear import NativeTrellisExperts
from tqtool.runtime.stock_model import TrellisExperts, code_values

EXPERTS = 5
CLASSES = [TrellisExperts, NativeTrellisExperts]
# [out, in] and layout: squares with ragged edges; blocks across rows; along outputs.
CASES = [((40, 72), {"axis": 1, "tile": True}), ((5, 40), {"axis": 1}), ((24, 300), {"axis": 0})]


def make(layer_class, shape, layout, k=3):
    """A stack of random words, and its weights by the oracle, ``[experts, out, in]``."""
    spec = spec_for(shape, k=k, **layout)
    rng = np.random.default_rng(11)
    words = rng.integers(0, 2**32, (EXPERTS, *spec.words_shape), dtype=np.uint32)
    scales = rng.uniform(0.5, 2.0, (EXPERTS, spec.rows)).astype(np.float16)
    config = spec.to_config() | {"experts": EXPERTS}
    layer = layer_class(config, codes=code_values("mul1", 12))
    assert (layer.weight.shape, layer.scales.shape) == (words.shape, scales.shape)
    layer.weight, layer.scales = mx.array(words), mx.array(scales)
    stored = [trellis_stream.decode(words[e], scales[e], spec.to_config()) for e in range(EXPERTS)]
    return layer, np.stack([matrix if spec.axis == 1 else matrix.T for matrix in stored])


@pytest.mark.parametrize("layer_class", CLASSES)
@pytest.mark.parametrize(("shape", "layout"), CASES, ids=str)
def test_each_row_meets_its_expert(layer_class, shape, layout):
    layer, weights = make(layer_class, shape, layout)
    rng = np.random.default_rng(1)
    x = rng.standard_normal((2, 7, shape[1])).astype(np.float32)
    indices = rng.integers(0, EXPERTS - 1, (2, 7, 3))  # the last expert is idle
    # As gate and up are called, every row for three experts, and as down is, a row an expert.
    shared = np.array(layer(mx.array(x)[..., None, None, :], mx.array(indices)))
    own = np.repeat(x[:, :, None, None, :], 3, axis=2)
    alone = np.array(layer(mx.array(own), mx.array(indices)))
    expected = np.einsum("btkoi,bti->btko", weights[indices], x)[..., None, :]
    # Float32 sums of `in` products: in · 2^-24 of the sum of their magnitudes.
    bound = shape[1] * 2.0**-24 * np.einsum("btkoi,bti->btko", np.abs(weights[indices]), np.abs(x))[..., None, :]
    assert shared.shape == alone.shape == expected.shape
    assert (np.abs(shared - expected) <= bound).all()
    assert np.array_equal(shared, alone)
    # As many rows are called: sorted by expert.
    order = np.argsort(indices.reshape(-1), kind="stable")
    rows = own.reshape(-1, 1, shape[1])[order]
    sorted_rows = layer(mx.array(rows), mx.array(indices.reshape(-1)[order]), sorted_indices=True)
    assert np.array_equal(np.array(sorted_rows), alone.reshape(-1, 1, shape[0])[order])


@pytest.mark.parametrize("layer_class", CLASSES)
def test_a_whole_block_is_that_of_dense_experts(layer_class):
    """mlx-lm's own block, sorting and all, with packed stacks and with their dense twins."""
    block = SwitchGLU(72, 40, EXPERTS)
    stacks = {
        "gate_proj": make(layer_class, (40, 72), {"axis": 1, "tile": True})[0],
        "up_proj": make(layer_class, (40, 72), {"axis": 1})[0],
        "down_proj": make(layer_class, (72, 40), {"axis": 0})[0],
    }
    x = mx.array(np.random.default_rng(2).standard_normal((1, 40, 72)).astype(np.float32)) / 10
    for tokens in (1, 40):  # 40 · 2 ≥ 64: mlx-lm sorts
        indices = mx.array(np.random.default_rng(3).integers(0, EXPERTS, (1, tokens, 2)))
        block.update_modules(stacks)
        packed = np.array(block(x[:, :tokens], indices))
        block.update_modules({name: dense_twin(stack, mx.float32) for name, stack in stacks.items()})
        assert all(type(block[name]) is SwitchLinear for name in stacks)
        dense = np.array(block(x[:, :tokens], indices))
        assert np.abs(packed - dense).max() <= 1e-4 * np.abs(dense).max()  # three products of float32


@pytest.mark.parametrize("layer_class", CLASSES)
def test_a_dense_twin_holds_every_expert(layer_class):
    for shape, layout in CASES:
        layer, weights = make(layer_class, shape, layout)
        np.testing.assert_array_equal(np.array(dense_twin(layer, mx.float32).weight), weights)


def test_a_spec_says_the_shapes_of_a_stack():
    spec = spec_for((40, 72), k=2, axis=1, tile=True)
    stack = TrellisSpec(**(spec.to_config() | {"experts": 3}))
    assert "experts" not in spec.to_config()
    assert stack.to_config()["experts"] == 3
    assert stack.matrix == spec
    assert (stack.words_shape, stack.scales_shape) == ((3, *spec.words_shape), (3, 40))
    assert (spec.served_shape, stack.served_shape) == ((40, 72), (3, 40, 72))


@pytest.mark.parametrize("experts", [0, -1, True, "3", 2.0])
def test_an_impossible_number_of_experts_is_refused(experts):
    entry = spec_for((40, 72), k=2, axis=1).to_config() | {"experts": experts}
    with pytest.raises(ArtifactError, match="experts"):
        TrellisSpec.from_config("m", entry)


def test_version_1_knows_no_stacks():
    entry = spec_for((40, 72), k=2, axis=1).to_config() | {"experts": 3}
    del entry["tile"]
    with pytest.raises(ArtifactError, match="expected the keys"):
        TrellisSpec.from_config("m", entry, version=1)
