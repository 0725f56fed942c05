"""The CUDA kernels, through ``mx.fast.cuda_kernel``."""

from __future__ import annotations

import atexit
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import mlx.core as mx

from tqtool.kernels.backend import Backend, Call, Ready, launcher
from tqtool.kernels.cuda_kernels import H200, METAL_ON_CUDA, Card, kernels
from tqtool.kernels.metal import sum_parts
from tqtool.kernels.problem import Dtype
from tqtool.kernels.sources import KernelText, digest, kernel_text

PROVEN_GENERATION = 9
"""Compute capability, before the point, of the H200; the texts compile for others, nobody has run them there."""
CUDA_TYPES: Final[dict[Dtype, str]] = {"float32": "float", "float16": "__half", "bfloat16": "__nv_bfloat16"}
"""What MLX calls them in its own texts."""
_SPACES = re.compile(r"\b(device|thread) (?=[\w(])")


def cuda_backend(card: Card) -> Backend:
    """The kernels as ``card`` takes them."""
    return Backend("CUDA", kernels(card), sum_parts, on_device, mx.compile)


@lru_cache(maxsize=64)
def text_of(source: str) -> KernelText:
    """Header and body of a kernel; that of a Metal kernel with what makes CUDA of it.

    ``device`` and ``thread`` cannot be macros: ``__device__`` is one that has the first of them in it.
    """
    if not source.startswith("metal/"):
        return kernel_text(source)
    text = kernel_text(source, before=METAL_ON_CUDA)
    return KernelText(_SPACES.sub("", text.header), _SPACES.sub("", text.body))


def on_device(call: Call, *, verbose: bool = False) -> Ready:
    """Launches through MLX; ``verbose`` prints the text that is compiled.

    What it returns raises RuntimeError where MLX has no CUDA backend.
    """
    ready: list[Ready] = []

    def run(arrays: Sequence[mx.array]) -> list[mx.array]:
        if not ready:
            dtypes = "_".join(str(array.dtype).rpartition(".")[2] for array in arrays)
            launch = call.launch
            # Kernels of Metal's text declare their shared memory themselves.
            shared_bytes = launch.threadgroup_bytes if call.source.startswith("cuda/") else 0
            kernel = _compiled(call.name, call.source, call.inputs, call.outputs, launch.template, dtypes, shared_bytes)
            ready.append(launcher(kernel, replace(launch, template=()), verbose=verbose))
        return ready[0](arrays)

    return run


@lru_cache(maxsize=1024)
def _compiled(
    name: str,
    source: str,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    template: tuple[tuple[str, int | Dtype], ...],
    dtypes: str,
    shared_bytes: int,
) -> Any:
    """MLX's kernel object, whose text only includes files that hold ours.

    At every call MLX puts the text together anew, template parameters too, and hashes it: 16 KB and ten parameters
    cost more than many a launch. It finds compiled code again by name: so the name says all that the code depends on.
    """
    header, body = included_texts(source, template)
    digest = hashlib.sha256(f"{header}\0{body}\0{dtypes}".encode()).hexdigest()[:16]
    folder = _text_folder()
    files = {kind: folder / f"{digest}.{kind}" for kind in ("header", "body")}
    files["header"].write_text(header)
    files["body"].write_text(body)
    return mx.fast.cuda_kernel(
        name=f"tq_{name}_{digest}",
        input_names=list(inputs),
        output_names=list(outputs),
        source=f'#include "{files["body"]}"\n',
        header=f'#include "{files["header"]}"\n',
        shared_memory=shared_bytes,
    )


def included_texts(source: str, template: tuple[tuple[str, int | Dtype], ...]) -> tuple[str, str]:
    """Header and body of a kernel, the template parameters as constants in the body."""
    text = text_of(source)
    constants = "".join(
        f"using {name} = {CUDA_TYPES[value]};\n" if isinstance(value, str) else f"constexpr int {name} = {value};\n"
        for name, value in template
    )
    return text.header, constants + text.body


@lru_cache(maxsize=1)
def _text_folder() -> Path:
    """Where texts lie while the process lives; MLX compiles each when it is first evaluated."""
    folder, owner = Path(tempfile.mkdtemp(prefix="tqtool-")), os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # not at the end of a fork's child
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder


def is_proven_here() -> bool:
    """Whether MLX has a card on whose generation the kernels have passed their tests, and whose memory they know.

    Elsewhere the geometry of ``CUDA`` may ask for more shared memory than there is.
    """
    return mx.cuda.is_available() and mx.device_info(mx.gpu)["compute_capability_major"] == PROVEN_GENERATION


SEARCH_SOURCES: Final = ("cuda/viterbi.cu", "cuda/viterbi14.cu", "cuda/viterbi16.cu")
SEARCH_THAT_RAN = "1e2510955ed2e6ff"
"""Digest of the texts of the search that found the CPU's states on a card (docs/benchmarks.md). Other texts are taken
only when asked for: ``benchmarks/bench_encode.py --backend cuda`` compares states and prints the digest."""


def is_search_proven_here() -> bool:
    """Whether ``auto`` may take the search for paths to the card."""
    return is_proven_here() and digest(SEARCH_SOURCES) == SEARCH_THAT_RAN


CUDA = cuda_backend(H200)
