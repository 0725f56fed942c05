"""The kernels of packed KV as CUDA: NVRTC compiles them for three generations, fibres run a part of the table."""

from __future__ import annotations

import platform
import sys

import numpy as np
import pytest

from tests.kernels.test_kv_metal import compute, encode
from tests.support import nvrtc
from tests.support.cuda.device import Lanes
from tests.support.kv_cases import TABLE, arrays_of, check, expected
from tests.support.metal.faults import BARRIER
from tests.unit.test_kv_codec import awkward, scheme
from tqtool.kernels.kv_attention import KVAttention
from tqtool.kernels.kv_kernels import HEAD_DIMS, KEY_BITS, VALUE_BITS
from tqtool.kv import codec

HAS_WHEELS = sys.platform == "linux" and platform.machine() == "x86_64"
ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
DTYPES = {"records": "uint32", "dims": "uint32"}


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("kv_cuda")


def calls_of(problem):
    """The calls, as they would be carried out."""
    made = []

    def run(call):
        made.append(call)
        return lambda arrays: []

    attention = KVAttention(run)
    attention._prepare(problem)
    attention._prepare_encoder(5, problem.head_dim, problem.k_bits, problem.v_bits)
    return made


def covering():
    """Few problems that have every head dimension and all bits."""
    left = {("d", d) for d in HEAD_DIMS} | {("k", k) for k in KEY_BITS} | {("v", v) for v in VALUE_BITS}
    for case in TABLE:
        p = case.problem
        has = {("d", p.head_dim), ("k", p.k_bits), ("v", p.v_bits)}
        if has & left and not case.special:
            left -= has
            yield case


@pytest.mark.skipif(not HAS_WHEELS, reason="NVIDIA has no compiler for this machine")
def test_they_compile():
    for number, case in enumerate(covering()):
        for call in calls_of(case.problem):
            kind = {"q": case.problem.dtype, "keys": case.problem.dtype, "values": case.problem.dtype}
            dtypes = [(kind | DTYPES).get(name, "float32") for name in call.inputs]
            architecture = ARCHITECTURES[number % len(ARCHITECTURES)]
            assert len(nvrtc.compile_text(nvrtc.text(call, dtypes), architecture)) > 1000, case


def lane_cases():
    """Every head dimension once, the most tokens first; fibres have no bfloat16."""
    found = {}
    for case in sorted(TABLE, key=lambda case: -case.tokens):
        if case.problem.dtype != "bfloat16" and not case.special:
            found.setdefault(case.problem.head_dim, case)
    return list(found.values())


@pytest.mark.parametrize("case", lane_cases(), ids=str)
def test_result(case, folder):
    arrays = arrays_of(case)
    results = [compute(case, arrays, KVAttention(Lanes(folder, backwards=order))) for order in (False, True)]
    check(case, results[0], expected(case, arrays))
    np.testing.assert_array_equal(results[0], results[1])


def test_bytes_of_the_encoder(folder):
    """Also without the barrier between codes and words, in one of the two orders: then they are wrong."""
    keys, values = (array[:3] for array in awkward(128))
    wanted = codec.encode(keys, values, scheme(5, 3))
    for order in (False, True):
        np.testing.assert_array_equal(encode(keys, values, 5, 3, KVAttention(Lanes(folder, backwards=order))), wanted)

    def plant(text):
        assert BARRIER in text
        return text.replace(BARRIER, ";")

    found = [encode(keys, values, 5, 3, KVAttention(Lanes(folder, plant, backwards=order))) for order in (False, True)]
    assert any((records != wanted).any() for records in found)
