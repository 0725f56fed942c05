"""Which Metal kernel is chosen for a problem, and how it is launched: no device, no text."""

from __future__ import annotations

import itertools

import pytest

from tqtool.errors import BackendError
from tqtool.formats.trellis import spec_for
from tqtool.kernels import metal_kernels
from tqtool.kernels.metal_kernels import KERNELS, MAX_THREADGROUP_BYTES, sum_parts_launch
from tqtool.kernels.problem import DTYPES, Launch, Problem, choose

# Real widths (SmolLM2, Qwen, 27B), ragged ones, one row, one column.
SHAPES = ((1536, 576), (192, 576), (4864, 896), (17408, 5120), (5120, 17408), (1, 8), (257, 300), (300, 257), (8, 1))


def spec(shape=(1536, 576), **options):
    return spec_for(shape, **({"k": 3, "axis": 1} | options))


def problems():
    for shape, m, dtype in itertools.product(SHAPES, (1, 3, 4, 5, 8, 17, 32, 33), DTYPES):
        for options in (
            {"axis": 1},
            {"axis": 1, "pad_rows": True},
            {"axis": 0},
            {"axis": 0, "pad_rows": True},
            {"tile": True},
        ):
            one = spec(shape, **options)
            yield Problem(spec=one, m=m, dtype=dtype)
            yield Problem(op="swiglu", spec=one, m=m, dtype=dtype, up=spec(shape, **options, k=2))
            yield Problem(op="expand", spec=one, m=0, dtype=dtype)


@pytest.mark.parametrize(
    ("options", "m", "expected"),
    [
        ({"axis": 1}, 1, "reduce"),
        ({"axis": 1}, 4, "reduce"),
        ({"axis": 1}, 5, "prefill"),
        ({"axis": 1}, 32, "prefill"),
        ({"axis": 1}, 33, "expand + matmul"),
        ({"axis": 0}, 2, "scatter"),
        ({"tile": True}, 3, "tile"),
        ({"tile": True}, 9, "prefill"),
        ({"axis": 1, "code": "rptc"}, 1, "expand + matmul"),
    ],
)
def test_the_kernel_of_a_product(options, m, expected):
    choice = choose(Problem(spec=spec(**options), m=m, dtype="bfloat16"), KERNELS)
    assert choice.path == expected


def test_every_refusal_says_why():
    choice = choose(Problem(spec=spec((64, 300)), m=1, dtype="float32"), KERNELS)  # 300 is no multiple of 8
    assert choice.path == "expand + matmul"
    assert "reduce: stride 300 is no multiple of 8" in choice.reason
    assert len(choice.refusals) == len(KERNELS)
    padded = choose(Problem(spec=spec((64, 300), pad_rows=True), m=1, dtype="float32"), KERNELS)
    assert (padded.path, padded.reason) == ("reduce", "product, axis1, m = 1")
    table = choose(Problem(op="expand", spec=spec(code="rptc"), m=0, dtype="float32"), KERNELS)
    assert (table.path, table.refusals[-1]) == ("MLX operations", ("expand", "code rptc has no formula"))


def test_a_pair_must_be_alike_but_for_its_bits():
    def path(**options):
        return choose(
            Problem(op="swiglu", spec=spec(tile=True), m=2, dtype="float16", up=spec(**options)), KERNELS
        ).path

    assert path(tile=True, k=4) == "tile_swiglu"
    assert path(tile=True, window=14) == path(tile=True, code="1mad") == path() == "two products"


def test_indices_fit_in_32_bits():
    wide = Problem(spec=spec((1 << 20, 2048)), m=1, dtype="float32")
    assert "at most 2^31 - 1" in (metal_kernels.reduce_supports(wide) or "")
    assert metal_kernels.reduce_supports(Problem(spec=spec((1 << 20, 2040)), m=1, dtype="float32")) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"m": 0},
        {"m": -1},
        {"m": 1, "dtype": "float64"},
        {"m": 1, "op": "expand"},
        {"m": 1, "op": "swiglu"},
        {"m": 1, "up": spec()},
        {"m": 1, "op": "swiglu", "up": spec((576, 1536))},
    ],
    ids=str,
)
def test_contradictory_problems_are_refused(fields):
    with pytest.raises(BackendError, match="kernel problem"):
        Problem(**({"spec": spec(), "dtype": "float32"} | fields))


def test_every_launch_keeps_within_metal():
    launched = set()
    for problem in problems():
        choice = choose(problem, KERNELS)
        if choice.kernel is None:
            continue
        launch = choice.kernel.launch(problem)
        launched.add(choice.kernel.name)
        assert launch.threadgroup_bytes <= MAX_THREADGROUP_BYTES
        threads = launch.threadgroup[0] * launch.threadgroup[1] * launch.threadgroup[2]
        assert threads <= 1024
        assert threads % 32 == 0
        assert all(size % group == 0 for size, group in zip(launch.grid, launch.threadgroup, strict=True))
        assert len({name for name, _ in launch.template}) == len(launch.template)
        assert all(0 <= size < 1 << 32 for size in launch.dims)
    assert launched == {kernel.name for kernel in KERNELS}


def test_every_launch_covers_its_matrix():
    """What one threadgroup does, times the threadgroups, is at least the matrix, and less than one group more."""
    for problem in problems():
        choice = choose(problem, KERNELS)
        if choice.kernel is None:
            continue
        launch = choice.kernel.launch(problem)
        options, groups = dict(launch.template), launch.grid[0] // launch.threadgroup[0]
        work = {
            "reduce": (problem.spec.rows, 8 * options.get("R", 0)),
            "reduce_swiglu": (problem.spec.rows, 8),
            "tile": (problem.spec.rows, 16),
            "tile_swiglu": (problem.spec.rows, 16),
            "scatter": (problem.spec.cols, 256),
            "prefill": (problem.spec.weight_shape[0], 32),
            "expand": (problem.spec.n_blocks, 8),
        }
        total, per_group = work[choice.kernel.name]
        assert groups == -(-total // per_group)


def test_scatter_splits_long_inputs_only():
    def splits(shape):
        return metal_kernels.scatter_launch(Problem(spec=spec(shape, axis=0), m=2, dtype="bfloat16")).outputs[0]

    assert (splits((5120, 17408)).shape, splits((5120, 17408)).dtype) == ((12, 2, 5120), "float32")
    assert (splits((512, 64)).shape, splits((512, 64)).dtype) == ((1, 2, 512), "bfloat16")
    last = sum_parts_launch((12, 2, 5120), "bfloat16")
    assert (last.outputs[0].shape, last.dims) == ((2, 5120), (10240, 12))


def test_a_grid_of_partial_groups_is_refused():
    with pytest.raises(BackendError, match="not made of groups"):
        Launch(grid=(100, 1, 1), threadgroup=(32, 1, 1), template=(), threadgroup_bytes=0, outputs=(), dims=())
