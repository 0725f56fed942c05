"""``tqtool trellis``: fold and code in one streaming pass.

The MLP layers (or all linear layers of the blocks, or those a glob names) are coded on the trellis, along the
dimension that the rotation has mixed: readers of the
residual along their inputs, writers along their outputs. Everything else is packed affine by rule, as in ``convert``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tqtool.artifact.reload import Depth, compare_modules, reload_stock
from tqtool.errors import ArtifactError, UserError
from tqtool.formats.kmap import rates_of
from tqtool.formats.sensitivity import Sensitivity
from tqtool.formats.trellis import FORMAT_VERSION, TrellisSpec
from tqtool.mathx.signs import require_seed
from tqtool.pipeline.allocation import coded_mix
from tqtool.pipeline.calibrated import SINK_WEIGHT, Hessians, LdlqEncoder, calibrated_affine, open_hessians
from tqtool.pipeline.convert import StoredDtype, packed_entry, plan_transform
from tqtool.pipeline.job import Job, JobExtras, module_entries, plan_job
from tqtool.pipeline.rules import Choices, Packed, Rule, matching_rule, near_names, resolve
from tqtool.solve.quantizer import Quantizer
from tqtool.solve.rtn import AffineRtn
from tqtool.solve.trellis import (
    Encoder,
    PlainEncoder,
    TrellisCarrier,
    TrellisFakeQuant,
    TrellisOptions,
    TrellisPacked,
)
from tqtool.source.checkpoint import Checkpoint, open_checkpoint
from tqtool.transform.channels import choose_channels, mlps, with_channels
from tqtool.transform.ops import Channels
from tqtool.transform.plan import OutputTensor, Role, TransformPlan

Form = Literal["packed", "fake-quant", "carrier"]
Layout = Literal["tile", "axis"]
Axis = Literal["out", "in"]

MODEL_FILE = "tqtool_model.py"
OTHER = Packed(bits=6, group_size=64, mode="affine")
"""What the trellis does not code.

A tied embedding at 4 bits costs SmolLM2-135M four points of perplexity, at 6 bits 0.2.
"""
LOOKUP = Packed(bits=4, group_size=64, mode="affine")
"""An embedding that is not the head too is only looked up: 4 bits cost SmolLM2-135M .01 of KL and save 7 of 100 MB."""
CARRIER_BITS, CARRIER_GROUP = 8, 64

MLP_ROLES = frozenset({Role.GATE, Role.UP, Role.DOWN})
BLOCK_ROLES = MLP_ROLES | {Role.Q, Role.K, Role.V, Role.O}

Tick = Callable[[int], None]


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
        fold_channels: Reorder and rescale the hidden channels of each MLP; None is yes where tiles meet Hessians.
        down_axis: Dimension along which down_proj is coded if the layout is ``axis``: ``out`` is the rotated one.
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
    """

    source: str
    out: Path
    options: TrellisOptions
    revision: str | None = None
    modules: tuple[str, ...] = ("mlp",)
    layout: Layout | None = None
    fold_channels: bool | None = None
    down_axis: Axis = "out"
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
    tick: Tick = field(default=lambda weights: None, compare=False)

    @property
    def chosen_layout(self) -> Layout:
        """Feedback wants tiles; without it a block lies along the dimension that the rotation has mixed."""
        return self.layout or ("axis" if self.hessians is None else "tile")

    @property
    def folds_channels(self) -> bool:
        """True when the MLPs' channels are reordered."""
        if self.fold_channels is None:
            return self.hessians is not None and self.chosen_layout == "tile"
        return self.fold_channels

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
            "fold_channels": self.folds_channels,
            "down_axis": self.down_axis,
            "form": self.form,
            "other": None if self.other is None else packed_entry(self.other),
            "rules": [rule.text for rule in self.rules],
            "rotation_seed": self.rotation_seed,
        }


def parse_axis(text: str) -> Axis:
    """``out`` or ``in``, as ``--down-axis`` takes it."""
    known: dict[str, Axis] = {"out": "out", "in": "in"}
    if text not in known:
        raise UserError(f"--down-axis {text!r}: expected out or in")
    return known[text]


def parse_layout(text: str | None) -> Layout | None:
    """``tile`` or ``axis``, as ``--layout`` takes it."""
    known: dict[str | None, Layout | None] = {None: None, "tile": "tile", "axis": "axis"}
    if text not in known:
        raise UserError(f"--layout {text!r}: expected tile or axis")
    return known[text]


def parse_form(*, fake_quant: bool, carrier: bool) -> Form:
    """The form that the two flags ask for."""
    if fake_quant and carrier:
        raise UserError("--fake-quant and --carrier are two forms of one artifact", hint="leave one out")
    return "fake-quant" if fake_quant else "carrier" if carrier else "packed"


def plan_trellis(request: TrellisRequest) -> Job:
    """Open the source and resolve the whole job; no tensor is read, but down_proj where channels are reordered.

    Raises:
        UserError: a glob matches nothing, a module cannot be coded, or the family cannot be rotated.
    """
    checkpoint = open_checkpoint(request.source, revision=request.revision)
    transform = _transform(checkpoint, request)
    coded = coded_modules(transform, request.modules, request.rules)
    request, mix_notes = _budgeted(request, coded)
    target = StoredDtype(checkpoint, None)
    other = request.other or OTHER
    rules = (*default_rules(transform, request), *request.rules)
    choices = resolve(transform.outputs, default=other, rules=rules, dtype_of=target.of)
    hessians = _hessians(request, checkpoint, transform)
    if request.folds_channels:
        hessians, transform = fold_channels(hessians, checkpoint, transform, coded)
        coded = coded_modules(transform, request.modules, request.rules)
    quantizers: dict[str, Quantizer] = dict(choices.quantizers)
    coded_names = {output.name for output in coded}
    notes = {name: lines for name, lines in choices.notes.items() if name not in coded_names}
    if hessians is not None:
        rest = tuple(output for output in transform.outputs if output.name not in coded_names)
        quantizers, uncalibrated = calibrated_affine(quantizers, rest, hessians)
        notes = {name: (*notes.get(name, ()), *uncalibrated.get(name, ())) for name in {*notes, *uncalibrated}}
    rates = rates_of(request.k_map, [str(output.module) for output in coded], request.options.k)
    for output in coded:
        encoder, lines = _encoder(output, hessians)
        options = replace(request.options, k=rates[str(output.module)])
        quantizers[output.name] = _quantizer(output, replace(request, options=options), target, encoder)
        if lines:
            notes[output.name] = lines
    chosen = Choices(quantizers=quantizers, notes=notes)
    is_packed = request.form == "packed"
    extras = JobExtras(
        config=_packed_config(coded, quantizers) if is_packed else {},
        files={**request.files, **({MODEL_FILE: _stock_model_source()} if is_packed else {})},
        notes=notes,
        plan_notes=(*target.notes(), *chosen.counted_notes(), *mix_notes),
        dtype=target.config_dtype,
        default_entry=packed_entry(other),
        request={**request.to_json(), **({} if hessians is None else {"calibration": hessians.to_json()})},
        kind=f"trellis-{request.form}",
        is_stock=not is_packed,
        tags=(_rate_tag(coded, rates), *(("rotated",) if request.rotation_seed is not None else ())),
        overwrite=request.overwrite,
        reuse=request.reuse,
        journal=request.journal,
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


def coded_modules(transform: TransformPlan, modules: Sequence[str], rules: Sequence[Rule]) -> tuple[OutputTensor, ...]:
    """Outputs that the trellis codes: chosen by ``modules`` and not taken away by a rule.

    Raises:
        UserError: a glob matches nothing or an embedding, or nothing is left to code.
    """
    linears = [
        output for output in transform.outputs if output.module is not None and output.role is not Role.EMBEDDING
    ]
    chosen: set[str] = set()
    for pattern in modules:
        if pattern in ("mlp", "all"):
            roles = MLP_ROLES if pattern == "mlp" else BLOCK_ROLES
            found = [output.name for output in linears if output.role in roles]
        else:
            found = [output.name for output in linears if output.module and fnmatchcase(output.module, pattern)]
        if not found:
            near = near_names(pattern, [output.module for output in linears if output.module])
            raise UserError(f"--modules {pattern!r} matches no linear layer", hint=f"near: {', '.join(near)}")
        chosen.update(found)
    coded = tuple(output for output in linears if output.name in chosen and matching_rule(output, rules) is None)
    if not coded:
        raise UserError("the rules take every module from the trellis", hint="use tqtool convert, or narrow the rules")
    return coded


def default_rules(transform: TransformPlan, request: TrellisRequest) -> tuple[Rule, ...]:
    """What the user's rules start from: ``LOOKUP`` for an embedding with a head apart, unless bits were asked for."""
    tables = {output.role: output for output in transform.outputs}
    embedding = tables.get(Role.EMBEDDING)
    if request.other is not None or embedding is None or Role.HEAD not in tables:
        return ()
    if embedding.module is None or embedding.shape[-1] % LOOKUP.group_size:
        return ()
    text = f"{embedding.module}=bits:{LOOKUP.bits},group:{LOOKUP.group_size}"
    return (Rule(glob=embedding.module, setting=LOOKUP, text=text),)


def coded_weights(job: Job) -> int:
    """Weights that the trellis encoder will see: the unit of progress."""
    return sum(work.parameters for work in job.works if _is_coded(work.quantizer))


def _is_coded(quantizer: Quantizer) -> bool:
    return isinstance(quantizer, TrellisPacked | TrellisFakeQuant | TrellisCarrier)


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


def fold_channels(
    hessians: Hessians | None, checkpoint: Checkpoint, transform: TransformPlan, coded: Sequence[OutputTensor]
) -> tuple[Hessians, TransformPlan]:
    """Reorder the channels of each MLP whose down_proj is coded; Hessians and plan in the new order.

    Raises:
        UserError: there are no Hessians, which say in what order.
    """
    if hessians is None:
        raise UserError("--fold-channels needs --ldlq: the order comes from the Hessians")
    names = {output.name for output in coded}
    found: dict[str, Channels] = {}
    for path, down in mlps(transform).items():
        if down.name in names and hessians.has(down):
            weight = np.asarray(checkpoint.tensors[down.source].read(), np.float32)
            norms = np.sqrt(np.einsum("oc,oc->c", weight, weight, dtype=np.float64))  # a rotation of outputs keeps them
            found[path] = choose_channels(norms, hessians.curvature(str(down.module)))
    by_module = {str(down.module): found[path] for path, down in mlps(transform).items() if path in found}
    return replace(hessians, channels=by_module), with_channels(transform, found)


def _encoder(output: OutputTensor, hessians: Hessians | None) -> tuple[Encoder, tuple[str, ...]]:
    """LDLQ where there is a Hessian; a note where one was wanted and is missing."""
    if hessians is None:
        return PlainEncoder(), ()
    if not hessians.has(output):
        return PlainEncoder(), ("coded without feedback: nothing to calibrate it on",)
    return LdlqEncoder(width=output.shape[-1], hessians=hessians), ()


def _quantizer(output: OutputTensor, request: TrellisRequest, target: StoredDtype, encoder: Encoder) -> Quantizer:
    along_outputs = output.role is Role.O or (output.role is Role.DOWN and request.down_axis == "out")
    tile = request.chosen_layout == "tile"
    axis: Literal[0, 1] = 0 if along_outputs and not tile else 1
    common: dict[str, Any] = {"options": request.options, "axis": axis, "tile": tile, "tick": request.tick}
    common["encoder"] = encoder
    dtype = target.of(output)
    if request.form == "packed":
        return TrellisPacked(**common)
    if request.form == "fake-quant":
        return TrellisFakeQuant(**common, dtype=dtype)
    width = output.shape[-1]
    if width % CARRIER_GROUP:
        raise UserError(
            f"{output.name}: the 8-bit carrier needs an input dimension divisible by {CARRIER_GROUP}, found {width}",
            hint="--fake-quant stores the same values dense",
        )
    carrier = AffineRtn(bits=CARRIER_BITS, group_size=CARRIER_GROUP, mode="affine", dtype=dtype)
    return TrellisCarrier(**common, carrier=carrier)


def _packed_config(coded: Sequence[OutputTensor], quantizers: Mapping[str, Quantizer]) -> dict[str, Any]:
    modules: dict[str, Any] = {}
    for output in coded:
        quantizer = quantizers[output.name]
        if isinstance(quantizer, TrellisPacked) and output.module is not None:
            spec: TrellisSpec = quantizer.spec(output.shape, output.name)
            modules[output.module] = spec.to_config()
    return {"trellis": {"format_version": FORMAT_VERSION, "modules": modules}, "model_file": MODEL_FILE}


def _stock_model_source() -> bytes:
    """The module that lets stock mlx-lm build the model; the runtime keeps it, the artifact carries it."""
    return resources.files("tqtool").joinpath("runtime", "stock_model.py").read_bytes()
