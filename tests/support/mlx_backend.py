"""Cases of the shared table on the kernels of a backend that MLX launches: numpy in, numpy out."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from tests.support.trellis_cases import Case
from tests.support.trellis_oracle import Arrays
from tqtool.kernels.backend import Backend, Packed


def compute(case: Case, arrays: Arrays, backend: Backend) -> NDArray[Any]:
    """The result of ``case`` by the kernel that is chosen for it, called as the product calls it."""
    packed = [Packed(mx.array(m.words), mx.array(m.scales), m.spec) for m in arrays.matrices]
    if case.problem.op == "expand":
        return to_numpy(backend.expand(packed[0], getattr(mx, case.problem.dtype)))
    x, choice = to_mlx(arrays.x), backend.choose(case.problem)
    if case.problem.op == "swiglu":
        return to_numpy(backend.swiglu(choice, x, *packed))
    return to_numpy(backend.product(choice, x, packed[0]))


def to_mlx(array: NDArray[Any]) -> mx.array:
    """With bfloat16 as MLX has it."""
    if array.dtype == ml_dtypes.bfloat16:
        return mx.array(array.view(np.uint16)).view(mx.bfloat16)
    return mx.array(array)


def to_numpy(array: mx.array) -> NDArray[Any]:
    """With bfloat16 as ml_dtypes has it."""
    if array.dtype == mx.bfloat16:
        return np.array(array.view(mx.uint16)).view(ml_dtypes.bfloat16)
    return np.array(array)
