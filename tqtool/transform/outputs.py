"""The plan of an artifact's tensors, as data: where each comes from and which folds it takes.

Most are one source tensor, folded. The experts of a layer are stored as stacks, ``[experts, out, in]``, as mlx-lm runs
them: a stack has one part an expert, and every part is folded, calibrated and quantized as the matrix it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from tqtool.errors import UserError
from tqtool.transform.folds import Op, op_from_json, op_to_json

_LAYER = re.compile(r"(?:language_model\.)?model\.layers\.(\d+)\.")


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
    LINEAR_IN = "linear_in"  # into linear attention: q, k, v and the output's gate
    LINEAR_OUT = "linear_out"
    RATE = "rate"  # into linear attention: how fast its state is written and forgotten
    FUSE = "fuse"  # of a draft head: reads an embedding and a hidden state end to end
    TOWER = "tower"  # of a vision tower
    STATE = "state"  # parameters of a recurrence and its convolution
    DECAY = "decay"  # the same, kept in the source's own type
    OTHER = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputTensor:
    """One tensor of the artifact: where it comes from and what is done to it, in order.

    Attributes:
        name: Name in the artifact: the Hugging Face name, mlx-lm's for a stack, and for a part what it
            would have alone.
        source: Name in the source checkpoint; empty for a stack.
        shape: Shape of the result; of a stack with the leading axis.
        ops: Folds in the order they are applied; a stack has none of its own.
        module: mlx-lm module path if this is the ``.weight`` of a Linear, Embedding or stack of experts, else None. Of
            a part: the path it would have alone, by which calibrations know it.
        role: What the tensor is.
        rows: Rows ``[start, stop)`` of the source with its leading axes flattened; None for all of it.
        parts: The matrices of a stack, in order; empty for any other tensor.
    """

    name: str
    source: str
    shape: tuple[int, ...]
    ops: tuple[Op, ...] = ()
    module: str | None = None
    role: Role = Role.OTHER
    rows: tuple[int, int] | None = None
    parts: tuple[OutputTensor, ...] = ()

    @property
    def pieces(self) -> tuple[OutputTensor, ...]:
        """What is folded and quantized on its own: the parts of a stack, or the tensor itself."""
        return self.parts or (self,)

    @property
    def source_text(self) -> str:
        """The source for people: its name, the rows taken, or first and number of a stack's."""
        if self.parts:
            return f"{self.parts[0].source_text} and {len(self.parts) - 1} more"
        return self.source if self.rows is None else f"{self.source}[{self.rows[0]}:{self.rows[1]}]"

    @property
    def folds(self) -> tuple[Op, ...]:
        """Its folds; of a stack those of the first part, which differ from the others' in channel orders at most."""
        return self.pieces[0].ops

    @property
    def layer(self) -> int | None:
        """Number of the decoder layer that it lies in, or None."""
        found = _LAYER.match(self.name)
        return int(found.group(1)) if found else None

    def to_json(self) -> dict[str, Any]:
        """JSON-ready form; ``from_json`` gives back an equal tensor."""
        return {
            "name": self.name,
            "source": self.source,
            "shape": list(self.shape),
            "role": self.role.value,
            "module": self.module,
            "ops": [op_to_json(op) for op in self.ops],
            "rows": None if self.rows is None else list(self.rows),
            "parts": [part.to_json() for part in self.parts],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> OutputTensor:
        """Rebuild from ``to_json``; KeyError, TypeError or ValueError if ``data`` is not such a form."""
        rows = data["rows"]
        return cls(
            name=data["name"],
            source=data["source"],
            shape=tuple(data["shape"]),
            role=Role(data["role"]),
            module=data["module"],
            ops=tuple(op_from_json(op) for op in data["ops"]),
            rows=None if rows is None else (rows[0], rows[1]),
            parts=tuple(cls.from_json(part) for part in data["parts"]),
        )


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

    def pieces(self) -> Iterator[OutputTensor]:
        """Every tensor that is folded and quantized on its own, in order: stacks by their parts."""
        return (piece for output in self.outputs for piece in output.pieces)

    def updated_config(self, config: dict[str, Any]) -> dict[str, Any]:
        """A copy of ``config`` with ``config_updates`` merged in as RFC 7396 does.

        Nested objects are merged, not replaced; None takes a key out.
        """
        return _merged(config, self.config_updates)

    def describe(self) -> tuple[PlanRow, ...]:
        """One printable row per tensor, dropped ones last."""
        rows = [
            PlanRow(
                name=output.name,
                source=output.source_text if output.source_text != output.name else "",
                shape=_shape_text(output.shape),
                role=output.role.value,
                module=output.module or "",
                folds="  ".join(str(op) for op in output.folds),
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
            "outputs": [output.to_json() for output in self.outputs],
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
                outputs=tuple(OutputTensor.from_json(output) for output in data["outputs"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"not a transform plan: {error!r}") from error


def _merged(base: dict[str, Any], updates: dict[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in updates.items():
        if value is None:
            result.pop(key, None)
            continue
        old = result.get(key)
        result[key] = _merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result


def _shape_text(shape: tuple[int, ...]) -> str:
    return "[" + ", ".join(str(side) for side in shape) + "]"


def _row_text(row: PlanRow) -> str:
    source = f" from {row.source}" if row.source else ""
    return f"{row.name} {row.shape}{source} {row.role}: {row.folds or 'as is'}"
