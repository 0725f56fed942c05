"""``tqtool sensitivity``: swap one group of modules at a time between artifacts, measure KL to the teacher.

In reference ``high`` every group has its highest rate and one at a time is lowered; in ``low`` one at a time is raised.
``high`` is the default: where the lowest rate breaks the model, swaps in it measure noise.
The model runs only from the layer that was touched. An interrupted run is resumed swap by swap and ends in the same
bytes.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tqtool.artifact.output import check_writable, whole_file
from tqtool.errors import UserError
from tqtool.evals.candidates import Candidates, CodedArtifact, open_candidates, teacher_notes
from tqtool.evals.estimate import estimate
from tqtool.evals.swap_log import SwapLog, log_path, open_log
from tqtool.evals.swaps import SwapScorer
from tqtool.formats.sensitivity import Group, Reference, Sensitivity, TeacherRecord, Transform, Value, encode
from tqtool.formats.teacher import TeacherDump, open_dump
from tqtool.runtime.donor import Donor
from tqtool.runtime.load import load
from tqtool.transform.plan import Role

BASE_MEMORY_BYTES = 500 << 20

Tick = Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SensitivityRequest:
    """What to measure.

    Attributes:
        artifacts: Candidates, in any order.
        teacher: Dump of the model that they were made from.
        out: File to write.
        reference: What a swap is compared with.
        windows: Of the dump, from its start; None is all.
        include_head: Also swap an untied head.
        resume: Go on with an interrupted run.
    """

    artifacts: tuple[Path, ...]
    teacher: Path
    out: Path
    reference: Reference = "high"
    windows: int | None = None
    include_head: bool = False
    resume: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SensitivityJob:
    """A validated request; nothing is loaded yet."""

    request: SensitivityRequest
    candidates: Candidates
    dump: TeacherDump
    windows: int

    @property
    def reference(self) -> CodedArtifact:
        """The artifact that the swaps start from."""
        return self.candidates.artifacts[0 if self.request.reference == "low" else -1]

    @property
    def others(self) -> tuple[CodedArtifact, ...]:
        """The artifacts that groups are taken from."""
        return tuple(artifact for artifact in self.candidates.artifacts if artifact is not self.reference)

    @property
    def swaps(self) -> int:
        """How many measurements there are."""
        return len(self.candidates.groups) * len(self.others)

    @property
    def peak_memory_bytes(self) -> int:
        """The dense model, hidden states and logits; a group of another artifact is small against the base."""
        info, manifest = self.dump.info, self.reference.manifest
        hidden = next(record.shape[-1] for record in manifest.tensors if record.role == Role.EMBEDDING.value)
        states = 4 * hidden * self.windows * info.context
        return BASE_MEMORY_BYTES + 4 * manifest.totals.parameters + states + 8 * info.context * info.vocab_size

    @property
    def notes(self) -> tuple[str, ...]:
        """What one may want and should know; see ``teacher_notes``."""
        return teacher_notes(self.candidates, self.dump)

    def key(self) -> str:
        """Names the run: two with one key give the same bytes."""
        facts = [
            [artifact.manifest_sha256 for artifact in self.candidates.artifacts],
            self.candidates.groups,
            [self.dump.header.metadata["info_sha256"], self.windows, self.request.reference],
            _tools(),
        ]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def plan_sensitivity(request: SensitivityRequest) -> SensitivityJob:
    """Open candidates and dump, check the target; no weight is read.

    Raises:
        UserError: see ``open_candidates``, ``open_dump``; more windows than there are; ``out`` is taken, or an
            interrupted run is there and ``resume`` was not given.
        ArtifactError: an artifact or the dump is damaged; ``out`` cannot be written.
    """
    candidates = open_candidates(request.artifacts, include_head=request.include_head)
    dump = open_dump(request.teacher)
    windows = dump.info.windows if request.windows is None else request.windows
    if not 1 <= windows <= dump.info.windows:
        raise UserError(f"--windows {windows}: the dump has {dump.info.windows}")
    out, log = request.out, log_path(request.out)
    if log.exists() and not request.resume:
        raise UserError(f"{log}: an interrupted measurement", hint="--resume finishes it")
    if out.exists() and not log.exists():
        raise UserError(f"{out}: exists already", hint="give another name")
    check_writable(out)
    return SensitivityJob(request=request, candidates=candidates, dump=dump, windows=windows)


def measure_sensitivity(job: SensitivityJob, tick: Tick = lambda swaps: None) -> Sensitivity:
    """Run ``job`` and write its file; ``tick(1)`` after each swap, also for those of an earlier run.

    Memory: the reference model dense, one group of another artifact, and what ``SwapScorer`` says.

    Raises:
        UserError: model and dump do not fit, or a module cannot be exchanged.
        NumericalError: logits or a KL that are not finite.
        ArtifactError: writing failed, or the log is damaged, of another run or in use.
    """
    log = log_path(job.request.out)
    with open_log(log, job.key()) as done:
        tick(len(done.values))
        scorer = SwapScorer(load(job.reference.folder, compute="expand"), job.dump, job.windows)
        reference = scorer.score()
        _measure(job, scorer, reference, done, tick)
        result = _document(job, reference, done)
        with whole_file(job.request.out) as (file, _):
            file.write(encode(result))
        log.unlink(missing_ok=True)
    return result


def _measure(
    job: SensitivityJob, scorer: SwapScorer, reference: NDArray[np.float64], done: SwapLog, tick: Tick
) -> None:
    donors = {artifact.setting.bits: Donor(artifact.folder) for artifact in job.others}
    places = [min(map(scorer.layer_of, group)) for group in job.candidates.groups]
    sign = 1 if job.request.reference == "low" else -1
    for place, index in sorted((place, index) for index, place in enumerate(places)):
        for bits, donor in donors.items():
            if (index, bits) in done.values:
                continue
            while scorer.layer < place:
                scorer.advance()
            group = job.candidates.groups[index]
            with scorer.exchanged({name: donor.take(name, scorer.dtype_of(name)) for name in group}):
                change = estimate(sign * (reference - scorer.score()))
            done.add((index, bits), Value(mean=change.mean, standard_error=change.se))
            tick(1)


def _document(job: SensitivityJob, reference: NDArray[np.float64], done: SwapLog) -> Sensitivity:
    candidates, info = job.candidates, job.dump.info
    kl, own = estimate(reference), job.reference.setting
    sizes = {artifact.setting.group_size for artifact in candidates.artifacts}
    groups = []
    for index, modules in enumerate(candidates.groups):
        counts = candidates.parameters(modules)
        measured = {str(each.setting.bits): done.values[index, each.setting.bits] for each in job.others}
        groups.append(
            Group(
                modules=list(modules),
                param_counts=counts,
                values={str(own.bits): Value(mean=0.0, standard_error=0.0), **measured},
                bits_per_weight={
                    str(each.setting.bits): each.stored_bits(modules) / sum(counts) for each in candidates.artifacts
                },
            )
        )
    manifest = job.reference.manifest
    return Sensitivity(
        base_model=manifest.source.location,
        source_sample_sha256=manifest.source.sample_sha256,
        transforms=[Transform(id=record.id, seed=record.seed) for record in manifest.transforms],
        candidate_bits=[artifact.setting.bits for artifact in candidates.artifacts],
        group_size=sizes.pop() if len(sizes) == 1 else None,
        reference=job.request.reference,
        reference_kl=Value(mean=kl.mean, standard_error=kl.se),
        candidates=candidates.described(),
        groups=groups,
        protected=list(candidates.protected),
        teacher=TeacherRecord(
            model=Path(info.model).name,
            model_hash=info.model_hash,
            text=info.text,
            text_sha256=info.text_sha256,
            windows=job.windows,
            context=info.context,
            top=info.top,
            skip=info.skip,
        ),
        tools=_tools(),
        notes=list(job.notes),
    )


def _tools() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in ("tqtool", "mlx", "mlx-lm", "numpy")}
