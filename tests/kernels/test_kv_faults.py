"""Faults planted in the text of the packed-KV kernels: the table, or the executor's rules, must find each of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from tests.kernels.test_kv_metal import compute, encode
from tests.support.cuda.device import Lanes
from tests.support.kv_cases import KVCase, arrays_of, check, expected, problem
from tests.support.metal.device import Shim, ShimError
from tests.support.metal.faults import BARRIER
from tests.unit.test_kv_codec import awkward, scheme
from tqtool.kernels.kv_attention import KVAttention
from tqtool.kv import codec

WRONG = r"beyond the bound|not finite"
RACE = "read before it is written|without a barrier"

CASES = [
    KVCase(
        problem(64, 5, 3, heads="gqa7", room=256), 201, seed=5
    ),  # codes that straddle, pieces of queries, many splits
    KVCase(problem(512, 8, 8, heads="one", room=256, dtype="float16"), 37, seed=6),  # sixteen elements a lane, no slots
    KVCase(problem(256, 8, 3, heads="gqa3", room=256), 256, seed=7),  # several rounds of a simdgroup
]


@dataclass(frozen=True)
class Fault:
    """``old`` becomes ``new`` in the text of ``kernel``; ``case`` finds it, with ``message``."""

    name: str
    kernel: str
    old: str
    new: str
    case: int = 0
    message: str = WRONG

    def __str__(self) -> str:
        return f"{self.kernel}-{self.name.replace(' ', '_')}"

    def plant(self, text: str) -> str:
        if f"void custom_kernel_tq_kv_{self.kernel}_" not in text:
            return text
        assert self.old in text, f"{self.old!r} is not in the text"
        return text.replace(self.old, self.new)


FAULTS = [
    Fault("no second word", "attend", "(first >> shift) | ((second << 1) << (31u - shift))", "first >> shift"),
    Fault("codes of keys unsigned", "attend", "bits == 8u ? code ^ 0x80u : code", "code", case=1),
    Fault(
        "zero and scale swapped", "attend", "tq_high_half(affine) * query_sum[r]", "tq_low_half(affine) * query_sum[r]"
    ),
    Fault("scale of the neighbour", "attend", "group % 2 == 0 ?", "group % 2 == 1 ?"),
    Fault("group of the first element", "attend", "AFFINE + place * E / 32", "AFFINE", case=1),
    Fault(
        "tokens beyond the end",
        "attend",
        "const bool is_here = base + slot + j * WARPS * SLOTS < end",
        "const bool is_here = true",
    ),
    Fault(
        "tokens beyond the room",
        "attend",
        "* WARPS * SLOTS, tokens - 1)",
        "* WARPS * SLOTS, room)",
        case=1,
        message=r"out of bounds|not finite",
    ),
    Fault("sums not corrected", "attend", "numerator[r][e] *= keep", "numerator[r][e] *= 1.0f", case=2),
    Fault(
        "slots left out",
        "attend",
        "uint32_t step = LANES; step < 32; step *= 2",
        "uint32_t step = LANES; step < 16; step *= 2",
    ),
    Fault("another head", "attend", "(head * room + token) * WORDS", "token * WORDS"),
    Fault(
        "another query", "attend", "head * queries + piece * R,", "head * queries,", message=rf"{WRONG}|written twice"
    ),
    Fault("no barrier", "attend", BARRIER, ";", message=RACE),
    Fault(
        "rows that are not there",
        "attend",
        "i < rows_here * (D + 2)",
        "i < R * (D + 2)",
        message="written twice|out of bounds",
    ),
    Fault("a split left out", "merge", "uint32_t s = warp; s < splits", "uint32_t s = warp + 1; s < splits"),
    Fault("rotated twice", "merge", "other - y[i]", "y[i] - other"),
    Fault("registers not rotated", "merge", "int step = 1; step < N", "int step = N; step < N"),
    Fault("no signs", "merge", "/ denominator * signs[32 * i + lane]", "/ denominator"),
    Fault("no barrier", "merge", BARRIER, ";", message=RACE),
]


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("kv_faults")


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_the_table_finds(fault, folder):
    case = CASES[fault.case]
    arrays = arrays_of(case)
    with pytest.raises((AssertionError, ShimError), match=fault.message):
        check(case, compute(case, arrays, KVAttention(Shim(folder, fault.plant))), expected(case, arrays))


ENCODER_FAULTS = {
    "zero before the scale is rounded": (
        "const float scale = float(stored);\n  const float zero",
        "const float scale = wide;\n  const float zero",
    ),
    "no floor of the scale": ("max(spacing, TQ_SMALLEST_HALF)", "TQ_SMALLEST_HALF"),
    "codes of keys clipped at one end": (
        "min(max(metal::rint(x / scale - zero), least), most)",
        "max(metal::rint(x / scale - zero), least)",
    ),
    "value on a boundary in the upper cell": ("normal > edges[upper - 1]", "normal >= edges[upper - 1]"),
    "squares of a part": (
        "uint32_t step = 16; step > 0; step /= 2) sum",
        "uint32_t step = 8; step > 0; step /= 2) sum",
    ),
    "codes end with their word": ("e * bits < 32 * word ? code >> (32 * word - e * bits)", "e * bits < 32 * word ? 0"),
    "scales swapped": ("before | bits << 16", "bits | before << 16"),
    "no barrier": (BARRIER, ";"),
}


@pytest.mark.parametrize("name", ENCODER_FAULTS)
def test_the_encoders_bytes_find(name, folder):
    old, new = ENCODER_FAULTS[name]

    def plant(text: str) -> str:
        assert old in text
        return text.replace(old, new)

    keys, values = (array[:20] for array in awkward(64))
    wanted = codec.encode(keys, values, scheme(5, 3))
    try:
        found = encode(keys, values, 5, 3, KVAttention(Shim(folder, plant)))
    except ShimError as error:
        assert "barrier" in str(error) or "before it is written" in str(error)  # noqa: PT017
        return
    assert (found != wanted).any()


def test_without_a_fault_they_are_green(folder):
    for case in CASES:
        arrays = arrays_of(case)
        check(case, compute(case, arrays, KVAttention(Shim(folder))), expected(case, arrays))


def test_a_barrier_that_is_missing_on_cuda_shows_in_one_order(folder):
    """The sums of a threadgroup's last simdgroup are read before they are there."""
    case = CASES[1]
    arrays = arrays_of(case)
    right = expected(case, arrays)

    def plant(text: str) -> str:
        assert BARRIER in text
        return text.replace(BARRIER, ";")

    wrong = 0
    for backwards in (False, True):
        try:
            check(case, compute(case, arrays, KVAttention(Lanes(folder, plant, backwards=backwards))), right)
        except AssertionError:
            wrong += 1
    assert wrong
    assert np.isfinite(right[0]).all()
