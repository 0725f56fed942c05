"""GGUF tensors to arrays of the folder's type, with the converter's edits undone."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tqtool.errors import NumericalError
from tqtool.formats.dtypes import DType
from tqtool.source.checks import require_finite
from tqtool.source.gguf.families import Edit, MappedTensor


def read_mapped(tensor: MappedTensor, dtype: DType) -> NDArray[Any]:
    """Dequantize ``tensor`` in float32, undo its edit, round once to ``dtype`` (nearest even).

    Peak memory: the result, a few MB, and a second copy of the result for permuted tensors.

    Raises:
        NumericalError: a value is inf or NaN, or does not fit ``dtype``.
    """
    row = tensor.shape[-1]
    out = np.empty((tensor.source.n_elements // row, row), dtype=dtype.numpy)
    for start, stop, values in tensor.source.chunks():
        require_finite(f"{tensor.source.path.name}: {tensor.source.name} (rows from {start})", values)
        if tensor.edit is Edit.MINUS_ONE:
            values = values - np.float32(1.0)
        with np.errstate(over="ignore"):
            out[start:stop] = values.astype(dtype.numpy)
    _require_fits(tensor.name, out, dtype)
    result = out.reshape(tensor.shape)
    if tensor.edit in (Edit.UNPERMUTE_Q, Edit.UNPERMUTE_K):
        return unpermute_heads(result, tensor.n_heads)
    return result


def unpermute_heads(weight: NDArray[Any], n_heads: int) -> NDArray[Any]:
    """Rows of q or k from llama.cpp's order to Hugging Face's.  weight: [heads·d, in] or [heads·d].

    llama.cpp rotates neighbours (row 2i with 2i+1), Hugging Face halves (row i with i + d/2).
    """
    half = weight.shape[0] // n_heads // 2
    pairs = weight.reshape(n_heads, half, 2, *weight.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weight.shape)


def _require_fits(name: str, array: NDArray[Any], dtype: DType) -> None:
    try:
        require_finite(name, array)
    except NumericalError as error:
        raise NumericalError(
            f"{error.message} after rounding to {dtype}, which cannot hold the value", hint="use --dtype bf16 or f32"
        ) from None
