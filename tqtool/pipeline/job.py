"""One job: each output tensor in turn, from checkpoint through fold and quantizer into the writer.

``plan_job`` decides and validates everything without reading a tensor; ``Job.run`` is dull. Peak memory: the
source tensor, its float32 fold, what the quantizer returns, and whatever the quantizer needs inside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tqtool.artifact.config import build_config, encode_config
from tqtool.artifact.stop_tokens import StopTokens, read_stop_tokens
from tqtool.artifact.writer import check_target, plan_shards
from tqtool.errors import SourceError, UserError
from tqtool.formats.dtypes import DType
from tqtool.formats.manifest import Manifest
from tqtool.pipeline.execute import Check, Progress, execute
from tqtool.pipeline.plan import JobPlan, Work, row_of, totals_of
from tqtool.pipeline.preflight import memory_note, require_disk
from tqtool.pipeline.provenance import transform_records
from tqtool.pipeline.reuse import check_shelf
from tqtool.solve.quantizer import ConfigEntry, Quantizer, StoredTensor
from tqtool.source.checkpoint import Checkpoint
from tqtool.source.checks import check_finite, require_json
from tqtool.source.mlx_lm import refuse_unservable
from tqtool.transform.apply import require_unit_gains
from tqtool.transform.claim import COMPANION_REASON
from tqtool.transform.plan import OutputTensor, TransformPlan
from tqtool.transform.tower import VISION_KEYS

Choose = Callable[[OutputTensor], Quantizer]

OTHER_FILE_BYTES = 1 << 20
"""Allowance for headers, index, config, card and manifest in the disk estimate."""


def silent(amount: float, what: str) -> None:
    """A progress callback that says nothing."""
    del amount, what


@dataclass(slots=True)
class Meter:
    """Counts encoded weights; the bar it moves exists only once the plan is known and is attached then."""

    advance: Progress | None = None

    def __call__(self, weights: int) -> None:
        """``weights`` more are done."""
        if self.advance is not None:
            self.advance(weights, "")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobExtras:
    """What a verb adds to the common job.

    Attributes:
        config: Further top-level keys of ``config.json``, e.g. ``trellis`` and ``model_file``.
        files: Further files of the artifact, relative path → bytes or a file to copy.
        notes: Tensor name → remarks made while choosing its quantizer.
        plan_notes: Remarks about the whole job, kept in the manifest and the card.
        hints: Advice for whoever reads the plan; not kept.
        default_entry: Top-level triple of ``quantization``; without it the most used entry.
        dtype: Dtype of dense tensors when set for the whole model; written into the config.
        request: What was asked for, JSON-ready, kept in the manifest.
        kind: Name of the artifact's format; without it ``affine`` or ``float``.
        is_stock: False when stock mlx-lm cannot load the artifact by itself.
        tags: Further tags of the model card.
        overwrite: Replace an existing artifact of tqtool under ``out``.
        reuse: Artifacts to take tensors from where their keys match.
        journal: Folder that keeps finished tensors until the artifact is whole, for a run that may be killed.
        sidecars: Further safetensors files that repeat tensors of the shards, relative path → names.
        companion: The job of an artifact inside this one, its ``out`` a folder of ours.
        borrowed: Tensors of another artifact that folds read: no weights of this one.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, bytes | Path] = field(default_factory=dict)
    notes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    plan_notes: tuple[str, ...] = ()
    hints: tuple[str, ...] = ()
    default_entry: dict[str, Any] | None = None
    dtype: DType | None = None
    request: Mapping[str, Any] = field(default_factory=dict)
    kind: str | None = None
    is_stock: bool = True
    tags: tuple[str, ...] = ()
    overwrite: bool = False
    reuse: tuple[Path, ...] = ()
    journal: Path | None = None
    sidecars: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    companion: Job | None = None
    borrowed: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    """What a finished job wrote; ``manifest`` holds a row per tensor, ``notes`` are about this run only."""

    out: Path
    plan: JobPlan
    manifest: Manifest
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A validated job; ``run`` executes it."""

    checkpoint: Checkpoint
    transform: TransformPlan
    works: tuple[Work, ...]
    plan: JobPlan
    config: Mapping[str, Any]
    stop_tokens: StopTokens
    extras: JobExtras
    kind: str
    out: Path

    def check_source(self, progress: Progress = silent) -> None:
        """Read every source tensor once; a value that is not finite is found before any work, not in the middle of it.

        Raises:
            NumericalError: a tensor holds an inf or a NaN, or a companion's gain cannot be folded.
            SourceError: a file cannot be read.
        """
        check_finite(self.checkpoint, progress)
        inside = self.extras.companion
        if inside is None:
            return
        if inside.checkpoint.path != self.checkpoint.path:
            check_finite(inside.checkpoint)
        for output in inside.transform.outputs:
            require_unit_gains(output, lambda name: inside.checkpoint.tensors[name].read())

    def run(
        self, progress: Progress = silent, check: Check | None = None, *, source_is_checked: bool = False
    ) -> JobResult:
        """Write the artifact; nothing is left under ``out`` or beside it when this raises.

        Args:
            progress: Called after each tensor with its parameter count and name.
            check: Called with the finished folder before it gets its final name; raises to refuse it.
            source_is_checked: ``check_source`` was called already.

        Raises:
            ArtifactError: the disk is too full, writing failed, or ``check`` refused.
            NumericalError: a source tensor is not finite or does not fit its dtype.
            SourceError: the source changed while it was read.
        """
        require_disk(self.out.parent, self.plan.totals.disk_bytes)
        if not source_is_checked:
            self.check_source()
        manifest, notes = execute(self, progress, check)
        return JobResult(out=self.out, plan=self.plan, manifest=manifest, notes=notes)


def plan_job(
    checkpoint: Checkpoint,
    transform: TransformPlan,
    choose: Choose,
    *,
    out: Path,
    extras: JobExtras | None = None,
) -> Job:
    """Resolve and validate the whole job; no tensor is read.

    Raises:
        UserError: a quantizer cannot take its tensor, or ``out`` is not a place to write to.
    """
    extras = extras or JobExtras()
    refuse_unservable(checkpoint.path, checkpoint.config)
    _require_separate(checkpoint.path, out)
    check_target(out, overwrite=extras.overwrite)
    check_shelf(extras.reuse, extras.journal, out)
    return resolve_job(checkpoint, transform, choose, out=out, extras=extras)


def resolve_job(
    checkpoint: Checkpoint, transform: TransformPlan, choose: Choose, *, out: Path, extras: JobExtras
) -> Job:
    """``plan_job`` without a look at ``out``, which may be inside an artifact that is not there yet."""
    works = tuple(
        _stack_work(output, choose) if output.parts else _work(output, choose(output)) for output in transform.outputs
    )
    entries = module_entries(works)
    stop_tokens = read_stop_tokens(checkpoint.config, checkpoint.files)
    config = build_config(
        transform.updated_config(dict(checkpoint.config)),
        entries=entries,
        default=extras.default_entry,
        dtype=extras.dtype,
        extra=_with_stop_tokens(extras.config, stop_tokens),
    )
    _require_writable_config(checkpoint.path, config)
    require_json(checkpoint.files)
    transform_records(checkpoint, transform)  # a malformed note in the source is refused now, not after the work
    stored = {tensor.name: tensor for work in works for tensor in work.stored}
    inside = None if extras.companion is None else extras.companion.plan
    apart = {drop.name for drop in transform.dropped if drop.reason == COMPANION_REASON}
    totals = totals_of(
        checkpoint,
        works,
        n_shards=len(plan_shards(list(stored.values()))),
        other_bytes=OTHER_FILE_BYTES
        + sum(path.stat().st_size for path in checkpoint.files)
        + sum(stored[name].nbytes for names in extras.sidecars.values() for name in names)
        + (0 if inside is None else inside.totals.disk_bytes),
        apart=apart | extras.borrowed,
    )
    if inside is not None:
        peak = max(totals.peak_memory_bytes, inside.totals.peak_memory_bytes)
        totals = replace(totals, peak_memory_bytes=peak)
    plan = JobPlan(
        out=str(out),
        transform=transform.id,
        rotation_seed=transform.seed,
        rows=tuple(row_of(work, extras.notes.get(work.output.name, ())) for work in works),
        totals=totals,
        notes=_present(*extras.plan_notes, *_left_out(transform, extras.companion), stop_tokens.note),
        warnings=_present(*checkpoint.warnings, memory_note(totals.peak_memory_bytes)),
        hints=extras.hints,
        companion=inside,
    )
    return Job(
        checkpoint=checkpoint,
        transform=transform,
        works=works,
        plan=plan,
        config=config,
        stop_tokens=stop_tokens,
        extras=extras,
        kind=extras.kind or ("affine" if any(entries.values()) else "float"),
        out=out,
    )


def module_entries(works: tuple[Work, ...]) -> dict[str, ConfigEntry]:
    """Module path → its entry for ``config.json: quantization``."""
    return {work.output.module: work.quantizer.config_entry() for work in works if work.output.module is not None}


def _work(output: OutputTensor, quantizer: Quantizer) -> Work:
    return Work(output=output, quantizer=quantizer, stored=quantizer.outputs(output.name, output.shape))


def _stack_work(output: OutputTensor, choose: Choose) -> Work:
    """Every part by its own quantizer, all stored alike and one after another."""
    parts = tuple(_work(part, choose(part)) for part in output.parts)
    first = parts[0]
    kinds = {tuple((stored.dtype, stored.shape) for stored in part.stored) for part in parts}
    entries = [part.quantizer.config_entry() for part in parts]
    if len(kinds) > 1 or any(entry != entries[0] for entry in entries):
        raise UserError(f"{output.module}: its experts would be stored in different ways, a stack has one")
    stored = tuple(
        StoredTensor(
            name=f"{output.module}{tensor.name.removeprefix(str(first.output.module))}",
            dtype=tensor.dtype,
            shape=(len(parts), *tensor.shape),
        )
        for tensor in first.stored
    )
    return Work(output=output, quantizer=first.quantizer, stored=stored, parts=parts)


def _require_writable_config(folder: Path, config: Mapping[str, Any]) -> None:
    """JSON escapes can hold half characters (lone surrogates) that no file can: better refused now than at the end."""
    try:
        encode_config(config)
    except UnicodeEncodeError as error:
        raise SourceError(
            f"{folder / 'config.json'}: holds text that is not valid Unicode ({error.reason})",
            hint="remove the \\udXXX escape that stands alone",
        ) from error


def _with_stop_tokens(extra: Mapping[str, Any], stop_tokens: StopTokens) -> dict[str, Any]:
    """``extra``, and the union of stop tokens when the source's files disagree about them."""
    if stop_tokens.note is None:
        return dict(extra)
    return {"eos_token_id": list(stop_tokens.union), **extra}


def _require_separate(source: Path, out: Path) -> None:
    source, target = source.resolve(), out.resolve()
    if target == source or target.is_relative_to(source):
        raise UserError(
            f"{out}: the output lies in the source folder {source}", hint="choose a folder outside the source"
        )
    if source.is_relative_to(target):
        raise UserError(f"{out}: the output holds the source folder {source}", hint="choose another output folder")


def _left_out(transform: TransformPlan, companion: Job | None) -> tuple[str, ...]:
    """Notes for what the artifact leaves out; rotary tables, one a layer, are named once."""
    kept = {} if companion is None else companion.checkpoint.tensors
    reasons: dict[str, list[str]] = {}
    for dropped in transform.dropped:
        if dropped.name in kept and dropped.reason == COMPANION_REASON:
            continue
        reasons.setdefault(dropped.reason, []).append(dropped.name)
    notes = [
        f"left out: {names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''} ({reason})"
        for reason, names in reasons.items()
    ]
    announced = [key for key, value in transform.config_updates.items() if value is None and key in VISION_KEYS]
    if announced:
        notes.append(f"left out of config.json: {', '.join(announced)} (the checkpoint holds no vision tower)")
    return tuple(notes)


def _present(*notes: str | None) -> tuple[str, ...]:
    return tuple(note for note in notes if note)
