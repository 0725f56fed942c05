"""Cases of the shared table on the Metal kernels: numpy in, numpy out."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from tests.support.trellis_cases import Case
from tests.support.trellis_oracle import Arrays
from tqtool.kernels import metal


def compute(case: Case, arrays: Arrays, run: metal.Runner) -> NDArray[Any]:
    """The result of ``case`` by the kernel that is chosen for it, called as the product calls it."""
    packed = [metal.Packed(mx.array(m.words), mx.array(m.scales), m.spec) for m in arrays.matrices]
    x = to_mlx(arrays.x)
    choice = metal.choose(case.problem)
    if case.problem.op == "expand":
        return to_numpy(metal.expand(packed[0], getattr(mx, case.problem.dtype), run=run))
    if case.problem.op == "swiglu":
        return to_numpy(metal.swiglu(choice, x, *packed, run=run))
    return to_numpy(metal.product(choice, x, packed[0], run=run))


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
