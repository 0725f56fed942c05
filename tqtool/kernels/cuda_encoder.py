"""The encoder of the CUDA kernels: L = 12, four blocks at a time in a thread block, 32-bit integer costs."""

from __future__ import annotations

from typing import Final

from tqtool.formats.trellis import BLOCK
from tqtool.kernels.cuda import on_device
from tqtool.kernels.cuda_kernels import H200
from tqtool.kernels.encoder import Encoder
from tqtool.kernels.encoding import LEVEL_LIMIT, EncodeProblem
from tqtool.kernels.problem import Launch, Output

WINDOW: Final = 12
THREADS: Final = 128
BLOCKS_A_GROUP: Final = 4
GROUPS_A_PROCESSOR: Final = 4
CHUNK: Final = 16
"""Steps that come back at a time."""
UNREACHED: Final = 1 << 28
"""What a start costs that is not the one asked for."""
SOURCE: Final = "cuda/viterbi.cu"
MOST_BLOCKS: Final = 1 << 20


def supports(problem: EncodeProblem) -> str | None:
    """Costs that fit 32 bits without anything being subtracted.

    A state's cost is D·((u - x)² + 560² - x²), D = 2^k. Going back from any suffix, each step is free to choose among
    the D states that end in it, so no suffix costs more than 256 times what the best of D states can cost at most
    (``dearest``). A path that begins where it must not saves no more than the steps in which another can join it.
    """
    factor = 1 << problem.k
    dearest_choice = problem.step_cost + LEVEL_LIMIT**2
    dearest = dearest_choice if problem.dearest is None else problem.dearest
    greatest = UNREACHED + factor * (BLOCK * dearest + dearest_choice)
    if problem.window != WINDOW:
        return f"window {problem.window}: does {WINDOW}"
    if not 2 <= problem.k <= 4:
        return f"k = {problem.k}: does 2 to 4"
    if problem.warmup % CHUNK:
        return f"warmup {problem.warmup}: no multiple of {CHUNK}"
    if factor * problem.reach * dearest_choice >= UNREACHED:
        return f"steps of up to {dearest_choice}: a start that is not allowed could win"
    if greatest >= 1 << 32:
        return f"costs up to {greatest}: more than 32 bits"
    return None


def launch(problem: EncodeProblem) -> Launch:
    """Four groups a processor, fewer for fewer blocks; each goes through the blocks in strides."""
    groups = min(H200.processors * GROUPS_A_PROCESSOR, -(-problem.blocks // BLOCKS_A_GROUP))
    return Launch(
        grid=(groups * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        template=(("L", problem.window), ("K", problem.k)),
        threadgroup_bytes=0,
        outputs=(
            Output((problem.blocks, BLOCK), "uint16"),
            Output((groups, BLOCK, problem.suffixes // 2), "uint32", scratch=True),
        ),
        dims=(problem.blocks, problem.warmup),
    )


CUDA_ENCODER = Encoder(
    name="cuda",
    source=SOURCE,
    supports=supports,
    launch=launch,
    blocks_at_once=lambda problem: MOST_BLOCKS,
    run=on_device,
)
