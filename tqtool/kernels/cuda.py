"""The CUDA kernels, through ``mx.fast.cuda_kernel``."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import mlx.core as mx

from tqtool.kernels.backend import Backend, Call, launch_through_mlx
from tqtool.kernels.cuda_kernels import H200, Card, kernels
from tqtool.kernels.metal import sum_parts
from tqtool.kernels.sources import KernelText, kernel_text

METAL_ON_CUDA = "cuda/msl.cuh"
PROVEN_GENERATION = 9
"""Compute capability, before the point, of the H200; the texts compile for others, nobody has run them there."""
_SPACES = re.compile(r"\b(device|thread) (?=[\w(])")


def cuda_backend(card: Card) -> Backend:
    """The kernels as ``card`` takes them."""
    return Backend("CUDA", kernels(card), sum_parts, on_device)


def text_of(source: str) -> KernelText:
    """Header and body of a kernel; that of a Metal kernel with what makes CUDA of it.

    ``device`` and ``thread`` cannot be macros: ``__device__`` is one that has the first of them in it.
    """
    if not source.startswith("metal/"):
        return kernel_text(source)
    text = kernel_text(source, before=METAL_ON_CUDA)
    return KernelText(_SPACES.sub("", text.header), _SPACES.sub("", text.body))


def on_device(call: Call, arrays: Sequence[mx.array], *, verbose: bool = False) -> list[mx.array]:
    """Launch through MLX; ``verbose`` prints the text that is compiled.

    Raises:
        RuntimeError: MLX has no CUDA backend here.
    """
    dtypes = "_".join(str(array.dtype).rpartition(".")[2] for array in arrays)
    kernel = _compiled(call.name, call.source, call.inputs, call.outputs, dtypes, call.launch.threadgroup_bytes)
    return launch_through_mlx(kernel, call, arrays, verbose=verbose)


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


SEARCH_HAS_RUN = False
"""Whether the text of the search, as it stands, has run on a card: set it when it has, clear it with every change.

An earlier text found the CPU's states on 26 × 1030 blocks (docs/log.md, 2026-11-30)."""


def is_search_proven_here() -> bool:
    """Whether ``auto`` may take the search for paths to the card."""
    return SEARCH_HAS_RUN and is_proven_here()


CUDA = cuda_backend(H200)
