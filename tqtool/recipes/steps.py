"""The steps of a run: each finds what an earlier run finished and checks whose it is, or does it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqtool.artifact.output import whole_file
from tqtool.artifact.reader import read_manifest
from tqtool.artifact.verify import verify_artifact
from tqtool.calibration.calibrate import calibrate
from tqtool.errors import ArtifactError
from tqtool.evals.kl import score_kl
from tqtool.evals.teacher import TeacherRequest, dump_teacher, model_hash
from tqtool.formats.hessians import open_calibration
from tqtool.formats.manifest import MANIFEST_NAME, Totals
from tqtool.formats.teacher import open_dump
from tqtool.pipeline.convert import check_artifact
from tqtool.pipeline.job import Job, Meter, silent
from tqtool.pipeline.trellis import check_trellis, coded_weights
from tqtool.recipes.jobs import is_trellis
from tqtool.recipes.opened import OpenRun
from tqtool.runtime.load import load, model_folder, scoring_compute

DONE, FOUND = "done", "found"


def calibration_step(run: OpenRun) -> tuple[Path, str]:
    """``OUT/calibration`` and whether it was done now; ArtifactError if another one is there."""
    job, folder = run.calibration, run.out / "calibration"
    assert job is not None, "the schema sees to it"
    if job.request.out == folder:
        with run.progress("calibrate", job.layers) as advance:
            calibrate(job, lambda layers: advance(layers, "layers"))
        return folder, DONE
    found = open_calibration(folder).info
    facts = (found.source_fingerprint, found.text, found.context, found.transform, found.rotation_seed)
    if facts != (job.fingerprint, job.rows.record, job.request.context, job.plan.id, job.plan.seed):
        raise ArtifactError(f"{folder}: a calibration of another source, text or setting", hint="remove it")
    return folder, FOUND


def write_artifact(run: OpenRun, job: Job, meter: Meter, label: str) -> None:
    """Carry ``job`` out."""
    trellis = is_trellis(run.recipe)
    check = check_trellis if trellis else check_artifact
    with run.progress("check source", job.checkpoint.nbytes) as advance:
        job.check_source(advance)
    with run.progress(label, coded_weights(job) if trellis else job.plan.totals.parameters) as advance:
        meter.advance = advance
        each_tensor = silent if trellis else advance
        job.run(each_tensor, check=lambda folder: check(job, folder, "forward"), source_is_checked=True)


def is_written(folder: Path) -> bool:
    """True where an artifact has its final name."""
    return (folder / MANIFEST_NAME).exists()


def require_inside(folder: Path, files: Mapping[str, bytes]) -> None:
    """ArtifactError unless the artifact ``folder`` carries ``files``."""
    for name, content in files.items():
        path = folder / name
        if not path.is_file() or path.read_bytes() != content:
            raise ArtifactError(f"{folder}: made by another recipe", hint="remove it and run again")


def verified(folder: Path) -> Totals:
    """Totals of an artifact that verifies; ArtifactError if it does not."""
    report = verify_artifact(folder)
    if not report.is_good:
        problem = next(check for check in report.checks if check.status == "fail")
        raise ArtifactError(f"{folder}: {problem.name}: {problem.problems[0]}", hint="remove it and run again")
    return read_manifest(folder).totals


def dump_step(run: OpenRun, dump: Path, request: TeacherRequest, label: str) -> str:
    """Make the teacher dump, or find that of the same model, text and windows; ArtifactError for another one."""
    if not dump.exists():
        source = load(run.recipe.source, compute=scoring_compute())
        with run.progress(label, request.windows) as advance:
            dump_teacher(source, dump, request, lambda done: advance(done, "windows"))
        return DONE
    info = open_dump(dump).info
    text = hashlib.sha256(request.text.read_bytes()).hexdigest()
    wanted = (model_hash(model_folder(run.recipe.source)), text, request.windows, request.context, request.skip)
    if (info.model_hash, info.text_sha256, info.windows, info.context, info.skip) != wanted:
        raise ArtifactError(f"{dump}: a dump of another source, text or setting", hint="remove it and run again")
    return FOUND


def score_step(run: OpenRun, dump: Path) -> tuple[str, dict[str, Any]]:
    """``OUT/kl.json``: the artifact against ``dump``."""
    scores = run.out / "kl.json"
    if scores.exists():
        return FOUND, read_scores(scores)
    report = score(run, run.out / "artifact", dump, "kl")
    with whole_file(scores) as (file, _):
        file.write(json.dumps(report, indent=1, default=str).encode())
    return DONE, report


def score(run: OpenRun, folder: Path, dump: Path, label: str) -> dict[str, Any]:
    """A KL report of ``folder``, ready for JSON."""
    teacher = open_dump(dump)
    model = load(folder, compute=scoring_compute())
    with run.progress(label, teacher.info.windows) as advance:
        return asdict(score_kl(model, teacher, lambda done: advance(done, "windows")))


def read_scores(path: Path) -> dict[str, Any]:
    """What ``score_step`` wrote; ArtifactError if it is damaged."""
    try:
        found: dict[str, Any] = json.loads(path.read_bytes())
        float(found["kl"]["mean"]), float(found["ppl"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ArtifactError(f"{path}: damaged ({error})", hint="remove it and run again") from error
    return found
