"""Element types of stored tensors: the names safetensors uses, their sizes and their numpy types."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Final

import ml_dtypes
import numpy as np
from numpy.typing import NDArray


class DType(StrEnum):
    """One element type; the value is the name written in a safetensors header."""

    BF16 = "BF16"
    F16 = "F16"
    F32 = "F32"
    F64 = "F64"
    U8 = "U8"
    I8 = "I8"
    U16 = "U16"
    I16 = "I16"
    U32 = "U32"
    I32 = "I32"
    U64 = "U64"
    I64 = "I64"
    BOOL = "BOOL"
    F8_E4M3 = "F8_E4M3"
    F8_E5M2 = "F8_E5M2"
    F8_E8M0 = "F8_E8M0"

    @property
    def numpy(self) -> np.dtype[Any]:
        """The numpy type; bf16 and the 8-bit floats come from ml_dtypes."""
        return _NUMPY[self]

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return int(_NUMPY[self].itemsize)

    @property
    def is_float(self) -> bool:
        """True for the types a weight may have before quantization: bf16, f16, f32, f64."""
        return self in _FLOATS

    @property
    def is_float8(self) -> bool:
        """True for the 8-bit floats, which only occur in already quantized checkpoints."""
        return self in _FLOAT8


# Explicitly little-endian, as safetensors is, so that the bytes mean the same on every machine.
_NUMPY: Final[dict[DType, np.dtype[Any]]] = {
    DType.BF16: np.dtype(ml_dtypes.bfloat16),
    DType.F16: np.dtype("<f2"),
    DType.F32: np.dtype("<f4"),
    DType.F64: np.dtype("<f8"),
    DType.U8: np.dtype("u1"),
    DType.I8: np.dtype("i1"),
    DType.U16: np.dtype("<u2"),
    DType.I16: np.dtype("<i2"),
    DType.U32: np.dtype("<u4"),
    DType.I32: np.dtype("<i4"),
    DType.U64: np.dtype("<u8"),
    DType.I64: np.dtype("<i8"),
    DType.BOOL: np.dtype("?"),
    DType.F8_E4M3: np.dtype(ml_dtypes.float8_e4m3fn),
    DType.F8_E5M2: np.dtype(ml_dtypes.float8_e5m2),
    DType.F8_E8M0: np.dtype(ml_dtypes.float8_e8m0fnu),
}
_OF_NUMPY: Final[dict[np.dtype[Any], DType]] = {numpy: dtype for dtype, numpy in _NUMPY.items()}
_FLOATS: Final = frozenset({DType.BF16, DType.F16, DType.F32, DType.F64})
_FLOAT8: Final = frozenset({DType.F8_E4M3, DType.F8_E5M2, DType.F8_E8M0})


def dtype_of(array: NDArray[Any]) -> DType:
    """The stored type of ``array``.

    Raises:
        TypeError: numpy types that safetensors has no name for (complex, strings, big-endian).
    """
    try:
        return _OF_NUMPY[array.dtype]
    except KeyError:
        known = ", ".join(dtype.value for dtype in DType)
        raise TypeError(f"numpy type {array.dtype!r} cannot be stored; known: {known}") from None
