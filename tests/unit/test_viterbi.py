"""The native encoder against slow oracles, and the laws that every encoder must keep."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.oracles import viterbi as oracle
from tqtool.errors import BackendError
from tqtool.formats.trellis import check_closed
from tqtool.mathx import codes
from tqtool.native import viterbi_encode


def instruction_sets() -> list[str]:
    x, levels = np.zeros((1, 256), np.int16), codes.levels("mul1", 12)
    found = []
    for name in ("avx512", "avx2", "neon", "scalar"):
        try:
            viterbi_encode(x, levels, window=12, k=2, force=name)
            found.append(name)
        except BackendError:
            continue
    return found


SETS = instruction_sets()


def small_levels(window: int, seed: int = 0) -> np.ndarray:
    return np.rint(np.random.default_rng(seed).standard_normal(1 << window) * 147).astype(np.int16)


def gaussian(n: int, block: int, k: int, seed: int = 0) -> np.ndarray:
    draw = np.random.default_rng(seed).standard_normal((n, block)) * 147.7 * codes.CODE_SCALE[k]
    return np.clip(np.rint(draw), -560, 560).astype(np.int16)


def test_the_scalar_set_is_always_there() -> None:
    assert "scalar" in SETS


@pytest.mark.parametrize(("window", "k", "block"), [(4, 1, 6), (4, 2, 4), (6, 2, 5), (6, 3, 4), (5, 1, 9)])
def test_oracle_of_the_oracle(window: int, k: int, block: int) -> None:
    """Pinned searches over every seam find what trying every symbol sequence finds."""
    levels = small_levels(window)
    for seed in range(4):
        x = gaussian(1, block, k, seed)[0]
        assert oracle.exhaustive(x, levels, window, k) == oracle.brute_force(x, levels, window, k)


@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("force", SETS)
def test_states_equal_the_oracle(force: str, k: int) -> None:
    window = 12
    levels = codes.levels("mul1", window)
    x = gaussian(3, 64, k, seed=k)
    states, name = viterbi_encode(x, levels, window=window, k=k, force=force)
    assert name == force
    for row, found in zip(x, states, strict=True):
        assert oracle.algorithm_4(row, levels, window, k)[0] == found.tolist()


@pytest.mark.parametrize("warmup", [1, 7, 16, 32])
def test_short_first_pass_equals_the_oracle(warmup: int) -> None:
    levels = small_levels(8)
    x = gaussian(4, 64, 2, seed=warmup)
    states, _ = viterbi_encode(x, levels, window=8, k=2, warmup=warmup)
    for row, found in zip(x, states, strict=True):
        assert oracle.algorithm_4(row, levels, 8, 2, warmup)[0] == found.tolist()


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_ties_and_extremes_equal_the_oracle(data: st.DataObject) -> None:
    """Few distinct levels make ties everywhere; extreme inputs stretch the costs to their bound."""
    k = data.draw(st.integers(1, 3), "k")
    window = data.draw(st.integers(2 * k, 8), "window")
    block = data.draw(st.integers(8, 40), "block")
    seed = data.draw(st.integers(0, 2**31), "seed")
    rng = np.random.default_rng(seed)
    levels = rng.choice(np.array([-600, -3, 0, 3, 640], np.int16), 1 << window)
    x = rng.choice(np.array([-560, -1, 0, 2, 560], np.int16), (2, block))
    warmup = data.draw(st.integers(1, block // 2), "warmup")
    states, _ = viterbi_encode(x, levels, window=window, k=k, warmup=warmup)
    for row, found in zip(x, states, strict=True):
        assert oracle.algorithm_4(row, levels, window, k, warmup)[0] == found.tolist()


@pytest.mark.parametrize(("window", "k"), [(14, 1), (14, 3), (16, 1), (16, 4)])
def test_wide_windows_agree_across_instruction_sets(window: int, k: int) -> None:
    levels, x = codes.levels("mul1", window), gaussian(2, 256, k)
    reference, _ = viterbi_encode(x, levels, window=window, k=k, force="scalar")
    check_closed(reference, k, window)
    for force in SETS:
        assert np.array_equal(viterbi_encode(x, levels, window=window, k=k, force=force)[0], reference)


def test_costs_that_float32_cannot_hold_are_searched_wider() -> None:
    """Steps of 16 million each, while the paths differ by a few units: float32 would round those away.

    The level is 4000 plus the newest symbol minus the one before, so the large part of every closed path is the same.
    """
    state = np.arange(1 << 6)
    levels = (4000 + (state & 1) - (state >> 1 & 1)).astype(np.int16)
    x = np.random.default_rng(5).integers(-2, 3, (20, 48)).astype(np.int16)
    states, _ = viterbi_encode(x, levels, window=6, k=1)
    for row, found in zip(x, states, strict=True):
        assert oracle.algorithm_4(row, levels, 6, 1)[0] == found.tolist()


@pytest.mark.parametrize("force", SETS)
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_a_decodable_block_is_coded_without_loss(force: str, k: int) -> None:
    """Law of every encoder: the levels of a closed path come back exactly."""
    window, block = 12, 256
    levels = codes.levels("mul1", window)
    bits = np.random.default_rng(k).integers(0, 1 << k, (8, block))
    state, mask = np.zeros(8, np.int64), (1 << window) - 1
    for t in range(block):
        state = ((state << k) | bits[:, t]) & mask
    path = np.empty((8, block), np.int64)
    for t in range(block):
        state = ((state << k) | bits[:, t]) & mask
        path[:, t] = state
    states, _ = viterbi_encode(levels[path], levels, window=window, k=k, force=force)
    check_closed(states, k, window)
    # k=1 paths of one bit a step may be ambiguous around the seam; the others are found to the state.
    loss = np.abs(levels[states].astype(int) - levels[path]).sum(axis=1)
    assert (loss == 0).all()


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_two_passes_are_close_to_exhaustive(k: int) -> None:
    window, block = 8, 48
    levels, x = small_levels(window, 3), gaussian(24, block, k, seed=9)
    states, _ = viterbi_encode(x, levels, window=window, k=k)
    check_closed(states, k, window)
    cost = ((levels[states].astype(np.int64) - x) ** 2).sum(axis=1)
    best = np.array([oracle.exhaustive(row, levels, window, k) for row in x])
    assert (cost >= best).all()
    # QTIP reports Algorithm 4 within 0.2 % of the optimum at T=256; blocks five times shorter leave more to the seam.
    assert cost.sum() <= 1.03 * best.sum()


def test_threads_do_not_change_a_state() -> None:
    levels, x = codes.levels("mul1", 12), gaussian(150, 256, 3)
    one = viterbi_encode(x, levels, window=12, k=3, threads=1)[0]
    for threads in (2, 3, 8):
        assert np.array_equal(one, viterbi_encode(x, levels, window=12, k=3, threads=threads)[0])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"warmup": 0}, "warmup"),
        ({"warmup": 129}, "warmup"),
        ({"k": 5}, "no encoder"),
        ({"window": 11}, "shapes"),
        ({"force": "avx1024"}, "no encoder"),
    ],
)
def test_refusals_say_what_is_wrong(change: dict, text: str) -> None:
    arguments = {"window": 12, "k": 3, **change}
    with pytest.raises(BackendError, match=text):
        viterbi_encode(np.zeros((1, 256), np.int16), codes.levels("mul1", 12), **arguments)
