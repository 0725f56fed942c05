"""What a transform does to a checkpoint, as data: folds per tensor, and the plan that lists them all.

Nothing here touches a weight. Layout of every weight is ``[out, in]``, ``y = x @ W.T + b``. A rotation R acts on
the residual stream as ``x' = x @ R``; every fold below follows from that one convention, so a reader becomes ``W @ R``
and a writer ``R.T @ W``.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, assert_never

import numpy as np
from numpy.typing import NDArray

from tqtool.errors import UserError


class Role(StrEnum):
    """What a tensor is in its model; quantization rules and the sensitivity map speak in roles."""

    EMBEDDING = "embedding"
    HEAD = "head"
    Q = "q"
    K = "k"
    V = "v"
    O = "o"  # noqa: E741 - the projection's usual name
    GATE = "gate"
    UP = "up"
    DOWN = "down"
    NORM = "norm"
    BIAS = "bias"
    ROUTER = "router"
    OTHER = "other"


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
    """

    gain: str
    offset: float = 0.0

    def __str__(self) -> str:
        return f"· diag({self.gain})" if self.offset == 0 else f"· diag({self.offset:g} + {self.gain})"


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


Op = ScaleInput | RotateInput | RotateOutput | RotateHeads | FoldChannels | Fill


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputTensor:
    """One tensor of the artifact: where it comes from and what is done to it, in order.

    Attributes:
        name: Name in the artifact (the Hugging Face name).
        source: Name in the source checkpoint; differs from ``name`` only for an untied head.
        shape: Shape of source and result.
        ops: Folds in the order they are applied.
        module: mlx-lm module path if this is the ``.weight`` of a Linear or Embedding, else None.
        role: What the tensor is.
    """

    name: str
    source: str
    shape: tuple[int, ...]
    ops: tuple[Op, ...] = ()
    module: str | None = None
    role: Role = Role.OTHER


@dataclass(frozen=True, slots=True, kw_only=True)
class DroppedTensor:
    """A source tensor that the artifact leaves out on purpose."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow:
    """One printable line of a plan."""

    name: str
    source: str
    shape: str
    role: str
    module: str
    folds: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformPlan:
    """Every tensor of the artifact, in the order it is written, and what is done to it.

    Attributes:
        id: ``"identity"`` or ``"rotation.<family>"``.
        outputs: All output tensors; together with ``dropped`` they claim every source tensor.
        seed: Seed of the sign streams; None for the identity.
        deviations: Where the recipe departs from its published references, with the reason; kept as provenance.
        config_updates: To be merged (deeply) into config.json: see ``updated_config``.
        dropped: Source tensors left out on purpose.
    """

    id: str
    outputs: tuple[OutputTensor, ...]
    seed: int | None = None
    deviations: tuple[str, ...] = ()
    config_updates: dict[str, Any] = field(default_factory=dict)
    dropped: tuple[DroppedTensor, ...] = ()

    def output(self, name: str) -> OutputTensor:
        """The output tensor called ``name``. Raises KeyError if there is none."""
        for output in self.outputs:
            if output.name == name:
                return output
        raise KeyError(name)

    def updated_config(self, config: dict[str, Any]) -> dict[str, Any]:
        """A copy of ``config`` with ``config_updates`` merged in; nested objects are merged, not replaced."""
        return _merged(config, self.config_updates)

    def describe(self) -> tuple[PlanRow, ...]:
        """One printable row per tensor, dropped ones last."""
        rows = [
            PlanRow(
                name=output.name,
                source=output.source if output.source != output.name else "",
                shape=_shape_text(output.shape),
                role=output.role.value,
                module=output.module or "",
                folds="  ".join(str(op) for op in output.ops),
            )
            for output in self.outputs
        ]
        rows += [
            PlanRow(name=drop.name, source="", shape="", role="dropped", module="", folds=drop.reason)
            for drop in self.dropped
        ]
        return tuple(rows)

    def diff(self, other: TransformPlan) -> tuple[str, ...]:
        """Lines that say how ``other`` differs from this plan; empty if the plans are equal."""
        lines = [
            f"{label}: {mine!r} -> {theirs!r}"
            for label, mine, theirs in (
                ("id", self.id, other.id),
                ("seed", self.seed, other.seed),
                ("deviations", self.deviations, other.deviations),
                ("config_updates", self.config_updates, other.config_updates),
            )
            if mine != theirs
        ]
        mine_rows = {row.name: row for row in self.describe()}
        their_rows = {row.name: row for row in other.describe()}
        for name in [*mine_rows, *(name for name in their_rows if name not in mine_rows)]:
            mine_row, their_row = mine_rows.get(name), their_rows.get(name)
            if mine_row != their_row:
                lines += [f"- {_row_text(mine_row)}"] if mine_row else []
                lines += [f"+ {_row_text(their_row)}"] if their_row else []
        if not lines and self.outputs != other.outputs:
            lines.append("outputs: same tensors in another order")
        return tuple(lines)

    def to_json(self) -> dict[str, Any]:
        """JSON-ready form; ``from_json`` gives back an equal plan."""
        return {
            "id": self.id,
            "seed": self.seed,
            "deviations": list(self.deviations),
            "config_updates": self.config_updates,
            "dropped": [{"name": drop.name, "reason": drop.reason} for drop in self.dropped],
            "outputs": [
                {
                    "name": output.name,
                    "source": output.source,
                    "shape": list(output.shape),
                    "role": output.role.value,
                    "module": output.module,
                    "ops": [op_to_json(op) for op in output.ops],
                }
                for output in self.outputs
            ],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> TransformPlan:
        """Rebuild a plan from ``to_json``. Raises UserError if ``data`` is not such a form.

        A plan with reordered channels names them by hash and cannot be rebuilt.
        """
        try:
            return cls(
                id=data["id"],
                seed=data["seed"],
                deviations=tuple(data["deviations"]),
                config_updates=data["config_updates"],
                dropped=tuple(DroppedTensor(**drop) for drop in data["dropped"]),
                outputs=tuple(
                    OutputTensor(
                        name=output["name"],
                        source=output["source"],
                        shape=tuple(output["shape"]),
                        role=Role(output["role"]),
                        module=output["module"],
                        ops=tuple(_op_from_json(op) for op in output["ops"]),
                    )
                    for output in data["outputs"]
                ),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"not a transform plan: {error!r}") from error


def _merged(base: dict[str, Any], updates: dict[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in updates.items():
        old = result.get(key)
        result[key] = _merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result


def _shape_text(shape: tuple[int, ...]) -> str:
    return "[" + ", ".join(str(side) for side in shape) + "]"


def _row_text(row: PlanRow) -> str:
    source = f" from {row.source}" if row.source else ""
    return f"{row.name} {row.shape}{source} {row.role}: {row.folds or 'as is'}"


def _rotation_to_json(rotation: Rotation) -> dict[str, Any]:
    return {"n": rotation.n, "signs_lane": rotation.signs_lane, "seed": rotation.seed}


def op_to_json(op: Op) -> dict[str, Any]:
    """JSON-ready form of one fold."""
    match op:
        case ScaleInput():
            return {"op": "scale_input", "gain": op.gain, "offset": op.offset}
        case RotateInput():
            return {"op": "rotate_input", "rotation": _rotation_to_json(op.rotation)}
        case RotateOutput():
            return {"op": "rotate_output", "rotation": _rotation_to_json(op.rotation)}
        case RotateHeads():
            return {"op": "rotate_heads", "rotation": _rotation_to_json(op.rotation), "axis": op.axis}
        case FoldChannels():
            return {"op": "fold_channels", "axis": op.axis, "is_scaled": op.is_scaled, "sha256": op.channels.sha256}
        case Fill():
            return {"op": "fill", "value": op.value}
        case _:
            assert_never(op)


def _op_from_json(data: dict[str, Any]) -> Op:
    match data["op"]:
        case "scale_input":
            return ScaleInput(gain=data["gain"], offset=data["offset"])
        case "rotate_input":
            return RotateInput(rotation=Rotation(**data["rotation"]))
        case "rotate_output":
            return RotateOutput(rotation=Rotation(**data["rotation"]))
        case "rotate_heads" if data["axis"] in ("input", "output"):
            return RotateHeads(rotation=Rotation(**data["rotation"]), axis=data["axis"])
        case "fill":
            return Fill(value=data["value"])
        case other:
            raise ValueError(f"unknown or malformed fold {other!r}")
