"""The CUDA kernels: what each supports and how it is launched. Pure functions of the problem and the card.

Squares of 16 × 16 have kernels of their own, on the tensor cores. Everything else is the text of the Metal kernels,
which ``kernels/cuda/msl.cuh`` lets CUDA compile: threadgroups are thread blocks, simdgroups are warps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from tqtool.formats.trellis import TILE
from tqtool.kernels import metal_kernels as metal
from tqtool.kernels.problem import Kernel, Launch, Output, Problem
from tqtool.kernels.rules import matvec_reason, trellis_template

METAL_ON_CUDA: Final = "cuda/msl.cuh"
"""What CUDA compiles before a text of Metal's."""
WARPS: Final = 16
THREADS: Final = 32 * WARPS
LIMBS: Final = 3
"""Signed bytes of an input in fixed point: 24 bits. With int8 activations it is one."""
TILES_A_UNIT: Final = 4
HASHED: Final = ("mul1", "1mad")
"""Codes whose value is affine in the byte sum of a hash."""
MOST_INPUTS: Final = 1 << 17
"""A thread adds up its fixed-point inputs in 32 bits: 256 of at most 2^23."""
SUM_BYTES: Final = 8
STATIC_BYTES: Final = 64
"""Shared memory that the kernel declares itself, rounded up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """What a launch depends on; no result does.

    Attributes:
        processors: Streaming multiprocessors.
        shared_bytes: Shared memory that one thread block can have.
    """

    processors: int
    shared_bytes: int


H200: Final = Card(processors=132, shared_bytes=227 << 10)
A100: Final = Card(processors=108, shared_bytes=163 << 10)


def tile_supports(problem: Problem, op: str) -> str | None:
    """Squares, 1 to 4 rows of x, also as int8, a code that is a byte sum; two matrices of the same bits."""
    reason = matvec_reason(replace(problem, int8=False), "tile", op)
    if reason is not None:
        return reason
    if len({spec.k for spec in problem.specs}) > 1:
        return "the two matrices differ in bits"
    if problem.spec.code not in HASHED:
        return f"code {problem.spec.code} is no byte sum"
    if problem.spec.cols % 4 or problem.spec.cols > MOST_INPUTS:
        return f"{problem.spec.cols} inputs: expected a multiple of 4, at most {MOST_INPUTS}"
    return None


def tile_launch(problem: Problem, card: Card) -> Launch:
    """A block for each processor, or fewer; x in slices that fit beside the sums."""
    spec, matrices, limbs = problem.spec, len(problem.specs), 1 if problem.int8 else LIMBS
    columns = limbs * problem.m
    row_tiles, squares = -(-spec.rows // TILE), spec.stride // TILE
    units = -(-squares // TILES_A_UNIT)
    row_bytes, unit_bytes = matrices * columns * SUM_BYTES, TILE * columns * 16
    # Sums may take a quarter of a block's memory: beyond that more blocks than the card runs at once.
    blocks = tile_blocks(row_tiles, card.shared_bytes // 4 // row_bytes, card)
    sums = -(-tile_rows(row_tiles, blocks) * row_bytes // 16) * 16
    at_once = (card.shared_bytes - STATIC_BYTES - sums) // unit_bytes - 1  # one of zeros
    slice_units = -(-units // -(-units // at_once))  # slices of one length
    return Launch(
        grid=(blocks * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        template=(
            *trellis_template(problem),
            ("M", problem.m),
            ("LIMBS", limbs),
            ("ROWS", spec.rows),
            ("COLS", spec.cols),
            ("SQUARES", squares),
            ("SLICE", slice_units),
            ("BLOCKS", blocks),
        ),
        threadgroup_bytes=sums + (slice_units + 1) * unit_bytes,
        outputs=(Output((problem.m, spec.rows), problem.dtype),),
        dims=(),
    )


def tile_rows(row_tiles: int, blocks: int) -> int:
    """Rows of the block that has most: whole rows of tiles, as many for each, and pairs of rows of what is left."""
    return TILE * (row_tiles // blocks) + 2 * -(-(TILE // 2) * (row_tiles % blocks) // blocks)


def tile_blocks(row_tiles: int, most_rows: int, card: Card) -> int:
    """How many blocks share ``row_tiles`` rows of tiles: one a processor; more where its rows would be too many."""
    blocks = min(card.processors, row_tiles * TILE // 2)
    return max(blocks, -(-row_tiles // (most_rows // TILE)))


def kernels(card: Card) -> tuple[Kernel, ...]:
    """The kernels for ``card``, those of the tensor cores first; more than four rows of x have none."""

    def own(name: str, op: str, inputs: tuple[str, ...]) -> Kernel:
        supports: Callable[[Problem], str | None] = partial(tile_supports, op=op)
        launch: Callable[[Problem], Launch] = partial(tile_launch, card=card)
        return Kernel(
            name=name, source=f"cuda/{name}.cu", inputs=inputs, outputs=("out",), supports=supports, launch=launch
        )

    one = ("x", "words", "scales")
    return (
        own("tile", "product", one),
        own("tile_swiglu", "swiglu", (*one, "up_words", "up_scales")),
        *(kernel for kernel in metal.KERNELS if kernel is not metal.PREFILL),
    )
