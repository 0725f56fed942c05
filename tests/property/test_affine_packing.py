"""Laws of the affine layout."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tqtool.formats.affine import AFFINE_BITS, pack, unpack


@given(bits=st.sampled_from(AFFINE_BITS), rows=st.integers(1, 4), units=st.integers(1, 5), seed=st.integers(0, 99))
def test_unpack_inverts_pack(bits: int, rows: int, units: int, seed: int) -> None:
    codes = np.random.default_rng(seed).integers(0, 1 << bits, (rows, 32 * units), dtype=np.uint8)
    words = pack(codes, bits)
    assert words.shape == (rows, units * bits)
    np.testing.assert_array_equal(unpack(words, bits), codes)


@given(bits=st.sampled_from(AFFINE_BITS), units=st.integers(1, 5), seed=st.integers(0, 99))
def test_pack_inverts_unpack(bits: int, units: int, seed: int) -> None:
    words = np.random.default_rng(seed).integers(0, 1 << 32, (3, units * bits), dtype=np.uint32)
    np.testing.assert_array_equal(pack(unpack(words, bits), bits), words)
