"""The CUDA kernels of the tensor cores, their text run by fibres, against float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.support.cuda.device import Lanes
from tests.support.mlx_backend import compute
from tests.support.trellis_cases import TABLE, Case
from tests.support.trellis_oracle import arrays_of, check, expected, int8_rounded
from tqtool.formats.trellis import spec_for
from tqtool.kernels.cuda import cuda_backend
from tqtool.kernels.cuda_kernels import H200, Card, kernels
from tqtool.kernels.problem import Problem, choose

CARDS = {"H200": H200, "two processors": replace(H200, processors=2)}
"""On the second each thread block has whole rows of tiles, and a part of what is left."""


def case_of(shape, seed=1, *, k=3, m=1, dtype="float32", int8=False, fused=False, special="", **trellis):
    spec = spec_for(shape, k=k, axis=1, tile=True, **trellis)
    op, up = ("swiglu", spec) if fused else ("product", None)
    return Case(Problem(op=op, spec=spec, m=m, dtype=dtype, up=up, int8=int8), seed=seed, special=special)


def of_the_table():
    return [case for case in TABLE if "cuda/" in getattr(choose(case.problem, kernels(H200)).kernel, "source", "")]


OWN = (
    case_of((100, 324), m=1, dtype="bfloat16"),  # 7 rows of tiles, 21 tiles: a last unit of one tile
    case_of((100, 324), m=2, dtype="float16", k=4, fused=True),
    case_of((72, 200), m=3, k=1, window=14),
    case_of((72, 200), m=4, dtype="bfloat16", k=2, code="1mad", window=14),
    case_of((72, 132), m=1, k=3, fused=True),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("cuda_tile")


def found_by(case, card, run):
    arrays = arrays_of(case)
    return arrays, compute(case, arrays, cuda_backend(card).with_runner(run))


def check_rows(case, arrays, found, wanted):
    """Fixed point has no infinities: a row that is not finite gives NaN, the others feel nothing of it."""
    finite = np.isfinite(arrays.x.astype(np.float32)).all(axis=1)
    if finite.all():
        check(case, found, wanted)
        return
    assert np.isnan(found[~finite].astype(np.float32)).all()
    assert np.isfinite(found[finite].astype(np.float32)).all()


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("case", [*of_the_table(), *OWN], ids=str)
def test_products(case, card, folder):
    arrays, found = found_by(case, CARDS[card], Lanes(folder, backwards=card != "H200"))
    check_rows(case, arrays, found, expected(case, arrays))


@pytest.mark.parametrize("case", OWN, ids=str)
def test_int8_activations(case, folder):
    case = replace(case, problem=replace(case.problem, int8=True))
    arrays, found = found_by(case, CARDS["two processors"], Lanes(folder))
    check_rows(case, arrays, found, expected(case, int8_rounded(arrays)))


@pytest.mark.parametrize("m", [1, 4])
def test_inputs_in_slices(m, folder):
    """Shared memory for a few units at once: the last slice is shorter, and with one row of x its halves are uneven."""
    small = Card(processors=2, shared_bytes=7000 if m == 1 else 20000)
    case = case_of((40, 64 * 13), m=m, dtype="float32")
    call = cuda_backend(small).call(case.problem)
    template = dict(call.launch.template)
    assert 1 < -(-13 // template["SLICE"]) < 13
    arrays, found = found_by(case, small, Lanes(folder))
    check(case, found, expected(case, arrays))


BEHIND = {
    "fused": (case_of((304, 516), m=1, k=4, fused=True), replace(H200, processors=5)),
    "in slices": (case_of((172, 2052), m=1, k=4), Card(processors=3, shared_bytes=36000)),
    "int8": (case_of((122, 2820), m=2, k=4, int8=True), Card(processors=3, shared_bytes=36000)),
}


@pytest.mark.parametrize("kind", BEHIND)
def test_nothing_behind_the_matrix_is_read(kind, folder):
    """An odd number of units, the last not full, in halves: two lie outside. Memory ends where the words do."""
    case, card = BEHIND[kind]
    arrays, found = found_by(case, card, Lanes(folder))
    check(case, found, expected(case, int8_rounded(arrays) if case.problem.int8 else arrays))


def test_fixed_point_is_exact_for_short_inputs(folder):
    """bfloat16 inputs within 2^15 of the largest lose nothing: whole numbers in, the same sums out, to the bit."""
    case = case_of((32, 128), m=1, dtype="float32")
    arrays = arrays_of(case)
    steps = np.random.default_rng(0).integers(-128, 129, arrays.x.shape).astype(np.float32)
    steps[0, :3] = 128, 2.0**-7, -(2.0**-7)
    arrays = replace(arrays, x=steps)
    backend = cuda_backend(H200).with_runner(Lanes(folder))
    found = compute(case, arrays, backend)
    scaled = compute(case, replace(arrays, x=steps * np.float32(2.0**20)), backend)
    np.testing.assert_array_equal(found * np.float32(2.0**20), scaled)
    check(case, found, expected(case, arrays))


FAULTS = {
    "a lane's ring does not close": ("next = ring ? K : -7 * K;", "next = K;"),
    "rows of a tile exchanged": ("tq_hash<K, L, CODE>(words, 16 + i)", "tq_hash<K, L, CODE>(words, i)"),
    "inputs exchanged": ("h ? in[g].z : in[g].x", "h ? in[g].x : in[g].z"),
    "limbs unsigned": ("HALVES = LIMBS == 1 ? 0 : 0x808080", "HALVES = 0"),
    "mean forgotten": ("-TQ_BYTE_SUM_MEAN * total[m].value()", "0 * total[m].value()"),
    "largest of another row": ("atomicMax(&largest[m], most[m])", "atomicMax(&largest[0], most[m])"),
    "sums not cleared": ("sum[g][0][j] = sum[g][1][j] = 0;", ""),
    "a row twice": ("const int pair = pair_of(part);", "const int pair = min(pair_of(part), pairs - 1);"),
    "second half of the inputs left out": ("first_column = r / TOGETHER * COLUMNS;", "first_column = 0;"),
    "inputs of the next slice counted": ("if (unit < here) part[m] += q;", "part[m] += q;"),
    "unit of zeros left out": ("if (SPLIT == 2 && here % 2)", "if (false)"),
    "rows that are left begin elsewhere": ("min(pair_of(part), pairs - 1) + pair0", "min(pair_of(part), pairs - 1)"),
    "scales of the neighbour": ("scales1 : scales0)[row < ROWS ? row : 0]", "scales1 : scales0)[row ? row - 1 : 0]"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault, folder):
    case, card = of_a_fault(fault)
    arrays, found = found_by(case, card, Lanes(folder, planted(*FAULTS[fault])))
    with pytest.raises(AssertionError):
        check(case, found, expected(case, arrays))


@pytest.mark.parametrize("fault", ["none", "another row", "slice"])
def test_without_a_fault_the_same_cases_are_right(fault, folder):
    case, card = of_a_fault(fault)
    arrays, found = found_by(case, card, Lanes(folder))
    check(case, found, expected(case, arrays))


def planted(before, after):
    """The edit that puts ``after`` in the place of ``before``."""

    def plant(text):
        assert before in text
        return text.replace(before, after)

    return plant


def of_a_fault(fault):
    """The case and the card that a fault shows on."""
    # Three thread blocks of two rows of tiles and two or three pairs of rows; 17 units, halves of nine and eight.
    case = case_of((110, 1028), m=2 if "another row" in fault else 1)
    card = replace(H200, processors=3)
    if "slice" in fault:  # two slices of 35 units, of which a thread takes two times four inputs
        case, card = case_of((40, 70 * 64)), Card(processors=3, shared_bytes=36000)
    return case, card


BARRIERS = {
    "sums read before all are there": (
        "  __syncthreads();\n  for (int e = tid; e < Share::rows * M",
        "  for (int e = tid; e < Share::rows * M",
    ),
    "largest read before all have said": ("load_scales(tid);\n  __syncthreads();", "load_scales(tid);"),
}


@pytest.mark.parametrize("fault", BARRIERS)
def test_a_barrier_that_is_missing_shows_in_one_order(fault, folder):
    """Two of the five: what the others keep apart, these two orders do in turn anyway; racecheck is for a card."""
    case = case_of((100, 324), m=1)
    wanted = expected(case, arrays_of(case))
    wrong = []
    for order in (False, True):
        _, found = found_by(case, CARDS["two processors"], Lanes(folder, planted(*BARRIERS[fault]), backwards=order))
        wrong.append(
            bool((np.abs(found.astype(np.float64) - wanted.value) > wanted.bound).any() or np.isnan(found).any())
        )
    assert any(wrong)
