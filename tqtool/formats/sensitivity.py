"""Sensitivity, format v1: how KL to the teacher changes when one group of modules is coded at another rate.

One JSON object that is also a sensitivity file of OptiQ: ``layers`` repeats the measurement a module at a time, a tied
group's value shared by its modules in proportion to their weights, so that the sum is what was measured.

Sign: in reference ``low`` a value is what the swap gains, KL(reference) - KL(swap); in ``high`` what it loses,
KL(swap) - KL(reference). At the reference's own bits it is 0. Prose: docs/formats/sensitivity.md.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tqtool.errors import UserError

FORMAT = "tqtool-sensitivity"

Reference = Literal["low", "high"]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Positive = Annotated[int, Field(ge=1)]
Number = Annotated[float, Field(allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Bits = Annotated[int, Field(ge=1, le=32)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Value(_Model):
    """A mean in nats per token with its standard error; None where one token says nothing about it."""

    mean: Number
    standard_error: NotNegative | None


class Candidate(_Model):
    """One artifact, and the one setting that it codes all measured modules at.

    ``mode`` is ``trellis``, ``affine``, ``mxfp4``, ``nvfp4``, ``mxfp8`` or ``dense``; ``bits_per_weight`` counts all
    that is stored for the measured modules. Of an imported file the last two may be unknown.
    """

    bits: Bits
    mode: str
    group_size: Positive | None
    bits_per_weight: NotNegative | None
    manifest_sha256: Sha256 | None


class Group(_Model):
    """Modules that take one rate together, and what each candidate's bits do to KL (the module docstring has the sign).

    ``bits_per_weight`` is what a candidate truly stores for the group; empty where a file does not say.
    """

    modules: Annotated[list[str], Field(min_length=1)]
    param_counts: list[Positive]
    values: dict[str, Value]
    bits_per_weight: dict[str, NotNegative]

    @property
    def parameters(self) -> int:
        """Weights of all modules."""
        return sum(self.param_counts)


class TeacherRecord(_Model):
    """The dump that KL was measured against, and how much of it; ``skip`` is written only where it is not 0."""

    model: str
    model_hash: Sha256
    text: str
    text_sha256: Sha256
    windows: Positive
    context: Positive
    top: Positive
    skip: Annotated[int, Field(ge=0)] = 0


class Transform(_Model):
    """A transform folded into every candidate."""

    id: str
    seed: int | None


class Sensitivity(_Model):
    """The whole document, without ``layers``; ``notes`` say what an import assumed.

    ``metric`` is OptiQ's word; readers of it know no other.
    """

    format: Literal["tqtool-sensitivity"] = "tqtool-sensitivity"
    format_version: Literal[1] = 1
    metric: Literal["kl_divergence_vs_reference"] = "kl_divergence_vs_reference"
    base_model: str | None
    source_sample_sha256: Sha256 | None
    transforms: list[Transform]
    candidate_bits: list[Bits]
    group_size: Positive | None
    reference: Reference
    reference_kl: Value | None
    candidates: list[Candidate]
    groups: Annotated[list[Group], Field(min_length=1)]
    protected: list[str]
    teacher: TeacherRecord | None
    tools: dict[str, str]
    notes: list[str]

    @model_validator(mode="after")
    def _fits(self) -> Self:
        bits = self.candidate_bits
        if len(bits) < 2 or any(a >= b for a, b in pairwise(bits)):
            raise ValueError(f"candidate_bits {bits}: expected two or more, rising")
        if [candidate.bits for candidate in self.candidates] != bits:
            raise ValueError("candidates: expected one for each of candidate_bits, in their order")
        names = [name for group in self.groups for name in group.modules]
        if len(set(names)) != len(names):
            raise ValueError("groups: a module is in two of them, or twice in one")
        keys = {str(value) for value in bits}
        for group in self.groups:
            if len(group.param_counts) != len(group.modules):
                raise ValueError(f"{group.modules[0]}: expected one of param_counts for each of modules")
            if set(group.values) != keys:
                raise ValueError(f"{group.modules[0]}: values: expected one for each of candidate_bits")
            if group.values[str(self.reference_bits)].mean != 0.0:
                raise ValueError(f"{group.modules[0]}: its value at the reference's own bits: expected 0")
            if group.bits_per_weight and set(group.bits_per_weight) != keys:
                raise ValueError(f"{group.modules[0]}: bits_per_weight: expected one for each of candidate_bits")
        return self

    @property
    def reference_bits(self) -> int:
        """Bits of every group in the reference model."""
        return self.candidate_bits[0 if self.reference == "low" else -1]

    def change(self, group: Group, bits: int) -> float:
        """KL with ``group`` alone at ``bits``, less the reference's: negative is better, whatever the mode."""
        value = group.values[str(bits)].mean
        return -value if self.reference == "low" else value

    def candidate(self, bits: int) -> Candidate:
        """The candidate of ``bits``."""
        return self.candidates[self.candidate_bits.index(bits)]


def tie(modules: Sequence[str]) -> list[list[str]]:
    """Groups in the order of ``modules``: each alone, but a gate_proj with its up_proj, which a fused kernel runs."""
    known = set(modules)
    partner = {name: name.removesuffix("gate_proj") + "up_proj" for name in modules if name.endswith(".gate_proj")}
    pairs = {name: other for name, other in partner.items() if other in known}
    behind = set(pairs.values())
    return [[name, pairs[name]] if name in pairs else [name] for name in modules if name not in behind]


def encode(sensitivity: Sensitivity) -> bytes:
    """Canonical bytes: sorted keys, indent 1, no time stamps; ``layers`` for readers of OptiQ's files."""
    body = sensitivity.model_dump(mode="json") | {"layers": _layers(sensitivity)}
    if sensitivity.teacher is not None and sensitivity.teacher.skip == 0:
        del body["teacher"]["skip"]  # the bytes of a file from the start of a text stay what they were
    text = json.dumps(body, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False)
    return (text + "\n").encode()


def parse(body: dict[str, Any], data: bytes, where: str) -> Sensitivity:
    """The document in ``body``, which ``data`` encodes.

    Raises:
        UserError: another version, or bytes that ``encode`` does not write.
        ValidationError: an unknown, missing or wrong field.
    """
    version = body.get("format_version")
    if type(version) is not int or version != 1:
        raise UserError(f"{where}: format_version {str(version)[:40]}, this tqtool reads 1", hint="use a newer tqtool")
    sensitivity = Sensitivity.model_validate({key: value for key, value in body.items() if key != "layers"})
    if encode(sensitivity) != data:
        raise UserError(
            f"{where}: not the bytes that tqtool sensitivity writes: edited or damaged", hint="measure again"
        )
    return sensitivity


def _layers(sensitivity: Sensitivity) -> list[dict[str, Any]]:
    """A row per module, as OptiQ has it."""
    return [
        {
            "layer_name": module,
            "param_count": count,
            "sensitivities": {
                bits: value.mean * count / group.parameters for bits, value in sorted(group.values.items())
            },
        }
        for group in sensitivity.groups
        for module, count in zip(group.modules, group.param_counts, strict=True)
    ]
