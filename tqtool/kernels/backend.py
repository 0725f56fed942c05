"""Calls of a backend's kernels on MLX arrays: the same for every backend whose kernels MLX launches.

    choice = METAL.choose(Problem(spec=spec, m=1, dtype="bfloat16"))
    y = METAL.product(choice, x, packed) if choice.kernel else x @ METAL.expand(packed, x.dtype).T

A kernel that does not fit is a ``Choice`` without kernel and with every reason; what to do then is the caller's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Protocol

import mlx.core as mx

from tqtool.errors import BackendError
from tqtool.formats.trellis import TrellisSpec
from tqtool.kernels.problem import ArrayDtype, Choice, Dtype, Kernel, Launch, Problem, choose

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
    """What is handed to MLX: identity of the text, names of inputs and outputs, launch."""

    name: str
    source: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    launch: Launch


Ready = Callable[[Sequence[mx.array]], list[mx.array]]
"""The outputs of one call for its inputs, which are of the same types every time."""

Product = Callable[[mx.array], mx.array]
"""The product of x, of one shape and dtype, with matrices that are bound already."""


class Runner(Protocol):
    """Makes a call ready to be carried out; tests put an executor in place of the device."""

    def __call__(self, call: Call) -> Ready:
        """What carries ``call`` out: all that does not depend on the arrays is done here, once."""


class Backend:
    """The kernels of one kind of device.

    Args:
        name: For messages.
        kernels: Asked in this order.
        sum_parts: The call that adds up ``[parts, m, out]`` of float32 over the parts, for a result of a dtype.
        run: Carries calls out.
        traced: Makes a bound product cheap to call again: ``mx.compile``, where MLX launches the kernel. It repeats
            what it saw at the first call, in place of putting the kernel's text together and converting its geometry
            from Python every time.
    """

    def __init__(
        self,
        name: str,
        kernels: Sequence[Kernel],
        sum_parts: Callable[[tuple[int, ...], Dtype], Call],
        run: Runner,
        traced: Callable[[Product], Product] = lambda product: product,
    ) -> None:
        self.name, self.run, self.traced = name, run, traced
        self._kernels, self._sum_parts = tuple(kernels), sum_parts
        # Layers ask for the same problems at every token.
        self._choose = lru_cache(maxsize=4096)(self._choose_afresh)
        self._prepared = lru_cache(maxsize=4096)(self._prepare)

    def with_runner(self, run: Runner) -> Backend:
        """The same kernels, carried out by ``run``."""
        return Backend(self.name, self._kernels, self._sum_parts, run)

    def choose(self, problem: Problem) -> Choice:
        """The kernel for ``problem``, or the reasons why there is none."""
        return self._choose(problem)

    def bind(self, choice: Choice, shape: tuple[int, ...], packed: Packed, up: Packed | None = None) -> Product:
        """The chosen kernel for x of ``shape`` ``[..., in]`` and the dtype of the problem, ready to be called often.

        It returns ``x Wᵀ`` as ``[..., out]`` in the type of x, for ``swiglu`` ``silu(x Wᵀ) ⊙ (x Upᵀ)``. Whoever calls
        it sees to it that x is of that shape and dtype.

        Raises:
            BackendError: there is no kernel, or shape and matrices are not of the problem that it was chosen for.
        """
        kernel, problem = self._require(choice), choice.problem
        asked = (shape[-1], math.prod(shape[:-1]), packed.spec, None if up is None else up.spec)
        if asked != (problem.spec.weight_shape[1], problem.m, problem.spec, problem.up):
            raise BackendError(f"the kernel {kernel.name} was chosen for another problem: {problem}")
        call = self.call(problem)
        matrices = [packed.words, packed.scales, *(() if up is None else (up.words, up.scales))]
        fixed = [*matrices, dims_array(call.launch.dims)] if "dims" in call.inputs else matrices
        mx.eval(*fixed)  # else what makes them would be a part of what is traced, and done again at every call
        launch, whole = call.launch, (*shape[:-1], problem.spec.weight_shape[0])
        if len(launch.outputs[0].shape) == 2:  # y as it is to be: in the shape that is wanted
            launch = replace(launch, outputs=(replace(launch.outputs[0], shape=whole), *launch.outputs[1:]))
            run = self.run(replace(call, launch=launch))
            return self.traced(lambda x: run([x, *fixed])[0])
        run = self.run(call)
        return self.traced(lambda x: self._whole(run([x, *fixed])[0], problem.dtype).reshape(whole))

    def product(self, choice: Choice, x: mx.array, packed: Packed) -> mx.array:
        """``x [..., in]`` → ``[..., out]`` in the type of x, by the chosen kernel.

        Raises:
            BackendError: there is none, or ``x`` and the matrix are not of the problem that it was chosen for.
        """
        self._check_dtype(choice, x)
        return self.bind(choice, x.shape, packed)(x)

    def swiglu(self, choice: Choice, x: mx.array, gate: Packed, up: Packed) -> mx.array:
        """``silu(x Gateᵀ) ⊙ (x Upᵀ)``, ``[..., in]`` → ``[..., out]`` in the type of x; errors as ``product``."""
        self._check_dtype(choice, x)
        return self.bind(choice, x.shape, gate, up)(x)

    def expand(self, packed: Packed, dtype: mx.Dtype) -> mx.array:
        """The stored matrix ``[rows, cols]``, rounded once to ``dtype``.

        Raises:
            BackendError: the code has no formula, or the matrix is too large for the kernel.
        """
        problem = Problem(op="expand", spec=packed.spec, m=0, dtype=_name(dtype, "expand to"))
        run, sizes = self._prepared(problem)
        (dense,) = run([packed.words, packed.scales, *sizes])
        return dense

    def _whole(self, parts: mx.array, dtype: Dtype) -> mx.array:
        """y, of a part for each split of the inputs."""
        return parts[0] if parts.shape[0] == 1 else self._add_up(parts, dtype)

    def _add_up(self, parts: mx.array, dtype: Dtype) -> mx.array:
        call = self._sum_parts(parts.shape, dtype)
        (y,) = self.run(call)([parts, dims_array(call.launch.dims)])
        return y

    def _choose_afresh(self, problem: Problem) -> Choice:
        return choose(problem, self._kernels)

    def call(self, problem: Problem) -> Call:
        """The call for a problem that has a kernel; BackendError if it has none."""
        kernel = self._require(self.choose(problem))
        return Call(
            name=kernel.name,
            source=kernel.source,
            inputs=kernel.inputs,
            outputs=kernel.outputs,
            launch=kernel.launch(problem),
        )

    def _prepare(self, problem: Problem) -> tuple[Ready, tuple[mx.array, ...]]:
        """The call made ready, and its sizes where the kernel reads them."""
        call = self.call(problem)
        return self.run(call), (dims_array(call.launch.dims),) if "dims" in call.inputs else ()

    def _require(self, choice: Choice) -> Kernel:
        if choice.kernel is None:
            raise BackendError(f"no {self.name} kernel: {choice.reason}")
        return choice.kernel

    def _check_dtype(self, choice: Choice, x: mx.array) -> None:
        if _NAMES.get(x.dtype) != choice.problem.dtype:
            raise BackendError(f"x is {x.dtype}, chosen for another problem: {choice.problem}")


def problem_of(x: mx.array, packed: Packed, up: Packed | None = None, *, int8: bool = False) -> Problem:
    """The problem that ``x [..., in]`` poses; BackendError if its dtype is none that kernels read."""
    m, dtype = x.size // x.shape[-1], _name(x.dtype, "x is")
    if up is None:
        return Problem(spec=packed.spec, m=m, dtype=dtype, int8=int8)
    return Problem(op="swiglu", spec=packed.spec, m=m, dtype=dtype, up=up.spec, int8=int8)


def launcher(kernel: Any, launch: Launch, *, verbose: bool = False) -> Ready:
    """Calls of MLX's ``kernel`` object, of ``mx.fast.metal_kernel`` or ``cuda_kernel``; ``verbose`` prints its text."""
    options = {
        "template": [(name, _DTYPES[value] if isinstance(value, str) else value) for name, value in launch.template],
        "grid": launch.grid,
        "threadgroup": launch.threadgroup,
        "output_shapes": [output.shape for output in launch.outputs],
        "output_dtypes": [_DTYPES[output.dtype] for output in launch.outputs],
        "init_value": None,
        "verbose": verbose,
    }

    def run(arrays: Sequence[mx.array]) -> list[mx.array]:
        done: list[mx.array] = kernel(inputs=arrays, **options)
        return done

    return run


@lru_cache(maxsize=1024)
def dims_array(sizes: tuple[int, ...]) -> mx.array:
    """Sizes as the array that kernels read, made once."""
    return mx.array(sizes, mx.uint32)


def _name(dtype: mx.Dtype, what: str) -> Dtype:
    if dtype not in _NAMES:
        raise BackendError(f"kernel problem: {what} {dtype}: expected one of {', '.join(_NAMES.values())}")
    return _NAMES[dtype]
