"""What must hold of LDLQ × trellis for any shape."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tqtool.formats.trellis import BLOCK, spec_for
from tqtool.solve.hessian import Hessian
from tqtool.solve.ldlq import ldlq_encode
from tqtool.solve.ldlq_coder import LdlqOptions, coding_order, trellis_coder
from tqtool.solve.trellis import TrellisOptions, encode_weight

NAME = "up_proj.weight"


@settings(deadline=None, max_examples=80)
@given(
    outputs=st.integers(1, 700),
    inputs=st.integers(1, 700),
    axis=st.sampled_from([0, 1]),
    columns=st.integers(1, 40),
    pad_rows=st.booleans(),
    order=st.sampled_from(["curvature", "natural"]),
)
def test_steps_cover_the_weight_once_and_in_order(
    outputs: int, inputs: int, axis: int, columns: int, pad_rows: bool, order: str
) -> None:
    spec = spec_for((outputs, inputs), k=3, axis=axis, pad_rows=pad_rows)
    options = LdlqOptions(trellis=TrellisOptions(k=3), columns=columns, order=order)
    statistics = Hessian(matrix=np.diag(np.arange(1.0, inputs + 1)), rows=1)
    coded = coding_order(spec, statistics, options)
    assert sorted(coded) == list(range(inputs))
    weight = np.ones((outputs, inputs), np.float32)
    reached = np.zeros(outputs, int)  # inputs coded of each output
    for step in trellis_coder(NAME, weight, spec, options, coded).steps():
        assert (reached >= step.complete).all()
        size = 0
        for piece in step.pieces:
            assert (reached[piece.outputs] == piece.start).all()
            assert piece.start < piece.stop
            reached[piece.outputs] = piece.stop
            size += len(reached[piece.outputs]) * (piece.stop - piece.start)
        assert size > 0
        if axis == 0 and spec.stride >= BLOCK:
            group = BLOCK // np.gcd(spec.stride, BLOCK)
            assert max(piece.stop - piece.start for piece in step.pieces) <= columns + group
    assert (reached == inputs).all()


@settings(deadline=None, max_examples=25)
@given(
    outputs=st.integers(1, 80),
    inputs=st.integers(1, 600),
    axis=st.sampled_from([0, 1]),
    columns=st.sampled_from([1, 3, 16]),
    k=st.integers(1, 4),
    pad_rows=st.booleans(),
    order=st.sampled_from(["curvature", "natural"]),
)
def test_independent_inputs_give_the_plain_trellis(
    outputs: int, inputs: int, axis: int, columns: int, k: int, pad_rows: bool, order: str
) -> None:
    """H = I: the same words. Scales too, unless a refit in another order of sums rounds across a float16 tie."""
    weight = np.random.default_rng(outputs * 1000 + inputs).standard_normal((outputs, inputs)).astype(np.float32)
    spec = spec_for((outputs, inputs), k=k, axis=axis, pad_rows=pad_rows)
    trellis = TrellisOptions(k=k, warmup=16)
    options = LdlqOptions(trellis=trellis, columns=columns, order=order, dampings=(0.0,), headroom=1.0)
    found = ldlq_encode(NAME, weight, Hessian(matrix=np.eye(inputs), rows=1), spec, options)
    plain = encode_weight(NAME, weight, spec, trellis)
    np.testing.assert_array_equal(found.matrix.words, plain.words)
    np.testing.assert_allclose(found.matrix.scales.astype(float), plain.scales.astype(float), rtol=2.0**-9)
    assert found.loss <= found.plain_loss


@settings(deadline=None, max_examples=12)
@given(power=st.integers(-20, 20), axis=st.sampled_from([0, 1]), seed=st.integers(0, 99))
def test_the_unit_of_the_inputs_does_not_matter(power: int, axis: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    weight = rng.standard_normal((40, 320)).astype(np.float32)
    rows = rng.standard_normal((600, 320)) + rng.standard_normal((600, 1))
    matrix = rows.T @ rows / 600
    spec = spec_for((40, 320), k=3, axis=axis)
    options = LdlqOptions(trellis=TrellisOptions(k=3, warmup=16), columns=16, headroom=1.0)
    one, two = (
        ldlq_encode(NAME, weight, Hessian(matrix=matrix * factor, rows=600), spec, options)
        for factor in (1, 4.0**power)
    )
    np.testing.assert_array_equal(one.matrix.words, two.matrix.words)
    np.testing.assert_array_equal(one.matrix.scales, two.matrix.scales)
    assert one.loss < 0.9 * one.plain_loss
