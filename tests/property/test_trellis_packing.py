"""Laws of the packed layout, against a stranger's bit-by-bit reading of it."""

from __future__ import annotations

import math
from importlib import import_module

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tqtool.errors import ArtifactError, BackendError, UserError
from tqtool.formats.trellis import TrellisSpec, check_closed, pack, spec_for, unpack
from tqtool.mathx import codes
from tqtool.native import trellis_expand, trellis_matvec


def random_words(spec: TrellisSpec, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**32, (spec.n_blocks, spec.words_per_block), dtype=np.uint32)


def instruction_sets() -> list[str]:
    """Those that this machine has."""
    spec, found = spec_for((1, 256), k=1, axis=1), []
    for name in ("avx512", "avx2", "neon", "scalar"):
        try:
            trellis_expand(np.zeros(8, np.uint32), np.ones(1, np.float16), spec, force=name)
            found.append(name)
        except BackendError:
            continue
    return found


SETS = instruction_sets()


def bit(block: np.ndarray, index: int) -> int:
    return int(block[index // 32]) >> (index % 32) & 1


@settings(max_examples=30, deadline=None)
@given(k=st.integers(1, 4), window=st.sampled_from([12, 14, 16]), seed=st.integers(0, 1000))
def test_states_are_windows_of_the_bit_string(k: int, window: int, seed: int) -> None:
    words = np.random.default_rng(seed).integers(0, 2**32, (2, 8 * k), dtype=np.uint32)
    states = unpack(words, k, window)
    n_bits = 256 * k
    for block, row in zip(words, states, strict=True):
        for t in (0, 1, 2, 100, 254, 255):
            start = (255 - t) * k
            expected = sum(bit(block, (start + i) % n_bits) << i for i in range(window))
            assert row[t] == expected
    check_closed(states, k, window)  # any words are a closed path: that is what tail-biting means
    assert np.array_equal(pack(states, k), words)


@pytest.mark.parametrize("step", [0, 17, 255])
def test_a_path_that_is_not_closed_is_found(step: int) -> None:
    states = unpack(np.random.default_rng(1).integers(0, 2**32, (3, 24), dtype=np.uint32), 3, 12)
    states[1, step] ^= 1 << 11
    with pytest.raises(ArtifactError, match=f"block 1, step {step}:"):
        check_closed(states, 3, 12)


def in_rows(values: np.ndarray, spec: TrellisSpec) -> np.ndarray:
    """The stored matrix, index by index as the page says; independent of ``from_stream``."""
    row, col = np.indices((spec.rows, spec.cols))
    if spec.tile:
        return values[row // 16 * (spec.stride // 16) + col // 16, row % 16 * 16 + col % 16]
    return values.reshape(-1)[row * spec.stride + col]


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 50), cols=st.integers(1, 70), layout=st.sampled_from(["rows", "padded", "tile"]))
def test_the_stream_is_the_matrix_in_another_order(rows: int, cols: int, layout: str) -> None:
    spec = spec_for((rows, cols), k=2, axis=1, pad_rows=layout == "padded", tile=layout == "tile")
    matrix = np.arange(1, rows * cols + 1).reshape(rows, cols)
    stream = spec.to_stream(matrix)
    assert stream.shape == (spec.n_blocks, 256)
    assert np.array_equal(in_rows(stream, spec), matrix)
    assert np.count_nonzero(stream) == rows * cols  # padding is zero
    assert np.array_equal(spec.from_stream(stream), matrix)


# The last two are several rows of squares, ragged at both ends.
SHAPES = [(3, 256), (4, 192), (9, 100), (2, 1536), (5, 577), (1, 1), (7, 4864), (50, 77), (33, 300)]


@pytest.mark.parametrize(("rows", "cols"), SHAPES)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("code", codes.CODES)
def test_expand_and_products_equal_the_table(code: codes.Code, k: int, axis: int, rows: int, cols: int) -> None:
    """Every instruction set, both axes, blocks that end inside rows, one to seven vectors (taken by fours at most)."""
    rng = np.random.default_rng(rows * 10000 + cols)
    specs = [
        TrellisSpec(k=k, code=code, axis=axis, rows=rows, cols=cols, stride=s) for s in {cols, -(-cols // 256) * 256}
    ]
    if axis == 1:
        specs.append(spec_for((rows, cols), k=k, code=code, axis=1, tile=True))
    for spec in specs:
        words = random_words(spec, k)
        scales = (rng.random(rows) * 3 - 1).astype(np.float16)
        dense = in_rows(codes.values(code, 12)[unpack(words, k, 12)], spec) * scales.astype(np.float32)[:, None]
        weight = dense if axis == 1 else dense.T
        for force in SETS:
            assert np.array_equal(trellis_expand(words, scales, spec, force=force), dense)
            for m in (1, 2, 4, 7):
                x = rng.standard_normal((m, weight.shape[1])).astype(np.float32)
                y = trellis_matvec(words, scales, spec, x, force=force)
                # Dot products of n terms: n·eps·|x|·|w| bounds any order of summation; two more for scales.
                bound = (weight.shape[1] + 2) * np.finfo(np.float32).eps * (np.abs(x) @ np.abs(weight.T) + 1e-30)
                exact = x.astype(np.float64) @ weight.T.astype(np.float64)
                assert (np.abs(y - exact) <= bound).all()


@pytest.mark.parametrize(("stride", "fits"), [(64, True), (48, False), (80, False), (96, False), (56, False)])
@pytest.mark.parametrize("what", ["expand", "matvec"])
def test_tiles_of_another_stride_are_refused_by_the_kernel(what: str, stride: int, fits: bool) -> None:
    """50 columns are four squares; a fifth would be read and written outside, whatever ``TrellisSpec`` says."""
    native = import_module("tqtool._native")
    words, scales = np.zeros(2 * stride // 16 * 24, np.uint32), np.ones(32, np.float32)
    shape = (words, scales, np.empty(0, np.float32), stride, 1, 16, 3, 12, 256, "mul1")
    out, x = np.empty((32, 50), np.float32), np.ones((5, 50), np.float32)
    call = {
        "expand": lambda: native.trellis_expand(*shape, out, 1, ""),
        "matvec": lambda: native.trellis_matvec(*shape, x, np.empty((5, 32), np.float32), 1, ""),
    }[what]
    if fits:
        call()
        return
    with pytest.raises(ValueError, match="in tiles the stride is the columns rounded up to 16"):
        call()


@pytest.mark.parametrize("force", SETS)
@pytest.mark.parametrize("layout", [{"axis": 0}, {"axis": 1}, {"axis": 1, "tile": True}], ids=str)
@pytest.mark.parametrize("cols", [640, 644])  # whole groups of sixteen, and not
def test_products_do_not_depend_on_threads(force: str, layout: dict, cols: int) -> None:
    spec = spec_for((300, cols) if layout["axis"] else (cols, 300), k=3, **layout)
    words, scales = random_words(spec), np.ones(300, np.float16)
    x = np.random.default_rng(0).standard_normal((3, spec.weight_shape[1])).astype(np.float32)
    one = trellis_matvec(words, scales, spec, x, threads=1, force=force)
    assert all(np.array_equal(one, trellis_matvec(words, scales, spec, x, threads=n, force=force)) for n in (2, 3, 7))


@pytest.mark.parametrize("window", [8, 12, 13, 14, 15, 16])
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_every_window_is_read_by_every_instruction_set(window: int, k: int) -> None:
    """The format has windows of 12, 14 and 16; kernels read any, up to 16 bits, round the end of a block too."""
    native = import_module("tqtool._native")
    words = np.random.default_rng(window).integers(0, 2**32, (3, 8 * k), dtype=np.uint32)
    wanted = codes.values("mul1", window)[unpack(words, k, window)]
    for force in SETS:
        found = np.empty((3, 256), np.float32)
        shape = (words.reshape(-1), np.ones(3, np.float32), np.empty(0, np.float32), 256, 1, 0, k, window, 256, "mul1")
        native.trellis_expand(*shape, found, 1, force)
        assert np.array_equal(found, wanted)


@pytest.mark.parametrize("shape", [(17408, 5120), (5120, 17408), (1536, 576), (4864, 896), (576, 1536)])
def test_real_widths_are_coded_without_waste(shape: tuple[int, int]) -> None:
    for axis in (0, 1):
        spec = spec_for(shape, k=3, axis=axis)
        assert spec.n_padding == 0
        assert spec.words_shape == (spec.rows, spec.cols * 3 // 32)
    assert spec_for((1536, 576), k=3, axis=1, pad_rows=True).stride == 768


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"k": 0}, "k=0"),
        ({"k": 5}, "k=5"),
        ({"window": 13}, "window 13"),
        ({"code": "hyb"}, "'hyb'"),
        ({"axis": 2}, "axis 2"),
        ({"block": 128}, "block 128"),
        ({"stride": 255}, "stride=255"),
        ({"rows": 0}, "rows=0"),
        ({"tile": 8}, "tile 8"),
        ({"tile": 16, "axis": 0}, "tile 16 with axis 0"),
        ({"tile": 16, "stride": 272}, "cols rounded up to 16"),
    ],
)
def test_specs_refuse_what_the_format_has_not(change: dict, text: str) -> None:
    with pytest.raises(UserError, match=text):
        TrellisSpec(**{"k": 3, "rows": 2, "cols": 256, "stride": 256, **change})


def test_config_entries_are_read_back_or_refused() -> None:
    spec = spec_for((1536, 576), k=3, axis=1)
    assert TrellisSpec.from_config("m", spec.to_config()) == spec
    with pytest.raises(ArtifactError, match=r"entry of m: expected the keys .*found \['k'\]"):
        TrellisSpec.from_config("m", {"k": 3})
    first = {name: value for name, value in spec.to_config().items() if name != "tile"}  # format version 1
    assert TrellisSpec.from_config("m", first, 1) == spec
    with pytest.raises(ArtifactError, match="expected the keys"):
        TrellisSpec.from_config("m", first, 2)
    with pytest.raises(ArtifactError, match="entry of m: trellis k=9"):
        TrellisSpec.from_config("m", {**spec.to_config(), "k": 9})


@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("shape", [(3, 128), (1, 96), (5, 64), (2, 128), (7, 288), (2, 256)])
def test_the_stored_shape_holds_exactly_the_words(shape: tuple[int, int], k: int) -> None:
    """Rows of words only where rows and blocks end together: the last block is padded, and its words are stored."""
    rows, cols = shape
    spec = spec_for(shape, k=k, axis=1)
    assert math.prod(spec.words_shape) == spec.n_words == -(-rows * cols // 256) * 8 * k
    is_whole = rows * cols % 256 == 0 and cols * k % 32 == 0
    assert spec.words_shape == ((rows, cols * k // 32) if is_whole else (spec.n_words,))
