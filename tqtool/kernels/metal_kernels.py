"""The Metal kernels: what each supports and how it is launched. Pure functions of the problem.

Features of Metal 3.1: simdgroups of 32, at most 32 KB of threadgroup memory and 1024 threads in a group. The numbers
of rows, simdgroups and splits below follow from occupancy by arithmetic; none of them has been timed on an Apple GPU.
"""

from __future__ import annotations

from collections.abc import Callable

from tqtool.formats.trellis import BLOCK, TILE
from tqtool.kernels.encoding import EXACT, EncodeProblem
from tqtool.kernels.problem import RUN, Dtype, Kernel, Launch, Output, Problem
from tqtool.kernels.rules import MATVEC_ROWS, general_reason, matvec_reason, rows_reason, sizes, trellis_template, up_of

SIMD = 32
MAX_THREADGROUP_BYTES = 32 * 1024
PREFILL_ROWS = 32
PREFILL_OUTPUTS = 32
"""Outputs, and inputs at a time, of a threadgroup of the prefill kernel; ``TQ_LINE`` is this and a pad."""
PREFILL_LINE = 36
THREADS = 256
"""Of every kernel with a free choice: eight simdgroups."""
MANY_ROWS = 256
"""From so many rows on, a simdgroup of ``reduce`` has two of them, and reads x once for both."""
WANTED_SIMDGROUPS = 2048
"""What ``scatter`` splits its inputs for: some 64 simdgroups for each of 32 cores."""
MAX_SPLITS = 16
STATES_PER_LANE = 64
"""Levels that a lane of the encoder keeps in registers."""
MAX_HISTORY_BYTES = 256 << 20
"""Choices of all blocks of one launch of the encoder: 4096 blocks at L = 12."""
ROWS_PER_SPLIT = 64
"""At least, so that partial sums are a small part of what is read and written."""


# --------------------------------------------------------------------------------------------- reduce, tile
def reduce_supports(problem: Problem) -> str | None:
    """Axis 1 in rows, 1 to 4 rows of x."""
    return matvec_reason(problem, "axis1", "product")


def reduce_launch(problem: Problem) -> Launch:
    """One simdgroup for every R rows of the matrix, eight in a threadgroup."""
    per_simdgroup = 2 if problem.spec.rows >= MANY_ROWS else 1
    simdgroups = -(-problem.spec.rows // per_simdgroup)
    template = (*trellis_template(problem), ("M", problem.m), ("R", per_simdgroup))
    return _launch(problem, threads=simdgroups * SIMD, template=template)


def reduce_swiglu_supports(problem: Problem) -> str | None:
    """Two matrices of axis 1 in rows, 1 to 4 rows of x; bits may differ."""
    return matvec_reason(problem, "axis1", "swiglu")


def reduce_swiglu_launch(problem: Problem) -> Launch:
    """One simdgroup for one row of each matrix, eight in a threadgroup."""
    template = (*trellis_template(problem), ("UP_K", up_of(problem).k), ("M", problem.m))
    return _launch(problem, threads=problem.spec.rows * SIMD, template=template)


def tile_supports(problem: Problem) -> str | None:
    """Squares of 16 × 16, 1 to 4 rows of x."""
    return matvec_reason(problem, "tile", "product")


def tile_launch(problem: Problem) -> Launch:
    """One threadgroup for every strip of 16 rows; long strips are shared by eight simdgroups, short ones by two."""
    return _tile_launch(problem, (("M", problem.m),))


def tile_swiglu_supports(problem: Problem) -> str | None:
    """Two matrices in squares of 16 × 16, 1 to 4 rows of x; bits may differ."""
    return matvec_reason(problem, "tile", "swiglu")


def tile_swiglu_launch(problem: Problem) -> Launch:
    """As ``tile_launch``; a lane decodes from both matrices."""
    return _tile_launch(problem, (("UP_K", up_of(problem).k), ("M", problem.m)))


def _tile_launch(problem: Problem, more: tuple[tuple[str, int], ...]) -> Launch:
    spec = problem.spec
    simdgroups = 8 if spec.stride // TILE >= 32 else 2
    return _launch(
        problem,
        threads=-(-spec.rows // TILE) * simdgroups * SIMD,
        group=simdgroups * SIMD,
        template=(*trellis_template(problem), *more, ("SIMDGROUPS", simdgroups)),
        threadgroup_bytes=len(problem.specs) * simdgroups * TILE * problem.m * 4,
    )


# -------------------------------------------------------------------------------------------------- scatter
def scatter_supports(problem: Problem) -> str | None:
    """Axis 0, 1 to 4 rows of x."""
    return matvec_reason(problem, "axis0", "product")


def scatter_launch(problem: Problem) -> Launch:
    """A threadgroup for 256 outputs and one of the splits; more than one split leaves float32 ``[splits, m, out]``."""
    spec = problem.spec
    across, simdgroups = -(-spec.cols // BLOCK), THREADS // SIMD
    splits = max(1, min(MAX_SPLITS, WANTED_SIMDGROUPS // (across * simdgroups), spec.rows // ROWS_PER_SPLIT))
    dtype: Dtype = problem.dtype if splits == 1 else "float32"
    return Launch(
        grid=(across * THREADS, splits, 1),
        threadgroup=(THREADS, 1, 1),
        template=(
            ("T", dtype),
            *trellis_template(problem)[1:],
            ("M", problem.m),
            ("SIMDGROUPS", simdgroups),
            ("WHOLE", int(spec.stride % BLOCK == 0)),
        ),
        threadgroup_bytes=simdgroups * BLOCK * 4,
        outputs=(Output((splits, problem.m, spec.cols), dtype),),
        dims=(*sizes(spec), splits),
    )


def sum_parts_launch(shape: tuple[int, ...], dtype: Dtype) -> Launch:
    """Sum of float32 parts ``[splits, m, out]`` over the first axis, rounded to ``dtype`` ``[m, out]``."""
    splits, m, out = shape
    return Launch(
        grid=(-(-m * out // THREADS) * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        template=(("T", dtype),),
        threadgroup_bytes=0,
        outputs=(Output((m, out), dtype),),
        dims=(m * out, splits),
    )


# ------------------------------------------------------------------------------------------ prefill, expand
def prefill_supports(problem: Problem) -> str | None:
    """Any layout, 5 to 32 rows of x."""
    return general_reason(problem, "product") or rows_reason(problem, MATVEC_ROWS + 1, PREFILL_ROWS)


def prefill_launch(problem: Problem) -> Launch:
    """A threadgroup of four simdgroups for every 32 outputs."""
    spec, eights = problem.spec, -(-problem.m // 8)
    return _launch(
        problem,
        threads=-(-spec.weight_shape[0] // PREFILL_OUTPUTS) * 128,
        group=128,
        template=(*trellis_template(problem), ("AXIS", spec.axis), ("TILE", spec.tile), ("MT", eights)),
        threadgroup_bytes=(PREFILL_OUTPUTS + 8 * eights) * PREFILL_LINE * 4,
        dims=(*sizes(spec), problem.m),
    )


def expand_supports(problem: Problem) -> str | None:
    """Any layout and stride."""
    return general_reason(problem, "expand")


def expand_launch(problem: Problem) -> Launch:
    """A thread for every run of eight weights; the result is the stored matrix ``[rows, cols]``."""
    spec = problem.spec
    return _launch(
        problem,
        threads=spec.n_blocks * (BLOCK // RUN),
        template=(*trellis_template(problem), ("TILE", spec.tile)),
        dims=(*sizes(spec), spec.n_blocks),
        shape=(spec.rows, spec.cols),
    )


# --------------------------------------------------------------------------------------------------- encode
def encode_supports(problem: EncodeProblem) -> str | None:
    """One or two rows of costs in threadgroup memory, exact in float32, and a lane for every 64 states."""
    bytes_needed = _encode_bytes(problem, 1)
    if not SIMD * STATES_PER_LANE <= 1 << problem.window <= 256 * STATES_PER_LANE:
        return f"window {problem.window}: one of 11 to 14"
    if problem.suffixes < 4 * problem.lanes(STATES_PER_LANE):
        return f"k = {problem.k}: a lane has fewer than four suffixes"
    if bytes_needed > MAX_THREADGROUP_BYTES:
        return f"k = {problem.k}, window {problem.window}: {bytes_needed} bytes of threadgroup memory"
    if problem.greatest_cost > EXACT:
        return f"costs up to {problem.greatest_cost}: not exact in float32"
    return None


def encode_launch(problem: EncodeProblem) -> Launch:
    """One threadgroup for every block; states, and choices that only the kernel reads."""
    lanes = problem.lanes(STATES_PER_LANE)
    rows = 2 if _encode_bytes(problem, 2) <= MAX_THREADGROUP_BYTES else 1
    trellis = (("L", problem.window), ("K", problem.k), ("LANES", lanes), ("ROWS", rows), ("REACH", problem.reach))
    return Launch(
        grid=(problem.blocks * lanes, 1, 1),
        threadgroup=(lanes, 1, 1),
        template=trellis,
        threadgroup_bytes=_encode_bytes(problem, rows),
        outputs=(
            Output((problem.blocks, BLOCK), "uint16"),
            Output((problem.blocks, BLOCK, lanes), "uint32", scratch=True),
        ),
        dims=(problem.blocks, problem.warmup),
    )


def encode_blocks_at_once(problem: EncodeProblem) -> int:
    """Blocks of one launch, so that the choices of all of them take no more than ``MAX_HISTORY_BYTES``."""
    return MAX_HISTORY_BYTES // (BLOCK * problem.lanes(STATES_PER_LANE) * 4)


def _encode_bytes(problem: EncodeProblem, rows: int) -> int:
    """Rows of costs, the inputs, one number."""
    return rows * problem.suffixes * 4 + BLOCK * 4 + 4


# --------------------------------------------------------------------------------------------------- common
def _launch(
    problem: Problem,
    *,
    threads: int,
    template: tuple[tuple[str, int | Dtype], ...],
    group: int = THREADS,
    threadgroup_bytes: int = 0,
    dims: tuple[int, ...] | None = None,
    shape: tuple[int, ...] | None = None,
) -> Launch:
    """A one-dimensional launch of at least ``threads`` threads."""
    return Launch(
        grid=(-(-threads // group) * group, 1, 1),
        threadgroup=(group, 1, 1),
        template=template,
        threadgroup_bytes=threadgroup_bytes,
        outputs=(Output(shape or (problem.m, problem.spec.weight_shape[0]), problem.dtype),),
        dims=dims or sizes(problem.spec),
    )


_ONE = ("x", "words", "scales", "dims")
_TWO = ("x", "words", "scales", "up_words", "up_scales", "dims")


def _kernel(
    name: str,
    inputs: tuple[str, ...],
    supports: Callable[[Problem], str | None],
    launch: Callable[[Problem], Launch],
) -> Kernel:
    return Kernel(
        name=name, source=f"metal/{name}.metal", inputs=inputs, outputs=("y",), supports=supports, launch=launch
    )


REDUCE = _kernel("reduce", _ONE, reduce_supports, reduce_launch)
TILE_PRODUCT = _kernel("tile", _ONE, tile_supports, tile_launch)
SCATTER = _kernel("scatter", _ONE, scatter_supports, scatter_launch)
PREFILL = _kernel("prefill", _ONE, prefill_supports, prefill_launch)
REDUCE_SWIGLU = _kernel("reduce_swiglu", _TWO, reduce_swiglu_supports, reduce_swiglu_launch)
TILE_SWIGLU = _kernel("tile_swiglu", _TWO, tile_swiglu_supports, tile_swiglu_launch)
EXPAND = _kernel("expand", ("words", "scales", "dims"), expand_supports, expand_launch)

KERNELS: tuple[Kernel, ...] = (REDUCE, TILE_PRODUCT, SCATTER, PREFILL, REDUCE_SWIGLU, TILE_SWIGLU, EXPAND)
ENCODE_SOURCE = "metal/viterbi.metal"
SUM_PARTS_SOURCE = "metal/sum_parts.metal"
METAL_SWITCH = "TQTOOL_METAL_KERNELS"
"""Environment variable: at 1 an Apple GPU runs the Metal kernels, which pass their tests under an executor of Metal
text and have run on no Apple GPU yet (decision 0004). Unset or 0, MLX's own operations decode."""
