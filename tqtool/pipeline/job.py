"""One job: each output tensor in turn, from checkpoint through fold and quantizer into the writer.

``plan_job`` decides and validates everything without reading a tensor; ``Job.run`` is dull. Peak memory: the
source tensor, its float32 fold, what the quantizer returns, and whatever the quantizer needs inside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tqtool.artifact.config import build_config, encode_config
from tqtool.artifact.writer import ArtifactWriter, check_target, plan_shards
from tqtool.errors import ArtifactError, NumericalError
from tqtool.formats.dtypes import DType, dtype_of
from tqtool.pipeline.plan import JobPlan, Work, row_of, totals_of
from tqtool.solve.quantizer import ConfigEntry, Quantizer, QuantResult, takes_source_dtype
from tqtool.source.checkpoint import Checkpoint
from tqtool.transform.apply import apply_folds
from tqtool.transform.plan import OutputTensor, TransformPlan

Choose = Callable[[OutputTensor], Quantizer]
Progress = Callable[[float, str], None]

OTHER_FILE_BYTES = 1 << 20
"""Allowance for headers, index, config, card and manifest in the disk estimate."""


def _silent(amount: float, what: str) -> None:
    del amount, what


@dataclass(frozen=True, slots=True, kw_only=True)
class JobExtras:
    """What a verb adds to the common job.

    Attributes:
        config: Further top-level keys of ``config.json``, e.g. ``trellis`` and ``model_file``.
        files: Further files of the artifact, relative path → bytes or a file to copy.
        notes: Tensor name → remarks made while choosing its quantizer.
        default_entry: Top-level triple of ``quantization``; without it the most used entry.
        dtype: Dtype of dense tensors when set for the whole model; written into the config.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, bytes | Path] = field(default_factory=dict)
    notes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    default_entry: dict[str, Any] | None = None
    dtype: DType | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorReport:
    """What happened to one output tensor."""

    tensor: str
    quantizer: str
    stats: Mapping[str, float]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    """What a finished job wrote."""

    out: Path
    plan: JobPlan
    reports: tuple[TensorReport, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A validated job; ``run`` executes it."""

    checkpoint: Checkpoint
    transform: TransformPlan
    works: tuple[Work, ...]
    plan: JobPlan
    config: Mapping[str, Any]
    extras: JobExtras
    out: Path

    def run(self, progress: Progress = _silent) -> JobResult:
        """Write the artifact; nothing is left under ``out`` or beside it when this raises.

        Args:
            progress: Called after each tensor with its parameter count and name.
        """
        planned = [stored for work in self.works for stored in work.stored]
        reports = []
        with ArtifactWriter(self.out, planned, total_parameters=self.plan.totals.parameters) as writer:
            for work in self.works:
                result = self._quantize(work)
                for name, array in result.tensors.items():
                    writer.write(name, array)
                reports.append(self._report(work, result))
                progress(work.parameters, work.output.name)
            self._write_companions(writer)
            writer.commit()
            notes = tuple(writer.notes)
        return JobResult(out=self.out, plan=self.plan, reports=tuple(reports), notes=notes)

    def _quantize(self, work: Work) -> QuantResult:
        output = work.output
        if output.ops or not takes_source_dtype(work.quantizer):
            weight = apply_folds(output, self._read)
        else:
            weight = self._read(output.source)
        result = work.quantizer.run(output.name, weight)
        found = [(name, dtype_of(array), tuple(array.shape)) for name, array in result.tensors.items()]
        promised = [(stored.name, stored.dtype, stored.shape) for stored in work.stored]
        if found != promised:
            raise ArtifactError(
                f"{output.name}: {work.quantizer.label} promised {promised} and returned {found}"
            )
        return result

    def _read(self, name: str) -> NDArray[Any]:
        array = self.checkpoint.tensors[name].read()
        require_finite_array(name, array)
        return array

    def _report(self, work: Work, result: QuantResult) -> TensorReport:
        notes = (*self.extras.notes.get(work.output.name, ()), *result.notes)
        return TensorReport(
            tensor=work.output.name, quantizer=work.quantizer.label, stats=dict(result.stats), notes=notes
        )

    def _write_companions(self, writer: ArtifactWriter) -> None:
        writer.add_bytes("config.json", encode_config(self.config))
        writer.add_index()
        for path in self.checkpoint.files:
            if path.name not in writer.files:
                writer.copy_file(path.name, path)
        for relpath, content in sorted(self.extras.files.items()):
            if isinstance(content, bytes):
                writer.add_bytes(relpath, content)
            else:
                writer.copy_file(relpath, content)


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
        UserError: a quantizer cannot take its tensor, or ``out`` cannot be written.
    """
    extras = extras or JobExtras()
    check_target(out)
    works = tuple(_work(output, choose(output)) for output in transform.outputs)
    entries: dict[str, ConfigEntry] = {
        work.output.module: work.quantizer.config_entry() for work in works if work.output.module is not None
    }
    config = build_config(
        transform.updated_config(dict(checkpoint.config)),
        entries=entries,
        default=extras.default_entry,
        dtype=extras.dtype,
        extra=extras.config,
    )
    shards = plan_shards([stored for work in works for stored in work.stored])
    other_bytes = OTHER_FILE_BYTES + sum(path.stat().st_size for path in checkpoint.files)
    plan = JobPlan(
        out=str(out),
        transform=transform.id,
        rotation_seed=transform.seed,
        rows=tuple(row_of(work, extras.notes.get(work.output.name, ())) for work in works),
        totals=totals_of(checkpoint, works, n_shards=len(shards), other_bytes=other_bytes),
        notes=(),
    )
    return Job(
        checkpoint=checkpoint,
        transform=transform,
        works=works,
        plan=plan,
        config=config,
        extras=extras,
        out=out,
    )


def require_finite_array(name: str, array: NDArray[Any]) -> None:
    """Raise NumericalError when a float array holds NaN or infinity."""
    if array.dtype.kind in "iub" or bool(np.isfinite(array).all()):
        return
    raise NumericalError(f"{name}: holds NaN or infinite values")


def _work(output: OutputTensor, quantizer: Quantizer) -> Work:
    return Work(output=output, quantizer=quantizer, stored=quantizer.outputs(output.name, output.shape))
