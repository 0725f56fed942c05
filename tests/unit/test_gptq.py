"""GPTQ against optimal brain quantization with explicit inverses, its guard, and what it stores."""

from __future__ import annotations

import numpy as np
import pytest

from tests.oracles import affine as affine_oracle
from tests.oracles import gptq as oracle
from tqtool.errors import NumericalError, UserError
from tqtool.formats.affine import AFFINE_BITS, AffineSpec, dequantize, unpack
from tqtool.formats.dtypes import DType, dtype_of
from tqtool.mathx.ldl import proxy_loss
from tqtool.solve import gptq
from tqtool.solve.gptq import AffineGptq, GptqMatrix, GptqOptions, gptq_quantize, search_grid
from tqtool.solve.hessian import Hessian
from tqtool.solve.quantizer import Quantizer

NAME = "model.layers.0.mlp.up_proj.weight"


def hessian(width: int, seed: int = 0, *, common: float = 2.0) -> Hessian:
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((3 * width, width)) + common * rng.standard_normal((3 * width, 1))
    rows *= np.exp(rng.normal(0, 0.5, width))
    return Hessian(matrix=rows.T @ rows / len(rows), rows=len(rows))


def gaussian(rows: int, width: int, seed: int = 1) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((rows, width)) * 0.02).astype(np.float32)


def decoded(matrix: GptqMatrix, options: GptqOptions) -> np.ndarray:
    spec = AffineSpec(bits=options.bits, group_size=options.group_size)
    return dequantize(matrix.words, matrix.scales, matrix.biases, spec)


def damping_taken(matrix: GptqMatrix) -> float:
    assert matrix.method == "gptq"
    return matrix.attempts[-1].damping


@pytest.mark.parametrize("bits", AFFINE_BITS)
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("dtype", [DType.F32, DType.BF16, DType.F16])
def test_codes_and_grids_are_the_oracles(bits: int, group: int, dtype: DType) -> None:
    """In float64 only the inverses differ, by 1e-10 of a step: codes are equal, and so are scales in their dtype.

    The oracle's float32 grid of a float64 target may differ by one unit in the last place where dtype is F32.
    """
    weight, statistics = gaussian(12, 3 * group), hessian(3 * group)
    options = GptqOptions(bits=bits, group_size=group, dtype=dtype, work="float64")
    matrix = gptq_quantize(NAME, weight, statistics, options)
    codes, scales, biases, served = oracle.obq_columns(
        weight, statistics.damped(damping_taken(matrix)), bits=bits, group=group, stored=dtype.numpy
    )
    np.testing.assert_array_equal(unpack(matrix.words, bits), codes)
    np.testing.assert_allclose(matrix.scales.astype(np.float64), scales, rtol=2.0**-22)
    np.testing.assert_allclose(matrix.biases.astype(np.float64), biases, rtol=2.0**-22, atol=1e-12)
    assert matrix.loss == pytest.approx(oracle.loss(weight, served, statistics.matrix), rel=1e-5)
    assert matrix.loss < matrix.plain_loss


@pytest.mark.parametrize("order", [False, True])
def test_static_groups_and_act_order(order: bool) -> None:
    """Five groups of 64; ordered columns go in blocks of 128, two whole ones and a ragged one."""
    weight, statistics = gaussian(9, 320), hessian(320)
    options = GptqOptions(bits=3, group_size=64, static_groups=True, act_order=order, work="float64")
    matrix = gptq_quantize(NAME, weight, statistics, options)
    grids = [oracle.mlx_grid(weight[:, start : start + 64], 3) for start in range(0, 320, 64)]
    stored = [np.stack(parts, axis=1).astype(DType.BF16.numpy).astype(np.float64) for parts in zip(*grids, strict=True)]
    columns = np.argsort(-np.diagonal(statistics.matrix), kind="stable") if order else None
    damped = statistics.damped(damping_taken(matrix))
    codes, *_, served = oracle.obq_columns(
        weight, damped, bits=3, group=64, order=columns, grids=(stored[0], stored[1])
    )
    np.testing.assert_array_equal(unpack(matrix.words, 3), codes)
    np.testing.assert_array_equal(matrix.scales.astype(np.float64), stored[0])
    assert matrix.loss == pytest.approx(oracle.loss(weight, served, statistics.matrix), rel=1e-5)


def test_float32_is_as_good() -> None:
    """A target is off by 1e-6 of its step; one code in 1e5 crosses a tie, and its row goes another, equal way."""
    weight, statistics = gaussian(64, 320), hessian(320)
    single = gptq_quantize(NAME, weight, statistics, GptqOptions(bits=4, group_size=64))
    double = gptq_quantize(NAME, weight, statistics, GptqOptions(bits=4, group_size=64, work="float64"))
    same = np.mean((single.words == double.words).all(axis=1))
    assert same > 0.9
    assert single.loss == pytest.approx(double.loss, rel=2e-3)


@pytest.mark.parametrize("bits", AFFINE_BITS)
@pytest.mark.parametrize("dtype", [DType.F32, DType.BF16, DType.F16])
def test_the_loss_is_that_of_the_stored_bytes(bits: int, dtype: DType) -> None:
    weight, statistics = gaussian(10, 192), hessian(192)
    options = GptqOptions(bits=bits, group_size=64, dtype=dtype)
    matrix = gptq_quantize(NAME, weight, statistics, options)
    slow = np.stack(
        [
            affine_oracle.decode(w, s.astype(np.float64), b.astype(np.float64), bits=bits, group=64, mode="affine")
            for w, s, b in zip(matrix.words, matrix.scales, matrix.biases, strict=True)
        ]
    )
    assert dtype_of(matrix.scales) is dtype
    # float32 decoding rounds a product and a sum of size |w|: 1e-7 of it, against steps of |w|/2^bits
    assert matrix.loss == pytest.approx(oracle.loss(weight, slow, statistics.matrix), rel=1e-7 * 2**bits * 50)


def test_rounding_scales_after_the_fact_costs() -> None:
    """The planted fault: codes found with float32 scales, which are then stored as bf16."""
    weight, statistics = gaussian(24, 256), hessian(256)
    fine = gptq_quantize(NAME, weight, statistics, GptqOptions(bits=6, group_size=64, dtype=DType.F32))
    parts = [part.astype(DType.BF16.numpy) for part in (fine.scales, fine.biases)]
    late = dequantize(fine.words, *parts, AffineSpec(bits=6, group_size=64))
    right = gptq_quantize(NAME, weight, statistics, GptqOptions(bits=6, group_size=64, dtype=DType.BF16))
    assert right.loss < 0.5 * proxy_loss(late - weight, statistics.matrix)


def test_dead_inputs_are_rounded_to_nearest() -> None:
    statistics = hessian(128)
    dead = [0, 5, 64, 127]
    statistics.matrix[dead] = statistics.matrix[:, dead] = 0
    weight, options = gaussian(8, 128), GptqOptions(bits=4, group_size=32)
    matrix = gptq_quantize(NAME, weight, statistics, options)
    step = np.abs(matrix.scales.astype(np.float32)).repeat(32, axis=1)
    inside = np.abs(decoded(matrix, options) - weight)[:, dead] <= 0.51 * step[:, dead]
    assert inside.mean() > 0.9  # but for weights beyond a range that followed its updated neighbours
    assert AffineGptq(options=options, hessian=statistics).run(NAME, weight).stats["dead_inputs"] == 4


def test_divergence_is_damped_and_told() -> None:
    """One bit: errors as large as the weights, fed on undamped, grow from group to group."""
    weight, statistics = gaussian(16, 320), hessian(320, common=1.0)
    options = GptqOptions(bits=1, group_size=64, dampings=(1e-6, 1e-2, 1e-1, 1.0))
    matrix = gptq_quantize(NAME, weight, statistics, options)
    assert [a.verdict for a in matrix.attempts] == ["diverged", "worse than plain", "accepted"]
    assert [a.damping for a in matrix.attempts] == [1e-6, 1e-2, 1e-1]
    assert matrix.attempts[0].growth > 4 >= matrix.attempts[1].growth
    assert matrix.loss == matrix.attempts[2].loss < matrix.plain_loss <= matrix.attempts[1].loss
    result = AffineGptq(options=options, hessian=statistics).run(NAME, weight)
    assert [note.split(" (")[0] for note in result.notes] == [
        "damping 1e-06: diverged",
        "damping 0.01: worse than plain",
    ]
    assert result.stats["damping"] == 0.1


def test_growth_is_of_the_scales() -> None:
    weight, statistics = gaussian(16, 320), hessian(320, common=1.0)
    options = GptqOptions(bits=1, group_size=64, dampings=(1e-1,))
    matrix = gptq_quantize(NAME, weight, statistics, options)
    plain = options.plain.run(NAME, weight).tensors["model.layers.0.mlp.up_proj.scales"]
    ratio = np.abs(matrix.scales.astype(np.float64)).max() / np.abs(plain.astype(np.float64)).max()
    assert matrix.attempts[0].growth == pytest.approx(ratio)


def test_the_last_resort_is_rtn_to_the_byte() -> None:
    weight = gaussian(16, 320)
    options = GptqOptions(bits=1, group_size=64, dampings=(1e-6, 1e-2))
    quantizer = AffineGptq(options=options, hessian=hessian(320, common=1.0))
    matrix = gptq_quantize(NAME, weight, quantizer.hessian, options)
    assert matrix.method == "rtn"
    assert matrix.loss == matrix.plain_loss
    result = quantizer.run(NAME, weight)
    for name, array in options.plain.run(NAME, weight).tensors.items():
        assert array.tobytes() == result.tensors[name].tobytes()
    assert result.notes[-1] == "fell back to round-to-nearest"
    assert "damping" not in result.stats
    assert np.isfinite(list(result.stats.values())).all()  # the manifest takes no others


def test_an_indefinite_hessian_is_an_attempt() -> None:
    matrix = np.eye(64)
    matrix[0, 1] = matrix[1, 0] = 1.05  # not what a sum of squares can be, but what a damaged file can
    found = gptq_quantize(
        NAME, gaussian(4, 64), Hessian(matrix=matrix, rows=1), GptqOptions(bits=4, group_size=64, dtype=DType.F32)
    )
    assert [a.verdict for a in found.attempts[:2]] == ["indefinite", "indefinite"]


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_the_search_finds_better_grids(bits: int) -> None:
    weight, statistics = gaussian(48, 256), hessian(256, common=0.5)
    plain = gptq_quantize(NAME, weight, statistics, GptqOptions(bits=bits, group_size=64))
    searched = gptq_quantize(NAME, weight, statistics, GptqOptions(bits=bits, group_size=64, grid="search"))
    assert searched.loss < (0.97 if bits == 4 else 0.9) * plain.loss


def test_the_search_never_makes_a_group_worse() -> None:
    rng = np.random.default_rng(3)
    values = rng.standard_t(2, (200, 32)).astype(np.float32)
    values[0], values[1], values[2, 1:] = 0, 3.0, 0
    weights = rng.uniform(0, 1, 32)
    for bits in AFFINE_BITS:
        start = [part.astype(DType.BF16.numpy) for part in oracle.mlx_grid(values, bits)]
        found = search_grid(values, weights, *start, bits=bits)

        def loss(grid: list[np.ndarray] | tuple[np.ndarray, np.ndarray], bits: int = bits) -> np.ndarray:
            scale, bias = (part.astype(np.float32)[:, None] for part in grid)
            codes = np.clip(np.rint((values - bias) / scale), 0, 2**bits - 1)
            return np.square(codes * scale + bias - values) @ weights

        assert (loss(found) <= loss(start) * (1 + 1e-5)).all()
        assert loss(found)[3:].sum() < 0.99 * loss(start)[3:].sum()


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("bits", [3, 8])
def test_promises_are_kept_and_nothing_is_written_to(
    bits: int, act_order: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gptq, "PACK_ROWS", 5)  # 17 rows in parts of 5: three whole ones and a ragged one
    weight, statistics = gaussian(17, 192), hessian(192)
    options = GptqOptions(bits=bits, group_size=64, static_groups=act_order, act_order=act_order)
    quantizer: Quantizer = AffineGptq(options=options, hessian=statistics)
    before = weight.copy(), statistics.matrix.copy()
    result = quantizer.run(NAME, weight)
    promised = [(t.name, t.dtype, t.shape) for t in quantizer.outputs(NAME, weight.shape)]
    assert [(name, dtype_of(array), array.shape) for name, array in result.tensors.items()] == promised
    np.testing.assert_array_equal(weight, before[0])
    np.testing.assert_array_equal(statistics.matrix, before[1])
    assert quantizer.label == f"gptq affine{bits} g64"
    assert quantizer.config_entry() == {"group_size": 64, "bits": bits, "mode": "affine"}
    assert result.notes == ()
    assert result.stats["proxy_loss"] < result.stats["proxy_loss_rtn"]
    again = quantizer.run(NAME, weight)
    assert all(result.tensors[name].tobytes() == again.tensors[name].tobytes() for name in result.tensors)


def test_refusals() -> None:
    with pytest.raises(UserError, match="7 bits"):
        GptqOptions(bits=7, group_size=64)
    with pytest.raises(UserError, match="act-order needs static groups"):
        GptqOptions(bits=4, group_size=64, act_order=True)
    options = GptqOptions(bits=4, group_size=64)
    with pytest.raises(UserError, match="divisible by group size 64"):
        gptq_quantize(NAME, gaussian(4, 96), hessian(96), options)
    with pytest.raises(UserError, match="width 96 do not fit"):
        gptq_quantize(NAME, gaussian(4, 128), hessian(96), options)


def test_a_range_that_overflows_is_an_error() -> None:
    weight = gaussian(4, 64)
    weight[2] = 6e4 * np.where(np.arange(64) % 2, 1, -1)
    with pytest.raises(NumericalError, match="does not fit F16"):
        gptq_quantize(NAME, weight, hessian(64), GptqOptions(bits=1, group_size=64, dtype=DType.F16))
