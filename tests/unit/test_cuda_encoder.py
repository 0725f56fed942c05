"""What the CUDA encoder takes, and why its costs fit 32 bits; it runs on a card alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tqtool.formats.trellis import BLOCK
from tqtool.kernels.cuda_encoder import (
    CUDA_ENCODER,
    PROCESSOR_BYTES,
    RESERVED_BYTES,
    RESUME_JOBS,
    STATIC_BYTES,
    UNREACHED,
    greatest_cost,
    search,
    supports,
)
from tqtool.kernels.cuda_kernels import H200
from tqtool.kernels.encoding import LEVEL_LIMIT, dearest_step, encode_problem
from tqtool.mathx import codes

TRELLISES = [(12, 1), (12, 2), (12, 3), (12, 4), (14, 2), (14, 3), (14, 4), (16, 2), (16, 3), (16, 4)]


@pytest.mark.parametrize("code", codes.COMPUTED_CODES)
@pytest.mark.parametrize(("window", "k"), TRELLISES)
def test_every_code_of_the_format_is_taken(code, window, k):
    problem = encode_problem(5, codes.levels(code, window), window=window, k=k)
    assert supports(problem) is None
    found, launch = search(problem), CUDA_ENCODER.launch(problem)
    groups = -(-5 // found.blocks)
    assert (launch.grid, launch.threadgroup) == ((groups * found.threads, 1, 1), (found.threads, 1, 1))
    assert launch.threadgroup_bytes + STATIC_BYTES <= H200.shared_bytes
    assert found.resident * (found.shared_bytes + STATIC_BYTES + RESERVED_BYTES) <= PROCESSOR_BYTES
    # A nibble for each suffix, block and step.
    choices = (1 << (window - k)) * found.blocks // 2
    assert [output.shape for output in launch.outputs] == [
        (5, 256),
        (groups, 256 if window == 12 else 512, choices // 4),
    ]
    many = replace(problem, blocks=10**6)
    assert CUDA_ENCODER.launch(many).grid[0] == 132 * found.resident * found.threads
    assert CUDA_ENCODER.launch(many).dims == (10**6, 128, 1)


def test_the_second_pass_is_halved_where_it_pays_and_its_costs_fit():
    problem = encode_problem(10**6, codes.levels("mul1", 12), window=12, k=4)
    few = 132 * 4 * 4 * (RESUME_JOBS - 1)
    # 256 steps of so much fit 32 bits, 384 do not.
    dear = ((1 << 32) - UNREACHED) // 16 // 300
    for change, halved in (({}, 1), ({"warmup": 64}, 0), ({"blocks": few}, 0), ({"dearest": dear}, 0)):
        changed = replace(problem, **change)
        assert supports(changed) is None
        assert CUDA_ENCODER.launch(changed).dims[2] == halved, change


def test_what_it_does_not_take_has_a_reason():
    for window, k, change, reason in (
        (12, 4, {"window": 13}, "window 13: does 12, 14 and 16"),
        (14, 1, {}, "k = 1: does 2 to 4 at window 14"),
        (16, 1, {}, "k = 1: does 2 to 4 at window 16"),
        (12, 4, {"warmup": 41}, "warmup 41: passes begin and end at even steps"),
        (12, 4, {"highest": 30_000}, "a start that is not allowed could win"),
        (16, 3, {"highest": 1_200}, "a start that is not allowed could win"),
        (12, 4, {"dearest": 1 << 20}, "more than 32 bits"),
        (12, 4, {"dearest": None}, "more than 32 bits"),
        (16, 3, {"dearest": 1 << 20}, "more than 32 bits"),
    ):
        problem = replace(encode_problem(5, codes.levels("mul1", window), window=window, k=k), **change)
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


@pytest.mark.parametrize(("window", "k"), [(12, 1), (12, 2), (12, 3), (12, 4), (14, 3), (16, 3)])
def test_no_cost_of_a_real_search_passes_the_bound(window, k):
    """The forward pass in Python, pinned, on inputs that cost much: constant, alternating, zeros."""
    table = codes.levels("mul1", window)
    levels = table.astype(np.int64).reshape(1 << k, -1)
    problem = encode_problem(1, table, window=window, k=k)
    suffixes, factor = levels.shape[1], search(problem).factor
    before = (np.arange(1 << k)[:, None] * (suffixes >> k)) + (np.arange(suffixes) >> k)
    steps = BLOCK if window == 12 else 40
    bound = greatest_cost(problem, factor, steps)
    for inputs in (np.full(steps, 560), np.full(steps, -560), np.resize([560, -560], steps), np.zeros(steps, int)):
        cost = np.full(suffixes, UNREACHED)
        cost[7] = 0
        for x in inputs:
            cost = (cost[before] + factor * (levels * (levels - 2 * x) + LEVEL_LIMIT**2)).min(axis=0)
            assert cost.min() >= 0
        assert cost.max() <= bound < 1 << 32
