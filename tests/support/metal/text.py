"""The text that MLX compiles for a call, and the same as C++."""

from __future__ import annotations

import ctypes
import os
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import mlx.core as mx

from tqtool.kernels.backend import Call, Ready
from tqtool.kernels.metal import on_device

# What MLX hands in besides buffers, as expressions of the runtime's state.
_ATTRIBUTES = {
    "thread_index_in_simdgroup": "uint(shim::lane % 32)",
    "simdgroup_index_in_threadgroup": "uint(shim::lane / 32)",
    "thread_index_in_threadgroup": "uint(shim::lane)",
    "threadgroup_position_in_grid": "shim::group",
    "thread_position_in_grid": "grid_position()",
}


def generated(call: Call, arrays: Sequence[mx.array], launch: Callable[..., Ready] = on_device) -> str:
    """Metal text of ``call``: MLX prints it while it traces a function for export, which needs no device.

    ``launch`` is ``tqtool.kernels.metal.on_device``, or that of a model file.
    """

    def traced(*inputs: mx.array) -> list[mx.array]:
        return launch(call, verbose=True)(inputs)

    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as printed:
        sys.stdout.flush()
        kept = os.dup(1)
        os.dup2(printed.fileno(), 1)
        try:
            mx.export_function(str(Path(folder) / "traced.mlxfn"), traced, *arrays)
        finally:
            ctypes.CDLL(None).fflush(None)
            os.dup2(kept, 1)
            os.close(kept)
        printed.seek(0)
        return printed.read().decode().split("```")[1]


def to_cpp(text: str) -> tuple[str, tuple[str, ...]]:
    """C++ of the generated ``text``, and the names of its buffers in order.

    The changes: includes of Metal go; pointers to device and constant memory become ``shim::Buffer``; arrays in
    threadgroup memory, declared one a statement, become ``shim::Shared``; attributes go. A function that calls the
    kernel for one lane is added.
    """
    signature = re.search(r"\[\[kernel\]\] void (\w+)\((.*?)\) \{", text, re.DOTALL)
    instance = re.search(r"\[\[kernel\]\] decltype\((.*?)\) ", text)
    assert signature is not None, text
    assert instance is not None, text
    arguments, names = [], []
    for parameter in signature.group(2).split(",\n"):
        declared, attribute = re.fullmatch(r"\s*(.*?)\s*\[\[(.*)\]\]\s*", parameter).groups()
        if not attribute.startswith("buffer"):
            arguments.append(_ATTRIBUTES[attribute])
            continue
        space, kind, name = re.fullmatch(r"((?:const )?)(?:device|constant) (\w+)\* (\w+)", declared).groups()
        arguments.append(f"shim::Buffer<{space}{kind}>(&shim::memory[{len(names)}], 0)")
        names.append(name)

    body = text[: text.rindex("template [[host_name")]
    body = re.sub(r"^\s*#include <.*$", "", body, flags=re.MULTILINE)
    body = re.sub(r"\[\[.*?\]\]", "", body)
    body = re.sub(r"\b(const\s+)?(?:device|constant)\s+(\w+)\s*\*", r"shim::Buffer<\1\2> ", body)
    body = re.sub(
        r"^(\s*)threadgroup\s+(\w+)\s+(\w+)\[(.*?)\];",
        r'\1static shim::Shared<\2, \4> \3("\3");',
        body,
        flags=re.MULTILINE,
    )
    listed = ", ".join(f'"{name}"' for name in names)
    return (
        f'#include "msl.h"\n{body}\n'
        "static uint3 grid_position() {\n"
        "  const uint l = shim::lane, x = shim::threads.x, y = shim::threads.y;\n"
        "  const uint z = shim::group.z * shim::threads.z + l / x / y;\n"
        "  return {shim::group.x * x + l % x, shim::group.y * y + l / x % y, z};\n"
        "}\n"
        f"extern const char *const buffer_names[] = {{{listed}, nullptr}};\n"
        f"void call_kernel() {{ (void)grid_position; {instance.group(1)}({', '.join(arguments)}); }}\n"
    ), tuple(names)
