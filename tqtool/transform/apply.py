"""Carry out the folds of one tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, assert_never, overload

import numpy as np
from numpy.typing import NDArray

from tqtool.errors import NumericalError, SourceError
from tqtool.mathx.signs import sign_vector
from tqtool.native import hadamard_transform
from tqtool.transform.folds import (
    Fill,
    FoldChannels,
    OnColumns,
    OnRows,
    Permute,
    Reshape,
    RotateHeads,
    RotateInput,
    RotateOutput,
    Rotation,
    ScaleInput,
    Shift,
    stored_shape,
)
from tqtool.transform.outputs import OutputTensor

Float = TypeVar("Float", np.float32, np.float64)
Read = Callable[[str], NDArray[Any]]


@overload
def apply_folds(output: OutputTensor, read: Read) -> NDArray[np.float32]: ...
@overload
def apply_folds(output: OutputTensor, read: Read, *, dtype: type[Float]) -> NDArray[Float]: ...
def apply_folds(output: OutputTensor, read: Read, *, dtype: Any = np.float32) -> NDArray[Any]:
    """Read one tensor and fold it.

    Every fold works in place on one copy, in ``dtype`` throughout, but the reordering of channels, which makes a
    second of the rows it reorders; nothing ``read`` returns is written to. Rounding to the stored type is the writer's
    business. Same inputs give the same bytes on every machine and thread count.

    Args:
        output: The tensor wanted.
        read: Source name to array of any float dtype; called for the tensor and for the norm gain it needs, if any. Of
            a source of which ``output`` takes some rows it may return these alone.
        dtype: float32, or float64 where exactness is at stake.

    Returns:
        A new array of ``output.shape``. Peak memory: what ``read`` returned, this array, 64 bytes · (n + 2m) per thread
        where it is rotated, and its size again where channels are reordered.

    Raises:
        SourceError: A source tensor has another shape than planned, or is not of a float dtype.
        NumericalError: A gain to be divided by its root mean square has none, see ``require_unit_gains``.
    """
    if output.ops and isinstance(output.ops[-1], Fill):
        return np.full(output.shape, output.ops[-1].value, dtype=dtype)
    source = taken_rows(output, read(output.source))
    weight = _float_copy(output.source_text, source, stored_shape(output.ops, output.shape), dtype)
    for op in output.ops:
        if isinstance(op, Reshape):
            weight = weight.reshape(output.shape)
        elif isinstance(op, Permute):
            weight = np.ascontiguousarray(weight.transpose(op.axes))
        elif isinstance(op, FoldChannels):
            weight = _reordered(op, weight)
        elif isinstance(op, OnRows):
            _fold_rows(op, weight, read)
        elif isinstance(op, OnColumns):
            _fold_columns(op, weight, read)
        else:
            _fold(op, weight, read)
    return weight


def require_unit_gains(output: OutputTensor, read: Read) -> None:
    """Raise NumericalError for a final gain of the trunk that ``output`` cannot be folded with; reads these gains only.

    A gain of zero in every channel has no root mean square to be divided by. ``read`` is as in ``apply_folds``.
    """
    for op in output.ops:
        fold = op.fold if isinstance(op, OnColumns | OnRows) else op
        if isinstance(fold, ScaleInput) and fold.is_unit:
            array = read(fold.gain)
            _gain(fold, array, array.shape, np.float32)


def taken_rows(output: OutputTensor, source: NDArray[Any]) -> NDArray[Any]:
    """What ``output`` takes of its source: a view of its rows, or ``source`` itself where it is all or just them."""
    if output.rows is None or source.shape == output.shape or source.ndim < 2:
        return source
    return source.reshape(-1, source.shape[-1])[slice(*output.rows)]


def _reordered(op: FoldChannels, weight: NDArray[Any]) -> NDArray[Any]:
    """The one fold that cannot work in place."""
    axis = weight.ndim - 1 if op.axis == "input" else 0
    if weight.shape[axis] != len(op.channels.order):
        raise SourceError(f"{len(op.channels.order)} channels do not fit axis {axis} of {list(weight.shape)}")
    mixed: NDArray[Any] = np.take(weight, op.channels.order, axis=axis)
    scale = op.channels.scale.astype(weight.dtype)[op.channels.order]
    if op.is_scaled and op.axis == "input":
        mixed /= scale
    elif op.is_scaled:
        mixed *= scale.reshape(-1, *[1] * (weight.ndim - 1))
    return mixed


def _fold_rows(op: OnRows, weight: NDArray[Any], read: Read) -> None:
    """Fold some rows of ``weight``, in place."""
    if not 0 <= op.start < op.stop <= weight.shape[0]:
        raise SourceError(f"rows {op.start}…{op.stop - 1} do not fit axis 0 of {list(weight.shape)}")
    part = weight[op.start : op.stop]
    if isinstance(op.fold, FoldChannels):
        part[...] = _reordered(op.fold, part)
    else:
        _fold(op.fold, part, read)


def _fold_columns(op: OnColumns, weight: NDArray[Any], read: Read) -> None:
    """Fold some columns of ``weight``, in place, by a copy of them."""
    if not 0 <= op.start < op.stop <= weight.shape[-1]:
        raise SourceError(f"columns {op.start}…{op.stop - 1} do not fit the last axis of {list(weight.shape)}")
    part = np.ascontiguousarray(weight[..., op.start : op.stop])
    _fold(op.fold, part, read)
    weight[..., op.start : op.stop] = part


def _fold(
    op: ScaleInput | RotateInput | RotateOutput | RotateHeads | Fill | Shift, weight: NDArray[Any], read: Read
) -> None:
    """Apply one fold to ``weight`` ``[out, in]`` or ``[out]``, in place."""
    match op:
        case ScaleInput():
            weight *= _gain(op, read(op.gain), weight.shape[-1:], weight.dtype)
        case RotateInput():
            _rotate(weight, op.rotation, axis=weight.ndim - 1, block=weight.shape[-1])
        case RotateOutput():
            _rotate(weight, op.rotation, axis=0, block=weight.shape[0])
        case RotateHeads():
            axis = 0 if op.axis == "output" else weight.ndim - 1
            _rotate(weight, op.rotation, axis=axis, block=op.rotation.n)
        case Fill():
            weight.fill(op.value)
        case Shift():
            weight += op.value
        case _:
            assert_never(op)


def _gain(op: ScaleInput, array: NDArray[Any], shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """What ``op`` multiplies the columns by."""
    gain = _float_copy(op.gain, array, shape, dtype)
    gain += op.offset
    if not op.is_unit:
        return gain
    rms = np.sqrt(np.mean(np.square(gain, dtype=np.float64))).astype(gain.dtype)
    if not (np.isfinite(rms) and rms > 0):
        bad = np.flatnonzero(~np.isfinite(gain)) if not np.isfinite(rms) else np.arange(gain.size)
        channel = int(bad[0]) if bad.size else int(np.abs(gain).argmax())
        where = f"all {gain.size} channels, the first" if bad.size == gain.size else "channel"
        stated = f" (stored {array[channel]:g}, {op.offset:+g})" if op.offset else ""
        raise NumericalError(
            f"{op.gain}: the trunk's final norm has a gain of {gain[channel]:g}{stated} in {where} {channel}; its root "
            f"mean square is {rms:g}, and the rotated companion's fc is divided by it",
            hint="--mtp none leaves the companion out; without a rotation, or with --mtp-tap pre where the head was "
            "made for that, nothing is divided",
        )
    gain /= rms
    return gain


def _rotate(weight: NDArray[Any], rotation: Rotation, *, axis: int, block: int) -> None:
    """``v ← v @ R`` for each block of each vector along ``axis``: ``W @ R`` on the last axis, ``Rᵀ @ W`` on axis 0."""
    if block != rotation.n or weight.shape[axis] % block:
        raise SourceError(f"rotation of order {rotation.n} does not fit axis {axis} of {list(weight.shape)}")
    signs = None
    if rotation.signs_lane is not None and rotation.seed is not None:
        signs = sign_vector(rotation.seed, rotation.n, lane=rotation.signs_lane).astype(weight.dtype)
    hadamard_transform(weight, axis=axis, block=block, scale=signs, out=weight)


def _float_copy(name: str, array: NDArray[Any], shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """A contiguous copy in ``dtype``, never the array itself."""
    if array.shape != shape:
        raise SourceError(f"{name}: expected {list(shape)}, found {list(array.shape)}")
    if array.dtype.kind in "biuOSU":  # bfloat16 is an extension type of kind V
        raise SourceError(f"{name}: expected a float dtype, found {array.dtype}")
    return np.array(array, dtype=dtype, order="C", copy=True)
