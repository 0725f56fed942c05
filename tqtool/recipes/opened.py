"""What a run opens before any work: source, texts and plans, held against each other, the disk and the target."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tqtool.calibration.calibrate import CalibrationJob, CalibrationRequest, plan_calibration
from tqtool.calibration.rows import first_shared, require_disjoint
from tqtool.errors import UserError
from tqtool.evals.teacher import TeacherRequest, dump_bytes
from tqtool.evals.text import TokenWindows
from tqtool.formats.hessians import INFO_NAME
from tqtool.formats.manifest import MANIFEST_NAME
from tqtool.pipeline.job import Job
from tqtool.pipeline.preflight import require_disk
from tqtool.recipes.jobs import Target, plan_quantization
from tqtool.recipes.schema import AllocationPart, ConvertPart, EvaluationPart, Recipe
from tqtool.runtime.load import load_tokenizer
from tqtool.source.checkpoint import Checkpoint, open_checkpoint
from tqtool.source.config import text_config

Advance = Callable[[float, str], None]
Progress = Callable[[str, float], AbstractContextManager[Advance]]
"""``progress(label, total)`` opens a bar."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRun:
    """A recipe that can be carried out in ``out``.

    Attributes:
        recipe: The recipe.
        out: Folder of the run.
        checkpoint: Its source.
        calibration: Planned; its ``out`` is another folder where a finished calibration is there already.
        evaluation: The dump to score the result with.
        measuring: The dump to measure swaps with; none of its windows is read by anything else.
        progress: Opens a bar.
        digests: SHA-256 of the source's tensors, once something that was found had to be held against them.
    """

    recipe: Recipe
    out: Path
    checkpoint: Checkpoint
    calibration: CalibrationJob | None
    evaluation: TeacherRequest | None
    measuring: TeacherRequest | None
    progress: Progress
    digests: dict[str, str] = field(default_factory=dict)


def open_run(recipe: Recipe, out: Path, progress: Progress) -> OpenRun:
    """Open everything that ``recipe`` names; nothing is written.

    Of the weights, what a fingerprint takes is read, and for a trellis in tiles every coded down_proj, whose columns'
    norms its plan needs: once for the artifact, or for each candidate.

    Raises:
        UserError: a part cannot be carried out; a text is missing, too short, or read by two parts.
        ArtifactError: ``out`` cannot be written, or the disk is too small for all that the run writes.
    """
    checkpoint = open_checkpoint(recipe.source, revision=recipe.revision)
    tokenizer = load_tokenizer(checkpoint.path)
    calibration = _calibration(recipe, out / "calibration")
    evaluation = None if recipe.evaluation is None else _request(recipe.evaluation, skip=0)
    scored = None if evaluation is None else evaluation.tokens(tokenizer)
    if calibration is not None and evaluation is not None and scored is not None:
        require_disjoint(calibration.rows, scored.tokens, str(evaluation.text))
    measuring = None
    if recipe.allocation is not None:
        measuring = _measuring(recipe.allocation, tokenizer, recipe.evaluation, scored)
        _require_apart(measuring, measuring.tokens(tokenizer).tokens, calibration, scored)
    run = OpenRun(
        recipe=recipe,
        out=out,
        checkpoint=checkpoint,
        calibration=calibration,
        evaluation=evaluation,
        measuring=measuring,
        progress=progress,
    )
    _require_room(run, _plans(recipe))
    return run


def _calibration(recipe: Recipe, folder: Path) -> CalibrationJob | None:
    part = recipe.calibration
    if part is None:
        return None
    request = CalibrationRequest(
        source=recipe.source,
        out=folder,
        text=Path(part.text),
        rows=part.rows,
        context=part.context,
        revision=recipe.revision,
        rotation_seed=None if recipe.rotation is None else recipe.rotation.seed,
        resume=True,
    )
    if (folder / INFO_NAME).exists():
        request = replace(request, out=folder / "unused")
    return plan_calibration(request)


def _request(part: EvaluationPart | AllocationPart, *, skip: int) -> TeacherRequest:
    return TeacherRequest(text=Path(part.text), windows=part.windows, context=part.context, top=part.top, skip=skip)


def _measuring(
    part: AllocationPart, tokenizer: Any, evaluation: EvaluationPart | None, scored: TokenWindows | None
) -> TeacherRequest:
    """Windows behind those that the evaluation reads, where both read one file; UserError for others there."""
    request = _request(part, skip=part.skip or 0)
    if evaluation is None or scored is None:
        return request
    if replace(request, windows=1).tokens(tokenizer).text_sha256 != scored.text_sha256:
        return request
    opened = int(scored.bos is not None)  # it is in each window and no part of the text
    if part.context <= opened + 1:
        raise UserError(f"allocation.context {part.context}: expected at least {opened + 2}")
    read = evaluation.windows * (evaluation.context - opened)
    behind = -(-read // (part.context - opened))
    if part.skip is not None and part.skip < behind:
        raise UserError(
            f"allocation.skip {part.skip}: the evaluation reads the first {behind} windows of {request.text}, "
            "the score would be flattered",
            hint="leave it out: measuring begins behind them",
        )
    return replace(request, skip=behind if part.skip is None else part.skip)


def _require_apart(
    request: TeacherRequest,
    measured: NDArray[np.uint32],
    calibration: CalibrationJob | None,
    scored: TokenWindows | None,
) -> None:
    """UserError if the measuring windows are part of what calibrates or of what scores."""
    if calibration is not None:
        index = first_shared(calibration.rows.sequences, measured)
        if index is not None:
            raise UserError(
                f"allocation: window {index} of {request.text} is part of the calibration text",
                hint="measure on another text, or on fewer windows; calibrate on fewer rows",
            )
    index = None if scored is None else first_shared(scored.tokens, measured)
    if index is not None:
        raise UserError(
            f"allocation: window {index} of {request.text} is part of the evaluation: the score would be flattered",
            hint="measure on another text",
        )


def _plans(recipe: Recipe) -> list[Job]:
    """The artifact, or all candidates for it, planned without Hessians into a place that is thrown away."""
    spent = recipe.allocation
    with tempfile.TemporaryDirectory() as scratch:  # planning writes nothing; it only wants a free name
        folder = Path(scratch)
        if spent is None:
            return [plan_quantization(recipe, Target(out=folder / "artifact", journal=folder / "journal"))]
        plans = [
            plan_quantization(recipe, Target(out=folder / str(rate), journal=folder / "journal", rate=rate))
            for rate in spent.rates
        ]
    if isinstance(recipe.quantize, ConvertPart) and spent.target_bpw is not None:
        least = _packed_bits(plans[0])
        if spent.target_bpw < least:
            raise UserError(
                f"allocation.target_bpw {spent.target_bpw}: the {spent.rates[0]}-bit candidate stores {least:.4f}",
                hint="raise it, or give lower candidates",
            )
    return plans


def _packed_bits(job: Job) -> float:
    """Bits a weight that the packed modules store."""
    packed = [work for work in job.works if isinstance(work.quantizer.config_entry(), dict)]
    stored = 8 * sum(stored.nbytes for work in packed for stored in work.stored)
    return stored / max(1, sum(work.parameters for work in packed))


def _require_room(run: OpenRun, plans: list[Job]) -> None:
    """Calibration, candidates, the artifact, the journal of the one in hand, and dumps; less what is there already."""
    largest = max(job.plan.totals.disk_bytes for job in plans)
    candidates = 0 if run.recipe.allocation is None else sum(job.plan.totals.disk_bytes for job in plans)
    needed = 0 if (run.out / "artifact" / MANIFEST_NAME).exists() else candidates + 2 * largest
    if run.calibration is not None:
        needed += run.calibration.disk_bytes
    config = run.checkpoint.config
    vocabulary = text_config(config).get("vocab_size", config.get("vocab_size"))
    for dump in (run.measuring, run.evaluation):
        if dump is not None:
            top = min(dump.top, vocabulary) if type(vocabulary) is int else dump.top
            needed += dump_bytes(windows=dump.windows, context=dump.context, top=top)
    if run.out.is_dir():
        needed -= sum(path.stat().st_size for path in run.out.rglob("*") if path.is_file())
    folder = next(parent for parent in (run.out.absolute(), *run.out.absolute().parents) if parent.is_dir())
    require_disk(folder, max(0, needed), "the run")
