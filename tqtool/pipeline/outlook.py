"""What each verb would do with a checkpoint: the verbs' own plans, made for their defaults and not run."""

from __future__ import annotations

import math
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tqtool.errors import TqError
from tqtool.formats.trellis import TrellisSpec, spec_for
from tqtool.pipeline.convert import ConvertRequest, plan_convert
from tqtool.pipeline.job import Job
from tqtool.pipeline.plan import product_text
from tqtool.pipeline.rules import DEFAULT_BITS, DEFAULT_GROUP, Packed
from tqtool.pipeline.trellis import TrellisRequest, plan_trellis
from tqtool.solve.trellis import TrellisOptions, TrellisPacked
from tqtool.source.checkpoint import Checkpoint
from tqtool.source.gguf.config import build_config, read_shape
from tqtool.source.gguf.families import family_of, has_bias, map_tensors
from tqtool.source.gguf.reader import GgufFile
from tqtool.source.gguf.tokenizer import check_tokenizer

SEED: Final = 42
K: Final = 3
PACK: Final = "convert -q"
ROTATE: Final = "convert -q --rotate-weights"
CODE: Final = f"trellis --k {K} --modules all"
PLAIN_CODE: Final = f"{CODE} --no-rotate-weights"
_LAYER: Final = re.compile(r"\.\d+\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Size of a result and cost of making it. Bytes; bits per weight of the source."""

    tensor_bytes: int
    bits_per_weight: float
    disk_bytes: int
    peak_memory_bytes: int
    check_memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VerbRow:
    """One verb: what it would do, or why it would refuse and what to do then."""

    verb: str
    possible: bool
    detail: str
    hint: str | None = None
    estimate: Estimate | None = None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddingRow:
    """Modules of one kind on the trellis; ``share`` is padded over real weights.

    ``layout`` is ``axis0`` or ``axis1``, as the verb would choose, or ``tile``, as it would with Hessians.
    """

    pattern: str
    count: int
    shape: tuple[int, int]
    layout: str
    blocks: int
    padded_weights: int
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorOutlook:
    """What happens to one source tensor; empty where a verb refuses."""

    role: str
    convert: str
    rotate: str
    trellis: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """The part of the report that looks ahead; ``config`` is what an import would write."""

    verbs: tuple[VerbRow, ...]
    tensors: Mapping[str, TensorOutlook] = field(default_factory=dict)
    padding: tuple[PaddingRow, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)


def outlook(checkpoint: Checkpoint) -> Outlook:
    """The verbs' view of a float checkpoint."""
    source = str(checkpoint.path)
    packing = Packed(bits=DEFAULT_BITS, group_size=DEFAULT_GROUP, mode="affine")
    options = TrellisOptions(k=K)
    # Planning writes nothing; it only wants a free name to write to.
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "out"
        planners: dict[str, Callable[[], Job]] = {
            "convert": lambda: plan_convert(ConvertRequest(source=source, out=out)),
            PACK: lambda: plan_convert(ConvertRequest(source=source, out=out, packing=packing)),
            ROTATE: lambda: plan_convert(ConvertRequest(source=source, out=out, packing=packing, rotation_seed=SEED)),
            f"trellis --k {K}": lambda: plan_trellis(TrellisRequest(source=source, out=out, options=options)),
            CODE: lambda: plan_trellis(TrellisRequest(source=source, out=out, options=options, modules=("all",))),
            PLAIN_CODE: lambda: plan_trellis(
                TrellisRequest(source=source, out=out, options=options, modules=("all",), rotation_seed=None)
            ),
        }
        jobs: dict[str, Job] = {}
        rows = []
        for verb, planner in planners.items():
            if verb == PLAIN_CODE and CODE in jobs:
                continue  # worth a line only where the rotation is refused
            try:
                jobs[verb] = planner()
            except TqError as error:
                rows.append(_refused(verb, error))
            else:
                rows.append(_verb_row(verb, jobs[verb], checkpoint))
    coded = jobs.get(CODE) or jobs.get(PLAIN_CODE)
    return Outlook(
        verbs=tuple(rows),
        tensors=_tensor_rows(jobs.get(PACK), jobs.get(ROTATE), coded),
        padding=() if coded is None else _padding(coded),
    )


def quantized_outlook(evidence: str) -> Outlook:
    """The verbs' view of a checkpoint that is already quantized."""
    detail = f"already quantized: {evidence}"
    hint = "start from the full-precision model"
    rows = [VerbRow(verb=verb, possible=False, detail=detail, hint=hint) for verb in ("convert", "trellis")]
    return Outlook(verbs=(*rows, VerbRow(verb="generate, eval", possible=True, detail="loads it, or says why not")))


def damaged_outlook(problem: str) -> Outlook:
    """The verbs' view of a checkpoint with weights that are not finite."""
    hint = "the source weights are damaged; take them from another download"
    return Outlook(
        verbs=tuple(VerbRow(verb=verb, possible=False, detail=problem, hint=hint) for verb in ("convert", "trellis"))
    )


def gguf_outlook(file: GgufFile) -> Outlook:
    """What ``import-gguf`` would make of a file, or why it would not."""
    try:
        family = family_of(file)
        shape = read_shape(file)
        attention, mlp = (has_bias(file, group) for group in family.optional_biases or (("-",), ("-",)))
        config = build_config(file, shape, torch_dtype="bfloat16", biases=(attention, mlp))
        mapped = map_tensors(file, family, shape)
        check_tokenizer(file)
    except TqError as error:
        return Outlook(verbs=(_refused("import-gguf", error),))
    size = 2 * sum(item.source.n_elements for item in mapped)
    detail = f"writes {len(mapped)} tensors as {config['model_type']}, {size / 1e6:.1f} MB in bf16"
    return Outlook(verbs=(VerbRow(verb="import-gguf", possible=True, detail=detail),), config=config)


def _refused(verb: str, error: TqError) -> VerbRow:
    return VerbRow(verb=verb, possible=False, detail=error.message, hint=error.hint)


def _verb_row(verb: str, job: Job, checkpoint: Checkpoint) -> VerbRow:
    plan = job.plan
    stored = Counter(row.quantizer for row in plan.rows)
    parts = [", ".join(f"{count} {label}" for label, count in stored.most_common())]
    folded = sum(1 for row in plan.rows if row.folds)
    if folded:
        parts.append(f"{plan.transform} folds {folded}")
    parts += [
        f"adds {work.output.name}"
        for work in job.works
        if not work.parts and work.output.name not in checkpoint.tensors
    ]
    stacks = [work for work in job.works if work.parts and work.parts[0].output.rows is None]
    if stacks:
        experts = sum(len(work.parts) for work in stacks)
        parts.append(f"stacks {experts} expert matrices into {len(stacks)} tensors")
    parts += [f"leaves out {drop.name} ({drop.reason})" for drop in job.transform.dropped]
    parts += [f"{count} {note}" for note, count in Counter(note for row in plan.rows for note in row.notes).items()]
    totals = plan.totals
    estimate = Estimate(
        tensor_bytes=totals.tensor_bytes,
        bits_per_weight=totals.bits_per_source_weight,
        disk_bytes=totals.disk_bytes,
        peak_memory_bytes=totals.peak_memory_bytes,
        check_memory_bytes=totals.check_memory_bytes,
    )
    return VerbRow(verb=verb, possible=True, detail="; ".join(parts), estimate=estimate, warnings=plan.warnings)


def _tensor_rows(packed: Job | None, rotated: Job | None, coded: Job | None) -> dict[str, TensorOutlook]:
    """By source tensor. The rows of an untied head are left to the verb's own line: it has no tensor yet."""
    if packed is None:
        return {}
    folds = {} if rotated is None else {row.tensor: product_text(row.folds) or "as is" for row in rotated.plan.rows}
    codes = {} if coded is None else {row.tensor: row.quantizer for row in coded.plan.rows}
    rows = {
        piece.source: TensorOutlook(
            role=row.role,
            convert=row.quantizer,
            rotate=folds.get(row.tensor, ""),
            trellis=codes.get(row.tensor, ""),
        )
        for row, work in zip(packed.plan.rows, packed.works, strict=True)
        for piece in work.output.pieces
    }
    left_out = TensorOutlook(role="left out", convert="", rotate="", trellis="")
    return {**rows, **{drop.name: left_out for drop in packed.transform.dropped}}


def _padding(coded: Job) -> tuple[PaddingRow, ...]:
    """One row per kind of coded module and layout: as the verb would store it, then in tiles."""
    kinds: Counter[tuple[str, TrellisSpec]] = Counter()
    for work in coded.works:
        if isinstance(work.quantizer, TrellisPacked) and work.output.module is not None:
            spec = work.quantizer.spec(work.pieces[0].output.shape, work.output.name)
            tiles = spec_for(spec.weight_shape, k=spec.k, axis=1, window=spec.window, code=spec.code, tile=True)
            for stored in dict.fromkeys((spec, tiles)):
                kinds[_LAYER.sub(".*.", work.output.module), stored] += len(work.pieces)
    return tuple(
        PaddingRow(
            pattern=pattern,
            count=count,
            shape=spec.weight_shape,
            layout=spec.layout,
            blocks=spec.n_blocks,
            padded_weights=spec.n_padding,
            share=spec.n_padding / math.prod(spec.weight_shape),
        )
        for (pattern, spec), count in sorted(kinds.items(), key=lambda kind: kind[0][1].tile)
    )
