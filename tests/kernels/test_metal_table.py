"""The Metal kernels on the table that all backends share: the text that MLX compiles, run lane by lane.

Where there is an Apple GPU, it runs the table too.
"""

from __future__ import annotations

from collections import defaultdict

import mlx.core as mx
import numpy as np
import pytest

from tests.support.metal.device import Shim
from tests.support.mlx_backend import compute, to_numpy
from tests.support.trellis_cases import TABLE
from tests.support.trellis_oracle import arrays_of, check, expected
from tqtool.errors import BackendError
from tqtool.formats.trellis import spec_for
from tqtool.kernels.backend import Packed, problem_of
from tqtool.kernels.metal import METAL
from tqtool.kernels.metal_kernels import KERNELS
from tqtool.kernels.problem import Problem
from tqtool.solve.trellis import TrellisFakeQuant, TrellisOptions, TrellisPacked

EXECUTORS = ["lanes", "device"] if mx.metal.is_available() else ["lanes"]


@pytest.fixture(scope="session", params=EXECUTORS)
def backend(request, tmp_path_factory):
    if request.param == "device":
        return METAL
    return METAL.with_runner(Shim(tmp_path_factory.mktemp("metal")))


@pytest.mark.parametrize("case", TABLE, ids=str)
def test_result(case, backend):
    arrays = arrays_of(case)
    check(case, compute(case, arrays, backend), expected(case, arrays))


def test_the_table_runs_every_kernel_with_every_value_of_its_parameters():
    """And the geometry's own choices: one row a simdgroup and two, two simdgroups and eight, one split and several."""
    seen = defaultdict(lambda: defaultdict(set))
    for case in TABLE:
        kernel = METAL.choose(case.problem).kernel
        assert kernel is not None, case
        launch = kernel.launch(case.problem)
        for name, value in launch.template:
            seen[kernel.name][name].add(value)
        seen[kernel.name]["splits"].add(launch.outputs[0].shape[0] if kernel.name == "scatter" else 1)
    assert set(seen) == {kernel.name for kernel in KERNELS}
    bits, dtypes = {1, 2, 3, 4}, {"float32", "float16", "bfloat16"}
    for found in seen.values():
        assert (found["T"], found["K"], found["L"], found["CODE"]) == (dtypes, bits, {12, 14, 16}, {0, 1, 2})
    assert all(
        seen[name]["M"] == {1, 2, 3, 4} for name in ("reduce", "tile", "scatter", "reduce_swiglu", "tile_swiglu")
    )
    assert all(seen[name]["UP_K"] == bits for name in ("reduce_swiglu", "tile_swiglu"))
    assert seen["reduce"]["R"] == {1, 2}
    assert seen["tile"]["SIMDGROUPS"] == seen["tile_swiglu"]["SIMDGROUPS"] == {2, 8}
    assert (seen["scatter"]["WHOLE"], seen["scatter"]["splits"]) == ({0, 1}, {1, 2, 4})
    assert (seen["prefill"]["MT"], seen["prefill"]["AXIS"], seen["prefill"]["TILE"]) == (bits, {0, 1}, {0, 16})
    assert seen["expand"]["TILE"] == {0, 16}


@pytest.mark.parametrize("layout", ["axis1", "axis0", "tile"])
def test_expansion_is_the_fake_quant_twin(layout, backend):
    """The dense bf16 tensor that ``trellis --fake-quant`` writes, to the bit."""
    options = {
        "options": TrellisOptions(k=3, warmup=16),
        "axis": 0 if layout == "axis0" else 1,
        "tile": layout == "tile",
    }
    weight = np.random.default_rng(0).standard_normal((40, 72)).astype(np.float32)
    stored = TrellisPacked(**options).run("m.weight", weight).tensors
    twin = TrellisFakeQuant(**options).run("m.weight", weight).tensors["m.weight"]
    spec = TrellisPacked(**options).spec(weight.shape, "m.weight")
    packed = Packed(mx.array(stored["m.weight"]), mx.array(stored["m.scales"]), spec)
    dense = to_numpy(backend.expand(packed, mx.bfloat16))
    np.testing.assert_array_equal((dense if spec.axis == 1 else dense.T).view(np.uint16), twin.view(np.uint16))


def test_leading_axes_of_x_are_kept(backend):
    spec = spec_for((24, 40), k=2, axis=1, tile=True)
    words = mx.array(np.random.default_rng(0).integers(0, 2**32, spec.words_shape, dtype=np.uint32))
    packed = Packed(words, mx.ones((24,), mx.float16), spec)
    x = mx.random.normal((2, 1, 40))
    choice = METAL.choose(problem_of(x, packed))
    y = backend.product(choice, x, packed)
    assert y.shape == (2, 1, 24)
    flat = backend.product(choice, x.reshape(2, 40), packed)
    assert mx.array_equal(y.reshape(2, 24), flat)


def test_a_call_that_was_not_chosen_for_is_refused():
    spec = spec_for((24, 40), k=2, axis=1)
    packed = Packed(mx.zeros(spec.words_shape, mx.uint32), mx.ones((24,), mx.float16), spec)
    x = mx.zeros((1, 40))
    other = METAL.choose(Problem(spec=spec, m=2, dtype="float32"))
    with pytest.raises(BackendError, match="the kernel reduce was chosen for another problem"):
        METAL.product(other, x, packed)
    none = METAL.choose(Problem(spec=spec, m=33, dtype="float32"))
    with pytest.raises(BackendError, match=r"no Metal kernel: .*prefill: m = 33"):
        METAL.product(none, mx.zeros((33, 40)), packed)
    with pytest.raises(BackendError, match=r"x is .*int32"):
        problem_of(mx.zeros((1, 40), mx.int32), packed)
    with pytest.raises(BackendError, match=r"no Metal kernel: .*code rptc has no formula"):
        METAL.expand(Packed(packed.words, packed.scales, spec_for((24, 40), k=2, axis=1, code="rptc")), mx.float32)
    with pytest.raises(BackendError, match=r"expand to .*int32"):
        METAL.expand(packed, mx.int32)


@pytest.mark.parametrize(
    "change",
    [{"words": mx.zeros((59,), mx.uint32)}, {"scales": mx.ones((23,), mx.float16)}, {"scales": mx.ones((24,))}],
    ids=lambda c: next(iter(c)),
)
def test_arrays_that_do_not_fit_the_matrix_are_refused(change):
    """A kernel would read beyond them."""
    spec = spec_for((24, 40), k=2, axis=1)
    arrays = {"words": mx.zeros((spec.n_words,), mx.uint32), "scales": mx.ones((24,), mx.float16)}
    Packed(**arrays, spec=spec)
    with pytest.raises(BackendError, match="packed matrix: expected 64 uint32 words and 24 float16 scales"):
        Packed(**(arrays | change), spec=spec)
