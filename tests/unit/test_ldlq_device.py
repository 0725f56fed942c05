"""LDLQ with products and search on a device: the CPU's targets to float32's rounding, its states where those agree."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import mlx.core as mx
import numpy as np
import pytest

from tests.unit.test_ldlq import NAME, gaussian, hessian
from tqtool import native
from tqtool.formats.trellis import pack, spec_for
from tqtool.kernels.cuda_encoder import CUDA_ENCODER
from tqtool.mathx.ldl import proxy_loss, upper_factor
from tqtool.solve import ldlq_device
from tqtool.solve.feedback import code_with_feedback
from tqtool.solve.ldlq import ldlq_encode
from tqtool.solve.ldlq_coder import LdlqOptions, coding_order, trellis_coder
from tqtool.solve.ldlq_device import TileJob, code_tiles
from tqtool.solve.trellis import TrellisOptions

OPTIONS = TrellisOptions(k=3, warmup=16)


def by_cpu(call, arrays):
    """The CPU's search where a kernel would be launched."""
    x, levels, dims = (np.array(array) for array in arrays)
    template = dict(call.launch.template)
    states, _ = native.viterbi_encode(x, levels, window=template["L"], k=template["K"], warmup=int(dims[1]))
    return [mx.array(states)]


ENCODER = CUDA_ENCODER.with_runner(lambda call: partial(by_cpu, call))


def coded(weight, statistics, options=OPTIONS):
    """Job, spec and what the CPU makes of it."""
    spec = spec_for(weight.shape, k=options.k, axis=1, tile=True)
    ldlq_options = LdlqOptions(trellis=options, headroom=1.0)
    order = coding_order(spec, statistics, ldlq_options)
    source = np.ascontiguousarray(weight[:, order])
    factor = upper_factor(replace(statistics, matrix=statistics.matrix[np.ix_(order, order)]).damped(0.05))
    coder = trellis_coder(NAME, source, spec, ldlq_options, order)
    done = code_with_feedback(source, factor, coder)
    return TileJob(weight=source, factor=factor, scales=coder.scales, order=order), spec, done, coder


# Whole tiles; ragged in both directions, more than a window and a last one that is not full; less than a tile.
@pytest.mark.parametrize("shape", [(32, 128), (70, 301), (7, 9)])
def test_a_batch_is_coded_as_the_cpu_codes_each(shape):
    """Float32 sums of 300 products in another order: targets 1e-6 of their size apart, so hardly an input rounds apart.

    A state that differs changes its row's later targets by what the code errs, which feedback corrects: losses agree to
    what few of such rows weigh.
    """
    pairs = [coded(gaussian(*shape, seed), hessian(shape[1], seed)) for seed in (1, 2)]
    spec = pairs[0][1]
    found = code_tiles([job for job, *_ in pairs], spec, OPTIONS, peak_limits=[np.inf] * 2, encoder=ENCODER)
    for result, (job, _, done, coder) in zip(found, pairs, strict=True):
        assert result.result.finished
        assert result.result.peak == pytest.approx(done.peak, rel=1e-3)
        assert result.result.loss == pytest.approx(done.loss, rel=0.02)
        same = (result.words == coder.words).all(axis=1)
        assert same.mean() > 0.9, "hardly any input rounds the other way"
        # The loss that is told is that of the errors that are told, under the damped Hessian.
        damped = job.factor.root @ job.factor.root.T
        assert result.result.loss == pytest.approx(proxy_loss(result.result.error, damped), rel=1e-4)


def test_packing_is_the_formats():
    states = np.random.default_rng(0).integers(0, 1 << 12, (5, 256)).astype(np.uint16)
    for k in (1, 2, 3, 4):
        np.testing.assert_array_equal(np.array(ldlq_device._pack(mx.array(states), k)), pack(states, k))


def test_a_job_beyond_its_limit_is_not_finished():
    pairs = [coded(gaussian(32, 160, seed), hessian(160, seed)) for seed in (1, 2)]
    jobs = [job for job, *_ in pairs]
    peaks = [done.peak for *_, done, _ in pairs]
    limits = [2 * peaks[0], 0.5 * peaks[1]]
    found = code_tiles(jobs, pairs[0][1], OPTIONS, peak_limits=limits, encoder=ENCODER)
    assert [one.result.finished for one in found] == [True, False]
    stopped = code_tiles(jobs, pairs[0][1], OPTIONS, peak_limits=[0.0, 0.0], encoder=ENCODER)
    assert not any(one.result.finished for one in stopped)


def test_the_whole_solver_takes_it(monkeypatch):
    """A weight coded with ``device`` a GPU beats the plain trellis as much as with the CPU."""
    monkeypatch.setattr(ldlq_device, "gpu_encoder", lambda device: ENCODER)
    monkeypatch.setattr("tqtool.solve.search.gpu_encoder", lambda device: ENCODER)
    weight, statistics = gaussian(48, 176), hessian(176)
    spec = spec_for(weight.shape, k=3, axis=1, tile=True)
    launched = []
    states = type(ENCODER).states
    monkeypatch.setattr(type(ENCODER), "states", lambda *args: launched.append(1) or states(*args))
    found = [
        ldlq_encode(NAME, weight, statistics, spec, LdlqOptions(trellis=replace(OPTIONS, device=device)))
        for device in ("cpu", "cuda")
    ]
    assert len(launched) == 176 // 16
    assert [one.method for one in found] == ["ldlq", "ldlq"]
    assert found[1].loss == pytest.approx(found[0].loss, rel=0.02)
