"""Stands where ``tqtool.kernels.cuda.on_device`` stands: fibres run the text, tensor cores are sums of bytes."""

from __future__ import annotations

import hashlib
import re
import subprocess
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from pathlib import Path

import mlx.core as mx
import numpy as np

from tests.support.mlx_backend import to_mlx, to_numpy
from tests.support.nvrtc import TYPES
from tqtool.kernels.backend import Call, Ready
from tqtool.kernels.cuda import included_texts
from tqtool.kernels.problem import DTYPE_BYTES

HERE = Path(__file__).parent
DYNAMIC = "extern __shared__ __align__(16) unsigned char tq_shared[];"


class Lanes:
    """Compiles each distinct text once into ``folder``; ``edit`` changes it before: how tests plant faults.

    ``backwards``: the last thread has the first turn.
    """

    def __init__(self, folder: Path, edit: Callable[[str], str] = str, *, backwards: bool = False) -> None:
        self.folder, self.edit, self.backwards = folder, edit, backwards

    def __call__(self, call: Call) -> Ready:
        """What carries ``call`` out."""
        return partial(self.outputs, call)

    def outputs(self, call: Call, arrays: Sequence[mx.array]) -> list[mx.array]:
        """The outputs of ``call``; bytes that nobody wrote are 0xA5."""
        launch = call.launch
        numpy = [to_numpy(array) for array in arrays]
        names = [*call.inputs, *call.outputs]
        types = [*(f"const {TYPES[str(a.dtype)]}" for a in numpy), *(TYPES[o.dtype] for o in launch.outputs)]
        sizes = [a.nbytes for a in numpy] + [DTYPE_BYTES[o.dtype] * prod(o.shape) for o in launch.outputs]
        program = self._build(self._text(call, names, types))
        request = b"".join(a.tobytes() for a in numpy)
        groups = launch.grid[0] // launch.threadgroup[0], launch.grid[1]
        done = subprocess.run(
            [program, *map(str, (*groups, launch.threadgroup[0], int(self.backwards), *sizes))],
            input=request,
            capture_output=True,
            check=True,
            timeout=100,
        )
        results, at = [], 0
        for output in launch.outputs:
            if output.scratch:
                results.append(mx.zeros((0,)))
                continue
            found = np.frombuffer(done.stdout, np.dtype(output.dtype), prod(output.shape), at).reshape(output.shape)
            results.append(to_mlx(found))
            at += found.nbytes
        return results

    def _text(self, call: Call, names: Sequence[str], types: Sequence[str]) -> str:
        header, body = included_texts(call.source, call.launch.template)
        header = re.sub(r"^#(undef|define) __global__.*$", "", header, flags=re.MULTILINE)
        assert header.count(DYNAMIC) <= 1
        header = header.replace(DYNAMIC, "unsigned char *tq_shared = lanes::shared;")
        globals_ = "".join(f"static {kind} *{name};\n" for name, kind in zip(names, types, strict=True))
        inputs = len(call.inputs)
        take = "".join(
            f"{name} = ({kind} *)lanes::{'read' if i < inputs else 'filled'}(atoll(arguments[{5 + i}]));\n"
            for i, (name, kind) in enumerate(zip(names, types, strict=True))
        )
        give = "".join(
            f"fwrite({name}, 1, atoll(arguments[{5 + inputs + i}]), stdout);\n"
            for i, (name, output) in enumerate(zip(call.outputs, call.launch.outputs, strict=True))
            if not output.scratch
        )
        return self.edit(
            f'#include "lanes.h"\n{header}\n{globals_}void kernel() {{\n{body}\n}}\n'
            f"int main(int, char **arguments) {{\n{take}"
            "const auto number = [&](int i) { return atoi(arguments[i]); };\n"
            f"lanes::launch(number(1), number(2), number(3), number(4));\n{give}}}\n"
        )

    def _build(self, source: str) -> Path:
        program = self.folder / hashlib.sha256(source.encode()).hexdigest()[:24]
        if not program.exists():
            text = program.with_suffix(".cpp")
            text.write_text(source)
            subprocess.run(["g++", "-std=c++17", "-O1", "-w", f"-I{HERE}", "-o", program, text], check=True)
        return program
