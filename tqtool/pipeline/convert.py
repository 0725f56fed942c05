"""``tqtool convert``: fold (or not), round to nearest (or not), write.

The default settings give the bytes of ``mlx_lm.convert`` with the same bits and group: every Linear and the
embedding packed alike, everything else cast to the model's dtype.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tqtool.artifact.reload import Depth, compare_modules, reload_stock
from tqtool.errors import ArtifactError, UserError
from tqtool.formats.dtypes import DType
from tqtool.formats.sensitivity import Sensitivity
from tqtool.pipeline.affine_mix import AffineMix, affine_mix, candidate_packings
from tqtool.pipeline.allocation import basis_notes
from tqtool.pipeline.beside import with_beside
from tqtool.pipeline.calibrated import SINK_WEIGHT, calibrated_affine, open_hessians
from tqtool.pipeline.companion import CompanionRequest
from tqtool.pipeline.dense import SHORT, StoredDtype
from tqtool.pipeline.job import Job, JobExtras, module_entries, plan_job
from tqtool.pipeline.rules import (
    Choices,
    Dense,
    Packed,
    Rule,
    Setting,
    packed_entry,
    resolve,
    router_hints,
    router_rules,
)
from tqtool.solve.rtn import AffineRtn
from tqtool.source.checkpoint import Checkpoint, open_checkpoint
from tqtool.source.mlx_lm_settings import eight_bit_modules
from tqtool.transform.plan import Role, TransformPlan, plan_identity, plan_rotation

LOW_HEAD_BITS = 4
HEAD_BITS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertRequest:
    """Everything the user asked for.

    Attributes:
        source: Folder or hub id.
        out: Folder to create.
        revision: Of a hub id.
        packing: Setting of all modules, or None for a dense model.
        rules: Per-module exceptions.
        dtype: Dtype of dense tensors and affine scales; None means what the source declares.
        rotation_seed: None means no rotation.
        overwrite: Replace an existing artifact of tqtool.
        hessians: Calibration folder; given, affine modules are solved by GPTQ.
        sink_weight: How many ordinary rows a sink row counts for.
        sensitivity: Measurement that decides the bits of the modules in it, under ``target_bpw``.
        target_bpw: What all packed modules together store at most for each weight.
        reuse: Artifacts to take tensors from where nothing that decides them differs.
        journal: Folder that keeps finished tensors until the artifact is whole.
        files: Further files of the artifact, relative path → bytes.
        mtp: The companion to bundle, or None.
        vision_sidecar: A vision tower is repeated in a file of its own, where other tools look for it.
    """

    source: str
    out: Path
    revision: str | None = None
    packing: Packed | None = None
    rules: tuple[Rule, ...] = ()
    dtype: DType | None = None
    rotation_seed: int | None = None
    overwrite: bool = False
    hessians: Path | None = None
    sink_weight: float = SINK_WEIGHT
    sensitivity: Sensitivity | None = None
    target_bpw: float | None = None
    reuse: tuple[Path, ...] = ()
    journal: Path | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)
    mtp: CompanionRequest | None = None
    vision_sidecar: bool = True

    def to_json(self) -> dict[str, Any]:
        """What the manifest records: all that decides bytes, no paths."""
        packing = self.packing
        return {
            "verb": "convert",
            "packing": None
            if packing is None
            else {"bits": packing.bits, "group_size": packing.group_size, "mode": packing.mode},
            "rules": [rule.text for rule in self.rules],
            "dtype": None if self.dtype is None else SHORT[self.dtype],
            "rotation_seed": self.rotation_seed,
        }


def plan_convert(request: ConvertRequest) -> Job:
    """Open the source and resolve the whole job; no tensor is read."""
    if request.sensitivity is not None and request.packing is None:
        packings = candidate_packings(request.sensitivity)
        request = replace(request, packing=packings[min(packings)])
    checkpoint = open_checkpoint(request.source, revision=request.revision)
    transform = plan_transform(checkpoint, rotation_seed=request.rotation_seed)
    basis: tuple[str, ...] = ()
    if request.sensitivity is not None:
        basis = basis_notes(request.sensitivity, checkpoint, transform, is_trellis=False)
    default: Setting = request.packing or Dense()
    target = StoredDtype(checkpoint, request.dtype)
    defaults = (*head_rules(transform, request), *router_rules(transform, request.packing, checkpoint.config))
    rules = (*defaults, *request.rules)
    choices = resolve(transform.outputs, default=default, rules=rules, dtype_of=target.of)
    mixed = _mixed(request, transform, choices, target)
    if mixed is not None:
        rules = (*defaults, *mixed.rules, *request.rules)
        choices = resolve(transform.outputs, default=default, rules=rules, dtype_of=target.of)
    _require_packed(request, transform, choices)
    choices, calibration = _calibrated(request, checkpoint, transform, choices)
    extras = JobExtras(
        notes=choices.notes,
        plan_notes=(*target.notes(), *choices.counted_notes(), *basis, *_mix_notes(request, mixed)),
        hints=(*head_hints(transform, choices), *_stock_hints(request, checkpoint, transform)),
        default_entry=None if request.packing is None else packed_entry(request.packing),
        dtype=target.config_dtype,
        request={**request.to_json(), **calibration, **_allocation(request, mixed)},
        tags=_tags(request, choices.main_bits(transform.outputs)),
        overwrite=request.overwrite,
        reuse=request.reuse,
        journal=request.journal,
        files=request.files,
    )
    extras = with_beside(
        extras,
        checkpoint,
        transform,
        out=request.out,
        mtp=request.mtp,
        vision_sidecar=request.vision_sidecar,
        dtype=request.dtype,
    )
    return plan_job(checkpoint, transform, choices.choose, out=request.out, extras=extras)


def head_rules(transform: TransformPlan, request: ConvertRequest) -> tuple[Rule, ...]:
    """With GPTQ or measured bits, what produces the logits takes at least ``HEAD_BITS``; the user's rules still win.

    A tied embedding at 4 bits costs SmolLM2-135M four points of perplexity, at 6 bits 0.2; plain ``convert`` keeps to
    the bytes of mlx_lm.convert instead and only says so.
    """
    tables = {output.role: output for output in transform.outputs if output.role in (Role.EMBEDDING, Role.HEAD)}
    head = tables.get(Role.HEAD) or tables.get(Role.EMBEDDING)
    packing = request.packing
    is_plain = request.hessians is None and request.sensitivity is None
    if is_plain or packing is None or packing.bits >= HEAD_BITS or head is None or head.module is None:
        return ()
    if head.shape[-1] % packing.group_size:
        return ()
    setting = Packed(bits=HEAD_BITS, group_size=packing.group_size, mode="affine")
    text = f"{head.module}=bits:{HEAD_BITS},group:{packing.group_size}"
    return (Rule(glob=head.module, setting=setting, text=text),)


def _mixed(
    request: ConvertRequest, transform: TransformPlan, choices: Choices, target: StoredDtype
) -> AffineMix | None:
    if request.sensitivity is None or request.target_bpw is None:
        return None
    return affine_mix(
        request.sensitivity,
        request.target_bpw,
        outputs=transform.outputs,
        choices=choices,
        rules=request.rules,
        dtype_of=target.of,
    )


def _mix_notes(request: ConvertRequest, mixed: AffineMix | None) -> tuple[str, ...]:
    if mixed is None or request.sensitivity is None or request.target_bpw is None:
        return ()
    return mixed.notes(request.sensitivity.base_model, request.target_bpw)


def _allocation(request: ConvertRequest, mixed: AffineMix | None) -> dict[str, Any]:
    """What the request in the manifest says of measured bits."""
    if mixed is None:
        return {}
    return {"allocation": {"target_bpw": request.target_bpw, "bits": dict(mixed.mix.bits)}}


def _calibrated(
    request: ConvertRequest, checkpoint: Checkpoint, transform: TransformPlan, choices: Choices
) -> tuple[Choices, dict[str, Any]]:
    """GPTQ in place of rounding, and what the request in the manifest says of it."""
    if request.hessians is None:
        return choices, {}
    hessians = open_hessians(request.hessians, checkpoint, transform, sink_weight=request.sink_weight)
    quantizers, notes = calibrated_affine(choices.quantizers, transform.outputs, hessians)
    merged = {name: (*choices.notes.get(name, ()), *notes.get(name, ())) for name in {*choices.notes, *notes}}
    return Choices(quantizers=quantizers, notes=merged), {"method": "gptq", "calibration": hessians.to_json()}


def check_artifact(job: Job, folder: Path, depth: Depth) -> None:
    """Reload ``folder`` in stock mlx-lm and compare every module with the plan.

    Raises:
        ArtifactError: it does not load, differs from the plan, or one forward is not finite.
    """
    if depth == "none":
        return
    report = reload_stock(folder, depth=depth)
    problems = compare_modules(report, module_entries(job.works))
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise ArtifactError(f"stock mlx-lm loads another model than planned: {problems[0]}{more}")


def plan_transform(checkpoint: Checkpoint, *, rotation_seed: int | None) -> TransformPlan:
    """The identity, or the family's rotation with ``rotation_seed``."""
    if rotation_seed is None:
        return plan_identity(checkpoint.shapes(), checkpoint.config)
    return plan_rotation(checkpoint.shapes(), checkpoint.config, seed=rotation_seed)


def head_hints(transform: TransformPlan, choices: Choices) -> tuple[str, ...]:
    """A line when what produces the logits is packed at low bits, as stock does without saying so."""
    tables = {output.role: output for output in transform.outputs if output.role in (Role.EMBEDDING, Role.HEAD)}
    head = tables.get(Role.HEAD) or tables.get(Role.EMBEDDING)
    if head is None:
        return ()
    entry = choices.choose(head).config_entry()
    if not isinstance(entry, dict) or entry["bits"] > LOW_HEAD_BITS:
        return ()
    what = "lm_head" if head.role is Role.HEAD else "the tied embedding, which is also the head,"
    return (
        f"{what} is packed at {entry['bits']} bits like every other module (as mlx_lm.convert does); "
        f"--rule '{head.module}=bits:8' usually pays for itself",
    )


def _stock_hints(request: ConvertRequest, checkpoint: Checkpoint, transform: TransformPlan) -> tuple[str, ...]:
    """A line where ``mlx_lm.convert`` would not have done what was asked for."""
    modules = [output.module for output in transform.outputs if output.module is not None]
    globs = [glob for glob in eight_bit_modules(checkpoint.config) if fnmatch.filter(modules, glob)]
    routers = router_hints(transform, request.packing, checkpoint.config, request.rules)
    if request.packing is None or not globs:
        return routers
    rules = " ".join(f"--rule '{glob}=mode:affine,bits:8,group:64'" for glob in globs)
    hint = f"mlx_lm.convert packs {', '.join(globs)} of {checkpoint.model_type} at 8 bits in any case: {rules}"
    return (hint, *routers)


def _require_packed(request: ConvertRequest, transform: TransformPlan, choices: Choices) -> None:
    """Refuse a job that was to pack modules and packs none."""
    if request.packing is None or any(isinstance(choices.choose(output), AffineRtn) for output in transform.outputs):
        return
    reasons = choices.counted_notes() or ("the rules keep every module dense",)
    raise UserError(
        f"no module would be packed: {'; '.join(reasons)}",
        hint="choose a smaller --group-size, or leave -q and --bits out",
    )


def _tags(request: ConvertRequest, bits: int | None) -> tuple[str, ...]:
    """``4-bit`` only where most of the weights are."""
    tags = [] if bits is None else [f"{bits}-bit"]
    return tuple(tags + (["rotated"] if request.rotation_seed is not None else []))
