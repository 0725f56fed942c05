"""The Metal kernels, through ``mx.fast.metal_kernel``."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import mlx.core as mx

from tqtool.kernels.backend import Backend, Call, Ready, launcher
from tqtool.kernels.metal_kernels import KERNELS, SUM_PARTS_SOURCE, sum_parts_launch
from tqtool.kernels.problem import Dtype
from tqtool.kernels.sources import kernel_text


def on_device(call: Call, *, verbose: bool = False) -> Ready:
    """Launches through MLX; ``verbose`` prints the text that is compiled.

    What it returns raises RuntimeError where MLX has no Metal backend; while it is traced for export it needs none.
    """
    kernel = _compiled(call.name, call.source, call.inputs, call.outputs)
    return launcher(kernel, call.launch, verbose=verbose)


@lru_cache(maxsize=64)
def _compiled(name: str, source: str, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> Any:
    """MLX's kernel object; the device compiles its text when it is first called with new template values."""
    text = kernel_text(source)
    return mx.fast.metal_kernel(
        name=f"tq_{name}", input_names=list(inputs), output_names=list(outputs), source=text.body, header=text.header
    )


def sum_parts(shape: tuple[int, ...], dtype: Dtype) -> Call:
    """The call that adds up parts, for every backend that takes Metal's texts."""
    launch = sum_parts_launch(shape, dtype)
    return Call(name="sum_parts", source=SUM_PARTS_SOURCE, inputs=("parts", "dims"), outputs=("y",), launch=launch)


METAL = Backend("Metal", KERNELS, sum_parts, on_device)
