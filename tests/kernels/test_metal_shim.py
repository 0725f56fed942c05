"""The executor of Metal text itself, on small kernels that keep or break one rule each."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from tests.support.metal.device import Shim, ShimError
from tqtool.kernels.backend import Call
from tqtool.kernels.problem import Launch, Output

LANE = "const uint32_t lane = thread_index_in_simdgroup, i = thread_index_in_threadgroup;\n"
SHARED = LANE + "threadgroup float shared[64];\nshared[i] = x[i];\n"
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);\n"
SIMD_BARRIER = "simdgroup_barrier(mem_flags::mem_threadgroup);\n"
X = np.random.default_rng(0).standard_normal(64).astype(np.float32)


@pytest.fixture
def run(tmp_path):
    """Runs a body over 64 threads in one group (or more groups): x float32 [64] → y float32 [64]."""

    def compute(body, *, shared_bytes=0, groups=1, size=64, scratch=False):
        source = tmp_path / "probe.metal"
        source.write_text(body)
        outputs = (Output((size,), "float32"), *((Output((64,), "uint32", scratch=True),) if scratch else ()))
        launch = Launch(
            grid=(64 * groups, 1, 1),
            threadgroup=(64, 1, 1),
            template=(("N", 64),),
            threadgroup_bytes=shared_bytes,
            outputs=outputs,
            dims=(),
        )
        # A name of its own for each text: kernel objects are kept by name.
        name = f"probe{abs(hash(body))}"
        names = ("y", "kept")[: len(outputs)]
        call = Call(name=name, source=str(source), inputs=("x",), outputs=names, launch=launch)
        return np.array(Shim(tmp_path)(call)([mx.array(X)])[0])

    from tqtool.kernels.sources import kernel_text

    kernel_text.cache_clear()
    yield compute
    kernel_text.cache_clear()


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("simd_sum(x[i])", np.repeat(X.reshape(2, 32).sum(axis=1), 32)),
        ("simd_min(x[i])", np.repeat(X.reshape(2, 32).min(axis=1), 32)),
        ("simd_shuffle_xor(x[i], 5)", X[np.arange(64) ^ 5]),
        ("simd_shuffle(x[i], 3)", np.repeat(X[[3, 35]], 32)),
        ("float(lane)", np.tile(np.arange(32), 2)),
        ("float(simdgroup_index_in_threadgroup)", np.repeat([0, 1], 32)),
        ("float(thread_position_in_grid.x + 1000 * threadgroup_position_in_grid.x)", np.arange(64)),
        ("float(bfloat16_t(1.00390625f))", np.ones(64)),  # halfway: ties to even
        ("float(bfloat16_t(1.01171875f))", np.full(64, 1.015625)),
        ("float(as_type<half2>(0x3C004000u).y)", np.ones(64)),
        ("float(min(i, 7u) + max(i, 60u))", np.minimum(np.arange(64), 7) + np.maximum(np.arange(64), 60)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_operations(expression, expected, run):
    np.testing.assert_allclose(run(f"{LANE}y[i] = {expression};"), expected, rtol=2e-6)


def test_eight_by_eight_matrices(run):
    """A · Bᵀ + A of the two halves of x."""
    body = f"""{SHARED}threadgroup float result[64];
{BARRIER}simdgroup_float8x8 a, b, c;
simdgroup_load(a, &shared[0], 8);
simdgroup_load(b, &shared[0], 8, ulong2(0), true);
c = a;
simdgroup_multiply_accumulate(c, a, b, c);
if (simdgroup_index_in_threadgroup == 0) simdgroup_store(c, &result[0], 8);
{BARRIER}y[i] = result[i];"""
    a = X.reshape(8, 8).astype(np.float64)
    np.testing.assert_allclose(run(body, shared_bytes=512).reshape(8, 8), a @ a.T + a, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("barrier", "reads", "message"),
    [
        (BARRIER, "63 - i", None),
        (SIMD_BARRIER, "i ^ 1", None),  # a neighbour in the SIMD group
        (SIMD_BARRIER, "63 - i", "without a barrier|read before it is written"),
        ("", "i", None),  # its own
        ("", "i ^ 1", "without a barrier|read before it is written"),
        ("threadgroup_barrier(mem_flags::mem_none);\n", "i ^ 1", "without a barrier"),
    ],
)
def test_shared_memory_needs_the_right_barrier(barrier, reads, message, run):
    body = f"{SHARED}{barrier}y[i] = shared[{reads}];"
    if message is None:
        index = {"63 - i": 63 - np.arange(64), "i ^ 1": np.arange(64) ^ 1, "i": np.arange(64)}[reads]
        np.testing.assert_array_equal(run(body, shared_bytes=256), X[index])
        return
    with pytest.raises(ShimError, match=message):
        run(body, shared_bytes=256)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (f"{SHARED}{BARRIER}y[i] = shared[63];\nshared[i] = 0.0f;", "lane 63 writes what lane .* read"),
        (f"{SHARED}shared[0] = 1.0f;\ny[i] = 0.0f;", "write without a barrier"),
        (f"{SHARED}y[i] = shared[64 + i];", r"shared\[64\] is out of bounds: 64 elements"),
        (f"{LANE}y[i] = x[i + 1];", r"x\[64\] is out of bounds: 64 elements"),
        (f"{LANE}y[i] = x[int(i) - 1];", r"x\[-1\] is out of bounds"),
        (f"{LANE}y[i + 1] = 0.0f;", r"y\[64\] is out of bounds"),
        (f"{LANE}y[i / 2] = 0.0f;", r"y\[0\] is written twice"),
        (f"{LANE}if (i != 40) y[i] = 0.0f;", r"y\[40\] is never written"),
        (f"{LANE}y[i] = 0.0f;\nif (y[i] > 0.0f) return;", r"y\[0\] is read, but it is a result"),
        (f"{LANE}if (lane == 31) return;\ny[i] = simd_sum(x[i]);", "divergent simdgroup: lane 0 is at simd_sum"),
        (
            f"{LANE}float s;\nif (lane < 3)\ns = simd_sum(x[i]);\nelse\ns = simd_sum(x[i]);\ny[i] = s;",
            "divergent simdgroup",
        ),
        (f"{LANE}y[i] = 0.0f;\nif (i < 32)\n{BARRIER}", "divergent threadgroup"),
        (f"{LANE}y[i] = float(1u << (i + lane));", "signal 4"),
        (
            f"threadgroup float much[8193];\n{LANE}y[i] = 0.0f;",
            "threadgroup memory: 32772 bytes with much, at most 32768",
        ),
        (f"{LANE}y[i] = nothing;", "does not compile"),
    ],
    ids=lambda value: value[-40:].replace("\n", " ") if "{" not in value else "",
)
def test_broken_rules(body, message, run):
    with pytest.raises(ShimError, match=message):
        run(body, shared_bytes=256 if "shared" in body else 0)


@pytest.mark.parametrize(
    ("body", "groups", "message"),
    [
        (f"{LANE}kept[i] = i;\ny[i] = float(kept[i]);", 1, None),
        (f"{LANE}kept[i] = 5;\nkept[i] = i;\ny[i] = float(kept[i]);", 1, None),
        (f"{LANE}kept[i] = 63 - i;\nthreadgroup_barrier(mem_flags::mem_device);\ny[i] = float(kept[63 - i]);", 1, None),
        (f"{LANE}kept[i] = i;\n{BARRIER}y[i] = float(kept[63 - i]);", 1, "kept.*without a barrier"),
        (f"{LANE}y[i] = float(kept[i]);", 1, r"kept\[0\] is read before it is written"),
        (f"{LANE}kept[i] = i;\ny[64 * threadgroup_position_in_grid.x + i] = 0.0f;", 2, "written by two threadgroups"),
    ],
    ids=str,
)
def test_scratch_in_device_memory(body, groups, message, run):
    if message is None:
        np.testing.assert_array_equal(run(body, scratch=True), np.arange(64))
        return
    with pytest.raises(ShimError, match=message):
        run(body, scratch=True, groups=groups, size=64 * groups)


def test_locals_are_not_zero_by_chance(run):
    """A sum that nobody set to zero must not come out right."""
    assert not np.allclose(run(f"{LANE}float sum;\nsum += x[i];\ny[i] = sum;"), X)
