"""Geometry of the packed-KV kernels: pure functions, no device."""

from __future__ import annotations

import mlx.core as mx
import pytest

from tests.support.kv_cases import TABLE, problem
from tqtool.errors import BackendError
from tqtool.kernels import kv_cuda
from tqtool.kernels.kv_attention import KVAttention
from tqtool.kernels.kv_kernels import (
    HEAD_DIMS,
    KVProblem,
    attend_dims,
    attend_launch,
    encode_launch,
    merge_launch,
    supports,
)
from tqtool.kernels.metal_kernels import MAX_THREADGROUP_BYTES, METAL_SWITCH
from tqtool.kv import attend


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(("queries", "heads"), [(1, 1), (6, 2), (14, 2), (32, 8), (64, 1)])
def test_every_token_and_query_has_a_place(head_dim, queries, heads):
    for room in (256, 8192, 131072):
        p = KVProblem(head_dim=head_dim, k_bits=8, v_bits=8, queries=queries, heads=heads, room=room, dtype="bfloat16")
        launch = attend_launch(p)
        assert launch.threadgroup_bytes <= MAX_THREADGROUP_BYTES
        assert merge_launch(p).threadgroup_bytes <= MAX_THREADGROUP_BYTES
        assert p.pieces * p.together >= queries // heads > (p.pieces - 1) * p.together
        assert launch.grid[:2] == (p.splits * launch.threadgroup[0], heads * p.pieces)
        for tokens in (1, room // 2 + 3, room):
            held, _, of_a_split, shared, rows = attend_dims(p, tokens)
            assert of_a_split * p.splits >= held == tokens
            assert (shared, rows) == (queries // heads, queries)


def test_a_long_context_fills_the_card():
    p = KVProblem(head_dim=128, k_bits=8, v_bits=3, queries=32, heads=8, room=8192, dtype="bfloat16")
    assert p.splits * p.heads * p.pieces >= 2 * 128
    assert p.words * 4 == 200
    assert encode_launch(8, 128, 8, 3).outputs[0].shape == (8, 50)


def test_reasons():
    assert supports(problem()) is None
    assert "head dimension 96" in supports(KVProblem(**fields(head_dim=96)))
    assert "k3v3" in supports(KVProblem(**fields(k_bits=3)))
    assert "2^31" in supports(KVProblem(**fields(room=1 << 26)))
    for change, message in (({"queries": 5}, "not shared"), ({"dtype": "float64"}, "dtype")):
        with pytest.raises(BackendError, match=message):
            KVProblem(**fields(**change))
    for tokens in (0, 257):
        with pytest.raises(BackendError, match=f"{tokens} tokens"):
            attend_dims(problem(), tokens)


def fields(**change):
    p = problem()
    names = ("head_dim", "k_bits", "v_bits", "queries", "heads", "room", "dtype")
    return {name: getattr(p, name) for name in names} | change


def test_arrays_of_another_problem_are_refused():
    attention = KVAttention(lambda call: lambda arrays: pytest.fail("nothing is launched"))
    p = problem()
    arrays = [
        mx.zeros((p.queries, p.head_dim)),
        mx.zeros((p.heads, p.room, p.words), mx.uint32),
        mx.zeros((1 << p.v_bits,)),
        mx.zeros((p.head_dim,)),
    ]
    for index, wrong in ((0, mx.zeros((p.queries, 64))), (1, arrays[1][:1]), (2, arrays[2][:4]), (3, arrays[3][:64])):
        changed = [*arrays[:index], wrong, *arrays[index + 1 :]]
        with pytest.raises(BackendError, match="expected arrays"):
            attention(p, *changed, tokens=3, scale=1.0)
    with pytest.raises(BackendError, match="encoder"):
        attention.encode(arrays[0], arrays[0][:1], arrays[3], mx.zeros((7,)), (8, 3))


def test_the_table_has_every_pair_of_bits():
    assert {(case.problem.k_bits, case.problem.v_bits) for case in TABLE} == {
        (k, v) for k in (2, 4, 5, 8) for v in (2, 3, 4, 5, 8)
    }


@pytest.mark.parametrize(("value", "taken"), [(None, False), ("0", False), ("1", True)])
def test_metal_kernels_are_asked_for(value, taken, monkeypatch):
    """As for weights: no Apple GPU has run them."""
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.delenv(METAL_SWITCH, raising=False)
    if value is not None:
        monkeypatch.setenv(METAL_SWITCH, value)
    attend.device_kernels.cache_clear()
    try:
        assert (attend.device_kernels() is not None) == taken
    finally:
        attend.device_kernels.cache_clear()


def test_texts_that_have_not_run_on_a_card_are_not_taken(monkeypatch):
    monkeypatch.setattr(kv_cuda, "is_proven_here", lambda: True)
    monkeypatch.setattr(kv_cuda, "KV_THAT_RAN", kv_cuda.kv_digest())
    assert kv_cuda.is_kv_proven_here()
    monkeypatch.setattr(kv_cuda, "KV_THAT_RAN", "another")
    assert not kv_cuda.is_kv_proven_here()
