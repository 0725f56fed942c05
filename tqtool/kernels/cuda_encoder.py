"""The encoder of the CUDA kernels: exact integer costs of 32 bits at every window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tqtool.formats.trellis import BLOCK
from tqtool.kernels.cuda import on_device
from tqtool.kernels.cuda_kernels import H200
from tqtool.kernels.encoder import Encoder
from tqtool.kernels.encoding import LEVEL_LIMIT, EncodeProblem
from tqtool.kernels.problem import Launch, Output

UNREACHED: Final = 1 << 28
"""What a start costs that is not the one asked for."""
MOST_BLOCKS: Final = 1 << 20
STATIC_BYTES: Final = 288
"""Shared memory that the kernel declares itself, rounded up."""
PROCESSOR_BYTES: Final = 228 << 10
RESERVED_BYTES: Final = 1 << 10
"""Of a processor's shared memory, for each thread block."""
RESUME_JOBS: Final = 6
"""Groups of blocks a thread block has to have for the shorter second pass to pay: the last, of open paths, is not full
(H200: at 4 it gains 14 % at L = 12 and loses 3 % at L = 16, at 8 it gains 8 %)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """How a window is searched.

    Attributes:
        source: The kernel's file.
        threads: Of a thread block.
        per_processor: Thread blocks that a processor's registers hold.
        blocks: Searched together.
        factor: Costs are this many times squared distances.
        cost_bytes: Shared memory of the costs.
        ks: Bits that it does.
        jobs: Whose choices are kept: two where a path is walked back during the steps of the next blocks.
    """

    source: str
    threads: int
    per_processor: int
    blocks: int
    factor: int
    cost_bytes: int
    ks: tuple[int, ...] = (2, 3, 4)
    jobs: int = 2

    @property
    def shared_bytes(self) -> int:
        """Costs, then the inputs and the states of the blocks."""
        return self.cost_bytes + self.blocks * BLOCK * (4 + 2)

    @property
    def resident(self) -> int:
        """Thread blocks of a processor."""
        return min(self.per_processor, PROCESSOR_BYTES // (self.shared_bytes + STATIC_BYTES + RESERVED_BYTES))


def search(problem: EncodeProblem) -> Search | None:
    """Two rows of costs while they fit; at L = 16 one row, levels in 16 bits, and costs of a square times squares."""
    rows, factor = 2 * 4 * 4 * problem.suffixes, 1 << problem.k
    if problem.window == 12:
        return Search(
            source="cuda/viterbi.cu",
            threads=128,
            per_processor=4,
            blocks=4,
            factor=factor,
            cost_bytes=rows,
            ks=(1, 2, 3, 4),
            jobs=1,
        )
    if problem.window == 14:
        return Search(
            source="cuda/viterbi14.cu", threads=256, per_processor=1, blocks=4, factor=factor, cost_bytes=rows
        )
    if problem.window == 16:
        blocks = 2 if problem.k == 2 else 4
        return Search(
            source="cuda/viterbi16.cu",
            threads=256,
            per_processor=1,
            blocks=blocks,
            factor=4 if problem.k == 2 else 16,
            cost_bytes=4 * blocks * problem.suffixes,
        )
    return None


def greatest_cost(problem: EncodeProblem, factor: int, steps: int) -> int:
    """Bound of every cost after so many steps of which nothing is subtracted.

    A state's cost is F·((u - x)² + 560² - x²), F = ``factor``. Going back from any suffix, each step is free to choose
    among the D states that end in it, so no suffix costs more than ``steps`` times what the best of D states can cost
    at most (``dearest``), and where it had to begin at an allowed suffix, no more than ``UNREACHED`` beyond. On the way
    to a minimum one choice more is added, which may be the dearest of all.
    """
    dearest_choice = problem.step_cost + LEVEL_LIMIT**2
    dearest = dearest_choice if problem.dearest is None else problem.dearest
    return UNREACHED + factor * (steps * dearest + dearest_choice)


def supports(problem: EncodeProblem) -> str | None:
    """Costs that fit 32 bits without anything being subtracted, and starts that cannot win if they must not.

    A path that begins where it must not saves no more than the steps in which another can join it.
    """
    found = search(problem)
    if found is None:
        return f"window {problem.window}: does 12, 14 and 16"
    if problem.k not in found.ks:
        return f"k = {problem.k}: does {found.ks[0]} to {found.ks[-1]} at window {problem.window}"
    if problem.warmup % 2:
        return f"warmup {problem.warmup}: passes begin and end at even steps"
    dearest_choice = problem.step_cost + LEVEL_LIMIT**2
    if found.factor * problem.reach * dearest_choice >= UNREACHED:
        return f"steps of up to {dearest_choice}: a start that is not allowed could win"
    greatest = greatest_cost(problem, found.factor, BLOCK)
    if greatest >= 1 << 32:
        return f"costs up to {greatest}: more than 32 bits"
    return None


def resumes(problem: EncodeProblem, found: Search, groups: int) -> bool:
    """Whether the second pass goes on where the first ends, see kernels/cuda/viterbi.cuh: 1.5 passes for 2.

    With a short first pass few paths are closed, with few blocks the rest weighs too much.
    """
    return (
        problem.warmup == BLOCK // 2
        and problem.blocks >= RESUME_JOBS * groups * found.blocks
        and greatest_cost(problem, found.factor, 3 * BLOCK // 2) < 1 << 32
    )


def launch(problem: EncodeProblem) -> Launch:
    """As many thread blocks as are resident, fewer for fewer blocks; each goes through the blocks in strides."""
    found = search(problem)
    assert found is not None, "asked for problems that are supported"
    groups = min(H200.processors * found.resident, -(-problem.blocks // found.blocks))
    return Launch(
        grid=(groups * found.threads, 1, 1),
        threadgroup=(found.threads, 1, 1),
        template=(("L", problem.window), ("K", problem.k)),
        threadgroup_bytes=found.shared_bytes,
        outputs=(
            Output((problem.blocks, BLOCK), "uint16"),
            Output((groups, found.jobs * BLOCK, problem.suffixes * found.blocks // 8), "uint32", scratch=True),
        ),
        dims=(problem.blocks, problem.warmup, int(resumes(problem, found, groups))),
    )


def source(problem: EncodeProblem) -> str:
    """The kernel's file."""
    found = search(problem)
    assert found is not None, "asked for problems that are supported"
    return found.source


CUDA_ENCODER = Encoder(
    name="cuda",
    source=source,
    supports=supports,
    launch=launch,
    blocks_at_once=lambda problem: MOST_BLOCKS,
    run=on_device,
)
