"""Faults planted in the text of the Metal kernels: the table, or the rules of the executor, must find each of them.

Without this, a green table could mean that nothing was compared.
"""

from __future__ import annotations

import pytest

from tests.support.metal.device import Shim, ShimError
from tests.support.metal.faults import BARRIER, WRONG, Fault
from tests.support.mlx_backend import compute
from tests.support.trellis_cases import TABLE, Case
from tests.support.trellis_oracle import arrays_of, check, expected
from tqtool.kernels.metal import METAL

RULE = [
    Fault("time runs forwards", "tile", "(block - 8u - t) * k", "t * k"),
    Fault(
        "window too short",
        "reduce",
        "((1u << window) - 1u);\n}\n\nTQ_FN uint32_t tq_sum4",
        "((1u << (window - 1u)) - 1u);\n}\n\nTQ_FN uint32_t tq_sum4",
    ),
    Fault("no second word", "scatter", "bits | (run.high << ((32u - shift) & 31u))", "bits"),
    Fault(
        "block does not close",
        "expand",
        "low + 1 == 8 * K ? 0 : low + 1",
        "low + 1",
        message=f"{WRONG}|words.* out of bounds",
    ),
    Fault("bytes of another sum", "reduce", ">> 8) & 0x00FF00FFu", ">> 8) & 0x00FF007Fu"),
    Fault("mean of another sum", "prefill", "(float)TQ_BYTE_SUM_MEAN", "509.0f"),
    Fault("unit of another code", "expand", "TQ_MUL1_INVERSE_UNIT : TQ_1MAD", "TQ_1MAD_INVERSE_UNIT : TQ_MUL1"),
    Fault("halves in one", "tile", "float(halves.x) + float(halves.y)", "float(halves.x) + float(halves.x)"),
]
SCALES = [
    Fault("scales upside down", "reduce", "scales[first + r]", "scales[rows - 1 - first - r]"),
    Fault("scales swapped in a strip", "tile", "float(scales[row])", "float(scales[min(row ^ 1, rows - 1)])"),
    Fault("scales of the other matrix", "tile_swiglu", "float(up_scales[row])", "float(scales[row])"),
    Fault("scales of the other matrix", "reduce_swiglu", "float(scales[row])", "float(up_scales[row])"),
    Fault("scale left out", "scatter", "tq_unit<CODE>() * float(scales[row])", "tq_unit<CODE>()"),
    Fault(
        "scale left out along outputs",
        "prefill",
        "AXIS == 1 ? 1.0f : tq_unit<CODE>() * float(scales[row])",
        "1.0f",
        where=lambda c: c.problem.spec.axis == 0,
    ),
    Fault(
        "scale before rounding only",
        "expand",
        "value * float(scales[row])",
        "float(static_cast<T>(value)) * float(scales[row])",
    ),
]
SHAPE = [
    Fault("first row of x for all", "reduce", "float(x[m * cols + first + i])", "float(x[first + i])"),
    Fault("tail not masked", "tile", "first + TQ_RUN <= cols", "true", message=f"{WRONG}|x.* out of bounds"),
    Fault("tail cut off", "reduce", "col < cols; col +=", "col + TQ_RUN < cols; col +="),
    Fault(
        "rows of the last strip",
        "tile",
        "if (row < rows) y",
        "y",
        message="y.* out of bounds|scales.* out of bounds|written twice",
    ),
    Fault("columns beyond the matrix", "scatter", "if (col < cols) y", "y", message="y.* out of bounds|written twice"),
    Fault(
        "rows end with runs",
        "expand",
        "if (++col == stride)",
        "if (false)",
        message=f"{WRONG}|out of bounds|never written|twice",
        where=lambda c: c.problem.spec.stride % 8,
    ),
    Fault(
        "one split lost",
        "sum_parts",
        "s < splits",
        "s + 1 < splits",
        where=lambda c: c.problem.spec.axis == 0 and c.problem.m < 5,
    ),
    Fault(
        "bits of the other matrix",
        "tile_swiglu",
        "TqCursor<UP_K> up",
        "TqCursor<K> up",
        message=f"{WRONG}|out of bounds",
    ),
    Fault("place in the block kept", "scatter", "if (!WHOLE) cursor.begin", "if (false) cursor.begin"),
    Fault("not transposed", "prefill", "ulong2(0), true", "ulong2(0), false"),
    Fault("sums not set to zero", "tile", "sums[m] = 0.0f", ";"),
]
LANES = [
    Fault(
        "half of the lanes add",
        "reduce",
        "simd_sum(sums[r][m])",
        "lane < 16 ? simd_sum(sums[r][m]) : 0.0f",
        message="divergent simdgroup",
    ),
    Fault(
        "lanes leave early",
        "reduce_swiglu",
        "TqCursor<K> gate;",
        "if (row + lane >= rows) return;\nTqCursor<K> gate;",
        message="divergent simdgroup",
    ),
    Fault(
        "even lanes shuffle",
        "tile",
        "simd_shuffle_xor(sums[m], 1)",
        "(lane % 2 == 0 ? simd_shuffle_xor(sums[m], 1) : 0.0f)",
        message="divergent simdgroup",
    ),
    Fault("wrong partner", "tile_swiglu", "simd_shuffle_xor(gates[m], 1)", "simd_shuffle_xor(gates[m], 2)"),
    Fault("every lane writes", "reduce", "if (lane == 0 && first", "if (first", message="y.* is written twice"),
    Fault(
        "last row not written", "reduce", "first + r < rows)", "first + r + 1 < rows)", message="y.* is never written"
    ),
]
MEMORY = [
    Fault("no barrier", "tile", BARRIER, ";", message="read before it is written|without a barrier"),
    Fault("no barrier", "tile_swiglu", BARRIER, ";", message="read before it is written|without a barrier"),
    Fault(
        "no barrier before the next row",
        "scatter",
        BARRIER,
        ";",
        nth=0,
        message="without a barrier",
        where=lambda c: c.problem.m > 1,
    ),
    Fault(
        "no barrier before adding up",
        "scatter",
        BARRIER,
        ";",
        nth=1,
        message="read before it is written|without a barrier",
    ),
    Fault(
        "no barrier before multiplying",
        "prefill",
        BARRIER,
        ";",
        nth=0,
        message="read before it is written|without a barrier",
    ),
    Fault("no barrier after multiplying", "prefill", BARRIER, ";", nth=1, message="without a barrier"),
    Fault("no barrier before the result", "prefill", BARRIER, ";", nth=2, message="without a barrier"),
    Fault(
        "barrier of other memory",
        "tile",
        BARRIER,
        "threadgroup_barrier(mem_flags::mem_device);",
        message="without a barrier",
    ),
    Fault("barrier for some", "tile", BARRIER, f"if (part == 0) {BARRIER}", message="divergent threadgroup"),
    Fault(
        "too much memory",
        "scatter",
        "parts[SIMDGROUPS * 256]",
        "parts[SIMDGROUPS * 1028]",
        message="threadgroup memory: 32896 bytes",
    ),
    Fault(
        "outside of memory",
        "tile",
        "parts[s * 16 * M + i]",
        "parts[(s + 1) * 16 * M + i]",
        message="parts.* is out of bounds",
    ),
    Fault("a shift by 32", "expand", "(high << 1) << (31u - shift)", "high << (32u - shift)", message="signal 4"),
]
FAULTS = [*RULE, *SCALES, *SHAPE, *LANES, *MEMORY]


def cases_of(fault: Fault) -> list[Case]:
    """Cases that run the kernel, without those of special values."""
    kernel = "scatter" if fault.kernel == "sum_parts" else fault.kernel
    plain = [case for case in TABLE if not case.special and fault.where(case)]
    return [case for case in plain if getattr(METAL.choose(case.problem).kernel, "name", "") == kernel]


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("faults")


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_the_table_finds(fault, folder):
    def edit(text: str) -> str:
        return fault.plant(text) if f"void custom_kernel_tq_{fault.kernel}_" in text else text

    backend, found = METAL.with_runner(Shim(folder, edit)), []
    for case in cases_of(fault):
        arrays = arrays_of(case)
        try:
            check(case, compute(case, arrays, backend), expected(case, arrays))
        except (AssertionError, ShimError) as error:
            found.append(str(error))
            break
    assert found, "no case turned red"
    with pytest.raises(AssertionError, match=fault.message):
        raise AssertionError(found[0])


def test_special_values_find_what_plain_ones_cannot(folder):
    """A scale that is taken for one where it is zero."""
    fault = Fault(
        "zero scales skipped", "tile", "float(scales[row])", "(scales[row] == half(0) ? 1.0f : float(scales[row]))"
    )
    specials = [
        c
        for c in TABLE
        if c.special == "zero scales" and c.problem.spec.tile and c.problem.op == "product" and c.problem.m < 5
    ]
    (case,) = specials
    arrays = arrays_of(case)
    with pytest.raises(AssertionError, match=WRONG):
        check(case, compute(case, arrays, METAL.with_runner(Shim(folder, fault.plant))), expected(case, arrays))
