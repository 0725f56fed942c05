"""Choice and geometry of the CUDA kernels, without a card."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.trellis_cases import TABLE
from tqtool.formats.trellis import spec_for
from tqtool.kernels.cuda import text_of
from tqtool.kernels.cuda_kernels import A100, H200, LIMBS, STATIC_BYTES, SUM_BYTES, Card, kernels, tile_launch
from tqtool.kernels.metal_kernels import KERNELS
from tqtool.kernels.problem import Problem, choose

FINE = 1024


def tile(rows, cols, m=1, fused=False, int8=False, **trellis):
    spec = spec_for((rows, cols), axis=1, tile=True, **{"k": 3, **trellis})
    if fused:
        return Problem(op="swiglu", spec=spec, m=m, dtype="bfloat16", up=spec, int8=int8)
    return Problem(spec=spec, m=m, dtype="bfloat16", int8=int8)


def test_squares_go_to_the_tensor_cores_and_everything_else_to_metals_text():
    chosen = {case: choose(case.problem, kernels(H200)) for case in TABLE}
    for case, choice in chosen.items():
        problem = case.problem
        if problem.m >= 5:
            assert choice.path == "expand + matmul"
            continue
        assert choice.kernel is not None, case
        own = problem.spec.tile and problem.spec.code != "3inst" and problem.spec.cols % 4 == 0 and problem.m > 0
        own = own and (problem.up is None or problem.up.k == problem.spec.k)
        assert (choice.kernel.source.startswith("cuda/")) == own, case
    assert {choice.kernel.source for choice in chosen.values() if choice.kernel} >= {
        "cuda/tile.cu",
        "cuda/tile_swiglu.cu",
    }


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (tile(32, 30), "30 inputs: expected a multiple of 4"),
        (tile(32, 32, code="3inst"), "code 3inst is no byte sum"),
        (tile(32, 32, m=5), "m = 5"),
        (tile(16, (1 << 17) + 4), "at most 131072"),
        (tile(32, 32, fused=True), "does no swiglu"),
        (
            Problem(
                op="swiglu",
                spec=tile(32, 32).spec,
                m=1,
                dtype="float32",
                up=spec_for((32, 32), k=2, axis=1, tile=True),
            ),
            "differ in bits",
        ),
    ],
)
def test_what_the_tensor_cores_do_not_do_has_a_reason(problem, reason):
    own = kernels(H200)[:2]
    reasons = dict(choose(problem, own).refusals)
    assert any(reason in text for text in reasons.values()), reasons


@given(
    rows=st.integers(1, 200_000),
    squares=st.integers(1, 1700),
    m=st.integers(1, 4),
    fused=st.booleans(),
    int8=st.booleans(),
    k=st.integers(1, 4),
    card=st.sampled_from([H200, A100, Card(processors=2, shared_bytes=99 << 10)]),
    meeting_rounds=st.sampled_from([-1000, 12, 1000]),
)
def test_a_launch_fits_the_card_and_leaves_no_unit_out(rows, squares, m, fused, int8, k, card, meeting_rounds):
    cols = 16 * squares - 4
    if rows * squares * 16 >= 1 << 31:
        return
    problem = tile(rows, cols, m=m, fused=fused, int8=int8, k=k)
    launch = tile_launch(problem, replace(card, meeting_rounds=meeting_rounds))
    template = dict(launch.template)
    limbs = 1 if int8 else LIMBS
    blocks, (threads, _, _) = launch.grid[0] // launch.threadgroup[0], launch.threadgroup
    row_tiles, units, cells = -(-rows // 16), -(-squares // 4), (2 if fused else 1) * 16 * limbs * m
    assert (threads, template["SQUARES"], template["ROWS"], template["COLS"]) == (512, squares, rows, cols)
    assert launch.threadgroup_bytes + STATIC_BYTES <= card.shared_bytes
    slices = -(-units // template["SLICE"])
    assert (slices - 1) * template["SLICE"] < units
    x_bytes = template["SLICE"] * 16 * limbs * m * 16
    # As the kernel cuts the rows of tiles: every piece fits into the sums, and each cut row knows who has a part of it.
    is_whole = template["WHOLE"]
    assert row_tiles * blocks < 1 << 32 or not is_whole
    cut = lambda b: row_tiles * b // blocks * FINE if is_whole else row_tiles * FINE * b // blocks  # noqa: E731
    block_of = lambda q: ((q + 1) * blocks - 1) // (row_tiles * FINE)  # noqa: E731
    assert (cut(0), cut(blocks)) == (0, row_tiles * FINE)
    for b in {0, blocks // 3, blocks // 2, blocks - 1}:
        begin, end = cut(b), cut(b + 1)
        assert begin < end
        tiles = -(-end // FINE) - begin // FINE
        assert tiles * cells * SUM_BYTES + x_bytes <= launch.threadgroup_bytes
        assert is_whole or (block_of(begin), block_of(end - 1)) == (b, b)
    if is_whole:  # y, and nothing that would have to be zeros before
        assert (launch.result, launch.outputs[0].shape, launch.outputs[0].dtype) == (None, (m, rows), "bfloat16")
        return
    words = math.prod(launch.outputs[0].shape)
    assert launch.result is not None
    result_bytes = math.prod(launch.result.shape) * 2
    assert words * 4 >= -(-result_bytes // 8) * 8 + blocks * (cells * SUM_BYTES + 4)


def test_metals_text_has_no_address_spaces_left():
    for kernel in KERNELS:
        text = text_of(kernel.source)
        code = [line.split("//")[0] for line in (text.header + text.body).splitlines()]
        assert not [line for line in code if " device " in line or "(thread " in line or "const device" in line], kernel
        assert "simd_sum(float value)" in text.header
    assert "threadgroup" not in text_of("cuda/tile.cu").body
