"""The Viterbi search on a GPU: the same call and the same states as ``tqtool.native.viterbi_encode``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from tqtool.errors import BackendError
from tqtool.formats.trellis import BLOCK
from tqtool.kernels.backend import Call, Runner, dims_array
from tqtool.kernels.encoding import LEVEL_LIMIT, EncodeProblem, encode_problem
from tqtool.kernels.problem import Launch


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoder:
    """The encoder of one backend.

    Attributes:
        name: Of the backend.
        source: The kernel's file for a problem that it supports.
        supports: Why it cannot do a problem, or None.
        launch: Geometry for a problem that it supports.
        blocks_at_once: Blocks of one launch.
        run: Carries calls out.
    """

    name: str
    source: Callable[[EncodeProblem], str]
    supports: Callable[[EncodeProblem], str | None]
    launch: Callable[[EncodeProblem], Launch]
    blocks_at_once: Callable[[EncodeProblem], int]
    run: Runner

    def with_runner(self, run: Runner) -> Encoder:
        """The same kernels, carried out by ``run``."""
        return replace(self, run=run)

    def call(self, problem: EncodeProblem) -> Call:
        """The call for a problem that is supported."""
        return Call(
            name="viterbi",
            source=self.source(problem),
            inputs=("x", "levels", "dims"),
            outputs=("states", "history"),
            launch=self.launch(problem),
        )

    def states(self, x: mx.array, levels: mx.array, problem: EncodeProblem) -> mx.array:
        """States ``[n, 256]`` of inputs ``[n, 256]`` int16 within ±560 that are on the device; nothing waits for them.

        ``problem`` must be supported; its number of blocks is that of ``x``.
        """
        step, found = self.blocks_at_once(problem), []
        for start in range(0, x.shape[0], step):
            part = x[start : start + step]
            call = self.call(replace(problem, blocks=part.shape[0]))
            found.append(self.run(call)([part, levels, dims_array(call.launch.dims)])[0])
        return found[0] if len(found) == 1 else mx.concatenate(found)

    def viterbi_encode(
        self,
        x: NDArray[np.int16],
        levels: NDArray[np.int16],
        *,
        window: int,
        k: int,
        warmup: int | None = None,
    ) -> tuple[NDArray[np.uint16], str]:
        """Best tail-biting path of each block.

        Args:
            x: Inputs ``[n, 256]`` in level units; values beyond ±560 are clipped.
            levels: Integer value of every state, ``[2^window]``.
            window: L, state bits.
            k: Bits per step.
            warmup: Steps on each side of the seam in the first pass; None is T/2, Algorithm 4.

        Returns:
            States ``[n, 256]`` and the backend's name. Device memory: the choices of ``blocks_at_once`` blocks.

        Raises:
            BackendError: shapes do not fit, or the kernel does not do this trellis; the message says why.
        """
        if x.ndim != 2 or x.shape[1] != BLOCK or levels.shape != (1 << window,):
            raise BackendError(f"viterbi_encode: x {list(x.shape)}, levels {list(levels.shape)}, L={window}")
        states = np.empty(x.shape, np.uint16)
        if not len(x):
            return states, self.name
        whole = encode_problem(len(x), levels, window=window, k=k, warmup=warmup)
        reason = self.supports(whole)
        if reason is not None:
            raise BackendError(f"viterbi_encode: no {self.name} kernel: {reason}")
        clipped, table, step = np.clip(x, -LEVEL_LIMIT, LEVEL_LIMIT), mx.array(levels), self.blocks_at_once(whole)
        for start in range(0, len(x), step):
            part = clipped[start : start + step]
            call = self.call(replace(whole, blocks=len(part)))
            found = self.run(call)([mx.array(part), table, dims_array(call.launch.dims)])[0]
            states[start : start + step] = np.array(found)  # waits: the next part may use the memory
        return states, self.name
