"""The Metal encoder: states equal to the CPU encoder's, to the last one."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from tests.support.metal.device import Shim, ShimError
from tests.support.metal.faults import BARRIER, Fault
from tqtool import native
from tqtool.errors import BackendError
from tqtool.kernels import metal_kernels
from tqtool.kernels.encoding import EXACT, LEVEL_LIMIT, EncodeProblem, encode_problem
from tqtool.kernels.metal import on_device
from tqtool.kernels.metal_encoder import METAL_ENCODER
from tqtool.kernels.metal_kernels import encode_launch, encode_supports
from tqtool.mathx import codes

# Window and k that the kernel does; every k, and every number of suffixes in a lane.
TRELLISES = [(12, 1), (12, 2), (12, 3), (12, 4), (14, 2), (14, 3), (14, 4)]


EXECUTORS = ["lanes", "device"] if mx.metal.is_available() else ["lanes"]


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("encoder")


@pytest.fixture(params=EXECUTORS)
def run(request, folder):
    return on_device if request.param == "device" else Shim(folder)


def viterbi_encode(x, levels, *, run=METAL_ENCODER.run, **options):
    return replace(METAL_ENCODER, run=run).viterbi_encode(x, levels, **options)


def gaussian(blocks, k, seed=0):
    draw = np.random.default_rng(seed).standard_normal((blocks, 256)) * 147.7 * codes.CODE_SCALE[k]
    return np.rint(draw).astype(np.int16)


def tied(blocks, window, seed=0):
    """Inputs and levels of which most are alike, so that ties are everywhere and must be broken the same way."""
    rng = np.random.default_rng(seed)
    x = rng.choice(np.array([-560, -1, 0, 2, 560], np.int16), (blocks, 256))
    return x, rng.choice(np.array([-600, -3, 0, 3, 620], np.int16), 1 << window)


def far(blocks, window, seed=0):
    """Every step costs 300 000 while paths differ by some units: sums beyond 2^24 would lose them."""
    rng = np.random.default_rng(seed)
    return np.full((blocks, 256), 560, np.int16), rng.integers(-3, 4, 1 << window).astype(np.int16)


def assert_same(x, levels, run, **options):
    found, name = viterbi_encode(x, levels, run=run, **options)
    expected, _ = native.viterbi_encode(x, levels, **options)
    assert name == "metal"
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(("window", "k"), TRELLISES)
@pytest.mark.parametrize("warmup", [None, 1, 32, 77])
def test_states(window, k, warmup, run):
    levels = codes.levels("mul1", window)
    assert_same(gaussian(3, k, seed=k), levels, run, window=window, k=k, warmup=warmup)


@pytest.mark.parametrize(("window", "k"), TRELLISES)
@pytest.mark.parametrize("inputs", [tied, far])
def test_ties_and_distances(window, k, inputs, run):
    x, levels = inputs(2, window)
    assert_same(x, levels, run, window=window, k=k)


@pytest.mark.parametrize("code", codes.CODES)
def test_codes(code, run):
    assert_same(gaussian(2, 2), codes.levels(code, 12), run, window=12, k=2)


def test_extreme_inputs(run):
    """Zeros, one value throughout, and values that have to be clipped."""
    x = gaussian(5, 3)
    x[0], x[1], x[2], x[3] = 0, 560, -560, 137
    x[4, ::7] = 32000
    assert_same(x, codes.levels("mul1", 12), run, window=12, k=3)


def test_several_launches(run, monkeypatch):
    problem = encode_problem(5, codes.levels("mul1", 12), window=12, k=4)
    monkeypatch.setattr(metal_kernels, "MAX_HISTORY_BYTES", 2 * 256 * 64 * 4)
    assert metal_kernels.encode_blocks_at_once(problem) == 2
    assert_same(gaussian(5, 4), codes.levels("mul1", 12), run, window=12, k=4)
    assert viterbi_encode(gaussian(0, 4), codes.levels("mul1", 12), window=12, k=4)[0].shape == (0, 256)


# ------------------------------------------------------------------------------------------------------- limits
def test_what_it_does():
    for code in codes.COMPUTED_CODES:
        for window in (12, 14, 16):
            for k in (1, 2, 3, 4):
                problem = encode_problem(7, codes.levels(code, window), window=window, k=k)
                done = encode_supports(problem) is None
                assert done == ((window, k) in TRELLISES), (code, window, k, encode_supports(problem))
                if done:
                    launch = encode_launch(problem)
                    assert launch.threadgroup_bytes <= metal_kernels.MAX_THREADGROUP_BYTES
                    assert launch.outputs[1].shape == (7, 256, (1 << window) // 64)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"window": 16, "k": 3}, "window 16"),
        ({"window": 14, "k": 1}, "33796 bytes of threadgroup memory"),
        ({"window": 12, "k": 1, "highest": 700}, "not exact in float32"),
    ],
    ids=str,
)
def test_refusals(fields, reason):
    problem = EncodeProblem(**({"blocks": 1, "lowest": -448, "highest": 454} | fields))
    assert reason in encode_supports(problem)


def test_bad_arguments():
    levels = codes.levels("mul1", 12)
    with pytest.raises(BackendError, match="no metal kernel: window 16"):
        viterbi_encode(gaussian(1, 3), codes.levels("mul1", 16), window=16, k=3)
    for x, table, warmup in ((gaussian(1, 3)[:, :255], levels, None), (gaussian(1, 3), levels[1:], None)):
        with pytest.raises(BackendError, match="viterbi_encode: x"):
            viterbi_encode(x, table, window=12, k=3, warmup=warmup)
    for warmup in (0, 129):
        with pytest.raises(BackendError, match="warmup"):
            viterbi_encode(gaussian(1, 3), levels, window=12, k=3, warmup=warmup)
    with pytest.raises(BackendError, match="encode problem"):
        EncodeProblem(k=3, window=5, blocks=1, lowest=0, highest=0)


@pytest.mark.parametrize(("window", "k"), [(6, 1), (6, 2), (7, 3), (8, 4), (7, 2)])
def test_no_cost_exceeds_its_bound(window, k):
    """The recursion in integers, on levels that tear the costs apart: suffixes that only dear steps lead to."""
    rng, top = np.random.default_rng(window), 0
    state, suffixes = np.arange(1 << window), 1 << (window - k)
    problem = EncodeProblem(k=k, window=window, blocks=1, lowest=-LEVEL_LIMIT, highest=LEVEL_LIMIT)
    for _ in range(60):
        levels = np.where(state % suffixes % 8 == rng.integers(8), LEVEL_LIMIT, -LEVEL_LIMIT)
        costs = np.zeros(suffixes, np.int64)
        for step, value in enumerate(rng.choice([-LEVEL_LIMIT, LEVEL_LIMIT], 40)):
            costs = costs - (costs[0] if step >= problem.reach else 0)
            costs = (costs[state >> k] + (levels - value) ** 2).reshape(-1, suffixes).min(axis=0)
            top = max(top, np.abs(costs).max())
    assert 0.3 * problem.greatest_cost < top <= problem.greatest_cost
    assert EXACT == 2**24


# ------------------------------------------------------------------------------------------------------- faults
FAULTS = [
    Fault("ties to the highest", "viterbi", "cost < best[g]", "cost <= best[g]", "not equal"),
    Fault("last of the best ends", "viterbi", "2 * l]) < as_type", "2 * l]) <= as_type", "not equal"),
    Fault("last of a lane's best", "viterbi", "memory[row + j]) < as_type", "memory[row + j]) <= as_type", "not equal"),
    Fault("costs grow", "viterbi", "i < REACH ? 0.0f", "true ? 0.0f", "not equal"),
    Fault("infinite cost subtracted", "viterbi", "i < REACH ? 0.0f", "i < 1 ? 0.0f", "not equal"),
    Fault("ends not pinned", "viterbi", "pass == 0 || own + g == seam", "true", "not equal"),
    Fault("pinned elsewhere", "viterbi", "own + g == seam", "own + g == 0", "not equal"),
    Fault(
        "seam a step early",
        "viterbi",
        "skip = pass == 0 ? warmup : 0",
        "skip = pass == 0 ? warmup - 1 : 0",
        "not equal",
    ),
    Fault("first pass unrolled", "viterbi", "first = pass == 0 ? TQ_BLOCK - warmup : 0", "first = 0", "not equal"),
    Fault("choices of the neighbour", "viterbi", "j % G * K", "(j + 1) % G * K", "not equal"),
    Fault(
        "one row of costs",
        "viterbi",
        "row = J - row",
        "row = row",
        "without a barrier",
    ),
    Fault("no barrier after the first row", "viterbi", BARRIER, ";", "before it is written|without a barrier", nth=0),
    Fault("no barrier between steps", "viterbi", BARRIER, ";", "before it is written|without a barrier", nth=2),
    Fault("no barrier after the last costs", "viterbi", BARRIER, ";", "without a barrier", nth=3),
    Fault("no barrier before the lowest", "viterbi", BARRIER, ";", "before it is written|without a barrier", nth=4),
    Fault("no barrier before the way back", "viterbi", BARRIER, ";", "without a barrier", nth=5),
    Fault("no barrier before the walk", "viterbi", BARRIER, ";", "without a barrier", nth=6),
    Fault("no barrier after the walk", "viterbi", BARRIER, ";", "without a barrier", nth=7),
    Fault(
        "reads what another lane wrote",
        "viterbi",
        "bottom + s) * LANES + lane]",
        "bottom + s) * LANES + (lane ^ 1)]",
        "history.*without a barrier",
    ),
]


ONE_ROW = Fault("no barrier before costs are overwritten", "viterbi", BARRIER, ";", "without a barrier", nth=1)


@pytest.mark.parametrize(("fault", "window"), [*((fault, 12) for fault in FAULTS), (ONE_ROW, 14)], ids=str)
def test_planted_faults_are_found(fault, window, folder):
    shim = Shim(folder, fault.plant)
    messages = []
    inputs = (gaussian(2, 2), codes.levels("mul1", window))
    # With a first pass of one step, what ends it decides the seam; with more, all survivors have met by then.
    for (x, levels), warmup in ((inputs, 40), (tied(4, window), 40), (tied(8, window), 1), (far(1, window), 40)):
        try:
            assert_same(x, levels, shim, window=window, k=2, warmup=warmup)
        except (AssertionError, ShimError) as error:
            messages.append(str(error))
    assert messages, "no case turned red"
    with pytest.raises(AssertionError, match=fault.message):
        raise AssertionError(messages[0])
