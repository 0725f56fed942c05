"""``tqtool run``: carry a recipe out, step by step, each skipped if an earlier run has finished it.

OUT/recipe.yaml             the resolved recipe, written first
OUT/calibration/            if Hessians are needed
OUT/artifact/               the result, with the recipe inside
OUT/teacher.safetensors     if there is an evaluation
OUT/kl.json                 its scores
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tqtool.artifact.output import whole_file
from tqtool.artifact.reader import read_manifest
from tqtool.artifact.verify import verify_artifact
from tqtool.calibration.calibrate import CalibrationRequest, calibrate, plan_calibration
from tqtool.calibration.rows import read_rows, require_disjoint
from tqtool.errors import ArtifactError, UserError
from tqtool.evals.kl import score_kl
from tqtool.evals.teacher import TeacherRequest, dump_teacher, model_hash
from tqtool.evals.text import read_windows
from tqtool.formats.hessians import INFO_NAME, open_calibration
from tqtool.formats.json_file import read_file
from tqtool.formats.manifest import MANIFEST_NAME, Totals
from tqtool.formats.sensitivity_file import read_sensitivity
from tqtool.formats.teacher import open_dump
from tqtool.mathx.codes import parse_code
from tqtool.pipeline.calibrated import SINK_WEIGHT
from tqtool.pipeline.coding import OTHER
from tqtool.pipeline.convert import ConvertRequest, check_artifact, plan_convert
from tqtool.pipeline.job import Job, Meter, silent
from tqtool.pipeline.provenance import source_name
from tqtool.pipeline.rules import packed_setting, parse_dtype, parse_rule
from tqtool.pipeline.trellis import TrellisRequest, check_trellis, coded_weights, plan_trellis
from tqtool.recipes.schema import ConvertPart, Recipe, TrellisPart, dump_recipe
from tqtool.runtime.load import load, load_tokenizer, model_folder, scoring_compute
from tqtool.solve.trellis import TrellisOptions
from tqtool.source.checkpoint import open_checkpoint

RECIPE_NAME = "recipe.yaml"
INSIDE_NAMES = ("tqtool/recipe.yaml", "tqtool/recipe.json")
SENSITIVITY_NAME = "tqtool/sensitivity.json"

Advance = Callable[[float, str], None]
Progress = Callable[[str, float], AbstractContextManager[Advance]]
"""``progress(label, total)`` opens a bar."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """What a finished run left; ``steps`` says which were done now and which were found done."""

    out: str
    recipe: str
    steps: dict[str, str]
    bits_per_weight: float
    tensor_bytes: int
    kl: dict[str, Any] | None


def run_recipe(recipe: Recipe, out: Path, progress: Progress, *, resume: bool = False) -> RunReport:
    """Carry ``recipe`` out in ``out``.

    Raises:
        UserError: a part cannot be carried out, or ``out`` holds another run, or one that ``resume`` was not given for.
        ArtifactError: writing failed, or what was written does not verify.
    """
    _check(recipe)
    _claim(recipe, out, resume=resume)
    steps: dict[str, str] = {}
    hessians = None
    if recipe.needs_hessians:
        hessians, steps["calibration"] = _calibration(recipe, out / "calibration", progress)
    steps["artifact"] = _artifact(recipe, out, hessians, progress)
    totals = _verified(out / "artifact")
    kl = None
    if recipe.evaluation is not None:
        steps["evaluation"], kl = _evaluation(recipe, out, progress)
    return RunReport(
        out=str(out),
        recipe=recipe.name,
        steps=steps,
        bits_per_weight=totals.bits_per_source_weight,
        tensor_bytes=totals.tensor_bytes,
        kl=kl,
    )


def _check(recipe: Recipe) -> None:
    """Everything that can be refused before any work: texts, their overlap, and the plan of the artifact."""
    checkpoint = open_checkpoint(recipe.source, revision=recipe.revision)
    tokenizer = load_tokenizer(checkpoint.path)
    rows = None
    if recipe.calibration is not None:
        part = recipe.calibration
        rows = read_rows(tokenizer, Path(part.text), rows=part.rows, context=part.context)
    if recipe.evaluation is not None:
        scored = recipe.evaluation
        text = read_windows(tokenizer, Path(scored.text), windows=scored.windows, context=scored.context)
        if rows is not None:
            require_disjoint(rows, text.tokens, scored.text)
    with tempfile.TemporaryDirectory() as scratch:  # planning writes nothing; it only wants a free name
        plan_quantization(recipe, Path(scratch), None, Meter())


def _claim(recipe: Recipe, out: Path, *, resume: bool) -> None:
    """Write the resolved recipe, or find the same one there."""
    path, text = out / RECIPE_NAME, dump_recipe(recipe)
    if path.exists():
        if path.read_bytes() != text:
            raise UserError(f"{path}: another recipe was begun here", hint="choose another OUT")
        if not resume:
            raise UserError(f"{out}: holds a run of this recipe", hint="--resume goes on with it")
        return
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out}: exists and is not empty", hint="choose another OUT")
    with whole_file(path) as (file, _):
        file.write(text)


def _calibration(recipe: Recipe, folder: Path, progress: Progress) -> tuple[Path, str]:
    part = recipe.calibration
    assert part is not None, "the schema sees to it"
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
        found = open_calibration(folder).info
        wanted = plan_calibration(replace(request, out=folder / "unused"))
        facts = (found.source_fingerprint, found.text, found.context, found.transform, found.rotation_seed)
        record = wanted.rows.record
        if facts != (wanted.fingerprint, record, part.context, wanted.plan.id, wanted.plan.seed):
            raise ArtifactError(f"{folder}: a calibration of another source, text or setting", hint="remove it")
        return folder, "found"
    job = plan_calibration(request)
    with progress("calibrate", job.layers) as advance:
        calibrate(job, lambda layers: advance(layers, "layers"))
    return folder, "done"


def _artifact(recipe: Recipe, out: Path, hessians: Path | None, progress: Progress) -> str:
    if (out / "artifact" / MANIFEST_NAME).exists():
        for name, content in _inside(recipe).items():
            path = out / "artifact" / name
            if not path.is_file() or path.read_bytes() != content:
                raise ArtifactError(f"{out / 'artifact'}: made by another recipe", hint="remove it and run again")
        return "found"
    meter = Meter()
    job = plan_quantization(recipe, out, hessians, meter)
    is_trellis = isinstance(recipe.quantize, TrellisPart)
    check = check_trellis if is_trellis else check_artifact
    total = coded_weights(job) if is_trellis else job.plan.totals.parameters
    with progress("check source", job.checkpoint.nbytes) as advance:
        job.check_source(advance)
    with progress("quantize", total) as advance:
        meter.advance = advance
        each_tensor = silent if is_trellis else advance
        job.run(each_tensor, check=lambda folder: check(job, folder, "forward"), source_is_checked=True)
    return "done"


def plan_quantization(recipe: Recipe, out: Path, hessians: Path | None, meter: Meter) -> Job:
    """The job of a recipe, with the resolved recipe among its files; no tensor is read."""
    part, seed = recipe.quantize, None if recipe.rotation is None else recipe.rotation.seed
    common: dict[str, Any] = {
        "source": recipe.source,
        "revision": recipe.revision,
        "out": out / "artifact",
        "rotation_seed": seed,
        "hessians": hessians,
        "sink_weight": SINK_WEIGHT if part.sink_weight is None else part.sink_weight,
        "journal": out / "journal",
        "files": _inside(recipe),
        "sensitivity": None if part.sensitivity is None else read_sensitivity(Path(part.sensitivity)),
    }
    if isinstance(part, ConvertPart):
        return plan_convert(_convert(part, common))
    return plan_trellis(_trellis(part, {**common, "tick": meter}))


def _convert(part: ConvertPart, common: dict[str, Any]) -> ConvertRequest:
    packing = None
    if any(value is not None for value in (part.bits, part.group_size, part.mode)):
        packing = packed_setting(bits=part.bits, group_size=part.group_size, mode=part.mode)
    return ConvertRequest(
        packing=packing,
        rules=tuple(parse_rule(text, packing) for text in part.rules),
        dtype=None if part.dtype is None else parse_dtype(part.dtype, "dtype"),
        target_bpw=part.target_bpw,
        **common,
    )


def _trellis(part: TrellisPart, common: dict[str, Any]) -> TrellisRequest:
    other = None
    if part.bits is not None or part.group_size is not None:
        other = packed_setting(
            bits=OTHER.bits if part.bits is None else part.bits,
            group_size=OTHER.group_size if part.group_size is None else part.group_size,
            mode="affine",
        )
    return TrellisRequest(
        options=TrellisOptions(k=part.k, window=part.window, code=parse_code(part.code), warmup=part.warmup),
        modules=tuple(part.modules),
        layout=part.chosen_layout,
        fold_channels=part.fold_channels if common["hessians"] is not None else False,
        down_axis=part.down_axis,
        form=part.form,
        other=other,
        rules=tuple(parse_rule(text, other or OTHER) for text in part.rules),
        k_map=part.k_map,
        k_budget=part.k_budget,
        **common,
    )


def _inside(recipe: Recipe) -> dict[str, bytes]:
    """The recipe as the artifact carries it: names instead of this machine's paths; and the measurement it names."""
    checkpoint = open_checkpoint(recipe.source, revision=recipe.revision)
    changes: dict[str, Any] = {"source": source_name(checkpoint)}
    for section in ("calibration", "evaluation"):
        part = getattr(recipe, section)
        if part is not None:
            changes[section] = part.model_copy(update={"text": Path(part.text).name})
    measured = recipe.quantize.sensitivity
    if measured is not None:
        changes["quantize"] = recipe.quantize.model_copy(update={"sensitivity": Path(measured).name})
    portable = recipe.model_copy(update=changes)
    as_json = json.dumps(portable.model_dump(mode="json"), indent=1, ensure_ascii=False)
    recipes = dict(zip(INSIDE_NAMES, (dump_recipe(portable), as_json.encode()), strict=True))
    return recipes if measured is None else {**recipes, SENSITIVITY_NAME: read_file(Path(measured))}


def _verified(folder: Path) -> Totals:
    report = verify_artifact(folder)
    if not report.is_good:
        problem = next(check for check in report.checks if check.status == "fail")
        raise ArtifactError(f"{folder}: {problem.name}: {problem.problems[0]}", hint="remove it and run again")
    return read_manifest(folder).totals


def _evaluation(recipe: Recipe, out: Path, progress: Progress) -> tuple[str, dict[str, Any]]:
    part = recipe.evaluation
    assert part is not None, "asked for only then"
    scores, dump = out / "kl.json", out / "teacher.safetensors"
    if scores.exists():
        return "found", _read_scores(scores)
    request = TeacherRequest(text=Path(part.text), windows=part.windows, context=part.context, top=part.top)
    if dump.exists():
        info = open_dump(dump).info
        text = hashlib.sha256(Path(part.text).read_bytes()).hexdigest()
        wanted = (model_hash(model_folder(recipe.source)), text, part.windows, part.context)
        if (info.model_hash, info.text_sha256, info.windows, info.context) != wanted:
            raise ArtifactError(f"{dump}: a dump of another source, text or setting", hint="remove it and run again")
    else:
        source = load(recipe.source, compute=scoring_compute())
        with progress("teacher", part.windows) as advance:
            dump_teacher(source, dump, request, lambda done: advance(done, "windows"))
        del source
    model = load(out / "artifact", compute=scoring_compute())
    with progress("kl", part.windows) as advance:
        report = asdict(score_kl(model, open_dump(dump), lambda done: advance(done, "windows")))
    with whole_file(scores) as (file, _):
        file.write(json.dumps(report, indent=1, default=str).encode())
    return "done", report


def _read_scores(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_bytes())
        float(found["kl"]["mean"]), float(found["ppl"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ArtifactError(f"{path}: damaged ({error})", hint="remove it and run again") from error
    return found
