"""What is to be computed, how a kernel would be launched for it, and which kernel is chosen: values, no device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from tqtool.errors import BackendError
from tqtool.formats.trellis import TrellisSpec

Dtype = Literal["float32", "float16", "bfloat16"]
DTYPES: tuple[Dtype, ...] = get_args(Dtype)

ArrayDtype = Literal["float32", "float16", "bfloat16", "uint16", "uint32"]
DTYPE_BYTES: dict[ArrayDtype, int] = {"float32": 4, "float16": 2, "bfloat16": 2, "uint16": 2, "uint32": 4}

Op = Literal["product", "swiglu", "expand"]

RUN = 8
"""Consecutive steps that one lane decodes from two words (``tq_run`` in kernels/common/trellis_decode.h)."""

MAX_STREAM = 1 << 31
"""Kernels count weights of the stream in 32 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing to compute with a packed matrix.

    Attributes:
        op: ``product``: y = x Wᵀ, ``[m, in]`` → ``[m, out]``. ``swiglu``: silu(x Wᵀ) ⊙ (x Upᵀ), both matrices in one
            launch. ``expand``: the stored matrix ``[rows, cols]``.
        spec: Of W.
        m: Rows of x; 0 for ``expand``.
        dtype: Of x and of the result; sums are float32 whatever it is.
        up: Of Up, for ``swiglu`` only.
        int8: x is rounded to 8 bits, relative to the largest of its row: opt-in, with an error of its own.

    Raises:
        BackendError: the fields contradict each other.
    """

    op: Op = "product"
    spec: TrellisSpec
    m: int
    dtype: Dtype
    up: TrellisSpec | None = None
    int8: bool = False

    def __post_init__(self) -> None:
        if self.int8 and self.op == "expand":
            raise BackendError("kernel problem: expand with int8 activations")
        if self.dtype not in DTYPES:
            raise BackendError(f"kernel problem: dtype {self.dtype!r}: expected one of {', '.join(DTYPES)}")
        if (self.op == "swiglu") != (self.up is not None):
            raise BackendError(f"kernel problem: {self.op} with{'' if self.up else 'out'} a second matrix")
        if self.m < 0 or (self.op == "expand") != (self.m == 0):
            raise BackendError(f"kernel problem: {self.op} with {self.m} rows of x")
        if self.up is not None and self.up.weight_shape != self.spec.weight_shape:
            raise BackendError(
                f"kernel problem: swiglu of {list(self.spec.weight_shape)} and {list(self.up.weight_shape)}"
            )

    @property
    def specs(self) -> tuple[TrellisSpec, ...]:
        """The matrices that are read, one or two."""
        return (self.spec,) if self.up is None else (self.spec, self.up)


@dataclass(frozen=True, slots=True)
class Output:
    """Shape and dtype of one array that a kernel writes; ``scratch`` if it reads it back, and nobody else does."""

    shape: tuple[int, ...]
    dtype: ArrayDtype
    scratch: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One launch, as ``mx.fast.metal_kernel`` and ``cuda_kernel`` take it.

    Attributes:
        grid: Threads in each dimension, a multiple of ``threadgroup`` (backends treat a remainder differently).
        threadgroup: Threads of one group.
        template: Names and values of the template parameters, in the order of declaration; a dtype by its name.
        threadgroup_bytes: Memory that one group shares.
        outputs: What is written.
        dims: Sizes that the kernel reads from its input ``dims``; each kernel's source names them.
    """

    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    template: tuple[tuple[str, int | Dtype], ...]
    threadgroup_bytes: int
    outputs: tuple[Output, ...]
    dims: tuple[int, ...]

    def __post_init__(self) -> None:
        if any(size < 1 or size % group for size, group in zip(self.grid, self.threadgroup, strict=True)):
            raise BackendError(f"kernel launch: a grid of {self.grid} is not made of groups of {self.threadgroup}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A kernel of one backend.

    Attributes:
        name: Unique in its backend.
        source: Its file below ``kernels/``.
        inputs: Names of its inputs, in order.
        outputs: Names of its outputs, in order.
        supports: Why it cannot do a problem, or None if it can.
        launch: Geometry for a problem that it supports.
    """

    name: str
    source: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    supports: Callable[[Problem], str | None]
    launch: Callable[[Problem], Launch]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The kernel that computes ``problem``, or None: then the caller does it another way, which ``path`` names.

    ``refusals`` are the kernels that were asked before, each with its reason.
    """

    problem: Problem
    kernel: Kernel | None
    refusals: tuple[tuple[str, str], ...]

    @property
    def path(self) -> str:
        """Name of the kernel, or what is done instead."""
        if self.kernel is not None:
            return self.kernel.name
        return {"product": "expand + matmul", "swiglu": "two products", "expand": "MLX operations"}[self.problem.op]

    @property
    def reason(self) -> str:
        """Why it is this path, in one line."""
        if self.kernel is not None:
            rounded = ", int8 activations" if self.problem.int8 else ""
            return f"{self.problem.op}, {self.problem.spec.layout}, m = {self.problem.m}{rounded}"
        return "; ".join(f"{name}: {reason}" for name, reason in self.refusals)


def choose(problem: Problem, kernels: Sequence[Kernel]) -> Choice:
    """The first of ``kernels`` that supports ``problem``."""
    refusals: list[tuple[str, str]] = []
    for kernel in kernels:
        reason = kernel.supports(problem)
        if reason is None:
            return Choice(problem=problem, kernel=kernel, refusals=tuple(refusals))
        refusals.append((kernel.name, reason))
    return Choice(problem=problem, kernel=None, refusals=tuple(refusals))
