"""The CUDA kernels, through ``mx.fast.cuda_kernel``."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import mlx.core as mx

from tqtool.kernels.backend import Backend, Call, Ready, launcher
from tqtool.kernels.cuda_kernels import H200, Card, kernels
from tqtool.kernels.metal import sum_parts
from tqtool.kernels.sources import KernelText, kernel_text, without_comments

METAL_ON_CUDA = "cuda/msl.cuh"
PROVEN_GENERATION = 9
"""Compute capability, before the point, of the H200; the texts compile for others, nobody has run them there."""
_SPACES = re.compile(r"\b(device|thread) (?=[\w(])")


def cuda_backend(card: Card) -> Backend:
    """The kernels as ``card`` takes them."""
    return Backend("CUDA", kernels(card), sum_parts, on_device)


@lru_cache(maxsize=64)
def text_of(source: str) -> KernelText:
    """Header and body of a kernel; that of a Metal kernel with what makes CUDA of it.

    Without comments: MLX puts the whole text together anew, and hashes it, for every call. ``device`` and ``thread``
    cannot be macros: ``__device__`` is one that has the first of them in it.
    """
    if not source.startswith("metal/"):
        return without_comments(kernel_text(source))
    text = without_comments(kernel_text(source, before=METAL_ON_CUDA))
    return KernelText(_SPACES.sub("", text.header), _SPACES.sub("", text.body))


def on_device(call: Call, *, verbose: bool = False) -> Ready:
    """Launches through MLX; ``verbose`` prints the text that is compiled.

    What it returns raises RuntimeError where MLX has no CUDA backend.
    """
    ready: list[Ready] = []

    def run(arrays: Sequence[mx.array]) -> list[mx.array]:
        if not ready:
            dtypes = "_".join(str(array.dtype).rpartition(".")[2] for array in arrays)
            shared_bytes = call.launch.threadgroup_bytes
            kernel = _compiled(call.name, call.source, call.inputs, call.outputs, dtypes, shared_bytes)
            ready.append(launcher(kernel, call.launch, verbose=verbose))
        return ready[0](arrays)

    return run


@lru_cache(maxsize=1024)
def _compiled(
    name: str, source: str, inputs: tuple[str, ...], outputs: tuple[str, ...], dtypes: str, shared_bytes: int
) -> Any:
    """MLX's kernel object.

    MLX finds compiled code again, on the disk too, by name and template values alone: so the name says what else the
    code depends on, the text and the types of the inputs.
    """
    text = text_of(source)
    digest = hashlib.sha256(f"{text.header}\0{text.body}\0{dtypes}".encode()).hexdigest()[:12]
    # Kernels of Metal's text declare their shared memory themselves.
    dynamic = shared_bytes if source.startswith("cuda/") else 0
    return mx.fast.cuda_kernel(
        name=f"tq_{name}_{digest}",
        input_names=list(inputs),
        output_names=list(outputs),
        source=text.body,
        header=text.header,
        shared_memory=dynamic,
    )


def is_proven_here() -> bool:
    """Whether MLX has a card on whose generation the kernels have passed their tests, and whose memory they know.

    Elsewhere the geometry of ``CUDA`` may ask for more shared memory than there is.
    """
    return mx.cuda.is_available() and mx.device_info(mx.gpu)["compute_capability_major"] == PROVEN_GENERATION


CUDA = cuda_backend(H200)
