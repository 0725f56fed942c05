"""What must hold of GPTQ for any weight and Hessian."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tqtool.formats.affine import AFFINE_BITS, AFFINE_GROUPS
from tqtool.formats.dtypes import DType
from tqtool.solve.gptq import AffineGptq, GptqOptions, gptq_quantize
from tqtool.solve.hessian import Hessian

NAME = "up_proj.weight"


def gaussian(rows: int, width: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, width)).astype(np.float32)


def correlated(width: int, seed: int) -> Hessian:
    """Half of every input is one common factor."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((2 * width, width)) + rng.standard_normal((2 * width, 1))
    return Hessian(matrix=rows.T @ rows / len(rows), rows=len(rows))


@settings(deadline=None, max_examples=30)
@given(
    bits=st.sampled_from(AFFINE_BITS),
    group=st.sampled_from(AFFINE_GROUPS),
    groups=st.integers(1, 4),
    scale=st.sampled_from([0.25, 1.0, 3.0]),
    seed=st.integers(0, 99),
)
def test_independent_inputs_give_round_to_nearest(bits: int, group: int, groups: int, scale: float, seed: int) -> None:
    """H a multiple of the identity: nothing to feed, byte for byte. float32 scales, which MLX does not round late."""
    weight = gaussian(5, group * groups, seed)
    options = GptqOptions(bits=bits, group_size=group, dtype=DType.F32)
    statistics = Hessian(matrix=scale * np.eye(group * groups), rows=1)
    matrix = gptq_quantize(NAME, weight, statistics, options)
    assert matrix.method == "gptq"
    expected = options.plain.run(NAME, weight).tensors.values()
    for ours, theirs in zip((matrix.words, matrix.scales, matrix.biases), expected, strict=True):
        assert ours.tobytes() == theirs.tobytes()


@settings(deadline=None, max_examples=30)
@given(bits=st.sampled_from(AFFINE_BITS), groups=st.integers(2, 4), seed=st.integers(0, 99))
def test_loss_never_above_rtn_and_below_it_where_inputs_correlate(bits: int, groups: int, seed: int) -> None:
    weight, statistics = gaussian(8, 64 * groups, seed), correlated(64 * groups, seed)
    for grid in ("mlx", "search"):
        options = GptqOptions(bits=bits, group_size=64, grid=grid)
        matrix = gptq_quantize(NAME, weight, statistics, options)
        assert matrix.loss <= matrix.plain_loss
        if matrix.method == "gptq" and bits > 1:
            assert matrix.loss < 0.9 * matrix.plain_loss


@settings(deadline=None, max_examples=20)
@given(power=st.integers(-20, 20), bits=st.sampled_from(AFFINE_BITS), seed=st.integers(0, 99))
def test_the_unit_of_the_inputs_does_not_matter(power: int, bits: int, seed: int) -> None:
    """By powers of four the factor scales by powers of two, and every bit of the arithmetic stays."""
    weight, statistics = gaussian(4, 128, seed), correlated(128, seed)
    options = GptqOptions(bits=bits, group_size=64)
    other = Hessian(matrix=statistics.matrix * 4.0**power, rows=statistics.rows)
    one, two = (AffineGptq(options=options, hessian=h).run(NAME, weight) for h in (statistics, other))
    assert all(one.tensors[name].tobytes() == two.tensors[name].tobytes() for name in one.tensors)


@settings(deadline=None, max_examples=20)
@given(bits=st.sampled_from(AFFINE_BITS), seed=st.integers(0, 99))
def test_rows_do_not_see_each_other(bits: int, seed: int) -> None:
    """Up to the guard, which judges the matrix: with one damping and no fallback each row is coded alone."""
    weight, statistics = gaussian(6, 128, seed), correlated(128, seed)
    options = GptqOptions(bits=bits, group_size=32, work="float64", dampings=(0.1,))
    whole = gptq_quantize(NAME, weight, statistics, options)
    part = gptq_quantize(NAME, weight[2:4].copy(), statistics, options)
    if whole.method == part.method == "gptq":
        np.testing.assert_array_equal(whole.words[2:4], part.words)
