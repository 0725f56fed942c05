"""The sign stream."""

from __future__ import annotations

import numpy as np
import pytest

from tests.oracles.hadamard import splitmix32_signs
from tqtool.errors import UserError
from tqtool.mathx.signs import sign_vector


@pytest.mark.parametrize(("seed", "lane"), [(0, 0), (42, 0), (42, 7), (2**32 - 1, 2**32 - 2), (2**31, 123456)])
def test_equal_to_one_integer_at_a_time(seed: int, lane: int) -> None:
    assert sign_vector(seed, 300, lane=lane).tolist() == splitmix32_signs(seed, 300, lane)


def test_a_shorter_vector_is_a_prefix() -> None:
    assert np.array_equal(sign_vector(42, 17, lane=3), sign_vector(42, 1000, lane=3)[:17])


def test_lanes_and_seeds_are_unrelated() -> None:
    # 4096 fair signs: a correlation beyond 6 / sqrt(4096) happens by chance once in 5e8 pairs.
    streams = [sign_vector(seed, 4096, lane=lane).astype(np.int64) for seed in (41, 42, 43) for lane in (0, 1, 2, 30)]
    gram = np.array(streams) @ np.array(streams).T
    off_diagonal = gram[~np.eye(len(streams), dtype=bool)]
    assert np.abs(off_diagonal).max() < 6 * 64
    assert np.abs(np.array(streams).sum(axis=1)).max() < 6 * 64


@pytest.mark.parametrize(
    ("seed", "lane", "words"), [(-1, 0, "seed -1"), (2**32, 0, "seed 4294967296"), (0, -1, "lane -1")]
)
def test_out_of_range_is_refused(seed: int, lane: int, words: str) -> None:
    with pytest.raises(UserError, match=words):
        sign_vector(seed, 4, lane=lane)
