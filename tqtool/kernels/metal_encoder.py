"""The Viterbi search on Metal: the same call and the same states as ``tqtool.native.viterbi_encode``."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from tqtool.errors import BackendError
from tqtool.formats.trellis import BLOCK
from tqtool.kernels.backend import Call, Runner, dims_array
from tqtool.kernels.encoding import LEVEL_LIMIT, EncodeProblem
from tqtool.kernels.metal import on_device
from tqtool.kernels.metal_kernels import ENCODE_SOURCE, encode_blocks_at_once, encode_launch, encode_supports


def encode_problem(
    blocks: int, levels: NDArray[np.int16], *, window: int, k: int, warmup: int | None = None
) -> EncodeProblem:
    """The problem of ``blocks`` blocks; ``warmup`` None is Algorithm 4."""
    return EncodeProblem(
        k=k,
        window=window,
        warmup=BLOCK // 2 if warmup is None else warmup,
        blocks=blocks,
        lowest=int(levels.min()),
        highest=int(levels.max()),
    )


def viterbi_encode(
    x: NDArray[np.int16],
    levels: NDArray[np.int16],
    *,
    window: int,
    k: int,
    warmup: int | None = None,
    run: Runner = on_device,
) -> tuple[NDArray[np.uint16], str]:
    """Best tail-biting path of each block.

    Args:
        x: Inputs ``[n, 256]`` in level units; values beyond ±560 are clipped.
        levels: Integer value of every state, ``[2^window]``.
        window: L, state bits.
        k: Bits per step.
        warmup: Steps on each side of the seam in the first pass; None is T/2, Algorithm 4.
        run: Carries the calls out.

    Returns:
        States ``[n, 256]`` and ``metal``. Device memory: the choices of ``encode_blocks_at_once`` blocks.

    Raises:
        BackendError: shapes do not fit, or the kernel does not do this trellis; the message says why.
    """
    if x.ndim != 2 or x.shape[1] != BLOCK or levels.shape != (1 << window,):
        raise BackendError(f"viterbi_encode: x {list(x.shape)}, levels {list(levels.shape)}, L={window}")
    states = np.empty(x.shape, np.uint16)
    if not len(x):
        return states, "metal"
    whole = encode_problem(len(x), levels, window=window, k=k, warmup=warmup)
    reason = encode_supports(whole)
    if reason is not None:
        raise BackendError(f"viterbi_encode: no Metal kernel: {reason}")
    clipped, table, step = np.clip(x, -LEVEL_LIMIT, LEVEL_LIMIT), mx.array(levels), encode_blocks_at_once(whole)
    for start in range(0, len(x), step):
        part = clipped[start : start + step]
        problem = encode_problem(len(part), levels, window=window, k=k, warmup=warmup)
        launch = encode_launch(problem)
        call = Call(
            name="viterbi",
            source=ENCODE_SOURCE,
            inputs=("x", "levels", "dims"),
            outputs=("states", "history"),
            launch=launch,
        )
        found = run(call, [mx.array(part), table, dims_array(launch.dims)])[0]
        states[start : start + step] = np.array(found)  # waits: the next part may use the memory
    return states, "metal"
