"""What the CUDA encoder takes, and why its costs fit 32 bits; it runs on a card alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tqtool.formats.trellis import BLOCK
from tqtool.kernels.cuda_encoder import CUDA_ENCODER, UNREACHED, supports
from tqtool.kernels.encoding import LEVEL_LIMIT, dearest_step, encode_problem
from tqtool.mathx import codes


@pytest.mark.parametrize("code", codes.COMPUTED_CODES)
@pytest.mark.parametrize("k", [2, 3, 4])
def test_every_code_of_the_format_is_taken(code, k):
    problem = encode_problem(5, codes.levels(code, 12), window=12, k=k)
    assert supports(problem) is None
    launch = CUDA_ENCODER.launch(problem)
    assert launch.grid == (2 * 128, 1, 1)
    assert launch.dims == (5, 128)
    assert [output.shape for output in launch.outputs] == [(5, 256), (2, 256, (1 << (12 - k)) // 2)]
    assert CUDA_ENCODER.launch(replace(problem, blocks=10**6)).grid[0] == 132 * 4 * 128


def test_what_it_does_not_take_has_a_reason():
    levels = codes.levels("mul1", 12)
    for change, reason in (
        ({"window": 14}, "window 14: does 12"),
        ({"k": 1}, "k = 1: does 2 to 4"),
        ({"warmup": 40}, "warmup 40: no multiple of 16"),
        ({"highest": 30_000}, "a start that is not allowed could win"),
        ({"dearest": 1 << 20}, "more than 32 bits"),
        ({"dearest": None}, "more than 32 bits"),
    ):
        problem = replace(encode_problem(5, levels, window=12, k=4), **change)
        assert reason in str(supports(problem)), change


@pytest.mark.parametrize("k", [1, 2, 3])
def test_the_dearest_step_is_that_of_the_worst_suffix_and_input(k):
    levels = np.random.default_rng(k).integers(-300, 300, 1 << 6).astype(np.int16)
    worst = 0
    for suffix in range(1 << (6 - k)):
        ends = [int(levels[(d << (6 - k)) | suffix]) for d in range(1 << k)]
        for x in range(-LEVEL_LIMIT, LEVEL_LIMIT + 1):
            worst = max(worst, min((u - x) ** 2 for u in ends) + LEVEL_LIMIT**2 - x * x)
    assert dearest_step(levels.tobytes(), k) == worst


@pytest.mark.parametrize("k", [2, 3, 4])
def test_no_cost_of_a_real_search_passes_the_bound(k):
    """The forward pass in Python, on inputs that cost much: constant, alternating, the worst input of each code."""
    levels = codes.levels("mul1", 12).astype(np.int64).reshape(1 << k, -1)
    suffixes, factor = levels.shape[1], 1 << k
    before = (np.arange(1 << k)[:, None] * (suffixes >> k)) + (np.arange(suffixes) >> k)
    problem = encode_problem(1, codes.levels("mul1", 12), window=12, k=k)
    bound = UNREACHED + factor * BLOCK * problem.dearest
    for inputs in (np.full(BLOCK, 560), np.full(BLOCK, -560), np.resize([560, -560], BLOCK), np.zeros(BLOCK, int)):
        cost = np.full(suffixes, UNREACHED)
        cost[7] = 0
        for x in inputs:
            cost = (cost[before] + factor * (levels * (levels - 2 * x) + LEVEL_LIMIT**2)).min(axis=0)
            assert cost.min() >= 0
        assert cost.max() <= bound < 1 << 32
