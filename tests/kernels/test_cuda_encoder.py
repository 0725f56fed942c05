"""The CUDA encoder, its text run by fibres: states equal to the CPU encoder's, to the last one."""

from __future__ import annotations

import signal
import subprocess
from dataclasses import replace

import numpy as np
import pytest

from tests.support.cuda.device import Lanes
from tqtool import native
from tqtool.kernels import cuda_encoder
from tqtool.kernels.cuda_encoder import CUDA_ENCODER
from tqtool.mathx import codes

TRELLISES = [(12, 1), (12, 2), (12, 3), (12, 4), (14, 2), (14, 3), (14, 4), (16, 2), (16, 3), (16, 4)]


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("cuda_encoder")


def inputs(blocks, k, window, seed=0):
    """Gaussian blocks, then one of zeros, one that alternates between the ends, and one full of ties."""
    rng = np.random.default_rng(seed)
    x = np.rint(rng.standard_normal((blocks, 256)) * 147.7 * codes.CODE_SCALE[k]).clip(-560, 560).astype(np.int16)
    x[1], x[2], x[3] = 0, np.resize([560, -560], 256), rng.choice([-560, -1, 0, 2, 560], 256)
    return x


def one_group(launch):
    """One thread block for all blocks."""
    return replace(launch, grid=(launch.threadgroup[0], 1, 1))


def encode(x, levels, run, monkeypatch, *, resume=False, **options):
    """States of ``x`` by one thread block; ``resume`` whatever the number of blocks."""
    monkeypatch.setattr(cuda_encoder, "RESUME_JOBS", 0 if resume else 1 << 20)
    encoder = replace(CUDA_ENCODER, run=run, launch=lambda problem: one_group(cuda_encoder.launch(problem)))
    return encoder.viterbi_encode(x, levels, **options)[0]


def expected(x, levels, **options):
    return native.viterbi_encode(x, levels, **options)[0]


@pytest.mark.parametrize(("window", "k"), TRELLISES)
def test_states(window, k, folder, monkeypatch):
    """Seven blocks: two groups of which the last is not full (at window 16 and k = 2 four), both second passes."""
    x, levels = inputs(7, k, window, seed=window + k), codes.levels("mul1", window)
    options = {"window": window, "k": k}
    wanted = expected(x, levels, **options)
    for backwards in (False, True):
        run = Lanes(folder, backwards=backwards)
        np.testing.assert_array_equal(encode(x, levels, run, monkeypatch, resume=True, **options), wanted)
    short = {**options, "warmup": 16}
    np.testing.assert_array_equal(encode(x, levels, run, monkeypatch, **short), expected(x, levels, **short))


@pytest.mark.parametrize(("code", "window", "k"), [("1mad", 12, 2), ("3inst", 12, 3), ("rptc", 14, 4)])
def test_codes_and_open_paths(code, window, k, folder, monkeypatch):
    """More blocks, so that enough paths are open for a whole group of them, and some are left over."""
    x, levels = inputs(40, k, window), codes.levels(code, window)
    found = encode(x, levels, Lanes(folder), monkeypatch, resume=True, window=window, k=k)
    np.testing.assert_array_equal(found, expected(x, levels, window=window, k=k))


FAULTS = {
    "choices counted backwards": ("TQ_MOST) + d,", "TQ_MOST) + (D - 1 - d),"),
    "an open path taken": ("jobs.at[job][t] != jobs.seam[job][t]", "false"),
    "not pinned": ("pinned ? TQ_UNREACHED : 0u", "0u"),
    "pinned elsewhere": ("*search.cost(costs, jobs.seam[half][own], own)", "*search.cost(costs, 0, own)"),
    "ends not the lowest": ("if (cost < least) least", "if (cost > least) least"),
    "choices of the neighbour": (">> (4 * (b & 1))", ">> (4 * (~b & 1))"),
    "group written over": ("waiting = waiting + 1;", ";"),
}
WALKED_AFTER = {"seam not walked to": ("walk(job, left - T, false);", ";")}
WALKED_ASIDE = {
    "seam forgotten": ("if (left == T) jobs.seam[job][t] = j;", ""),
    "choice of another step": ("(left - 1) % T", "(left - 2) % T"),
    "last steps not walked": ("walk(job, left < T ? left : T, true);", ""),
    "choices of the job that is searched": ("walk_aside(half ^ 1);", "walk_aside(half);"),
    "one job's choices for both": ("choices + half * T * S::ROW", "choices"),
}

BARRIERS = {
    "costs overwritten while the lowest is sought": ("      __syncthreads();\n      pinned =", "      pinned =", True),
    "no barrier between two steps": (
        "S::ROW);\n        __syncthreads();\n      }\n      if (end",
        "S::ROW);\n        if (i & 1) __syncthreads();\n      }\n      if (end",
        False,
    ),
    "choices over costs that are read": ("top - CHUNK : 0;\n      __syncthreads();", "top - CHUNK : 0;", False),
}


@pytest.mark.parametrize("fault", BARRIERS)
def test_a_barrier_that_is_missing_shows_in_one_order(fault, folder, monkeypatch):
    """At window 16 costs move in place and choices lie where they were: nothing forgives a missing barrier.

    With warm-ups where the fault allows it: threads that disagree about open paths would wait for each other for ever.
    """
    before, after, resume = BARRIERS[fault]

    def plant(text):
        assert before in text
        return text.replace(before, after)

    x, levels = inputs(6, 4, 16), codes.levels("mul1", 16)
    options = {"window": 16, "k": 4, "warmup": None if resume else 16}
    wanted = expected(x, levels, **options)
    differing = [
        (
            encode(x, levels, Lanes(folder, plant, backwards=order), monkeypatch, resume=resume, **options) != wanted
        ).any()
        for order in (False, True)
    ]
    assert any(differing)


@pytest.mark.parametrize("fault", FAULTS | WALKED_AFTER | WALKED_ASIDE)
def test_planted_faults_are_found(fault, folder, monkeypatch):
    before, after = (FAULTS | WALKED_AFTER | WALKED_ASIDE)[fault]

    def plant(text):
        assert before in text
        return text.replace(before, after)

    window, k, blocks = (14, 4, 12) if fault in WALKED_ASIDE else (12, 3, 24)
    x, levels = inputs(blocks, k, window), codes.levels("mul1", window)
    try:
        found = encode(x, levels, Lanes(folder, plant), monkeypatch, resume=True, window=window, k=k)
    except subprocess.CalledProcessError as error:  # read or wrote where no array is: found as well
        if error.returncode != -signal.SIGSEGV:
            raise
        return
    assert (found != expected(x, levels, window=window, k=k)).any()
