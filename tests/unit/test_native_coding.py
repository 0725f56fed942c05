"""What stands around the search, compiled: level units, words, sums; against numpy and the format's own packing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tqtool import native
from tqtool.errors import BackendError
from tqtool.formats.trellis import check_closed, pack, unpack
from tqtool.solve.trellis_rows import squared_errors

THREADS = (1, 3)


def closed_paths(blocks: int, k: int, window: int, seed: int = 0) -> np.ndarray:
    """Any words are closed paths."""
    words = np.random.default_rng(seed).integers(0, 2**32, (blocks, 8 * k), dtype=np.uint32)
    return unpack(words, k, window)


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("shape", [(1, 1), (3, 257), (500, 100), (0, 4), (2, 70_000)], ids=str)
def test_levels(shape: tuple[int, int], threads: int) -> None:
    """Halves, both limits, what lies just beyond them, and what only float32 products round as they do."""
    rng = np.random.default_rng(1)
    rows = (rng.standard_normal(shape) * 300).astype(np.float32)
    special = np.array([0.5, 1.5, 2.5, -0.5, -1.5, 559.5, 560.4, 560.6, -560.5, 1e9, -1e9, 3e38, 0.0, -0.0], np.float32)
    rows.reshape(-1)[: special.size] = special[: rows.size]
    factors = rng.choice(np.array([1.0, 0.1, 1 / 3, 0.0], np.float32), shape[0])
    factors[:1] = 1
    with np.errstate(over="ignore"):
        wanted = np.clip(np.rint(rows * factors[:, None]), -560, 560).astype(np.int16)
    found = native.trellis_levels(rows, factors, limit=560.0, threads=threads)
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(native.trellis_levels(rows[:, ::2], factors, limit=560.0), wanted[:, ::2])


@given(
    k=st.integers(1, 4), window=st.sampled_from([8, 12, 14, 16]), blocks=st.integers(0, 300), seed=st.integers(0, 99)
)
def test_words_are_the_formats(k: int, window: int, blocks: int, seed: int) -> None:
    states = closed_paths(blocks, k, window, seed)
    for threads in THREADS:
        words, broken = native.trellis_pack(states, k=k, window=window, threads=threads)
        assert broken is None
        np.testing.assert_array_equal(words, pack(states, k))


@pytest.mark.parametrize("step", [0, 1, 128, 255])
@pytest.mark.parametrize("bit", [0, 2, 3, 11])
def test_the_first_broken_block_is_named(step: int, bit: int) -> None:
    """The seam among the steps, each end of a state; a later block that is broken too is not the one."""
    states = closed_paths(700, 3, 12)
    states[[401, 650], step] ^= np.uint16(1 << bit)
    for threads in THREADS:
        assert native.trellis_pack(states, k=3, window=12, threads=threads)[1] == 401
    with pytest.raises(Exception, match="block 401"):
        check_closed(states, 3, 12)


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (5, 8), (40, 1003), (0, 3)], ids=str)
def test_products(shape: tuple[int, int]) -> None:
    """Within the roundings of n sums in float64, the same whatever the threads, zeros and large numbers among them."""
    rng = np.random.default_rng(2)
    weights, codes = (rng.standard_normal(shape).astype(np.float32) for _ in range(2))
    weights[:1] *= np.float32(1e30)
    codes[1:2] = 0
    found = native.row_products(weights, codes, threads=1)
    wide = [array.astype(np.longdouble) for array in (weights, codes)]
    pairs = ((0, 1), (1, 1), (0, 0))
    for column, (a, b) in enumerate(pairs):
        bound = shape[1] * 2.0**-53 * np.abs(wide[a] * wide[b]).sum(axis=1)
        assert (np.abs(found[:, column] - (wide[a] * wide[b]).sum(axis=1)) <= bound).all()
    np.testing.assert_array_equal(native.row_products(weights, codes, threads=3), found)


def test_squared_errors_are_those_of_the_decoded_weights() -> None:
    """An error of a thousandth of the weight, as at four bits; a row that is met exactly has none, and not less."""
    rng = np.random.default_rng(3)
    codes = rng.standard_normal((6, 4000)).astype(np.float32)
    scales = rng.uniform(0.01, 0.02, 6).astype(np.float16)
    weights = codes * scales[:, None].astype(np.float32) * np.float32(1.03)
    weights[2] = codes[2] * np.float32(scales[2])
    found = squared_errors(native.row_products(weights, codes), scales)
    exact = (weights.astype(np.float64) - codes.astype(np.float64) * scales[:, None].astype(np.float64)) ** 2
    np.testing.assert_allclose(found, exact.sum(axis=1), rtol=1e-9, atol=1e-12)
    assert (found >= 0).all()


def test_what_does_not_fit_is_refused() -> None:
    states, rows = np.zeros((2, 256), np.uint16), np.zeros((2, 8), np.float32)
    with pytest.raises(BackendError, match="trellis_pack: no trellis"):
        native.trellis_pack(states, k=9, window=12)
    with pytest.raises(BackendError, match="trellis_pack"):
        native.trellis_pack(states[:, :5], k=3, window=12)
    with pytest.raises(BackendError, match="trellis_levels: shapes"):
        native.trellis_levels(rows, np.zeros(3, np.float32), limit=560.0)
    with pytest.raises(BackendError, match="row_products: shapes"):
        native.row_products(rows, rows[:1])
