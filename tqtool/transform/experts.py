"""Mixture-of-experts blocks as data: which layers have them, what experts and router are called, where they lie.

mlx-lm runs the experts of a layer as three stacks ``[experts, out, in]`` and stores them so; other checkpoints have a
tensor an expert, or gate and up of all experts in one. All are claimed, and a stack's parts always go by the names of
the second kind, so that calibrations of both hold the same bytes under the same names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tqtool.errors import SourceError
from tqtool.transform.outputs import OutputTensor, Role

STACKS: Mapping[Role, str] = {Role.GATE: "gate_proj", Role.UP: "up_proj", Role.DOWN: "down_proj"}
"""mlx-lm's names of the three stacks, in the order of writing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Names and config fields of a family's experts.

    Attributes:
        block: Module of the block inside a layer.
        names: gate, up and down of one expert, under ``block.experts.N``.
        count_keys: Fields of config.json with the number of experts: the first that is there counts.
        width_key: Field with the hidden width of one expert.
        shared_key: Field with the width of an expert that every token reads, beside the others; None if there is none.
        sparse_fields: True where ``mlp_only_layers`` and ``decoder_sparse_step`` say which layers are dense.
    """

    block: str
    names: Mapping[Role, str]
    count_keys: tuple[str, ...]
    width_key: str
    shared_key: str | None = None
    sparse_fields: bool = False

    def is_sparse(self, layer: int, config: Mapping[str, Any]) -> bool:
        """Whether ``layer`` has experts. Raises SourceError where config.json says so in an impossible way."""
        if not self.sparse_fields:
            return True
        step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
        if not isinstance(step, int) or isinstance(step, bool) or step < 1:
            raise SourceError(f"config.json: decoder_sparse_step: expected a positive integer, found {step!r}")
        if not isinstance(dense, list) or not all(type(index) is int for index in dense):
            raise SourceError(f"config.json: mlp_only_layers: expected a list of layer numbers, found {dense!r}")
        return layer not in dense and (layer + 1) % step == 0

    def count_key(self, config: Mapping[str, Any]) -> str:
        """The field that says how many experts there are; SourceError where two say different numbers."""
        stated = [key for key in self.count_keys if config.get(key) is not None]
        if len({config[key] for key in stated}) > 1:
            told = ", ".join(f"{key} {config[key]!r}" for key in stated)
            raise SourceError(f"config.json: {told}: loaders would disagree", hint="keep the one that is true")
        return stated[0] if stated else self.count_keys[0]

    def require_one_spelling(self, layer: int, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise SourceError where some experts of ``layer`` are stacked and some are not: no loader reads that."""
        stem = f"model.layers.{layer}.{self.block}"
        fused = (f"{stem}.experts.gate_up_proj", f"{stem}.experts.down_proj")
        spellings = {
            "stacks": [self.stack_name(layer, role) in shapes for role in STACKS],
            "gate and up in one": [name in shapes for name in fused],
            "a tensor an expert": [f"{stem}.experts.0.{self.names[role]}.weight" in shapes for role in STACKS],
        }
        mixed = [spelling for spelling, present in spellings.items() if any(present)]
        if len(mixed) > 1:
            raise SourceError(
                f"{stem}: its experts are stored in two ways, {' and '.join(mixed)}", hint="store them in one"
            )

    def router(self, layer: int) -> str:
        """Module of the layer's router."""
        return f"model.layers.{layer}.{self.block}.gate"

    def stack_name(self, layer: int, role: Role) -> str:
        """Name of one of the three stacks of ``layer``."""
        return f"model.layers.{layer}.{self.block}.switch_mlp.{STACKS[role]}.weight"

    def stack(
        self, layer: int, role: Role, shape: tuple[int, int, int], shapes: Mapping[str, tuple[int, ...]]
    ) -> OutputTensor:
        """One of the three stacks of ``layer``, unfolded.

        Args:
            layer: Number of the decoder layer.
            role: gate, up or down.
            shape: ``(experts, out, in)``.
            shapes: The source's tensors: they decide whether the parts are tensors or slices of one.
        """
        stem = f"model.layers.{layer}.{self.block}"
        name = self.stack_name(layer, role)
        count, n_out, n_in = shape
        source, stride, first = self._place(stem, name, role, n_out, shapes)

        def part(expert: int) -> OutputTensor:
            alone = f"{stem}.experts.{expert}.{self.names[role]}"
            start = expert * stride + first
            return OutputTensor(
                name=f"{alone}.weight",
                source=source or f"{alone}.weight",
                shape=(n_out, n_in),
                module=alone,
                role=role,
                rows=None if source is None else (start, start + n_out),
            )

        parts = tuple(part(expert) for expert in range(count))
        return OutputTensor(
            name=name, source="", shape=shape, module=name.removesuffix(".weight"), role=role, parts=parts
        )

    def _place(
        self, stem: str, name: str, role: Role, n_out: int, shapes: Mapping[str, tuple[int, ...]]
    ) -> tuple[str | None, int, int]:
        """The tensor of all experts, its rows for each of them, the first of ``role``'s; None if each has its own."""
        if name in shapes:
            return name, n_out, 0
        fused, down = f"{stem}.experts.gate_up_proj", f"{stem}.experts.down_proj"
        if fused not in shapes:
            return None, 0, 0
        return (down, n_out, 0) if role is Role.DOWN else (fused, 2 * n_out, n_out if role is Role.UP else 0)


def sources(stack: OutputTensor) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every source tensor that ``stack`` takes: one, or one for each part."""
    first = stack.parts[0]
    if first.rows is not None:
        experts, n_out, n_in = stack.shape
        yield first.source, (experts, 2 * n_out if first.source.endswith("gate_up_proj") else n_out, n_in)
        return
    for part in stack.parts:
        yield part.source, part.shape
