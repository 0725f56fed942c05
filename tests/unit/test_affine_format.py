"""Byte layout of MLX's packed weights, against a one-code-at-a-time oracle and against ``mx.quantize``."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from tests.oracles import affine as oracle
from tqtool.formats.affine import AFFINE_BITS, AFFINE_GROUPS, FP_MODES, AffineSpec, dequantize, pack, unpack

SPECS = [AffineSpec(bits=b, group_size=g) for b in AFFINE_BITS for g in AFFINE_GROUPS] + [
    AffineSpec(bits=bits, group_size=group, mode=mode) for mode, (bits, group) in FP_MODES.items()
]


def ids(spec: AffineSpec) -> str:
    return f"{spec.mode}{spec.bits}g{spec.group_size}"


def packed(spec: AffineSpec, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    parts = mx.quantize(mx.array(weight), group_size=spec.group_size, bits=spec.bits, mode=spec.mode, stream=mx.cpu)
    arrays = [np.array(part) for part in parts]
    return arrays[0], arrays[1], arrays[2] if len(arrays) == 3 else None


@pytest.mark.parametrize("bits", AFFINE_BITS)
def test_unpack_reads_each_code_at_its_bit(bits: int) -> None:
    words = np.random.default_rng(bits).integers(0, 1 << 32, (2, 3 * bits), dtype=np.uint32)
    codes = unpack(words, bits)
    assert codes.shape == (2, 96)
    expected = [[oracle.code_at(row, index, bits) for index in range(96)] for row in words]
    np.testing.assert_array_equal(codes, expected)


def test_three_bit_words_by_hand() -> None:
    """codes 1, 2, 3, …, 7, 0, 1, 2, 3: ten whole codes in the first word, then two bits of the eleventh."""
    codes = np.array([[(index + 1) % 8 for index in range(32)]], np.uint8)
    words = pack(codes, 3)
    bits = "".join(format((index + 1) % 8, "03b")[::-1] for index in range(32))
    assert [int(bits[32 * i : 32 * i + 32][::-1], 2) for i in range(3)] == words[0].tolist()
    assert words[0, 0] == 0xD11F58D1  # the example of docs/formats/affine.md
    np.testing.assert_array_equal(unpack(words, 3), codes)


@pytest.mark.parametrize("spec", SPECS, ids=ids)
def test_dequantize_equals_oracle_and_mlx(spec: AffineSpec) -> None:
    rng = np.random.default_rng(spec.bits)
    weight = rng.standard_normal((5, 256)).astype(np.float32) * np.array([[1], [1e-3], [50], [0], [1]], np.float32)
    weight[4, :128] = 7.0  # a constant group
    words, scales, biases = packed(spec, weight)
    ours = dequantize(words, scales, biases, spec)
    theirs = np.array(
        mx.dequantize(
            mx.array(words),
            mx.array(scales),
            None if biases is None else mx.array(biases),
            group_size=spec.group_size,
            bits=spec.bits,
            mode=spec.mode,
            dtype=mx.float32,
            stream=mx.cpu,
        )
    )
    np.testing.assert_array_equal(ours, theirs)
    for row in range(5):
        exact = oracle.decode(
            words[row],
            scales[row],
            None if biases is None else biases[row],
            bits=spec.bits,
            group=spec.group_size,
            mode=spec.mode,
        )
        # One product and one sum, each rounded once in float32.
        magnitude = np.abs(exact) + (0 if biases is None else np.repeat(np.abs(biases[row]), spec.group_size))
        assert (np.abs(ours[row] - exact) <= 2 * np.finfo(np.float32).eps * magnitude).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bits": 7, "group_size": 64}, "7 bits: affine has 1, 2, 3, 4, 5, 6, 8"),
        ({"bits": 4, "group_size": 48}, "group size 48: affine has 32, 64, 128"),
        ({"bits": 4, "group_size": 64, "mode": "mxfp4"}, "mxfp4 is 4 bits in groups of 32 and nothing else"),
        ({"bits": 4, "group_size": 64, "mode": "int4"}, "mode 'int4' is not one of affine"),
    ],
)
def test_impossible_combinations(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AffineSpec(**arguments)


def test_every_code_of_the_small_floats() -> None:
    """All codes, also those ``mx.quantize`` never writes (negative zero, subnormal and NaN scales)."""
    scale = np.array([[127, 127]], np.uint8)  # 2^0
    codes = np.concatenate([np.arange(16), np.arange(16)[::-1]]).astype(np.uint8)[None, :]
    words = pack(np.tile(codes, 2), 4)
    mxfp4 = dequantize(words, scale, None, AffineSpec(bits=4, group_size=32, mode="mxfp4"))
    np.testing.assert_array_equal(mxfp4[0, :32], [oracle.e2m1(int(code)) for code in codes[0]])
    assert np.signbit(mxfp4[0, 8])
    every = np.arange(256, dtype=np.uint8)[None, :]
    scales = np.full((1, 8), 127, np.uint8)
    mxfp8 = dequantize(pack(every, 8), scales, None, AffineSpec(bits=8, group_size=32, mode="mxfp8"))
    np.testing.assert_array_equal(mxfp8[0], [oracle.e4m3(code) for code in range(256)])
    ones = np.full((1, 256 * 16), 2, np.uint8)  # E2M1 code 2 is 1.0
    nvfp4 = dequantize(pack(ones, 4), every, None, AffineSpec(bits=4, group_size=16, mode="nvfp4"))
    np.testing.assert_array_equal(nvfp4[0, ::16], [oracle.e4m3(code) for code in range(256)])


def test_affine_needs_biases() -> None:
    spec = AffineSpec(bits=4, group_size=32)
    with pytest.raises(ValueError, match="biases"):
        dequantize(np.zeros((1, 4), np.uint32), np.ones((1, 1), np.float32), None, spec)
