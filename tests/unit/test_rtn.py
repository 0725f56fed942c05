"""Round to nearest: the bytes of ``mx.quantize``, whatever the chunks and threads."""

from __future__ import annotations

import ml_dtypes
import mlx.core as mx
import numpy as np
import pytest

from tqtool import native
from tqtool.errors import BackendError, NumericalError, UserError
from tqtool.formats.affine import AFFINE_BITS, AFFINE_GROUPS, FP_MODES
from tqtool.formats.dtypes import DType, dtype_of
from tqtool.solve import rtn
from tqtool.solve.quantizer import Quantizer, QuantResult, RowQuantizer
from tqtool.solve.rtn import AffineRtn, FloatStore

NAME = "model.layers.0.mlp.up_proj.weight"
SETTINGS = [(b, g, "affine") for b in AFFINE_BITS for g in AFFINE_GROUPS] + [
    (bits, group, mode) for mode, (bits, group) in FP_MODES.items()
]


def special_weight(rows: int = 37, width: int = 384) -> np.ndarray:
    """Gaussian rows, and every row a rounding bug would stumble on."""
    weight = np.random.default_rng(1).standard_normal((rows, width)).astype(np.float32)
    weight[0] = 0.0
    weight[1] = -0.0
    weight[2] = 3.25
    weight[3] = -1e-30
    weight[4, 17] = 1e4  # one outlier
    weight[5] = 1e-39  # subnormal
    weight[6] = np.abs(weight[6])
    weight[7] = -np.abs(weight[7])
    weight[8] *= 1e30
    weight[9] = np.where(np.arange(width) % 3 == 0, -0.0, 0.0)  # both zeros, in an order that lanes would lose
    weight[10] = np.abs(weight[10]) * (np.arange(width) % 7 > 2)
    weight[10, 1::5] = -0.0
    weight[11] = 1e38 * np.where(np.arange(width) % 2, 1, -1)
    weight[12] = np.round(weight[12] * 4) / 4  # many exact ties
    weight[13] = 1e-8 * weight[13]  # below the smallest scale
    return weight


def mlx_bytes(weight: np.ndarray, bits: int, group: int, mode: str) -> list[bytes]:
    parts = mx.quantize(mx.array(weight), group_size=group, bits=bits, mode=mode, stream=mx.cpu)
    return [np.array(part.view(mx.uint8)).tobytes() for part in parts]


def our_bytes(result: QuantResult) -> list[bytes]:
    return [array.tobytes() for array in result.tensors.values()]


@pytest.mark.parametrize(("bits", "group", "mode"), SETTINGS)
@pytest.mark.parametrize("dtype", [DType.BF16, DType.F32])
def test_bytes_are_those_of_mlx(
    bits: int, group: int, mode: str, dtype: DType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rtn, "CHUNK_ELEMENTS", 5 * 384)  # 37 rows in chunks of 5: seven whole ones and a ragged tail
    weight = special_weight()
    quantizer = AffineRtn(bits=bits, group_size=group, mode=mode, dtype=dtype)
    result = quantizer.run(NAME, weight)
    assert our_bytes(result) == mlx_bytes(weight.astype(dtype.numpy), bits, group, mode)
    promised = quantizer.outputs(NAME, weight.shape)
    assert [(t.name, t.dtype, t.shape) for t in promised] == [
        (name, dtype_of(array), array.shape) for name, array in result.tensors.items()
    ]


def test_float16_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rtn, "CHUNK_ELEMENTS", 1)  # one row at a time
    weight = np.random.default_rng(2).standard_normal((9, 128)).astype(np.float32)
    result = AffineRtn(bits=4, group_size=64, dtype=DType.F16).run(NAME, weight)
    assert our_bytes(result) == mlx_bytes(weight.astype(np.float16), 4, 64, "affine")


@pytest.mark.parametrize("chunk", [1, 128, 3 * 128, 1 << 20])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_chunks_and_threads_do_not_change_bytes(chunk: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = np.random.default_rng(3).standard_normal((50, 128)).astype(ml_dtypes.bfloat16)
    expected = mlx_bytes(weight, 3, 32, "affine")
    monkeypatch.setattr(rtn, "CHUNK_ELEMENTS", chunk)
    quantizer = AffineRtn(bits=3, group_size=32, threads=threads)
    assert our_bytes(quantizer.run(NAME, weight)) == expected


def test_rows_read_once_in_order_give_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rtn, "CHUNK_ELEMENTS", 4 * 64)
    weight = np.random.default_rng(4).standard_normal((3, 7, 64)).astype(ml_dtypes.bfloat16)
    rows, asked = weight.reshape(21, 64), []

    def read_rows(start: int, stop: int) -> np.ndarray:
        asked.append((start, stop))
        return rows[start:stop].copy()

    quantizer = AffineRtn(bits=6, group_size=32)
    assert our_bytes(quantizer.run_rows(NAME, weight.shape, read_rows)) == our_bytes(quantizer.run(NAME, weight))
    assert asked == [(0, 4), (4, 8), (8, 12), (12, 16), (16, 20), (20, 21)]


def test_input_is_not_written() -> None:
    weight = special_weight()
    before = weight.copy()
    AffineRtn(bits=4, group_size=64).run(NAME, weight)
    FloatStore(dtype=DType.BF16).run(NAME, weight)
    np.testing.assert_array_equal(weight, before)


def test_labels_and_entries() -> None:
    assert AffineRtn(bits=3, group_size=128).label == "affine3 g128"
    assert AffineRtn(bits=4, group_size=16, mode="nvfp4").label == "nvfp4"
    assert AffineRtn(bits=3, group_size=128).config_entry() == {"group_size": 128, "bits": 3, "mode": "affine"}
    assert FloatStore(dtype=DType.F16).label == "f16"
    assert FloatStore(dtype=DType.I64).label == "i64"
    assert FloatStore(dtype=DType.BF16).config_entry() is False


def test_both_are_quantizers_of_rows() -> None:
    quantizers: list[Quantizer] = [AffineRtn(bits=4, group_size=64), FloatStore(dtype=DType.BF16)]
    assert all(isinstance(quantizer, RowQuantizer) for quantizer in quantizers)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bits": 7, "group_size": 64}, "7 bits"),
        ({"bits": 4, "group_size": 16}, "group size 16"),
        ({"bits": 8, "group_size": 32, "mode": "mxfp4"}, "mxfp4 is 4 bits in groups of 32"),
    ],
)
def test_impossible_settings(settings: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        AffineRtn(**settings)


@pytest.mark.parametrize("shape", [(8, 96), (64,), ()])
def test_indivisible_shapes_are_refused_before_work(shape: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match="divisible by group size 64"):
        AffineRtn(bits=4, group_size=64).outputs(NAME, shape)


def test_groups_too_small_for_nvfp4_are_counted() -> None:
    weight = np.random.default_rng(4).standard_normal((37, 384)).astype(np.float32)
    weight[3:9, 16:48] *= 1e-4  # twelve groups of 16, over the border of a chunk
    weight[20] = 0.0  # nothing is lost where nothing was
    result = AffineRtn(bits=4, group_size=16, mode="nvfp4", dtype=DType.F32).run(NAME, weight)
    words, scales = (mx.array(array) for array in result.tensors.values())
    decoded = mx.dequantize(words, scales, group_size=16, bits=4, mode="nvfp4", stream=mx.cpu)
    served = np.array(decoded.astype(mx.float32))
    groups, dead = weight.reshape(-1, 16), ~served.reshape(-1, 16).any(axis=1)
    assert np.count_nonzero(dead & groups.any(axis=1)) == 12
    lost = (groups[dead].astype(np.float64) ** 2).sum() / (groups.astype(np.float64) ** 2).sum()
    assert result.notes == (
        f"12 of {37 * 24} groups of 16 are too small for nvfp4's scales and became zeros, {lost:.1e} of the weight",
    )
    for bits, group, mode in ((4, 32, "mxfp4"), (8, 32, "mxfp8"), (4, 64, "affine")):
        assert AffineRtn(bits=bits, group_size=group, mode=mode, dtype=DType.F32).run(NAME, weight).notes == ()


def test_a_weight_that_would_vanish_in_nvfp4_is_an_error() -> None:
    weight = (0.002 * np.random.default_rng(5).standard_normal((37, 384))).astype(np.float32)
    with pytest.raises(NumericalError, match=r"up_proj\.weight: .* of 888 groups .*: they would be zeros, 9\d%"):
        AffineRtn(bits=4, group_size=16, mode="nvfp4").run(NAME, weight)
    AffineRtn(bits=4, group_size=32, mode="mxfp4").run(NAME, weight)


def test_a_range_that_overflows_is_an_error() -> None:
    """MLX would store an infinite scale, and every value of the group would come back as NaN."""
    weight = np.zeros((4, 128), np.float32)
    weight[2, :64] = 3e38 * np.where(np.arange(64) % 2, 1, -1)
    with pytest.raises(NumericalError, match=r"up_proj\.scales: a group's range does not fit F32"):
        AffineRtn(bits=1, group_size=64, dtype=DType.F32).run(NAME, weight)
    weight[2, :64] = 6e4 * np.where(np.arange(64) % 2, 1, -1)
    with pytest.raises(NumericalError, match="does not fit F16"):
        AffineRtn(bits=1, group_size=64, dtype=DType.F16).run(NAME, weight)


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5)])
def test_float_store_keeps_shape(shape: tuple[int, ...]) -> None:
    values = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    store = FloatStore(dtype=DType.BF16)
    result = store.run("x", np.asarray(values))
    assert result.tensors["x"].shape == shape
    np.testing.assert_array_equal(result.tensors["x"], np.asarray(values).astype(ml_dtypes.bfloat16))


def test_float_store_rounds_half_to_even() -> None:
    values = np.array([1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8)], np.float32)
    stored = FloatStore(dtype=DType.BF16).run("x", values).tensors["x"]
    np.testing.assert_array_equal(stored.astype(np.float32), [1.0, 1 + 2**-6, -1.0])


def test_float16_overflow_is_an_error() -> None:
    with pytest.raises(NumericalError, match=r"x: \|70000\| does not fit float16"):
        FloatStore(dtype=DType.F16).run("x", np.array([1.0, -70000.0], np.float32))


def test_integers_pass() -> None:
    values = np.arange(6, dtype=np.int64).reshape(2, 3)
    np.testing.assert_array_equal(FloatStore(dtype=DType.I64).run("x", values).tensors["x"], values)


@pytest.mark.parametrize("force", ["scalar", "avx2", "avx512"])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("bits", AFFINE_BITS)
def test_every_instruction_set_gives_the_same_bits(force: str, dtype: type, bits: int) -> None:
    weight = special_weight().astype(dtype)
    try:
        words, scales, biases = native.affine_quantize(weight, bits=bits, group_size=32, force=force)
    except BackendError as error:
        pytest.skip(str(error))
    expected = native.affine_quantize(weight, bits=bits, group_size=32, threads=1)
    for ours, reference in zip((words, scales, biases), expected, strict=True):
        assert ours.tobytes() == reference.tobytes()
    if dtype is np.float32:
        assert [a.tobytes() for a in (words, scales, biases)] == mlx_bytes(weight, bits, 32, "affine")


def test_random_weights_in_bulk() -> None:
    """A million weights of the shapes models have: heavy tails, tiny and large rows."""
    rng = np.random.default_rng(11)
    weight = (rng.standard_t(3, (512, 2048)) * np.exp(rng.normal(0, 4, (512, 1)))).astype(ml_dtypes.bfloat16)
    for bits, group in ((1, 64), (2, 128), (3, 64), (4, 32), (5, 128), (6, 64), (8, 128)):
        result = AffineRtn(bits=bits, group_size=group).run(NAME, weight)
        assert our_bytes(result) == mlx_bytes(weight, bits, group, "affine")


def test_the_kernel_refuses_what_does_not_fit() -> None:
    weight = np.zeros((4, 128), np.float32)
    with pytest.raises(BackendError, match="group: expected 32, 64, 96 or 128"):
        native.affine_quantize(weight, bits=4, group_size=16)
    with pytest.raises(BackendError, match="bits: expected 1 to 8"):
        native.affine_quantize(weight, bits=9, group_size=64)
    with pytest.raises(BackendError, match="unknown instruction set"):
        native.affine_quantize(weight, bits=4, group_size=64, force="mmx")
    with pytest.raises(BackendError, match="affine_quantize: float32"):
        native.affine_quantize(np.zeros((128, 4), np.float32).T, bits=4, group_size=64)
