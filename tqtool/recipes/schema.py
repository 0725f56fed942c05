"""A recipe: one YAML file that is a whole run. Every field is documented here; unknown ones are refused.

Paths are relative to the current directory. ``recipes/*.yaml`` are examples, ``tqtool run`` carries one out.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from tqtool.errors import UserError, reason_of
from tqtool.formats.affine import AFFINE_BITS
from tqtool.formats.kmap import RATES
from tqtool.pipeline.calibrated import MOST_SINK_WEIGHT

Positive = Annotated[int, Field(ge=1)]
Weight = Annotated[float, Field(ge=0, le=MOST_SINK_WEIGHT, allow_inf_nan=False)]
Budget = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Rotation(_Part):
    """Fold γ, R1 and R2 into the weights; leave the section out for the basis of the source."""

    seed: Annotated[int, Field(ge=0, le=2**32 - 1, description="Seed of the signs.")] = 42


class CalibrationPart(_Part):
    """Sum Hessians first; needed by ``method: gptq`` and ``ldlq: true``."""

    text: str = Field(description="UTF-8 text, read from its end, or .jsonl with text or messages a line.")
    rows: Positive = Field(128, description="Sequences.")
    context: Annotated[int, Field(ge=2)] = Field(512, description="Tokens of a sequence at most.")


class _Written(_Part):
    """What both verbs can write beside the model's own tensors."""

    mtp: Literal["none", "dense", 8, 4] = Field("none", description="Companion for multi-token prediction, at mtp/.")
    mtp_source: str | None = Field(None, description="Folder or hub id that holds it; default source, or source/mtp.")
    mtp_tap: Literal["post", "pre"] | None = Field(
        None, description="It reads the hidden state post or pre the final norm; default post."
    )
    vision_sidecar: bool = Field(True, description="A vision tower also as optiq/optiq_vision.safetensors.")

    @model_validator(mode="after")
    def _companion(self) -> Self:
        if self.mtp == "none" and (self.mtp_source is not None or self.mtp_tap is not None):
            raise ValueError("mtp_source and mtp_tap are for mtp: dense, 8 or 4")
        return self


class ConvertPart(_Written):
    """Affine or floating-point packing, as ``tqtool convert``."""

    verb: Literal["convert"]
    bits: int | None = Field(None, description="1-6 or 8; left out with mode and group_size: dense.")
    group_size: int | None = Field(None, description="32, 64 or 128.")
    mode: str | None = Field(None, description="affine, mxfp4, nvfp4 or mxfp8.")
    rules: list[str] = Field(default_factory=list, description="GLOB=bits:8,group:32 or GLOB=float; the last wins.")
    dtype: str | None = Field(None, description="bf16, f16 or f32 for dense tensors and scales.")
    method: Literal["rtn", "gptq"] = Field("rtn", description="Round to nearest, or GPTQ under Hessians.")
    sink_weight: Weight | None = Field(None, description="Ordinary rows that an attention sink counts for.")
    sensitivity: str | None = Field(None, description="File of tqtool sensitivity: bits by module, with target_bpw.")
    target_bpw: Budget | None = Field(None, description="Bits a weight that all packed modules store at most.")

    @model_validator(mode="after")
    def _measured(self) -> Self:
        if (self.sensitivity is None) != (self.target_bpw is None):
            raise ValueError("sensitivity and target_bpw belong together")
        return self


class TrellisPart(_Written):
    """Trellis coding, as ``tqtool trellis``."""

    verb: Literal["trellis"]
    k: Annotated[int, Field(ge=1, le=4)] = Field(3, description="Bits per weight.")
    k_map: dict[str, Annotated[int, Field(ge=1, le=4)]] = Field(
        default_factory=dict, description="Module path or glob: bits, where they differ from k; the last wins."
    )
    modules: list[str] = Field(default_factory=lambda: ["mlp"], description="mlp, all, or globs of module paths.")
    layout: Literal["tile", "axis"] | None = Field(
        None, description="Blocks as 16x16 tiles or along an axis; default tile with ldlq, else axis."
    )
    fold_channels: bool = Field(False, description="Reorder and rescale the channels of each MLP; needs ldlq.")
    down_axis: Literal["out", "in"] | None = Field(
        None, description="Dimension along which down_proj is coded with layout: axis; default out."
    )
    form: Literal["packed", "fake-quant", "carrier"] = Field("packed", description="What is stored.")
    code: str = Field("mul1", description="mul1, 1mad, 3inst, rptc or random.")
    window: int = Field(12, description="State bits: 12, 14 or 16.")
    warmup: int | None = Field(None, description="Steps each side of the seam in a shorter first pass.")
    backend: Literal["auto", "cuda", "metal", "cpu"] = Field(
        "auto", description="Where paths are searched. Same result; with ldlq but for the rounding of sums."
    )
    bits: int | None = Field(None, description="Of modules not on the trellis; default 6, 4 for an untied embedding.")
    group_size: int | None = Field(None, description="Of those; default 64.")
    rules: list[str] = Field(default_factory=list, description="Take modules from the trellis: GLOB=bits:8,group:32.")
    ldlq: bool = Field(False, description="Code with feedback under Hessians; affine modules by GPTQ.")
    sink_weight: Weight | None = Field(None, description="Ordinary rows that an attention sink counts for.")
    sensitivity: str | None = Field(None, description="File of tqtool sensitivity: makes the k_map, with k_budget.")
    k_budget: Budget | None = Field(None, description="Mean bits of the codes over all coded weights, at most.")

    @model_validator(mode="after")
    def _measured(self) -> Self:
        if (self.sensitivity is None) != (self.k_budget is None):
            raise ValueError("sensitivity and k_budget belong together")
        if self.sensitivity is not None and self.k_map:
            raise ValueError("a k_map is decided already; leave it or sensitivity out")
        return self

    @property
    def chosen_layout(self) -> Literal["tile", "axis"]:
        """``layout``, or its default."""
        return self.layout or ("tile" if self.ldlq else "axis")

    @model_validator(mode="after")
    def _laid_out(self) -> Self:
        if self.down_axis is not None and self.chosen_layout == "tile":
            raise ValueError("down_axis is for layout: axis; a tile is coded along both dimensions")
        if self.fold_channels and not self.ldlq:
            raise ValueError("fold_channels needs ldlq: true; the order comes from the Hessians")
        return self


class AllocationPart(_Part):
    """Measure, then spend bits where they help: an artifact at each rate, swaps between them, the mix of them."""

    candidates: Annotated[list[int], Field(min_length=2)] = Field(description="Rates: k, or bits of verb: convert.")
    k_budget: Budget | None = Field(None, description="verb: trellis: mean bits of the codes over all coded weights.")
    target_bpw: Budget | None = Field(None, description="verb: convert: bits a weight that all packed modules store.")
    text: str = Field(description="UTF-8 text that the swaps are measured on; never the windows of the evaluation.")
    windows: Positive = Field(4, description="Windows.")
    context: Annotated[int, Field(ge=2)] = Field(512, description="Tokens of a window.")
    skip: Annotated[int, Field(ge=0)] | None = Field(
        None, description="Windows passed over first; left out: those that the evaluation reads of the same file."
    )
    top: Positive = Field(2048, description="Logits kept per position.")
    reference: Literal["high", "low"] = Field("high", description="Lower one group at a time, or raise one.")
    keep_candidates: bool = Field(False, description="Keep OUT/candidates when the artifact has been verified.")

    @model_validator(mode="after")
    def _can_be_spent(self) -> Self:
        if len(set(self.candidates)) != len(self.candidates):
            raise ValueError("candidates: one of each rate")
        budget = self.k_budget if self.target_bpw is None else self.target_bpw
        if budget is None or (self.k_budget is not None and self.target_bpw is not None):
            raise ValueError("one budget: k_budget for verb: trellis, target_bpw for verb: convert")
        if budget < min(self.candidates):
            raise ValueError(f"budget {budget}: the lowest candidate has {min(self.candidates)} bits")
        return self

    @property
    def rates(self) -> tuple[int, ...]:
        """The candidates, rising."""
        return tuple(sorted(self.candidates))


class EvaluationPart(_Part):
    """Score the result against the source."""

    text: str = Field(description="UTF-8 text, read from its start.")
    windows: Positive = Field(32, description="Windows.")
    context: Annotated[int, Field(ge=2)] = Field(512, description="Tokens of a window.")
    top: Positive = Field(2048, description="Logits kept per position.")


class Recipe(_Part):
    """The whole file."""

    name: str = Field(description="What the result is called in reports.")
    description: str = Field("", description="For people.")
    source: str = Field(description="Model folder or hub id.")
    revision: str | None = Field(None, description="Branch, tag or commit of a hub id.")
    rotation: Rotation | None = None
    calibration: CalibrationPart | None = None
    allocation: AllocationPart | None = None
    quantize: Annotated[ConvertPart | TrellisPart, Field(discriminator="verb")]
    evaluation: EvaluationPart | None = None

    @property
    def needs_hessians(self) -> bool:
        """True when the solver asked for reads a calibration."""
        part = self.quantize
        return part.ldlq if isinstance(part, TrellisPart) else part.method == "gptq"

    @model_validator(mode="after")
    def _calibration_where_needed(self) -> Self:
        if self.needs_hessians and self.calibration is None:
            raise ValueError("method: gptq and ldlq: true need a calibration section")
        if not self.needs_hessians and (self.calibration is not None or self.quantize.sink_weight is not None):
            raise ValueError("calibration and sink_weight are for method: gptq and ldlq: true, and would be ignored")
        return self

    @model_validator(mode="after")
    def _allocation_fits(self) -> Self:
        part, spent = self.quantize, self.allocation
        if spent is None:
            return self
        is_trellis = isinstance(part, TrellisPart)
        if (spent.k_budget is not None) != is_trellis:
            raise ValueError("allocation: k_budget is for verb: trellis, target_bpw for verb: convert")
        known = sorted(RATES if is_trellis else AFFINE_BITS)
        if not set(spent.candidates) <= set(known):
            raise ValueError(f"allocation.candidates {spent.candidates}: {part.verb} has {', '.join(map(str, known))}")
        if part.sensitivity is not None or (isinstance(part, TrellisPart) and part.k_map):
            raise ValueError("allocation decides the bits; leave sensitivity and k_map out")
        if isinstance(part, TrellisPart) and part.form != "packed":
            raise ValueError("allocation mixes packed artifacts: form: packed")
        return self


def read_recipe(path: Path, changes: Sequence[str] = ()) -> Recipe:
    """The recipe in ``path`` with ``changes``, each ``dotted.field=value`` in YAML.

    Raises:
        UserError: it cannot be read, is not YAML, or a field is wrong, with its line where it stands in the file.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path}: cannot be read ({reason_of(error)})", hint="expected a recipe in YAML; recipes/ has examples"
        ) from error
    try:
        node, value = yaml.compose(text), yaml.safe_load(text)
        twice = _given_twice(node)
    except (ValueError, RecursionError) as error:  # impossible dates, for one
        raise UserError(f"{path}: not YAML ({error})") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark is not None else ""
        raise UserError(f"{path}{where}: not YAML ({getattr(error, 'problem', None) or error})") from error
    if twice is not None:
        name, second, first_line = twice
        raise UserError(f"{path}, line {second}: {name}: given twice, first in line {first_line}", hint="remove one")
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected fields, found {type(value).__name__}")
    for change in changes:
        _apply(value, change)
    try:
        return Recipe.model_validate(value)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        first = problems[0]
        field = ".".join(str(part) for part in first["loc"] if part not in ("convert", "trellis")) or "recipe"
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        where = _place_of(field, path, _line_of(node, first["loc"]), changes)
        raise UserError(f"{where}: {field}: {first['msg']}{more}", hint=_known_fields(first["loc"])) from error


def dump_recipe(recipe: Recipe) -> bytes:
    """The resolved recipe as YAML: every field, defaults too, in the order of the schema."""
    text: str = yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)
    return text.encode()


def _apply(value: dict[str, Any], change: str) -> None:
    path, equals, text = change.partition("=")
    if not equals or not path:
        raise UserError(f"--set {change!r}: expected field=value", hint="e.g. --set quantize.k=2")
    *parents, last = path.split(".")
    part: Any = value
    for name in parents:
        if part.get(name) is None:
            part[name] = {}
        part = part[name]
        if not isinstance(part, dict):
            raise UserError(f"--set {change!r}: {name} has no fields")
    try:
        part[last] = yaml.safe_load(text)
        twice = _given_twice(yaml.compose(text))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"--set {change!r}: {text!r} is not YAML") from error
    if twice is not None:
        raise UserError(f"--set {change!r}: {twice[0]}: given twice")


def _given_twice(root: yaml.Node | None) -> tuple[str, int, int] | None:
    """The first key that a mapping has twice, with both lines: YAML forbids it, PyYAML takes the last."""
    waiting, seen = [root], set[int]()
    while waiting:
        node = waiting.pop()
        if node is None or id(node) in seen:  # an alias may lead back
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            waiting += reversed(node.value)
        elif isinstance(node, yaml.MappingNode):
            lines: dict[tuple[str, str], int] = {}
            for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
                identity, line = (key.tag, key.value), key.start_mark.line + 1
                if identity in lines:
                    return key.value, line, lines[identity]
                lines[identity] = line
            waiting += [item for _, item in reversed(node.value)]
    return None


def _place_of(field: str, path: Path, line: int | None, changes: Sequence[str]) -> str:
    """The change that gave ``field`` its value, else the file and the line."""
    for change in reversed(changes):
        name = change.partition("=")[0]
        if f"{field}.".startswith(f"{name}."):
            return f"--set {change}"
    return f"{path}" if line is None else f"{path}, line {line}"


def _line_of(node: yaml.Node | None, location: Sequence[int | str]) -> int | None:
    """Line of the deepest part of ``location`` that stands in the file."""
    line = None
    for part in location:
        if isinstance(node, yaml.MappingNode):
            found = next(((key, item) for key, item in node.value if key.value == part), None)
            if found is None:
                continue  # the discriminator's name is part of pydantic's location, not of the file
            line, node = found[0].start_mark.line + 1, found[1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            line = node.start_mark.line + 1
    return line


def _known_fields(location: Sequence[int | str]) -> str:
    parts: dict[str, type[BaseModel]] = {
        "rotation": Rotation,
        "calibration": CalibrationPart,
        "allocation": AllocationPart,
        "evaluation": EvaluationPart,
    }
    part: type[BaseModel] = parts.get(str(location[0]), Recipe) if location else Recipe
    if location and location[0] == "quantize":
        part = TrellisPart if "trellis" in location else ConvertPart
    return f"fields there: {', '.join(part.model_fields)}"
