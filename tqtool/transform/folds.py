"""Folds of one tensor, as data: what is done to a weight ``[out, in]``, and its JSON form.

A rotation R acts on the residual stream as ``x' = x @ R``; every fold follows from that one convention, so a reader
becomes ``W @ R`` and a writer ``R.T @ W``.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Literal, assert_never

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """R = diag(signs) · H_n / √n, an ``[n, n]`` orthogonal matrix that is never materialized.

    Attributes:
        n: Side of the matrix.
        signs_lane: Lane of the sign stream, or None for the plain Hadamard (all signs +1).
        seed: Seed of the sign stream; None exactly when ``signs_lane`` is None.
    """

    n: int
    signs_lane: int | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if (self.signs_lane is None) != (self.seed is None):
            raise ValueError(f"signs_lane={self.signs_lane}, seed={self.seed}: need both or neither")

    def __str__(self) -> str:
        signs = "plain" if self.signs_lane is None else f"lane {self.signs_lane}"
        return f"H{self.n} {signs}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleInput:
    """``W[:, c] *= gain[c] + offset``: fold a norm's gain into the linear that reads it.

    Attributes:
        gain: Source name of the norm tensor, shape ``[in]``.
        offset: 0 for gains stored as is, 1 for zero-centred gains (the norm multiplies by 1 + w).
        is_unit: The gain is first divided by its root mean square: what is read is normalized once more.
    """

    gain: str
    offset: float = 0.0
    is_unit: bool = False

    def __str__(self) -> str:
        gain = self.gain if self.offset == 0 else f"{self.offset:g} + {self.gain}"
        return f"· diag({gain})" + ("/rms" if self.is_unit else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class RotateInput:
    """``W ← W @ R``, R of side ``in``: it reads the rotated residual stream (or is embedding rows)."""

    rotation: Rotation

    def __str__(self) -> str:
        return f"· R[{self.rotation}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class RotateOutput:
    """``W ← Rᵀ @ W`` (bias: ``Rᵀ @ b``), R of side ``out``: the tensor writes the rotated residual stream."""

    rotation: Rotation

    def __str__(self) -> str:
        return f"Rᵀ[{self.rotation}] ·"


@dataclass(frozen=True, slots=True, kw_only=True)
class RotateHeads:
    """Block-diagonal rotation, one R of side head_dim per head.

    ``axis="output"``: ``W ← diag(R, R, …)ᵀ @ W`` (v_proj and its bias); ``axis="input"``:
    ``W ← W @ diag(R, R, …)`` (o_proj).
    """

    rotation: Rotation
    axis: Literal["input", "output"]

    def __str__(self) -> str:
        rotation = f"[{self.rotation}]"
        return f"· heads R{rotation}" if self.axis == "input" else f"heads Rᵀ{rotation} ·"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fill:
    """Replace every element by ``value``: the neutral gain of a norm whose gain was folded away."""

    value: float

    def __str__(self) -> str:
        return f"← {self.value:g}"


@dataclass(frozen=True, slots=True, eq=False)
class Channels:
    """A new order of an MLP's hidden channels and what each is multiplied by; compared by content.

    Attributes:
        order: int32 ``[n]``: channel ``order[i]`` of the source becomes channel i.
        scale: float32 ``[n]``, positive, in the source's order: up_proj's rows are multiplied, down_proj's columns
            divided.
    """

    order: NDArray[np.int32]
    scale: NDArray[np.float32]

    @property
    def sha256(self) -> str:
        """Names the content."""
        return hashlib.sha256(self.order.astype("<i4").tobytes() + self.scale.astype("<f4").tobytes()).hexdigest()

    @property
    def is_in_order(self) -> bool:
        """True when channels are scaled and stay where they are."""
        return bool(np.array_equal(self.order, np.arange(len(self.order))))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Channels) and self.sha256 == other.sha256

    def __hash__(self) -> int:
        return hash(self.sha256)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldChannels:
    """Reorder an MLP's hidden channels: the outputs of gate and up (weight or bias), the inputs of down.

    Attributes:
        channels: Order and scale.
        axis: Where the channels lie.
        is_scaled: Multiply (outputs) or divide (inputs) by the scale before reordering; gate_proj is only reordered.
    """

    channels: Channels
    axis: Literal["input", "output"]
    is_scaled: bool

    def __str__(self) -> str:
        name = self.channels.sha256[:8]
        if self.channels.is_in_order:
            what = f"outliers[{name}] tamed"
        else:
            what = f"channels[{name}] by curvature" + (", of equal norm" if self.is_scaled else "")
        return f"· {what}" if self.axis == "input" else f"{what} ·"


@dataclass(frozen=True, slots=True, kw_only=True)
class OnRows:
    """A fold of rows ``start … stop - 1`` alone: of one part of a fused projection (v in qkv, up in gate_up).

    Attributes:
        start: First row (weight) or element (bias).
        stop: One past the last.
        fold: Acts on the part as it would on a tensor of its own; only folds of outputs make sense here.
    """

    start: int
    stop: int
    fold: RotateHeads | FoldChannels

    def __str__(self) -> str:
        return f"rows {self.start}…{self.stop - 1}: {self.fold}"


@dataclass(frozen=True, slots=True, kw_only=True)
class OnColumns:
    """A fold of input columns ``start … stop - 1`` alone: of one of two vectors that a linear layer reads end to end.

    Attributes:
        start: First column.
        stop: One past the last.
        fold: Acts on the part as it would on a tensor of its own; only folds of inputs make sense here.
    """

    start: int
    stop: int
    fold: ScaleInput | RotateInput

    def __str__(self) -> str:
        return f"columns {self.start}…{self.stop - 1}: {self.fold}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shift:
    """Add ``value`` to every element: a gain stored around zero becomes the gain itself."""

    value: float

    def __str__(self) -> str:
        return f"+ {self.value:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reshape:
    """The same values in the same order, from another shape: a depthwise convolution's axes of one."""

    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"from [{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Permute:
    """Axis ``i`` of the result is axis ``axes[i]`` of the source: Hugging Face stores channels first, MLX last."""

    axes: tuple[int, ...]

    def __str__(self) -> str:
        return f"axes {', '.join(map(str, self.axes))}"


Op = (
    ScaleInput
    | RotateInput
    | RotateOutput
    | RotateHeads
    | FoldChannels
    | OnRows
    | OnColumns
    | Fill
    | Shift
    | Reshape
    | Permute
)


def stored_shape(ops: tuple[Op, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape in the source of what becomes ``shape``: another one where it is reshaped, or its axes change places."""
    for op in ops:
        if isinstance(op, Reshape):
            return op.shape
        if isinstance(op, Permute):
            return tuple(shape[op.axes.index(axis)] for axis in range(len(shape)))
    return shape


def _rotation_to_json(rotation: Rotation) -> dict[str, Any]:
    return {"n": rotation.n, "signs_lane": rotation.signs_lane, "seed": rotation.seed}


def op_to_json(op: Op) -> dict[str, Any]:
    """JSON-ready form of one fold."""
    match op:
        case ScaleInput():
            unit = {"is_unit": True} if op.is_unit else {}
            return {"op": "scale_input", "gain": op.gain, "offset": op.offset, **unit}
        case RotateInput():
            return {"op": "rotate_input", "rotation": _rotation_to_json(op.rotation)}
        case RotateOutput():
            return {"op": "rotate_output", "rotation": _rotation_to_json(op.rotation)}
        case RotateHeads():
            return {"op": "rotate_heads", "rotation": _rotation_to_json(op.rotation), "axis": op.axis}
        case FoldChannels():
            return {"op": "fold_channels", "axis": op.axis, "is_scaled": op.is_scaled, "sha256": op.channels.sha256}
        case OnRows():
            return {"op": "on_rows", "start": op.start, "stop": op.stop, "fold": op_to_json(op.fold)}
        case OnColumns():
            return {"op": "on_columns", "start": op.start, "stop": op.stop, "fold": op_to_json(op.fold)}
        case Fill():
            return {"op": "fill", "value": op.value}
        case Shift():
            return {"op": "shift", "value": op.value}
        case Reshape():
            return {"op": "reshape", "shape": list(op.shape)}
        case Permute():
            return {"op": "permute", "axes": list(op.axes)}
        case _:
            assert_never(op)


def op_from_json(data: dict[str, Any]) -> Op:
    """The fold of ``op_to_json``; KeyError, TypeError or ValueError if it is none, or names channels by hash."""
    match data["op"]:
        case "scale_input":
            return ScaleInput(gain=data["gain"], offset=data["offset"], is_unit=data.get("is_unit", False))
        case "rotate_input":
            return RotateInput(rotation=Rotation(**data["rotation"]))
        case "rotate_output":
            return RotateOutput(rotation=Rotation(**data["rotation"]))
        case "rotate_heads" if data["axis"] in ("input", "output"):
            return RotateHeads(rotation=Rotation(**data["rotation"]), axis=data["axis"])
        case "on_rows" | "on_columns":
            return _part_from_json(data)
        case "fill":
            return Fill(value=data["value"])
        case "shift":
            return Shift(value=data["value"])
        case "reshape":
            return Reshape(shape=tuple(data["shape"]))
        case "permute":
            return Permute(axes=tuple(data["axes"]))
        case other:
            raise ValueError(f"unknown or malformed fold {other!r}")


def _part_from_json(data: dict[str, Any]) -> OnRows | OnColumns:
    """A fold of some rows or columns."""
    fold = op_from_json(data["fold"])
    if data["op"] == "on_rows" and isinstance(fold, RotateHeads):
        return OnRows(start=data["start"], stop=data["stop"], fold=fold)
    if data["op"] == "on_columns" and isinstance(fold, ScaleInput | RotateInput):
        return OnColumns(start=data["start"], stop=data["stop"], fold=fold)
    raise ValueError(f"{data['op']} holds {data['fold']['op']}")
