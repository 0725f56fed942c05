"""``tqtool trellis``: fold and code in one streaming pass.

The MLP layers (or all linear layers of the blocks, or those a glob names) are coded on the trellis; how is
``pipeline.coding``. Everything else is packed affine by rule, as in ``convert``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tqtool.artifact.model_file import MODEL_FILE, model_file
from tqtool.artifact.reload import Depth, compare_modules, reload_stock
from tqtool.errors import ArtifactError, UserError
from tqtool.formats.kmap import rates_of
from tqtool.formats.sensitivity import Sensitivity
from tqtool.mathx.signs import require_seed
from tqtool.pipeline.allocation import basis_notes, coded_mix
from tqtool.pipeline.beside import with_beside
from tqtool.pipeline.calibrated import SINK_WEIGHT, Hessians, calibrated_affine, open_hessians
from tqtool.pipeline.coding import (
    OTHER,
    Axis,
    Coding,
    Form,
    Layout,
    coded_modules,
    default_rules,
    encoder_of,
    fold_channels,
    is_coded,
    packed_config,
    tame_columns,
)
from tqtool.pipeline.companion import CompanionRequest
from tqtool.pipeline.convert import plan_transform
from tqtool.pipeline.dense import StoredDtype
from tqtool.pipeline.job import Job, JobExtras, module_entries, plan_job
from tqtool.pipeline.rules import Choices, Packed, Rule, packed_entry, resolve, router_rules
from tqtool.solve.quantizer import Quantizer
from tqtool.solve.search import Backend, DeviceChoice, choose_device
from tqtool.solve.trellis import Tick, TrellisOptions
from tqtool.source.checkpoint import Checkpoint, open_checkpoint
from tqtool.transform.plan import OutputTensor, TransformPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class TrellisRequest:
    """Everything the user asked for.

    Attributes:
        source: Folder or hub id.
        out: Folder to create.
        options: The code.
        revision: Of a hub id.
        modules: ``mlp``, ``all`` (every linear layer of the blocks) or globs of module paths.
        layout: ``tile`` or ``axis``; None is ``tile`` with Hessians and ``axis`` without.
        fold_channels: Reorder and rescale the hidden channels of each MLP; needs Hessians.
        down_axis: Dimension along which down_proj is coded if the layout is ``axis``; None is ``out``, the rotated one.
        form: What is stored for a coded module.
        other: Setting of the modules that are not coded; None is ``OTHER``, and ``LOOKUP`` for an untied embedding.
        rules: Per-module exceptions; a rule also takes a module from the trellis.
        rotation_seed: None means no rotation.
        overwrite: Replace an existing artifact of tqtool.
        hessians: Calibration folder; given, coded modules are coded with feedback (LDLQ) and affine ones by GPTQ.
        sink_weight: How many ordinary rows a sink row counts for.
        k_map: Module path or glob → bits, for modules that differ from ``options.k``.
        sensitivity: Measurement to make the k-map from, with ``k_budget``.
        k_budget: Mean bits of the codes over all coded weights.
        reuse: Artifacts to take tensors from where nothing that decides them differs.
        journal: Folder that keeps finished tensors until the artifact is whole.
        files: Further files of the artifact, relative path → bytes.
        backend: Where paths are searched; ``options.device`` is what is made of it, module by module.
        mtp: The companion to bundle, or None.
        vision_sidecar: A vision tower is repeated in a file of its own, where other tools look for it.
    """

    source: str
    out: Path
    options: TrellisOptions
    revision: str | None = None
    modules: tuple[str, ...] = ("mlp",)
    layout: Layout | None = None
    fold_channels: bool = False
    down_axis: Axis | None = None
    form: Form = "packed"
    other: Packed | None = None
    rules: tuple[Rule, ...] = ()
    rotation_seed: int | None = 42
    overwrite: bool = False
    hessians: Path | None = None
    sink_weight: float = SINK_WEIGHT
    reuse: tuple[Path, ...] = ()
    journal: Path | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)
    k_map: Mapping[str, int] = field(default_factory=dict)
    sensitivity: Sensitivity | None = None
    k_budget: float | None = None
    backend: Backend = "auto"
    mtp: CompanionRequest | None = None
    vision_sidecar: bool = True
    tick: Tick = field(default=lambda weights: None, compare=False)

    @property
    def chosen_layout(self) -> Layout:
        """Feedback wants tiles; without it a block lies along the dimension that the rotation has mixed."""
        return self.layout or ("axis" if self.hessians is None else "tile")

    @property
    def coding(self) -> Coding:
        """How modules are coded.

        Raises:
            UserError: an axis for tiles, which lie along both.
        """
        if self.down_axis is not None and self.chosen_layout == "tile":
            raise UserError(
                "--down-axis with tiles does nothing: a tile is coded along both dimensions",
                hint="--layout axis, or leave it out",
            )
        return Coding(form=self.form, layout=self.chosen_layout, down_axis=self.down_axis or "out", tick=self.tick)

    def to_json(self) -> dict[str, Any]:
        """What the manifest records: all that decides bytes, no paths, no threads."""
        return {
            "verb": "trellis",
            "k": self.options.k,
            "k_map": dict(self.k_map),
            "window": self.options.window,
            "code": self.options.code,
            "warmup": self.options.warmup,
            "refit": self.options.refit,
            "modules": list(self.modules),
            "layout": self.chosen_layout,
            "fold_channels": self.fold_channels,
            "down_axis": None if self.chosen_layout == "tile" else self.down_axis or "out",
            "form": self.form,
            "other": None if self.other is None else packed_entry(self.other),
            "rules": [rule.text for rule in self.rules],
            "rotation_seed": self.rotation_seed,
        }


def plan_trellis(request: TrellisRequest) -> Job:
    """Open the source and resolve the whole job; no tensor is read, but down_proj for its columns' norms in tiles.

    Raises:
        UserError: a glob matches nothing, a module cannot be coded, the family cannot be rotated, or an option would
            do nothing.
    """
    coding = request.coding
    checkpoint = open_checkpoint(request.source, revision=request.revision)
    transform = _transform(checkpoint, request)
    coded = coded_modules(transform, request.modules, request.rules)
    basis: tuple[str, ...] = ()
    if request.sensitivity is not None:
        basis = basis_notes(request.sensitivity, checkpoint, transform, is_trellis=True)
    request, mix_notes = _budgeted(request, coded)
    target = StoredDtype(checkpoint, None)
    other = request.other or OTHER
    rules = (
        *default_rules(transform, request.other),
        *router_rules(transform, other, checkpoint.config),
        *request.rules,
    )
    choices = resolve(transform.outputs, default=other, rules=rules, dtype_of=target.of)
    hessians = _hessians(request, checkpoint, transform)
    fold_notes: tuple[str, ...] = ()
    if request.fold_channels:
        hessians, transform, fold_notes = fold_channels(hessians, checkpoint, transform, coded)
        coded = coded_modules(transform, request.modules, request.rules)
    elif request.chosen_layout == "tile":
        hessians, transform = tame_columns(hessians, checkpoint, transform, coded)
        coded = coded_modules(transform, request.modules, request.rules)
    quantizers: dict[str, Quantizer] = dict(choices.quantizers)
    coded_names = {output.name for output in coded}
    notes = {name: lines for name, lines in choices.notes.items() if name not in coded_names}
    if hessians is not None:
        rest = tuple(output for output in transform.outputs if output.name not in coded_names)
        quantizers, uncalibrated = calibrated_affine(quantizers, rest, hessians)
        notes = {name: (*notes.get(name, ()), *uncalibrated.get(name, ())) for name in {*notes, *uncalibrated}}
    rates = rates_of(request.k_map, [str(output.module) for output in coded], request.options.k)
    devices = {k: _device(request, k) for k in sorted(set(rates.values()))}
    for output in coded:
        k = rates[str(output.module)]
        options = replace(request.options, k=k, device=devices[k].device)
        made, said = _coders(output, coding, options, hessians, target)
        quantizers |= made
        notes |= said
    chosen = Choices(quantizers=quantizers, notes=notes)
    is_packed = request.form == "packed"
    extras = JobExtras(
        config=packed_config(coded, quantizers) if is_packed else {},
        files={**request.files, **({MODEL_FILE: model_file()} if is_packed else {})},
        notes=notes,
        plan_notes=(*target.notes(), *chosen.counted_notes(), *basis, *mix_notes, *fold_notes, *_device_notes(devices)),
        dtype=target.config_dtype,
        default_entry=packed_entry(other),
        request={
            **request.to_json(),
            "backend": {f"k{k}": choice.device for k, choice in devices.items()},
            **({} if hessians is None else {"calibration": hessians.to_json()}),
        },
        kind=f"trellis-{request.form}",
        is_stock=not is_packed,
        tags=(_rate_tag(coded, rates), *(("rotated",) if request.rotation_seed is not None else ())),
        overwrite=request.overwrite,
        reuse=request.reuse,
        journal=request.journal,
    )
    extras = with_beside(
        extras, checkpoint, transform, out=request.out, mtp=request.mtp, vision_sidecar=request.vision_sidecar
    )
    return plan_job(checkpoint, transform, chosen.choose, out=request.out, extras=extras)


def check_trellis(job: Job, folder: Path, depth: Depth) -> None:
    """Reload ``folder`` in stock mlx-lm (a packed artifact through the model file it ships) and compare with the plan.

    Raises:
        ArtifactError: it does not load, differs from the plan, or one forward is not finite.
    """
    if depth == "none":
        return
    report = reload_stock(folder, depth=depth, trust_remote_code=not job.extras.is_stock)
    problems = compare_modules(report, module_entries(job.works))
    if problems:
        raise ArtifactError(f"stock mlx-lm loads another model than planned: {problems[0]} ({len(problems)} in all)")


def coded_weights(job: Job) -> int:
    """Weights that the trellis encoder will see: the unit of progress."""
    return sum(work.parameters for work in job.works if is_coded(work.quantizer))


def _coders(
    output: OutputTensor, coding: Coding, options: TrellisOptions, hessians: Hessians | None, target: StoredDtype
) -> tuple[dict[str, Quantizer], dict[str, tuple[str, ...]]]:
    """Quantizers of a coded output and its pieces by name, and what is to be said of them."""
    quantizers: dict[str, Quantizer] = {}
    notes: dict[str, tuple[str, ...]] = {}
    for piece in output.pieces:
        encoder, lines = encoder_of(piece, hessians)
        quantizers[piece.name] = coding.quantizer(piece, options, encoder, target.of(output))
        if lines:
            notes[piece.name] = lines
    quantizers[output.name] = quantizers[output.pieces[0].name]
    return quantizers, notes


def _transform(checkpoint: Checkpoint, request: TrellisRequest) -> TransformPlan:
    if request.rotation_seed is not None:
        require_seed(request.rotation_seed)
    try:
        return plan_transform(checkpoint, rotation_seed=request.rotation_seed)
    except UserError as error:
        if request.rotation_seed is None:
            raise
        hint = "--no-rotate-weights codes the weights as they are (worse: the trellis expects Gaussian weights)"
        raise UserError(error.message, hint=f"{error.hint}; {hint}" if error.hint else hint) from error


def _device(request: TrellisRequest, k: int) -> DeviceChoice:
    options = request.options
    return choose_device(request.backend, window=options.window, k=k, code=options.code, warmup=options.warmup)


def _device_notes(devices: Mapping[int, DeviceChoice]) -> tuple[str, ...]:
    """Where paths are searched, one line for each device and reason."""
    found: dict[DeviceChoice, list[str]] = {}
    for k, choice in devices.items():
        found.setdefault(choice, []).append(str(k))
    lines = {choice: f"paths of k = {', '.join(ks)} are searched by {choice.device}" for choice, ks in found.items()}
    return tuple(f"{line}: {choice.reason}" if choice.reason else line for choice, line in lines.items())


def _budgeted(request: TrellisRequest, coded: Sequence[OutputTensor]) -> tuple[TrellisRequest, tuple[str, ...]]:
    """``request`` with the k-map that its measurement and budget make, and what to say of it."""
    if request.sensitivity is None or request.k_budget is None:
        return request, ()
    weights = {str(output.module): math.prod(output.shape) for output in coded}
    mix = coded_mix(request.sensitivity, request.k_budget, weights, request.options.k)
    return replace(request, k_map=mix.bits), mix.notes(request.sensitivity.base_model)


def _rate_tag(coded: Sequence[OutputTensor], rates: Mapping[str, int]) -> str:
    """``trellis-k3``, or the mean over weights where modules differ."""
    weights = {str(output.module): math.prod(output.shape) for output in coded}
    mean = sum(rates[module] * count for module, count in weights.items()) / sum(weights.values())
    return f"trellis-k{mean:.0f}" if mean == round(mean) else f"trellis-k{mean:.2f}"


def _hessians(request: TrellisRequest, checkpoint: Checkpoint, transform: TransformPlan) -> Hessians | None:
    if request.hessians is None:
        return None
    return open_hessians(request.hessians, checkpoint, transform, sink_weight=request.sink_weight)
