"""The steps of a run: each finds what an earlier run finished and checks whose it is, or does it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from tqtool.artifact.output import whole_file
from tqtool.artifact.reader import read_manifest
from tqtool.artifact.verify import verify_artifact
from tqtool.calibration.calibrate import calibrate
from tqtool.errors import ArtifactError
from tqtool.evals.kl import KlReport, score_kl
from tqtool.evals.teacher import TeacherRequest, dump_teacher
from tqtool.formats.hessians import open_calibration
from tqtool.formats.manifest import MANIFEST_NAME, Totals
from tqtool.formats.teacher import TeacherDump, open_dump
from tqtool.pipeline.convert import check_artifact
from tqtool.pipeline.job import Job, Meter, silent
from tqtool.pipeline.trellis import check_trellis, coded_weights
from tqtool.recipes.jobs import is_trellis
from tqtool.recipes.opened import OpenRun
from tqtool.recipes.sources import AGAIN
from tqtool.runtime.load import load, scoring_compute
from tqtool.source.fingerprint import fingerprint

DONE, FOUND = "done", "found"

DUMP_FACTS: Final = ("model_hash", "text_sha256", "windows", "context", "top", "vocab_size", "skip")
"""What a score repeats of its dump, which may have been removed since: it is large."""


def calibration_step(run: OpenRun) -> tuple[Path, str]:
    """``OUT/calibration`` and whether it was done now; ArtifactError if another one is there."""
    job, folder = run.calibration, run.out / "calibration"
    assert job is not None, "the schema sees to it"
    if job.request.out == folder:
        with run.progress("calibrate", job.layers) as advance:
            calibrate(job, lambda layers: advance(layers, "layers"))
        return folder, DONE
    found = open_calibration(folder).info
    facts = (found.source_fingerprint, found.tokenizer_sha256, found.text, found.context)
    basis = (found.transform, found.rotation_seed)
    wanted = (job.fingerprint, job.tokenizer_sha256, job.rows.record, job.request.context)
    if (facts, basis) != (wanted, (job.plan.id, job.plan.seed)):
        raise ArtifactError(
            f"{folder}: a calibration of another source, tokenizer, text or setting", hint="choose another OUT"
        )
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


def manifest_sha256(folder: Path) -> str:
    """Names what an artifact is: with one that verifies, every byte of it."""
    return hashlib.sha256((folder / MANIFEST_NAME).read_bytes()).hexdigest()


def require_inside(folder: Path, files: Mapping[str, bytes]) -> None:
    """ArtifactError unless the artifact ``folder`` carries ``files``."""
    for name, content in files.items():
        path = folder / name
        if not path.is_file() or path.read_bytes() != content:
            raise ArtifactError(f"{folder}: made by another recipe", hint=AGAIN)


def require_calibrated(folder: Path, hessians: Path | None) -> None:
    """ArtifactError unless the artifact ``folder`` was made under the calibration ``hessians``, or None, under none.

    A recipe inside an artifact has the name of the text; other words under that name are another calibration.
    """
    wanted = None if hessians is None else open_calibration(hessians).info.content_sha256()
    found = read_manifest(folder).request.get("calibration", {}).get("sha256")
    if found != wanted:
        raise ArtifactError(f"{folder}: made under another calibration than {hessians}", hint=AGAIN)


def verified(folder: Path) -> Totals:
    """Totals of an artifact that verifies; ArtifactError if it does not."""
    report = verify_artifact(folder)
    if not report.is_good:
        problem = next(check for check in report.checks if check.status == "fail")
        raise ArtifactError(f"{folder}: {problem.name}: {problem.problems[0]}", hint=AGAIN)
    return read_manifest(folder).totals


def dump_step(run: OpenRun, dump: Path, request: TeacherRequest, label: str) -> str:
    """Make the teacher dump, or find that of the same model, text and windows; ArtifactError for another one."""
    if not dump.exists():
        source = load(run.checkpoint.path, compute=scoring_compute())  # what was opened: a hub id would be main
        with run.progress(label, request.windows) as advance:
            dump_teacher(source, dump, request, lambda done: advance(done, "windows"))
        return DONE
    _open_own(run, dump, request)
    return FOUND


def score_step(run: OpenRun, dump: Path) -> tuple[str, dict[str, Any]]:
    """``OUT/kl.json``: the artifact against ``dump``; what is there already is held against both, see below."""
    assert run.evaluation is not None, "asked for only then"
    scores = run.out / "kl.json"
    if scores.exists():
        found = read_scores(scores)
        require_scored(run, scores, found, dump, run.evaluation)
        return FOUND, found
    dump_step(run, dump, run.evaluation, "teacher")
    report = {**asdict(score(run, run.out / "artifact", dump, "kl")), "scored": scored_on(run, dump)}
    write_sealed(scores, report)
    return DONE, report


def write_sealed(path: Path, report: Mapping[str, Any]) -> None:
    """``report`` as JSON with its ``seal``: what somebody edits is no longer what was measured."""
    body = json.loads(json.dumps(report, default=str, allow_nan=False))
    with whole_file(path) as (file, _):
        file.write(json.dumps({**body, "seal": _seal(body)}, indent=1).encode())


def _seal(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(dict(body), sort_keys=True).encode()).hexdigest()


def score(run: OpenRun, folder: Path, dump: Path, label: str) -> KlReport:
    """KL of ``folder`` on ``dump``."""
    teacher = open_dump(dump)
    model = load(folder, compute=scoring_compute())
    with run.progress(label, teacher.info.windows) as advance:
        return score_kl(model, teacher, lambda done: advance(done, "windows"))


def scored_on(run: OpenRun, dump: Path) -> dict[str, Any]:
    """What a score of ``OUT/artifact`` on ``dump`` is of: kept with it as ``scored``."""
    return {"manifest_sha256": manifest_sha256(run.out / "artifact"), **_facts(open_dump(dump))}


def require_scored(run: OpenRun, path: Path, found: Mapping[str, Any], dump: Path, request: TeacherRequest) -> None:
    """Hold the scores ``found`` in ``path`` against ``OUT/artifact``, ``dump`` and what ``request`` asks for.

    A score of something else is refused and never silently made anew: that somebody put it there, or exchanged what
    it is of, is news. Where the dump was removed, what the score repeats of it must be what ``request`` asks for.

    Raises:
        ArtifactError: another artifact, dump, source, text or setting; scores that do not say what they are of.
    """
    if found.get("seal") != _seal({name: value for name, value in found.items() if name != "seal"}):
        raise ArtifactError(f"{path}: was edited since it was measured", hint=AGAIN)
    scored = found.get("scored")
    if not isinstance(scored, dict):
        raise ArtifactError(f"{path}: does not say what it scored", hint=AGAIN)
    artifact = run.out / "artifact"
    if scored.get("manifest_sha256") != manifest_sha256(artifact):
        raise ArtifactError(f"{path}: scores of another artifact than {artifact}", hint=AGAIN)
    facts = {name: value for name, value in scored.items() if name != "manifest_sha256"}
    if dump.exists():
        if facts != _facts(_open_own(run, dump, request)):
            raise ArtifactError(f"{path}: scores on another dump than {dump}", hint=AGAIN)
    elif not _is_asked_for(run, facts, request):
        raise ArtifactError(f"{path}: scores on a dump of another source, text or setting", hint=AGAIN)


def read_scores(path: Path) -> dict[str, Any]:
    """What ``score_step`` wrote; ArtifactError if it is damaged."""
    try:
        found: dict[str, Any] = json.loads(path.read_bytes())
        float(found["kl"]["mean"]), float(found["ppl"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ArtifactError(f"{path}: damaged ({error})", hint=AGAIN) from error
    return found


def _open_own(run: OpenRun, path: Path, request: TeacherRequest) -> TeacherDump:
    """The dump ``path``; ArtifactError unless it is of this source and what ``request`` asks for."""
    dump = open_dump(path)
    if not _is_asked_for(run, _facts(dump), request):
        raise ArtifactError(f"{path}: a dump of another source, text or setting", hint=AGAIN)
    return dump


def _facts(dump: TeacherDump) -> dict[str, Any]:
    facts = {name: getattr(dump.info, name) for name in DUMP_FACTS}
    return {"dump_sha256": dump.header.metadata["info_sha256"], **facts}


def _is_asked_for(run: OpenRun, facts: Mapping[str, Any], request: TeacherRequest) -> bool:
    vocabulary = facts.get("vocab_size")
    wanted = {
        "model_hash": fingerprint(run.checkpoint),
        "text_sha256": hashlib.sha256(request.text.read_bytes()).hexdigest(),
        "windows": request.windows,
        "context": request.context,
        "top": min(request.top, vocabulary) if isinstance(vocabulary, int) else None,
        "skip": request.skip,
    }
    return all(facts.get(name) == value for name, value in wanted.items())
