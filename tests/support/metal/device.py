"""An executor that stands where ``tqtool.kernels.metal.on_device`` stands."""

from __future__ import annotations

import hashlib
import struct
import subprocess
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import mlx.core as mx
import numpy as np

from tests.support.metal.text import generated, to_cpp
from tqtool.kernels.backend import Call, Ready
from tqtool.kernels.metal import on_device
from tqtool.kernels.problem import DTYPE_BYTES, ArrayDtype

HERE = Path(__file__).parent
FLAGS = [
    "-std=gnu++14",  # what Metal 3.1 is made of
    "-O1",
    "-w",
    "-ffp-contract=off",  # fused sums would be closer than any tolerance asks
    "-ftrivial-auto-var-init=pattern",  # locals that nothing was stored in hold no zeros
    "-fno-threadsafe-statics",
    "-fsanitize=shift,signed-integer-overflow",  # a shift by 32 ends the program
    "-fsanitize-undefined-trap-on-error",
]
_NUMPY: dict[ArrayDtype, type] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": np.uint16,
    "uint16": np.uint16,
    "uint32": np.uint32,
}


class ShimError(Exception):
    """The kernel did what it must not, or does not compile."""


class Shim:
    """Compiles each distinct text once into ``folder``, and runs it for one grid at a time.

    ``edit`` changes the text before it is compiled: how tests plant faults. ``launch`` is whose text it is.
    """

    def __init__(
        self, folder: Path, edit: Callable[[str], str] = str, launch: Callable[..., Ready] = on_device
    ) -> None:
        self.folder, self.edit, self.launch = folder, edit, launch
        self.shared_bytes = 0
        """Threadgroup memory that the last call claimed."""

    def __call__(self, call: Call) -> Ready:
        """What carries ``call`` out."""
        return partial(self.outputs, call)

    def outputs(self, call: Call, arrays: Sequence[mx.array]) -> list[mx.array]:
        """The outputs of ``call``.

        Raises:
            ShimError: the text does not compile, or breaks a rule while it runs; the message says which.
        """
        source, names = to_cpp(self.edit(generated(call, arrays, self.launch)))
        assert names == (*call.inputs, *call.outputs), "buffers come in the order of the call"
        program = self._build(source)
        launch = call.launch
        request = [struct.pack("<6I", *launch.grid, *launch.threadgroup)]
        for array in arrays:
            data = np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)
            request += [struct.pack("<3Q", 0, data.itemsize, data.nbytes), data.tobytes()]
        for output in launch.outputs:
            size = DTYPE_BYTES[output.dtype]
            request.append(struct.pack("<3Q", 2 if output.scratch else 1, size, size * int(np.prod(output.shape))))
        done = subprocess.run([program], input=b"".join(request), capture_output=True, check=False)
        if done.returncode:
            raise ShimError(done.stderr.decode().strip() or f"signal {-done.returncode}")
        (self.shared_bytes,) = struct.unpack_from("<Q", done.stdout)
        assert self.shared_bytes == launch.threadgroup_bytes, "geometry knows the threadgroup memory"
        results, at = [], 8
        for output in launch.outputs:
            if output.scratch:
                results.append(mx.zeros((0,)))
                continue
            kind, count = np.dtype(_NUMPY[output.dtype]), int(np.prod(output.shape))
            array = mx.array(np.frombuffer(done.stdout, kind, count, at).reshape(output.shape))
            results.append(array.view(mx.bfloat16) if output.dtype == "bfloat16" else array)
            at += count * kind.itemsize
        return results

    def _build(self, source: str) -> Path:
        program = self.folder / hashlib.sha256(source.encode()).hexdigest()[:24]
        if not program.exists():
            runtime = self.folder / "runtime.o"
            if not runtime.exists():
                _compile(["-c", "-O2", "-o", str(runtime), str(HERE / "runtime.cpp")])
            text = program.with_suffix(".cpp")
            text.write_text(source)
            _compile([f"-I{HERE}", "-o", str(program), str(text), str(runtime)])
        return program


def _compile(arguments: list[str]) -> None:
    done = subprocess.run(["g++", *FLAGS, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ShimError(f"does not compile:\n{done.stderr[:4000]}")
