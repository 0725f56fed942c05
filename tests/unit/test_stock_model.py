"""The module file of packed artifacts: decoding in MLX operations against Python integers."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from tests.oracles import trellis_stream
from tests.support.tiny_models import Tiny
from tqtool.formats.trellis import spec_for
from tqtool.mathx import codes
from tqtool.runtime import stock_model
from tqtool.runtime.linear import MATVEC_ROWS, NativeTrellisLinear
from tqtool.runtime.stock_model import TrellisLinear, code_values

# [out, in]: blocks fill rows; blocks cross rows; a padded last block; narrower than a block.
SHAPES = ((8, 256), (4, 576), (7, 300), (5, 40))
CASES = [
    (shape, axis, k, window, code, pad)
    for shape in SHAPES
    for axis in (0, 1)
    for k, window, code, pad in (
        (1, 12, "mul1", False),
        (2, 14, "1mad", True),
        (3, 12, "mul1", False),
        (4, 16, "mul1", True),
    )
]


def make(layer_class, shape, axis, k, window, code, pad, *, bias=None):
    spec = spec_for(shape, k=k, axis=axis, window=window, code=code, pad_rows=pad)
    rng = np.random.default_rng(7 * k + axis)
    words = rng.integers(0, 2**32, spec.words_shape, dtype=np.uint32)
    scales = rng.uniform(0.5, 2.0, spec.rows).astype(np.float16)
    layer = layer_class(spec.to_config(), bias=bias is not None, codes=code_values(code, window))
    assert layer.weight.shape == words.shape
    layer.weight, layer.scales = mx.array(words), mx.array(scales)
    if bias is not None:
        layer.bias = mx.array(bias)
    return layer, trellis_stream.decode(words, scales, spec.to_config())


@pytest.mark.parametrize("layer_class", [TrellisLinear, NativeTrellisLinear])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_decode_equals_the_integer_oracle(layer_class, case):
    layer, expected = make(layer_class, *case)
    np.testing.assert_array_equal(np.array(layer.stored_weight()), expected)


@pytest.mark.parametrize("case", CASES[:8], ids=str)
def test_any_span_of_rows_decodes_alone(case):
    layer, expected = make(TrellisLinear, *case)
    for start in range(len(expected)):
        np.testing.assert_array_equal(np.array(layer.decode_rows(start, start + 1)), expected[start : start + 1])


@pytest.mark.parametrize("n_rows", [1, MATVEC_ROWS, MATVEC_ROWS + 1])
@pytest.mark.parametrize("layer_class", [TrellisLinear, NativeTrellisLinear])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_product_with_bias(layer_class, case, n_rows, monkeypatch):
    monkeypatch.setattr(stock_model, "CHUNK_WEIGHTS", 512)  # several chunks even here
    rng = np.random.default_rng(1)
    (out_dims, in_dims), axis = case[0], case[1]
    bias = rng.standard_normal(out_dims).astype(np.float32)
    layer, stored = make(layer_class, *case, bias=bias)
    weight = (stored if axis == 1 else stored.T).astype(np.float64)
    x = rng.standard_normal((1, n_rows, in_dims)).astype(np.float32)
    y = np.array(layer(mx.array(x)))
    assert y.shape == (1, n_rows, out_dims)
    # Every product and sum rounds once, in any order: n·eps of the sum of magnitudes, and the bias.
    bound = (in_dims + 2) * np.finfo(np.float32).eps * (np.abs(x) @ np.abs(weight.T) + np.abs(bias))
    assert (np.abs(y - (x.astype(np.float64) @ weight.T + bias)) <= bound).all()


@pytest.mark.parametrize("layer_class", [TrellisLinear, NativeTrellisLinear])
def test_bf16_input_gives_bf16_output(layer_class):
    layer, stored = make(layer_class, (4, 576), 0, 3, 12, "mul1", False)
    x = mx.random.normal((1, 6, 576)).astype(mx.bfloat16)
    y = layer(x)
    assert y.dtype == mx.bfloat16
    exact = np.array(x.astype(mx.float32)).astype(np.float64) @ stored.astype(np.float64)
    magnitude = np.abs(np.array(x.astype(mx.float32))) @ np.abs(stored)
    assert (np.abs(np.array(y.astype(mx.float32)) - exact) <= 2**-7 * magnitude).all()


@pytest.mark.parametrize("code", codes.COMPUTED_CODES)
@pytest.mark.parametrize("window", [12, 14, 16])
def test_code_values_equal_mathx(code, window):
    np.testing.assert_array_equal(np.array(code_values(code, window)), codes.values(code, window))


def test_a_code_without_formula_uses_the_stored_table():
    spec = spec_for((4, 256), k=3, axis=1, code="rptc")
    layer = TrellisLinear(spec.to_config(), bias=False, codes=code_values("rptc", 12))
    assert layer.table.shape == (4096,)
    layer.table = code_values("mul1", 12)
    words = np.random.default_rng(0).integers(0, 2**32, spec.words_shape, dtype=np.uint32)
    layer.weight, layer.scales = mx.array(words), mx.ones((4,), mx.float16)
    expected = trellis_stream.decode(words, np.ones(4, np.float16), spec.to_config() | {"code": "mul1"})
    np.testing.assert_array_equal(np.array(layer.stored_weight()), expected)


@pytest.mark.parametrize(
    "change",
    [{"k": 0}, {"window": 17}, {"block": 24}, {"axis": 2}, {"stride": 200}, {"tile": 8}],
    ids=lambda change: str(change),
)
def test_impossible_specs_are_refused(change):
    spec = spec_for((4, 256), k=3, axis=1).to_config() | change
    with pytest.raises(ValueError, match="not decodable"):
        TrellisLinear(spec, bias=False, codes=None)


@pytest.mark.parametrize(
    ("trellis", "message"),
    [
        ({"format_version": 3, "modules": {}}, "format_version: expected 1 or 2, found 3"),
        ({"modules": {}}, "format_version: expected 1 or 2, found None"),
        (
            {"format_version": 1, "modules": {"model.norm": spec_for((4, 256), k=3, axis=1).to_config()}},
            "trellis module model.norm: expected a Linear layer, found RMSNorm",
        ),
        (
            {"format_version": 1, "modules": {"model.absent": spec_for((4, 256), k=3, axis=1).to_config()}},
            "trellis module model.absent: expected a Linear layer, found NoneType",
        ),
    ],
)
def test_the_module_file_refuses_what_it_does_not_know(trellis, message):
    with pytest.raises(ValueError, match=message):
        stock_model.Model(stock_model.ModelArgs.from_dict(Tiny().config() | {"trellis": trellis}))
