"""The KV codec: error against theory, the format page, constant groups, MLX's operations and numpy's the same bytes."""

from __future__ import annotations

import itertools

import ml_dtypes
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.stats import norm

from tests.oracles import kv as oracle
from tqtool.errors import BackendError, UserError
from tqtool.kv import array_codec, codec, record
from tqtool.kv.lloyd_max import EXACT, boundaries, levels
from tqtool.kv.record import RecordLayout
from tqtool.kv.scheme import GROUP, HEAD_DIMS, KEY_BITS, VALUE_BITS, KVOptions, KVScheme, parse_options, parse_scheme
from tqtool.kv.signs import signs

PAIRS = list(itertools.product(KEY_BITS, VALUE_BITS))
RULES = ("exact", "vllm-metal")


def scheme(k_bits=8, v_bits=3, rule="exact"):
    return KVScheme(kind="turbo", k_bits=k_bits, v_bits=v_bits, rule=rule)


def gaussian(rows, head_dim, seed=0):
    return np.random.default_rng(seed).standard_normal((2, rows, head_dim)).astype(np.float32)


def awkward(head_dim):
    """Rows of many sizes and offsets, constants, zeros, ties of keys, values on boundaries."""
    keys, values = gaussian(40, head_dim, seed=head_dim)
    for row in range(12):
        keys[row] = keys[row] * np.float32(10.0) ** (row - 8) + np.float32((row % 4) * 2.5)
        values[row] *= np.float32(10.0) ** (2 * row - 14)
    keys[12], keys[13], keys[14] = 0, -3.25, 1e-30
    keys[15] = np.resize(np.arange(-127, 128, dtype=np.float32) / 2, head_dim)
    keys[16, ::2], keys[16, 1::2] = 60000, -60000
    values[12], values[13] = 0, 1e-30
    values[14] = signs(head_dim)  # one rotated element has it all
    return keys, values


# ------------------------------------------------------------------------------------------------------ tables
@pytest.mark.parametrize("bits", VALUE_BITS)
def test_levels_are_means_of_their_cells(bits):
    """Lloyd-Max's two conditions on N(0, 1), in float64."""
    half = np.array(EXACT[bits])
    table = np.concatenate([-half[::-1], half])
    edges = np.concatenate([[-np.inf], (table[:-1] + table[1:]) / 2, [np.inf]])
    means = (norm.pdf(edges[:-1]) - norm.pdf(edges[1:])) / (norm.cdf(edges[1:]) - norm.cdf(edges[:-1]))
    # The difference of two cumulative probabilities near 1 has lost digits; the lower half has not.
    lower = slice(0, 1 << (bits - 1))
    np.testing.assert_allclose(means[lower], table[lower], rtol=0, atol=1e-12 * (1 << bits))
    np.testing.assert_array_equal(boundaries(bits, "exact"), edges[1:-1].astype(np.float32))


@pytest.mark.parametrize("bits", VALUE_BITS)
def test_constants_of_the_page(bits):
    np.testing.assert_array_equal(oracle.page_levels(bits), levels(bits, "exact"))
    for head_dim in HEAD_DIMS:
        np.testing.assert_array_equal(oracle.page_signs(head_dim), signs(head_dim))


# ------------------------------------------------------------------------------------------------- distortion
# Squared errors of 640 000 draws; the standard error of each is below 0.3 %, gates are at 1 %.
PLAIN = {2: 0.117482, 3: 0.034548, 4: 0.009501, 5: 0.0025047, 8: 4.11851e-5}
GROUPED = {2: 0.11196, 3: 0.03255, 4: 0.00898}
KEYS = {2: 0.165, 4: 0.00653, 5: 0.00153, 8: 2.28e-5}


@pytest.mark.parametrize("bits", VALUE_BITS)
def test_error_of_values(bits):
    x, rotated = gaussian(5000, 128)
    cells = np.searchsorted(boundaries(bits, "exact"), x)
    assert np.mean((levels(bits, "exact")[cells] - x) ** 2) == pytest.approx(PLAIN[bits], rel=0.01)
    _, decoded = codec.decode(codec.encode(x, rotated, scheme(v_bits=bits)), 128, scheme(v_bits=bits))
    error = np.mean((decoded - rotated) ** 2)
    if bits in GROUPED:
        assert error == pytest.approx(GROUPED[bits], rel=0.01)
    else:
        assert error < PLAIN[bits]


@pytest.mark.parametrize("bits", KEY_BITS)
def test_error_of_keys(bits):
    keys, values = gaussian(5000, 128)
    decoded, _ = codec.decode(codec.encode(keys, values, scheme(bits)), 128, scheme(bits))
    assert np.mean((decoded - keys) ** 2) == pytest.approx(KEYS[bits], rel=0.01)


def test_keys_with_an_offset_are_no_worse_than_float16():
    """bf16 keys around 5 with a spread of a hundredth: the reference gives NaN for some groups."""
    keys = gaussian(500, 64)[0] * np.float32(0.01) + np.float32(5)
    decoded, _ = codec.decode(codec.encode(keys, keys, scheme()), 64, scheme())
    # Half the floor of the scale, 2^-8 · … : spacing of float16 at 5 is 2^-8; plus what x/s - z rounds.
    assert np.abs(decoded - keys).max() <= 2.0**-9 * 1.001


@pytest.mark.parametrize("bits", KEY_BITS)
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_constant_groups_decode_to_themselves(bits, dtype):
    rng = np.random.default_rng(1)
    constants = (rng.standard_normal(300) * 10.0 ** rng.uniform(-3, 4, 300)).astype(dtype).astype(np.float32)
    keys = np.repeat(constants, GROUP).reshape(-1, 64)
    decoded, _ = codec.decode(codec.encode(keys, keys, scheme(bits)), 64, scheme(bits))
    np.testing.assert_array_equal(decoded, keys)


@given(arrays(np.float32, (1, 64), elements=st.floats(-1e5, 1e5, width=32)))
@settings(max_examples=60, deadline=None)
def test_keys_are_within_a_step(keys):
    """Of the stored scale: half a step by rounding, half by an integer zero."""
    for bits in KEY_BITS:
        records = codec.encode(keys, keys, scheme(bits))
        decoded, values = codec.decode(records, 64, scheme(bits))
        scales = record.split(records, record.layout_of(scheme(bits), 64)).k_scales.astype(np.float64)
        error = np.abs(decoded.astype(np.float64) - keys).reshape(-1, GROUP).max(axis=1)
        spread = np.ptp(keys.astype(np.float64).reshape(-1, GROUP), axis=1)
        largest = np.abs(keys.astype(np.float64)).reshape(-1, GROUP).max(axis=1)
        # x/s, minus z, and the product round in float32 (2^-23 of the magnitude each); rounding the scale to float16
        # may clip the ends.
        bound = scales[0] + spread * 2.0**-11 + largest * 2.0**-21
        assert (error <= bound).all(), bits
        assert np.isfinite(values).all()


# -------------------------------------------------------------------------------------------------- the format
@pytest.mark.parametrize(
    ("head_dim", "k_bits", "v_bits"), [(64, 8, 3), (128, 5, 5), (64, 2, 2), (256, 4, 8), (512, 8, 4)]
)
def test_a_decoder_written_from_the_page(head_dim, k_bits, v_bits):
    keys, values = gaussian(2, head_dim)
    records = codec.encode(keys, values, scheme(k_bits, v_bits))
    found = codec.decode(records, head_dim, scheme(k_bits, v_bits))
    for row in range(2):
        key, value, _ = oracle.decode(records[row], head_dim, k_bits, v_bits)
        np.testing.assert_allclose(found[0][row], key, rtol=2**-23)
        # log2(d) + 2 roundings of sums whose terms are at most the root of the sum of squares.
        np.testing.assert_allclose(found[1][row], value, atol=(np.log2(head_dim) + 2) * 2**-24 * np.sqrt(head_dim) * 3)


def test_bytes_of_a_record():
    for head_dim, (k_bits, v_bits) in itertools.product(HEAD_DIMS, PAIRS):
        layout = RecordLayout(head_dim, k_bits, v_bits)
        assert 4 * layout.words == scheme(k_bits, v_bits).bytes_per_token(head_dim)
    assert scheme().bytes_per_token(128) == 200
    with pytest.raises(BackendError, match="head dimension 80"):
        RecordLayout(80, 8, 3)


@pytest.mark.parametrize("bits", VALUE_BITS)
def test_packing(bits):
    codes = np.random.default_rng(bits).integers(0, 1 << bits, (3, 5, 64), dtype=np.uint8)
    words = record.pack(codes, bits)
    assert words.shape == (3, 5, 2 * bits)
    np.testing.assert_array_equal(record.unpack(words, bits), codes)


# ------------------------------------------------------------------------------------------- MLX's operations
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_mlx_gives_the_same_bytes(head_dim):
    keys, values = awkward(head_dim)
    for (k_bits, v_bits), rule in itertools.product(PAIRS, RULES):
        if rule == "vllm-metal" and k_bits != v_bits:
            continue
        chosen = scheme(k_bits, v_bits, rule)
        expected = codec.encode(keys, values, chosen)
        found = array_codec.encode(mx.array(keys), mx.array(values), chosen)
        np.testing.assert_array_equal(np.array(found), expected, err_msg=chosen.name)
        layout = record.layout_of(chosen, head_dim)
        for one, other in zip(
            codec.decode_rotated(expected, layout, rule), array_codec.decode_rotated(found, layout, rule), strict=True
        ):
            np.testing.assert_array_equal(np.array(other), one)
    np.testing.assert_array_equal(np.array(array_codec.unrotate(mx.array(values))), codec.unrotate(values))


# ----------------------------------------------------------------------------------------------------- schemes
def test_scheme_texts():
    assert parse_scheme(None) is parse_scheme("none") is parse_scheme("full") is None
    assert parse_scheme("turbo") == scheme()
    for k_bits, v_bits in PAIRS:
        for rule in RULES:
            assert parse_scheme(scheme(k_bits, v_bits, rule).name) == scheme(k_bits, v_bits, rule)
    for text in ("affine4", "affine8"):
        assert parse_scheme(text).name == text


@pytest.mark.parametrize("text", ["turbo:k3v3", "turbo:k8v6", "turbo:k8", "affine3", "turbo:v3k8", "", "TURBO", "k8v3"])
def test_unknown_schemes_are_refused(text):
    with pytest.raises(UserError, match=r"KV scheme|no such"):
        parse_scheme(text)


def test_options():
    assert parse_options("turbo", 512).name == "turbo:k8v3 from 512"
    assert KVOptions().name is None
    for text, start in ((None, 5), ("turbo", -1)):
        with pytest.raises(UserError, match="--kv-start"):
            parse_options(text, start)


def test_affine_bytes():
    """mx.quantize: words, and a scale and a bias a group, of keys and of values."""
    for bits, head_dim in ((4, 64), (8, 96), (8, 128)):
        group = 32 if head_dim == 96 else 64
        expected = 2 * sum(array.nbytes for array in mx.quantize(mx.zeros((1, head_dim), mx.bfloat16), group, bits))
        assert parse_scheme(f"affine{bits}").bytes_per_token(head_dim) == expected
    with pytest.raises(UserError, match="head dimension 80"):
        parse_scheme("affine8").bytes_per_token(80)
