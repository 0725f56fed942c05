"""Choice and geometry of the CUDA kernels, without a card."""

from __future__ import annotations

import collections
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.trellis_cases import TABLE
from tqtool.formats.trellis import spec_for
from tqtool.kernels.cuda import text_of
from tqtool.kernels.cuda_kernels import (
    A100,
    H200,
    LIMBS,
    STATIC_BYTES,
    SUM_BYTES,
    Card,
    kernels,
    tile_launch,
    tile_rows,
)
from tqtool.kernels.metal_kernels import KERNELS
from tqtool.kernels.problem import Problem, choose


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
)
def test_a_launch_fits_the_card_and_leaves_no_row_and_no_unit_out(rows, squares, m, fused, int8, k, card):
    """The shares of the thread blocks as ``TqShare`` of kernels/cuda/tile.cuh has them."""
    cols = 16 * squares - 4
    if rows * squares * 16 >= 1 << 31:
        return
    launch = tile_launch(tile(rows, cols, m=m, fused=fused, int8=int8, k=k), card)
    template = dict(launch.template)
    columns = (1 if int8 else LIMBS) * m
    blocks, (threads, _, _) = launch.grid[0] // launch.threadgroup[0], launch.threadgroup
    row_tiles, units = -(-rows // 16), -(-squares // 4)
    assert (threads, template["SQUARES"], template["ROWS"], template["COLS"]) == (512, squares, rows, cols)
    assert (launch.outputs[0].shape, launch.outputs[0].dtype, template["BLOCKS"]) == ((m, rows), "bfloat16", blocks)
    assert launch.threadgroup_bytes + STATIC_BYTES <= card.shared_bytes
    slices = -(-units // template["SLICE"])
    assert (slices - 1) * template["SLICE"] < units
    whole, left = row_tiles // blocks, 8 * (row_tiles % blocks)
    pairs = [left * block // blocks for block in range(blocks + 1)]
    assert (blocks * whole + left // 8, pairs[0], pairs[-1]) == (row_tiles, 0, left)
    most = max(after - before for before, after in itertools.pairwise(pairs))
    assert tile_rows(row_tiles, blocks) == 16 * whole + 2 * -(-left // blocks) >= 16 * whole + 2 * most
    sums = tile_rows(row_tiles, blocks) * (2 if fused else 1) * columns * SUM_BYTES
    assert sums + (template["SLICE"] + 1) * 16 * columns * 16 <= launch.threadgroup_bytes


@pytest.mark.parametrize(
    ("columns", "here", "whole", "pairs"), [(3, 80, 8, 2), (3, 9, 0, 8), (12, 5, 1, 3), (1, 1, 2, 5)]
)
@pytest.mark.parametrize("matrices", [1, 2])
def test_every_pair_of_rows_meets_every_unit_once(columns, here, whole, pairs, matrices):
    """The positions of a thread block's warps, as ``part_at`` and ``pair_of`` of kernels/cuda/tile.cuh read them."""
    split = 2 if 2 * columns <= 8 * -(-columns // 8) else 1
    together, half = 8 // split, -(-here // split)
    bulk = whole * here
    each = bulk + -(-pairs // together) * half
    met = collections.Counter()
    for warp in range(16):
        for position in range(matrices * each * warp // 16, matrices * each * (warp + 1) // 16):
            matrix, rest = divmod(position, each)
            for r in range(8):
                if rest < bulk:
                    met[matrix, "whole", rest // here, r, rest % here] += 1
                    continue
                group, unit = divmod(rest - bulk, half)
                pair, unit = group * together + r % together, unit + r // together * half
                if pair < pairs and unit < here:
                    met[matrix, "left", 0, pair, unit] += 1
    assert set(met.values()) == {1}
    assert len(met) == matrices * here * (8 * whole + pairs)


def test_metals_text_has_no_address_spaces_left():
    for kernel in KERNELS:
        text = text_of(kernel.source)
        code = [line.split("//")[0] for line in (text.header + text.body).splitlines()]
        assert not [line for line in code if " device " in line or "(thread " in line or "const device" in line], kernel
        assert "simd_sum(float value)" in text.header
    assert "threadgroup" not in text_of("cuda/tile.cu").body
