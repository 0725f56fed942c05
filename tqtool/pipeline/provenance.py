"""What a finished job says about itself: the manifest, ``optiq_metadata.json`` and the model card."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqtool.artifact.card import CARD_NAME, CardFacts, card_title, render_card, stated_fields
from tqtool.artifact.writer import ArtifactWriter, shard_of
from tqtool.errors import NumericalError, SourceError
from tqtool.formats.manifest import (
    FileRecord,
    Manifest,
    PartRecord,
    SourceRecord,
    StoredRecord,
    TensorRecord,
    Totals,
    TransformRecord,
)
from tqtool.pipeline.plan import JobTotals, Work
from tqtool.source.checkpoint import Checkpoint
from tqtool.source.fingerprint import fingerprint
from tqtool.transform.plan import TransformPlan

if TYPE_CHECKING:
    from tqtool.pipeline.job import Job

OPTIQ_NAME = "optiq_metadata.json"
_TOOLS = ("tqtool", "mlx", "numpy", "scipy", "ml-dtypes")


def transform_records(checkpoint: Checkpoint, transform: TransformPlan) -> list[TransformRecord]:
    """Transforms folded into the tensors: those the source already carried, then this job's."""
    records = carried_transforms(checkpoint)
    if transform.id != "identity":
        deviations = list(transform.deviations)
        records.append(TransformRecord(id=transform.id, seed=transform.seed, deviations=deviations))
    return records


def optiq_metadata(records: Sequence[TransformRecord], job: Job) -> bytes:
    """The cross-tool note: which transforms the weights carry, and the bits of each module."""
    transforms = [
        {
            "id": record.id,
            "family": record.id.partition(".")[2] or record.id,
            "seed": record.seed,
            "deviations": record.deviations,
        }
        for record in records
    ]
    per_layer = {
        work.output.module: {"bits": entry["bits"], "group_size": entry["group_size"]}
        for work in job.works
        if work.output.module is not None and isinstance(entry := work.quantizer.config_entry(), dict)
    }
    body = {
        "method": f"tqtool {job.kind}",
        "base_model": _base_model(job.checkpoint),
        "achieved_bpw": round(job.plan.totals.bits_per_weight, 4),
        "weight_transforms": transforms,
        "per_layer": per_layer,
    }
    return _json(body)


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """One piece that was made: what its quantizer said, the hash of its source, the key to find it by."""

    stats: Mapping[str, float]
    notes: tuple[str, ...]
    source_sha256: str
    key: str | None


def tensor_record(
    work: Work, pieces: Sequence[Made], known_notes: tuple[str, ...], writer: ArtifactWriter
) -> TensorRecord:
    """The manifest row of one written tensor; ``known_notes`` are those about a stack as a whole."""
    places = shard_of(writer.shards)
    only = None if work.parts else pieces[0]
    return TensorRecord(
        name=work.output.name,
        module=work.output.module,
        role=work.output.role.value,
        source=None if only is None else work.output.source,
        source_sha256=None if only is None else only.source_sha256,
        key=None if only is None else only.key,
        folds=[str(op) for op in work.output.folds],
        quantizer=work.label,
        shape=list(work.output.shape),
        parameters=work.parameters,
        stored=[
            StoredRecord(
                name=stored.name,
                dtype=stored.dtype.value,
                shape=list(stored.shape),
                file=places[stored.name],
                size_bytes=stored.nbytes,
                sha256=writer.tensor_sha256[stored.name],
            )
            for stored in work.stored
        ],
        notes=list(known_notes if only is None else only.notes),
        stats={} if only is None else _finite_stats(work.output.name, only.stats),
        parts=[_part_record(part, made) for part, made in zip(work.parts, pieces, strict=True)] if work.parts else [],
    )


def _part_record(part: Work, made: Made) -> PartRecord:
    output = part.output
    return PartRecord(
        name=output.name,
        source=output.source,
        rows=None if output.rows is None else list(output.rows),
        source_sha256=made.source_sha256,
        key=made.key,
        folds=[str(op) for op in output.ops],
        quantizer=part.quantizer.label,
        notes=list(made.notes),
        stats=_finite_stats(output.name, made.stats),
    )


def build_manifest(
    job: Job,
    *,
    records: Sequence[TensorRecord],
    transforms: Sequence[TransformRecord],
    source_sha256: Mapping[str, str],
    writer: ArtifactWriter,
) -> Manifest:
    """The manifest of everything ``writer`` holds."""
    return Manifest(
        kind=job.kind,
        source=SourceRecord(
            kind=job.checkpoint.origin.kind,
            location=source_name(job.checkpoint),
            revision=job.checkpoint.origin.revision,
            content_sha256=used_content(job.checkpoint, source_sha256),
            sample_sha256=fingerprint(job.checkpoint),
        ),
        transforms=list(transforms),
        request=dict(job.extras.request),
        tools=tool_versions(),
        tensors=list(records),
        totals=_totals(job.plan.totals),
        files={
            name: FileRecord(size_bytes=record.size_bytes, sha256=record.sha256)
            for name, record in sorted(writer.files.items())
        },
        notes=list(job.plan.notes),
    )


def card(job: Job, manifest: Manifest) -> bytes:
    """The model card; ``manifest`` lists everything but it."""
    name = source_name(job.checkpoint).rpartition("/")[2]
    facts = CardFacts(
        title=card_title(name, manifest),
        base_model=_base_model(job.checkpoint),
        stated=stated_fields(job.checkpoint.path / CARD_NAME),
        is_quantized=job.kind != "float",
        needs_code=not job.extras.is_stock,
        tags=job.extras.tags,
    )
    return render_card(manifest, facts)


def source_name(checkpoint: Checkpoint) -> str:
    """The hub id, or the folder's name: an absolute path says nothing to others and must not be published."""
    origin = checkpoint.origin
    return origin.location if origin.kind == "hub" else Path(origin.location).name


def tool_versions() -> dict[str, str]:
    """Versions of what decides bytes."""
    return {name: importlib.metadata.version(name) for name in _TOOLS}


def _base_model(checkpoint: Checkpoint) -> str | None:
    return checkpoint.origin.location if checkpoint.origin.kind == "hub" else None


def carried_transforms(checkpoint: Checkpoint) -> list[TransformRecord]:
    """Transforms the source says it carries. To lose them would misreport the artifact: a bad file is an error."""
    path = checkpoint.path / OPTIQ_NAME
    if not path.is_file():
        return []
    try:
        entries = json.loads(path.read_bytes()).get("weight_transforms", [])
        return [
            TransformRecord(id=entry["id"], seed=entry.get("seed"), deviations=list(entry.get("deviations", ())))
            for entry in entries
        ]
    except (ValueError, AttributeError, TypeError, KeyError) as error:
        reason = str(error).splitlines()[0]
        raise SourceError(
            f"{path}: weight_transforms: expected a list of {{id, seed, deviations}}, found something else ({reason})",
            hint="repair or remove the file; it only says which transforms the weights already carry",
        ) from error


def used_content(checkpoint: Checkpoint, source_sha256: Mapping[str, str]) -> str:
    """SHA-256 over the source's layout and the hash of each tensor that was used, by name."""
    body = {"layout": checkpoint.content_hash(), "tensors": dict(source_sha256)}
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _totals(totals: JobTotals) -> Totals:
    return Totals(
        parameters=totals.parameters,
        source_parameters=totals.source_parameters,
        tensor_bytes=totals.tensor_bytes,
        bits_per_weight=totals.bits_per_weight,
        bits_per_source_weight=totals.bits_per_source_weight,
        code_bits_per_weight=totals.code_bits_per_weight,
    )


def _finite_stats(name: str, stats: Mapping[str, float]) -> dict[str, float]:
    """Refused here, at its tensor, and not by the JSON encoder after the last one."""
    for key, value in stats.items():
        if not math.isfinite(value):
            raise NumericalError(f"{name}: the quantizer's {key} is {value}")
    return {key: float(value) for key, value in stats.items()}


def _json(body: dict[str, Any]) -> bytes:
    return (json.dumps(body, indent=2, ensure_ascii=False) + "\n").encode()
