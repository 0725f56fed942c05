"""Calls of the Metal kernels through ``mx.fast.metal_kernel``.

    choice = choose(Problem(spec=spec, m=1, dtype="bfloat16"))
    y = product(choice, x, packed) if choice.kernel else x @ expand(...)

A kernel that does not fit is a ``Choice`` without kernel and with every reason; what to do then is the caller's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import mlx.core as mx

from tqtool.errors import BackendError
from tqtool.formats.trellis import TrellisSpec
from tqtool.kernels.metal_kernels import KERNELS, SUM_PARTS_SOURCE, sum_parts_launch
from tqtool.kernels.problem import ArrayDtype, Choice, Dtype, Kernel, Launch, Problem
from tqtool.kernels.problem import choose as choose_among
from tqtool.kernels.sources import kernel_text

_NAMES: dict[mx.Dtype, Dtype] = {mx.float32: "float32", mx.float16: "float16", mx.bfloat16: "bfloat16"}
_DTYPES: dict[ArrayDtype, mx.Dtype] = {
    **{name: dtype for dtype, name in _NAMES.items()},
    "uint16": mx.uint16,
    "uint32": mx.uint32,
}


@dataclass(frozen=True, slots=True)
class Packed:
    """A packed matrix on the device: ``words`` uint32 in any shape, ``scales`` float16 ``[rows]``.

    Raises:
        BackendError: the arrays are not as long as ``spec`` says: kernels would read beyond them.
    """

    words: mx.array
    scales: mx.array
    spec: TrellisSpec

    def __post_init__(self) -> None:
        found = (self.words.dtype, self.words.size, self.scales.dtype, self.scales.size)
        if found != (mx.uint32, self.spec.n_words, mx.float16, self.spec.rows):
            raise BackendError(
                f"packed matrix: expected {self.spec.n_words} uint32 words and {self.spec.rows} float16 scales, "
                f"found words {self.words.dtype} {list(self.words.shape)}, "
                f"scales {self.scales.dtype} {list(self.scales.shape)}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What is handed to ``mx.fast.metal_kernel``: identity of the text, names, launch."""

    name: str
    source: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    launch: Launch


class Runner(Protocol):
    """Carries a call out; tests put an executor in place of the device."""

    def __call__(self, call: Call, arrays: Sequence[mx.array]) -> list[mx.array]:
        """The outputs of ``call`` for its inputs."""


def on_device(call: Call, arrays: Sequence[mx.array], *, verbose: bool = False) -> list[mx.array]:
    """Launch through MLX; ``verbose`` prints the text that is compiled.

    Raises:
        RuntimeError: MLX has no Metal backend here (only while the call is traced for export it needs none).
    """
    launch = call.launch
    kernel = _compiled(call.name, call.source, call.inputs, call.outputs)
    template = [(name, _DTYPES[value] if isinstance(value, str) else value) for name, value in launch.template]
    done: list[mx.array] = kernel(
        inputs=list(arrays),
        template=template,
        grid=launch.grid,
        threadgroup=launch.threadgroup,
        output_shapes=[output.shape for output in launch.outputs],
        output_dtypes=[_DTYPES[output.dtype] for output in launch.outputs],
        verbose=verbose,
    )
    return done


@lru_cache(maxsize=4096)
def choose(problem: Problem) -> Choice:
    """The Metal kernel for ``problem``, or the reasons why there is none; kept, since layers ask at every token."""
    return choose_among(problem, KERNELS)


def problem_of(x: mx.array, packed: Packed, up: Packed | None = None) -> Problem:
    """The problem that ``x [..., in]`` poses; BackendError if its dtype is none that kernels read."""
    m, dtype = x.size // x.shape[-1], _name(x.dtype, "x is")
    if up is None:
        return Problem(spec=packed.spec, m=m, dtype=dtype)
    return Problem(op="swiglu", spec=packed.spec, m=m, dtype=dtype, up=up.spec)


def product(choice: Choice, x: mx.array, packed: Packed, *, run: Runner = on_device) -> mx.array:
    """``x [..., in]`` → ``[..., out]`` in the type of x, by the chosen kernel.

    Raises:
        BackendError: there is none, or ``x`` and the matrix are not of the problem that it was chosen for.
    """
    _check(choice, x, packed.spec, None)
    call, dims = _prepared(choice.problem)
    (y,) = run(call, [x.reshape(-1, x.shape[-1]), packed.words, packed.scales, dims])
    if y.ndim == 3:  # scatter: one part for each split
        y = y[0] if y.shape[0] == 1 else _sum_parts(y, choice.problem.dtype, run)
    return y.reshape(*x.shape[:-1], -1)


def swiglu(choice: Choice, x: mx.array, gate: Packed, up: Packed, *, run: Runner = on_device) -> mx.array:
    """``silu(x Gateᵀ) ⊙ (x Upᵀ)``, ``[..., in]`` → ``[..., out]`` in the type of x; errors as :func:`product`."""
    _check(choice, x, gate.spec, up.spec)
    call, dims = _prepared(choice.problem)
    flat = x.reshape(-1, x.shape[-1])
    (y,) = run(call, [flat, gate.words, gate.scales, up.words, up.scales, dims])
    return y.reshape(*x.shape[:-1], -1)


def expand(packed: Packed, dtype: mx.Dtype, *, run: Runner = on_device) -> mx.array:
    """The stored matrix ``[rows, cols]``, rounded once to ``dtype``.

    Raises:
        BackendError: the code has no formula, or the matrix is too large for the kernel.
    """
    choice = choose(Problem(op="expand", spec=packed.spec, m=0, dtype=_name(dtype, "expand to")))
    _require(choice)
    call, dims = _prepared(choice.problem)
    (dense,) = run(call, [packed.words, packed.scales, dims])
    return dense


def _name(dtype: mx.Dtype, what: str) -> Dtype:
    if dtype not in _NAMES:
        raise BackendError(f"kernel problem: {what} {dtype}: expected one of {', '.join(_NAMES.values())}")
    return _NAMES[dtype]


def _sum_parts(parts: mx.array, dtype: Dtype, run: Runner) -> mx.array:
    launch = sum_parts_launch(parts.shape, dtype)
    call = Call(name="sum_parts", source=SUM_PARTS_SOURCE, inputs=("parts", "dims"), outputs=("y",), launch=launch)
    (y,) = run(call, [parts, dims_array(launch.dims)])
    return y


def _require(choice: Choice) -> Kernel:
    if choice.kernel is None:
        raise BackendError(f"no Metal kernel: {choice.reason}")
    return choice.kernel


def _check(choice: Choice, x: mx.array, spec: TrellisSpec, up: TrellisSpec | None) -> None:
    kernel, problem = _require(choice), choice.problem
    asked = (x.shape[-1], x.size // x.shape[-1], _NAMES.get(x.dtype), spec, up)
    if asked != (problem.spec.weight_shape[1], problem.m, problem.dtype, problem.spec, problem.up):
        raise BackendError(f"the kernel {kernel.name} was chosen for another problem: {problem}")


@lru_cache(maxsize=4096)
def _prepared(problem: Problem) -> tuple[Call, mx.array]:
    """The call for a problem that has a kernel, and its sizes: the same at every token."""
    kernel = _require(choose(problem))
    launch = kernel.launch(problem)
    names = {"name": kernel.name, "source": kernel.source}
    call = Call(**names, inputs=kernel.inputs, outputs=kernel.outputs, launch=launch)
    return call, dims_array(launch.dims)


@lru_cache(maxsize=256)
def dims_array(sizes: tuple[int, ...]) -> mx.array:
    """Sizes as an array, made once: a layer asks for the same ones at every token."""
    return mx.array(sizes, mx.uint32)


@lru_cache(maxsize=64)
def _compiled(name: str, source: str, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> Any:
    """MLX's kernel object; the device compiles its text when it is first called with new template values."""
    text = kernel_text(source)
    return mx.fast.metal_kernel(
        name=f"tq_{name}", input_names=list(inputs), output_names=list(outputs), source=text.body, header=text.header
    )
