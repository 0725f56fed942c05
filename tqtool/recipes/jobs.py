"""A recipe → the quantization job of its artifact or of one of its candidates, and the files the artifact carries."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tqtool.formats.json_file import read_file
from tqtool.formats.sensitivity import Sensitivity
from tqtool.formats.sensitivity_file import read_sensitivity
from tqtool.mathx.codes import parse_code
from tqtool.pipeline.calibrated import SINK_WEIGHT
from tqtool.pipeline.coding import OTHER
from tqtool.pipeline.companion import companion_request
from tqtool.pipeline.convert import HEAD_BITS, ConvertRequest, plan_convert, plan_transform
from tqtool.pipeline.job import Job, Meter
from tqtool.pipeline.provenance import source_name
from tqtool.pipeline.rules import Packed, Rule, packed_setting, parse_dtype, parse_rule
from tqtool.pipeline.trellis import TrellisRequest, plan_trellis
from tqtool.recipes.schema import ConvertPart, Recipe, TrellisPart, dump_recipe
from tqtool.solve.trellis import TrellisOptions
from tqtool.source.checkpoint import Checkpoint, open_checkpoint
from tqtool.transform.plan import Role

INSIDE_NAMES = ("tqtool/recipe.yaml", "tqtool/recipe.json")
SENSITIVITY_NAME = "tqtool/sensitivity.json"
KMAP_NAME = "tqtool/kmap.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where a job writes, and what earlier steps gave it.

    Attributes:
        out: Folder to create.
        journal: Folder that keeps finished tensors until the artifact is whole.
        hessians: Finished calibration.
        rate: Of a candidate; None is the recipe's artifact.
        sensitivity: What the artifact's bits are chosen by, where the recipe has an allocation.
        reuse: Candidates to take tensors from.
        files: What the artifact carries.
        meter: Counts encoded weights.
    """

    out: Path
    journal: Path
    hessians: Path | None = None
    rate: int | None = None
    sensitivity: Sensitivity | None = None
    reuse: tuple[Path, ...] = ()
    files: Mapping[str, bytes] = field(default_factory=dict)
    meter: Meter = field(default_factory=Meter)


def plan_quantization(recipe: Recipe, target: Target) -> Job:
    """The job of a recipe; of the weights only every coded down_proj is read, where the trellis is in tiles.

    Its columns' norms are part of the plan, and its channels may be reordered.
    """
    part, spent = recipe.quantize, recipe.allocation
    sensitivity = target.sensitivity
    if part.sensitivity is not None:
        sensitivity = read_sensitivity(Path(part.sensitivity))
    common: dict[str, Any] = {
        "source": recipe.source,
        "revision": recipe.revision,
        "out": target.out,
        "rotation_seed": None if recipe.rotation is None else recipe.rotation.seed,
        "hessians": target.hessians,
        "sink_weight": SINK_WEIGHT if part.sink_weight is None else part.sink_weight,
        "journal": target.journal,
        "files": target.files,
        "sensitivity": sensitivity,
        "reuse": target.reuse,
    }
    if target.rate is None:
        common["mtp"] = companion_request(str(part.mtp), part.mtp_source, part.mtp_tap)
    common["vision_sidecar"] = part.vision_sidecar and target.rate is None  # candidates are read by tqtool alone
    rate, chosen = target.rate, None if target.rate is not None else spent
    if isinstance(part, ConvertPart):
        if chosen is not None and part.bits is None:
            rate = min(chosen.candidates)  # of what was not measured
        target_bpw = part.target_bpw if chosen is None else chosen.target_bpw
        request = _convert(part, rate, {**common, "target_bpw": target_bpw})
        if spent is not None and chosen is None:
            least = min(spent.candidates) if part.bits is None else part.bits
            kept = packed_setting(bits=least, group_size=part.group_size, mode=part.mode)
            request = replace(request, rules=(*_tables(request, kept), *request.rules))
        return plan_convert(request)
    k_budget = part.k_budget if chosen is None else chosen.k_budget
    return plan_trellis(_trellis(part, rate, {**common, "k_budget": k_budget, "tick": target.meter}))


def bits_of(request: Mapping[str, Any]) -> dict[str, int]:
    """The bits that a measurement chose, by module; ``request`` is the manifest's."""
    found: dict[str, int] = dict(request["k_map"] if "k_map" in request else request["allocation"]["bits"])
    return found


def is_trellis(recipe: Recipe) -> bool:
    """True for ``verb: trellis``."""
    return isinstance(recipe.quantize, TrellisPart)


def files_inside(recipe: Recipe, checkpoint: Checkpoint) -> dict[str, bytes]:
    """The recipe as the artifact carries it: names instead of this machine's paths; and the measurement it names."""
    changes: dict[str, Any] = {"source": source_name(checkpoint)}
    for section in ("calibration", "allocation", "evaluation"):
        part = getattr(recipe, section)
        if part is not None:
            changes[section] = part.model_copy(update={"text": Path(part.text).name})
    if recipe.quantize.mtp_source is not None and Path(recipe.quantize.mtp_source).exists():
        named = {"mtp_source": Path(recipe.quantize.mtp_source).name}
        recipe = recipe.model_copy(update={"quantize": recipe.quantize.model_copy(update=named)})
    measured = recipe.quantize.sensitivity
    if measured is not None:
        changes["quantize"] = recipe.quantize.model_copy(update={"sensitivity": Path(measured).name})
    portable = recipe.model_copy(update=changes)
    as_json = json.dumps(portable.model_dump(mode="json"), indent=1, ensure_ascii=False)
    recipes = dict(zip(INSIDE_NAMES, (dump_recipe(portable), as_json.encode()), strict=True))
    return recipes if measured is None else {**recipes, SENSITIVITY_NAME: read_file(Path(measured))}


def _convert(part: ConvertPart, rate: int | None, common: dict[str, Any]) -> ConvertRequest:
    """``rate`` is what the recipe leaves open: a candidate's bits."""
    packing, bits = None, part.bits if rate is None else rate
    if any(value is not None for value in (bits, part.group_size, part.mode)):
        packing = packed_setting(bits=bits, group_size=part.group_size, mode=part.mode)
    return ConvertRequest(
        packing=packing,
        rules=tuple(parse_rule(text, packing) for text in part.rules),
        dtype=None if part.dtype is None else parse_dtype(part.dtype, "dtype"),
        **common,
    )


def _trellis(part: TrellisPart, rate: int | None, common: dict[str, Any]) -> TrellisRequest:
    other = None
    if part.bits is not None or part.group_size is not None:
        other = packed_setting(
            bits=OTHER.bits if part.bits is None else part.bits,
            group_size=OTHER.group_size if part.group_size is None else part.group_size,
            mode="affine",
        )
    k = part.k if rate is None else rate
    return TrellisRequest(
        options=TrellisOptions(k=k, window=part.window, code=parse_code(part.code), warmup=part.warmup),
        modules=tuple(part.modules),
        layout=part.chosen_layout,
        fold_channels=part.fold_channels and common["hessians"] is not None,
        down_axis=part.down_axis,
        form=part.form,
        other=other,
        rules=tuple(parse_rule(text, other or OTHER) for text in part.rules),
        k_map=part.k_map,
        backend=part.backend,
        **common,
    )


def _tables(request: ConvertRequest, kept: Packed) -> tuple[Rule, ...]:
    """Embedding and head of a candidate as the artifact has them: ``kept``, the head at ``HEAD_BITS`` or more.

    They are never swapped, so a prediction made from candidates is of the artifact only if all of them agree there.
    """
    checkpoint = open_checkpoint(request.source, revision=request.revision)
    outputs = plan_transform(checkpoint, rotation_seed=request.rotation_seed).outputs
    tables = {output.role: output for output in outputs if output.role in (Role.EMBEDDING, Role.HEAD)}
    head = tables.get(Role.HEAD) or tables.get(Role.EMBEDDING)
    rules = []
    for output in tables.values():
        if output.module is None or output.shape[-1] % kept.group_size:
            continue  # dense in all of them
        bits = max(kept.bits, HEAD_BITS) if output is head else kept.bits
        text = f"{output.module}=bits:{bits},group:{kept.group_size}"
        rules.append(Rule(glob=output.module, setting=replace(kept, bits=bits), text=text))
    return tuple(rules)
