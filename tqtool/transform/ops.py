"""What a transform does to a checkpoint, as data: the plan that lists every tensor with its folds (``folds``).

Nothing here touches a weight. Layout of every weight is ``[out, in]``, ``y = x @ W.T + b``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from tqtool.errors import UserError
from tqtool.transform.folds import (
    Channels,
    Fill,
    FoldChannels,
    OnRows,
    Op,
    RotateHeads,
    RotateInput,
    RotateOutput,
    Rotation,
    ScaleInput,
    op_from_json,
    op_to_json,
)

__all__ = [
    "Channels",
    "DroppedTensor",
    "Fill",
    "FoldChannels",
    "OnRows",
    "Op",
    "OutputTensor",
    "PlanRow",
    "Role",
    "RotateHeads",
    "RotateInput",
    "RotateOutput",
    "Rotation",
    "ScaleInput",
    "TransformPlan",
    "op_to_json",
]


class Role(StrEnum):
    """What a tensor is in its model; quantization rules and the sensitivity map speak in roles."""

    EMBEDDING = "embedding"
    HEAD = "head"
    QKV = "qkv"  # one projection: rows of q, then k, then v
    Q = "q"
    K = "k"
    V = "v"
    O = "o"  # noqa: E741 - the projection's usual name
    GATE_UP = "gate_up"  # one projection: rows of gate, then of up
    GATE = "gate"
    UP = "up"
    DOWN = "down"
    NORM = "norm"
    BIAS = "bias"
    ROUTER = "router"
    OTHER = "other"


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
                        ops=tuple(op_from_json(op) for op in output["ops"]),
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
