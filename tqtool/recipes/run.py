"""``tqtool run``: carry a recipe out, step by step, each skipped if an earlier run has finished it.

OUT/recipe.yaml             the resolved recipe, written first
OUT/source.json             which weights the run was begun on
OUT/calibration/            if Hessians are needed
OUT/candidates/ …           if bits are measured: see ``measuring``
OUT/artifact/               the result, with the recipe inside, and the measurement
OUT/teacher.safetensors     if there is an evaluation
OUT/kl.json                 its scores
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tqtool.artifact.leftovers import Hold
from tqtool.artifact.output import whole_file
from tqtool.errors import ArtifactError, UserError
from tqtool.pipeline.job import Meter
from tqtool.recipes.jobs import KMAP_NAME, SENSITIVITY_NAME, Target, files_inside, is_trellis, plan_quantization
from tqtool.recipes.measuring import Measured, measure, mix_step
from tqtool.recipes.opened import OpenRun, Progress, open_run
from tqtool.recipes.schema import Recipe, dump_recipe
from tqtool.recipes.sources import hold_source, require_made_from
from tqtool.recipes.steps import (
    DONE,
    FOUND,
    calibration_step,
    is_written,
    require_calibrated,
    require_inside,
    score_step,
    verified,
    write_artifact,
)

RECIPE_NAME = "recipe.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """What a finished run left; ``steps`` says which were done now and which were found done.

    ``mix`` is the artifact on the measuring windows beside its prediction, where bits were measured; ``kl`` the scores
    of the evaluation.
    """

    out: str
    recipe: str
    steps: dict[str, str]
    bits_per_weight: float
    tensor_bytes: int
    mix: dict[str, Any] | None
    kl: dict[str, Any] | None


def run_recipe(recipe: Recipe, out: Path, progress: Progress, *, resume: bool = False) -> RunReport:
    """Carry ``recipe`` out in ``out``.

    Raises:
        UserError: a part cannot be carried out; ``out`` holds another run, one begun on other weights, one that
            ``resume`` was not given for, or one that goes on now.
        ArtifactError: writing failed; what was written does not verify; what is there came from another run.
    """
    run = check_recipe(recipe, out, progress, resume=resume)
    with _alone_in(out):  # asked once more: another run may have begun here meanwhile
        return _carry_out(run, is_begun=_is_begun(recipe, out, resume=resume))


def check_recipe(recipe: Recipe, out: Path, progress: Progress, *, resume: bool = False) -> OpenRun:
    """All that can fail before the first matmul; nothing is written. Errors as ``run_recipe``."""
    _is_begun(recipe, out, resume=resume)
    return open_run(recipe, out, progress)


@contextmanager
def _alone_in(out: Path) -> Iterator[None]:
    """Hold ``out`` against a second run; without a hold where the file system has no locks."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArtifactError(f"{out}: cannot be created ({error})", hint="choose another OUT") from error
    try:
        hold = Hold.take(out.resolve())
    except OSError:
        yield
        return
    if hold is None:
        raise UserError(f"{out}: another run works here", hint="wait for it, or choose another OUT")
    try:
        yield
    finally:
        hold.release()


def _carry_out(run: OpenRun, *, is_begun: bool) -> RunReport:
    recipe, out = run.recipe, run.out
    if not is_begun:
        with whole_file(out / RECIPE_NAME) as (file, _):
            file.write(dump_recipe(recipe))
    steps: dict[str, str] = {}
    remark = hold_source(run, is_new=not is_begun)
    if remark is not None:
        steps["source"] = remark
    hessians = mix = kl = None
    if recipe.needs_hessians:
        hessians, steps["calibration"] = calibration_step(run)
    _artifact(run, hessians, steps)
    totals = verified(out / "artifact")
    if recipe.allocation is not None:
        steps["mix"], mix = mix_step(run)
    if run.evaluation is not None:
        steps["evaluation"], kl = score_step(run, out / "teacher.safetensors")
    return RunReport(
        out=str(out),
        recipe=recipe.name,
        steps=steps,
        bits_per_weight=totals.bits_per_source_weight,
        tensor_bytes=totals.tensor_bytes,
        mix=mix,
        kl=kl,
    )


def outline(recipe: Recipe) -> list[str]:
    """What ``run_recipe`` does, a line a step, from the recipe alone."""
    steps: list[str] = []
    part, spent, scored = recipe.calibration, recipe.allocation, recipe.evaluation
    if part is not None:
        steps.append(f"calibration: {part.rows} x {part.context} tokens of {part.text} from its end -> calibration/")
    if spent is not None:
        names = [f"{'k' if is_trellis(recipe) else 'b'}{rate}/" for rate in spent.rates]
        steps += [f"candidate: {recipe.quantize.verb} -> candidates/{name}, verified" for name in names]
        behind = "the evaluation's, if the text is the same" if spent.skip is None else f"{spent.skip}"
        steps += [
            f"measuring dump: {spent.windows} x {spent.context} tokens of {spent.text} behind {behind} "
            "-> measuring.safetensors",
            f"sensitivity: one group at a time, reference {spent.reference} -> sensitivity.json",
        ]
        if spent.k_budget is not None:
            steps.append(f"k-map: {spent.k_budget} bits of the codes on average -> kmap.json")
            steps.append("artifact: the mix, from the candidates' tensors -> artifact/")
        else:
            steps.append(f"artifact: the mix of at most {spent.target_bpw} bits a packed weight -> artifact/")
    else:
        steps.append(f"artifact: {recipe.quantize.verb} -> artifact/")
    steps.append("verify: artifact/")
    if spent is not None:
        steps.append("mix: the artifact on the measuring dump, beside prediction and best candidate -> mix.json")
        steps.append("candidates: kept" if spent.keep_candidates else "candidates: removed")
    if scored is not None:
        steps.append(
            f"evaluation: {scored.windows} x {scored.context} tokens of {scored.text} from its start "
            "-> teacher.safetensors, kl.json"
        )
    return steps


def _is_begun(recipe: Recipe, out: Path, *, resume: bool) -> bool:
    """True where ``out`` holds a run of this recipe; UserError if it holds something else, or may not go on."""
    path = out / RECIPE_NAME
    if path.exists():
        if path.read_bytes() != dump_recipe(recipe):
            raise UserError(f"{path}: another recipe was begun here", hint="choose another OUT")
        if not resume:
            raise UserError(f"{out}: holds a run of this recipe", hint="--resume goes on with it")
        return True
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out}: exists and is not empty", hint="choose another OUT")
    return False


def _artifact(run: OpenRun, hessians: Path | None, steps: dict[str, str]) -> None:
    """The artifact, and before it what its bits are chosen by."""
    folder, files = run.out / "artifact", files_inside(run.recipe, run.checkpoint)
    measures = run.recipe.allocation is not None
    if is_written(folder):
        names = {"sensitivity.json": SENSITIVITY_NAME, "kmap.json": KMAP_NAME} if measures else {}
        left = {inside: run.out / name for name, inside in names.items() if (run.out / name).exists()}
        require_inside(folder, files)
        for inside, path in left.items():
            if not (folder / inside).is_file() or (folder / inside).read_bytes() != path.read_bytes():
                raise ArtifactError(f"{path}: not the one in {folder}", hint="remove the one that is not of this run")
        require_calibrated(folder, hessians)
        require_made_from(run, folder)
        before = ("candidates", "measuring dump", "sensitivity") if measures else ()
        steps |= dict.fromkeys((*before, "artifact"), FOUND)
        return
    measured: Measured | None = measure(run, hessians, steps) if measures else None
    meter = Meter()
    target = Target(out=folder, journal=run.out / "journal", hessians=hessians, files=files, meter=meter)
    if measured is not None:
        sensitivity, reuse, files = measured.sensitivity, measured.candidates, {**files, **measured.files}
        target = replace(target, sensitivity=sensitivity, reuse=reuse, files=files)
    write_artifact(run, plan_quantization(run.recipe, target), meter, "quantize")
    steps["artifact"] = DONE
