"""CUDA without a card: the text that MLX would compile, compiled by NVRTC for any architecture."""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from tqtool.kernels.backend import Call
from tqtool.kernels.cuda import included_texts

# What MLX puts in front of every text, as far as kernels rely on it (its custom_kernel.cpp and utils.cuh).
BEFORE = """#include <cuda_bf16.h>
#include <cuda_fp16.h>
typedef signed char int8_t;
typedef short int16_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
"""
TYPES = {
    "float32": "float",
    "float16": "__half",
    "bfloat16": "__nv_bfloat16",
    "uint32": "uint32_t",
    "uint16": "uint16_t",
    "int16": "int16_t",
}


@lru_cache(maxsize=1)
def root() -> Path | None:
    """Folder of the CUDA wheels, or None."""
    spec = importlib.util.find_spec("nvidia")
    for place in spec.submodule_search_locations if spec and spec.submodule_search_locations else ():
        folder = Path(place) / "cu13"
        if list(folder.glob("lib/libnvrtc.so.*")):
            return folder
    return None


def text(call: Call, inputs: Sequence[str]) -> str:
    """The function that MLX writes around the body of ``call`` whose inputs have these dtypes."""
    header, body = included_texts(call.source, call.launch.template)
    parameters = [f"const {TYPES[dtype]}* {name}" for name, dtype in zip(call.inputs, inputs, strict=True)]
    outputs = zip(call.outputs, call.launch.outputs, strict=True)
    parameters += [f"{TYPES[output.dtype]}* {name}" for name, output in outputs]
    return (
        f"{BEFORE}{header}\nnamespace mlx::core::cu {{\n"
        f"__global__ void kernel({', '.join(parameters)}) {{\n{body}\n}}\n}}\n"
    )


def compile_text(source: str, architecture: str) -> bytes:
    """Machine code; AssertionError with the compiler's words if it refuses."""
    folder = root()
    assert folder is not None, "install nvidia-cuda-nvrtc, nvidia-cuda-runtime and nvidia-cuda-cccl"
    nvrtc = ctypes.CDLL(str(next(folder.glob("lib/libnvrtc.so.*"))))
    program = ctypes.c_void_p()
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None) == 0
    options = [f"--gpu-architecture={architecture}", f"-I{folder}/include", f"-I{folder}/include/cccl"]
    array = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    failed = nvrtc.nvrtcCompileProgram(program, len(options), array)
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    assert not failed, log.value.decode()
    nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
    code = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetCUBIN(program, code)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return code.raw
