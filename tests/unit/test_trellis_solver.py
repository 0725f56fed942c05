"""Weights in, packed, fake-quant or carried tensors out."""

from __future__ import annotations

import numpy as np
import pytest

from tqtool.errors import BackendError, NumericalError, UserError
from tqtool.formats.dtypes import DType, dtype_of
from tqtool.formats.trellis import spec_for
from tqtool.mathx import codes
from tqtool.native import trellis_expand
from tqtool.solve import trellis as solver
from tqtool.solve.rtn import AffineRtn
from tqtool.solve.trellis import TrellisCarrier, TrellisFakeQuant, TrellisOptions, TrellisPacked, encode_weight

NAME = "model.layers.0.mlp.up_proj.weight"


def gaussian(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32) * np.float32(0.02)


@pytest.mark.parametrize(("k", "limit"), [(1, 0.285), (2, 0.0735), (3, 0.0193), (4, 0.0051)])
@pytest.mark.parametrize("axis", [0, 1])
def test_gaussian_weights_are_coded_at_the_codes_error(axis: int, k: int, limit: float) -> None:
    """512 blocks: one standard error is 0.4 % of the figures of codec validate, the limits leave three."""
    weight = gaussian(256, 512, seed=k)
    matrix = TrellisPacked(options=TrellisOptions(k=k), axis=axis).encode(NAME, weight).matrix
    served = trellis_expand(matrix.words, matrix.scales, matrix.spec)
    served = served if axis == 1 else served.T
    error = float(np.sum((served - weight) ** 2) / np.sum(weight**2))
    assert error == pytest.approx(matrix.relative_error, rel=1e-4)
    assert 4.0**-k < error < limit


def test_rows_keep_their_own_scale() -> None:
    weight = gaussian(4, 512) * np.array([[1.0], [100.0], [1e-4], [0.0]], np.float32)
    matrix = TrellisPacked(options=TrellisOptions(k=3), axis=1).encode(NAME, weight).matrix
    served = trellis_expand(matrix.words, matrix.scales, matrix.spec)
    relative = np.sum((served - weight) ** 2, axis=1)[:3] / np.sum(weight**2, axis=1)[:3]
    assert (relative < 0.03).all()
    assert matrix.scales[3] == 0
    assert (served[3] == 0).all()


def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of 100 share blocks; chunks must still start on a block, and the bytes must not depend on the chunk."""
    weight = gaussian(300, 100)
    whole = TrellisPacked(options=TrellisOptions(k=3), axis=1).run(NAME, weight)
    monkeypatch.setattr(solver, "CHUNK_WEIGHTS", 7000)
    ticks: list[int] = []
    parts = TrellisPacked(options=TrellisOptions(k=3), axis=1, tick=ticks.append).run(NAME, weight)
    assert len(ticks) > 3
    assert sum(ticks) == weight.size
    for name, array in whole.tensors.items():
        assert np.array_equal(array, parts.tensors[name])


@pytest.mark.parametrize("step", [0, 100, 255])
def test_an_encoder_that_returns_a_broken_path_is_caught(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Packed, one wrong state would silently turn into other weights; the high bit is not even stored."""
    honest = solver.native.viterbi_encode

    def faulty(*arguments: object, **options: object) -> tuple[np.ndarray, str]:
        states, name = honest(*arguments, **options)
        states[5, step] ^= 1 << 11
        return states, name

    monkeypatch.setattr(solver.native, "viterbi_encode", faulty)
    with pytest.raises(BackendError, match=f"{NAME}: the encoder is at fault: trellis block 5, step {step}:"):
        TrellisPacked(options=TrellisOptions(k=3), axis=1).run(NAME, gaussian(8, 512))


def test_refit_never_hurts_and_helps_heavy_tails() -> None:
    weight = np.random.default_rng(0).standard_t(4, (64, 512)).astype(np.float32)
    with_refit = TrellisPacked(options=TrellisOptions(k=3), axis=1).encode(NAME, weight).matrix
    without = TrellisPacked(options=TrellisOptions(k=3, refit=False), axis=1).encode(NAME, weight).matrix
    assert np.array_equal(with_refit.words, without.words)
    assert with_refit.squared_error < 0.995 * without.squared_error


@pytest.mark.parametrize("axis", [0, 1])
def test_the_twin_is_the_expanded_matrix_to_the_bit(axis: int) -> None:
    weight = gaussian(192, 576)
    options = TrellisOptions(k=2)
    packed = TrellisPacked(options=options, axis=axis).encode(NAME, weight).matrix
    expanded = trellis_expand(packed.words, packed.scales, packed.spec)
    expanded = expanded if axis == 1 else expanded.T
    twin = TrellisFakeQuant(options=options, axis=axis, dtype=DType.BF16).run(NAME, weight).tensors[NAME]
    assert np.array_equal(twin.view(np.uint16), expanded.astype(DType.BF16.numpy).view(np.uint16))


@pytest.mark.parametrize(
    "quantizer",
    [
        TrellisPacked(options=TrellisOptions(k=3), axis=1),
        TrellisPacked(options=TrellisOptions(k=1, window=14), axis=0),
        TrellisFakeQuant(options=TrellisOptions(k=3, code="rptc"), axis=0),
        TrellisCarrier(
            options=TrellisOptions(k=3),
            axis=0,
            carrier=AffineRtn(bits=8, group_size=64, mode="affine", dtype=DType.BF16),
        ),
    ],
    ids=lambda quantizer: quantizer.label,
)
def test_promises_are_kept_and_the_weight_is_not_touched(quantizer: TrellisPacked) -> None:
    weight = gaussian(96, 128)
    before = weight.copy()
    result = quantizer.run(NAME, weight)
    promised = [(item.name, item.dtype, item.shape) for item in quantizer.outputs(NAME, weight.shape)]
    assert [(name, dtype_of(array), array.shape) for name, array in result.tensors.items()] == promised
    assert np.array_equal(weight, before)
    assert 0 < result.stats["relative_error"] < 0.3


def test_threads_and_repeats_give_the_same_bytes() -> None:
    weight = gaussian(64, 512)
    first = TrellisPacked(options=TrellisOptions(k=3, threads=1), axis=1).run(NAME, weight)
    again = TrellisPacked(options=TrellisOptions(k=3, threads=3), axis=1).run(NAME, weight)
    assert all(np.array_equal(first.tensors[name], again.tensors[name]) for name in first.tensors)


@pytest.mark.parametrize("factor", [1e8, 1e-9])
def test_scales_beyond_float16_are_an_error(factor: float) -> None:
    with pytest.raises(NumericalError, match=r"up_proj.weight: row 0 has scale .* float16 cannot hold"):
        TrellisPacked(options=TrellisOptions(k=3), axis=1).run(NAME, gaussian(2, 256) * np.float32(factor))


def test_refusals() -> None:
    with pytest.raises(UserError, match="k=5"):
        TrellisOptions(k=5)
    with pytest.raises(UserError, match="--warmup 129"):
        TrellisOptions(k=3, warmup=129)
    with pytest.raises(UserError, match="window 13"):
        TrellisOptions(k=3, window=13)
    with pytest.raises(UserError, match="'rptc' needs a table"):
        TrellisPacked(options=TrellisOptions(k=3, code="rptc"), axis=1).outputs(NAME, (64, 256))
    with pytest.raises(UserError, match="not a matrix"):
        TrellisPacked(options=TrellisOptions(k=3), axis=1).outputs(NAME, (64,))


def test_codes_are_what_their_sources_say() -> None:
    """713 and 703 distinct values at L=12 (1mad, mul1), as others counted; unit variance; levels are the values."""
    assert len(set(codes.levels("1mad", 12).tolist())) == 713
    assert len(set(codes.levels("mul1", 12).tolist())) == 703
    for code in codes.CODES:
        assert codes.values(code, 16).std() == pytest.approx(1, abs=0.003)
        step = np.abs(codes.levels(code, 12) / codes.UNIT[code] - codes.values(code, 12))
        assert step.max() <= 0.51 / codes.UNIT[code]


def test_rows_padded_to_blocks_are_coded_as_well() -> None:
    weight = gaussian(40, 300)
    options = TrellisOptions(k=3)
    padded = encode_weight(NAME, weight, spec_for((40, 300), k=3, axis=1, pad_rows=True), options)
    assert padded.spec.stride == 512
    served = trellis_expand(padded.words, padded.scales, padded.spec)
    assert np.sum((served - weight) ** 2) < 0.025 * np.sum(weight**2)
