"""The steps of an ``allocation:``: candidates, the dump to measure on, swaps, the map that the budget buys, the mix.

OUT/candidates/k2 …         an artifact at each rate, journals beside them; removed when the mix has been measured
OUT/measuring.safetensors   teacher dump of windows that nothing else reads
OUT/sensitivity.json        what each swap does
OUT/kmap.json               trellis: bits by module, and what is predicted
OUT/mix.json                the written artifact on the measuring dump, beside prediction and best candidate
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqtool.artifact.output import whole_file
from tqtool.artifact.reader import read_config, read_manifest
from tqtool.errors import ArtifactError
from tqtool.evals.mix import open_measured
from tqtool.evals.sensitivity import SensitivityRequest, measure_sensitivity, plan_sensitivity
from tqtool.evals.swap_log import log_path
from tqtool.formats.kmap import encode_kmap
from tqtool.formats.sensitivity import Candidate, Sensitivity
from tqtool.formats.sensitivity_file import read_sensitivity
from tqtool.formats.teacher import open_dump
from tqtool.pipeline.allocation import exact, kmap_for
from tqtool.pipeline.job import Meter
from tqtool.recipes.jobs import KMAP_NAME, SENSITIVITY_NAME, Target, bits_of, is_trellis, plan_quantization
from tqtool.recipes.opened import OpenRun
from tqtool.recipes.schema import AllocationPart
from tqtool.recipes.sources import AGAIN, require_made_from
from tqtool.recipes.steps import (
    DONE,
    FOUND,
    dump_step,
    is_written,
    manifest_sha256,
    require_scored,
    score,
    scored_on,
    verified,
    write_artifact,
    write_sealed,
)

DUMP_NAME = "measuring.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What the artifact is made from: its bits' measurement, the candidates, and what it carries of both."""

    sensitivity: Sensitivity
    candidates: tuple[Path, ...]
    files: dict[str, bytes]


def measure(run: OpenRun, hessians: Path | None, steps: dict[str, str]) -> Measured:
    """Everything in front of the artifact; ``steps`` gets a line for each.

    Raises:
        UserError: the candidates cannot be swapped, or the budget is below what they can keep.
        ArtifactError: what is there is of another run or damaged; writing failed.
        NumericalError: a KL that is not finite.
    """
    part = _part(run)
    folders, steps["candidates"] = _candidates(run, part, hessians)
    assert run.measuring is not None, "opened with the part"
    steps["measuring dump"] = dump_step(run, run.out / DUMP_NAME, run.measuring, "measuring teacher")
    sensitivity, steps["sensitivity"] = _swaps(run, part, folders)
    files = {SENSITIVITY_NAME: (run.out / "sensitivity.json").read_bytes()}
    if part.k_budget is not None:
        mix = kmap_for(sensitivity, part.k_budget)
        report = {"budget": part.k_budget, "reference": sensitivity.reference, **mix.to_json()}
        files[KMAP_NAME] = encode_kmap(mix.bits, report)
        with whole_file(run.out / "kmap.json") as (file, _):
            file.write(files[KMAP_NAME])
    return Measured(sensitivity=sensitivity, candidates=folders, files=files)


def mix_step(run: OpenRun) -> tuple[str, dict[str, Any]]:
    """``OUT/mix.json``: what was written, measured where the swaps were; then the candidates go.

    Scores that are there already are held against artifact, dump and recipe; see ``require_scored``.
    """
    part, path, dump = _part(run), run.out / "mix.json", run.out / DUMP_NAME
    assert run.measuring is not None, "opened with the part"
    state = FOUND
    if not path.exists():
        dump_step(run, dump, run.measuring, "measuring teacher")
        write_sealed(path, _remeasured(run, part))
        state = DONE
    found = _read_mix(path)
    require_scored(run, path, found, dump, run.measuring)
    if not part.keep_candidates:
        _remove_candidates(run.out)
    return state, found


def _read_mix(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_bytes())
        float(found["measured_kl"]), float(found["predicted_kl"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ArtifactError(f"{path}: damaged ({error})", hint=AGAIN) from error
    return found


def candidate_folder(run: OpenRun, rate: int) -> Path:
    """``OUT/candidates/k3``, or ``b3`` of affine ones."""
    return run.out / "candidates" / f"{'k' if is_trellis(run.recipe) else 'b'}{rate}"


def _candidates(run: OpenRun, part: AllocationPart, hessians: Path | None) -> tuple[tuple[Path, ...], str]:
    state, folders = FOUND, []
    (run.out / "candidates").mkdir(exist_ok=True)
    for rate in part.rates:
        folder, meter = candidate_folder(run, rate), Meter()
        there = is_written(folder)
        job = plan_quantization(
            run.recipe,
            Target(
                out=folder.with_name("unused") if there else folder,
                journal=folder.with_name(f"{folder.name}.journal"),
                hessians=hessians,
                rate=rate,
                meter=meter,
            ),
        )
        if not there:
            write_artifact(run, job, meter, f"candidate {folder.name}")
            state = DONE
        else:
            if read_manifest(folder).request != json.loads(json.dumps(dict(job.extras.request))):
                raise ArtifactError(f"{folder}: made by another recipe", hint=AGAIN)
            require_made_from(run, folder)
        verified(folder)
        folders.append(folder)
    return tuple(folders), state


def _swaps(run: OpenRun, part: AllocationPart, folders: tuple[Path, ...]) -> tuple[Sensitivity, str]:
    out, dump = run.out / "sensitivity.json", run.out / DUMP_NAME
    if out.exists() and not log_path(out).exists():
        found = read_sensitivity(out)
        open_measured(folders, found)
        _require_measured_on(out, found, dump, part)
        return found, FOUND
    request = SensitivityRequest(artifacts=folders, teacher=dump, out=out, reference=part.reference, resume=True)
    job = plan_sensitivity(request)
    with run.progress("sensitivity", job.swaps) as advance:
        return measure_sensitivity(job, lambda swaps: advance(swaps, "swaps")), DONE


def _require_measured_on(where: Path, found: Sensitivity, dump: Path, part: AllocationPart) -> None:
    """ArtifactError unless ``found`` in ``where`` was measured on ``dump``, from the recipe's reference."""
    info, teacher = open_dump(dump).info, found.teacher
    wanted = (part.reference, info.model_hash, info.text_sha256, info.windows, info.context, info.top, info.skip)
    if teacher is None or wanted != (
        found.reference,
        teacher.model_hash,
        teacher.text_sha256,
        teacher.windows,
        teacher.context,
        teacher.top,
        teacher.skip,
    ):
        raise ArtifactError(f"{where}: of another source, text or setting", hint=AGAIN)


def _remeasured(run: OpenRun, part: AllocationPart) -> dict[str, Any]:
    artifact, dump = run.out / "artifact", run.out / DUMP_NAME
    sensitivity = read_sensitivity(artifact / SENSITIVITY_NAME)
    _require_measured_on(artifact / SENSITIVITY_NAME, sensitivity, dump, part)
    bits, reference = bits_of(read_manifest(artifact).request), sensitivity.reference_kl
    assert reference is not None, "measured by this run"
    groups = [group for group in sensitivity.groups if group.modules[0] in bits]
    change = sum(sensitivity.change(group, bits[group.modules[0]]) for group in groups)
    measured = score(run, artifact, dump, "kl of the mix")
    report = {
        "scored": scored_on(run, dump),
        "windows": measured.windows,
        "context": measured.context,
        "skip": 0 if run.measuring is None else run.measuring.skip,
        "mean_bits": sum(bits[group.modules[0]] * group.parameters for group in groups)
        / sum(group.parameters for group in groups),
        "reference": sensitivity.reference,
        "reference_bits": sensitivity.reference_bits,
        "reference_kl": reference.mean,
        "reference_kl_standard_error": reference.standard_error,
        "predicted_kl": reference.mean + change,
        "measured_kl": measured.kl.mean,
        "measured_kl_standard_error": measured.kl.se,
    }
    uniform = _uniform(run, part, sensitivity)
    if uniform is None:
        return report
    alike = score(run, candidate_folder(run, uniform), dump, f"kl of {uniform} bits alike")
    return report | {
        "uniform_bits": uniform,
        "uniform_kl": alike.kl.mean,
        "uniform_kl_standard_error": alike.kl.se,
    }


def _uniform(run: OpenRun, part: AllocationPart, sensitivity: Sensitivity) -> int | None:
    """The highest candidate within the budget that is still there; ArtifactError for one that was not measured."""
    there = [each for each in sensitivity.candidates if is_written(candidate_folder(run, each.bits))]
    for candidate in there:
        folder = candidate_folder(run, candidate.bits)
        if candidate.manifest_sha256 != manifest_sha256(folder):
            raise ArtifactError(f"{folder}: not the candidate that was measured", hint=AGAIN)
        verified(folder)
    return max((each.bits for each in there if _is_within_budget(run, part, each)), default=None)


def _is_within_budget(run: OpenRun, part: AllocationPart, candidate: Candidate) -> bool:
    """Whether a candidate spends what the artifact may: bits of codes, or all that its packed modules store.

    The second is of embedding and head too, which the sensitivity's own ``bits_per_weight`` leaves out.
    """
    if part.k_budget is not None:
        return candidate.bits <= part.k_budget
    assert part.target_bpw is not None, "the schema sees to it"
    stored, weights = _packed(candidate_folder(run, candidate.bits))
    return stored <= exact(part.target_bpw, "allocation.target_bpw") * weights


def _packed(folder: Path) -> tuple[int, int]:
    """Bits stored for the packed modules of an artifact, and their weights."""
    entries: Mapping[str, Any] = read_config(folder).get("quantization", {})
    rows = [row for row in read_manifest(folder).tensors if isinstance(entries.get(row.module or ""), dict)]
    return 8 * sum(stored.size_bytes for row in rows for stored in row.stored), sum(row.parameters for row in rows)


def _remove_candidates(out: Path) -> None:
    """In one step out of the way of a later run, then from the disk: a kill leaves no half of one behind."""
    folder, trash = out / "candidates", out / ".candidates.removed"
    if trash.exists():
        shutil.rmtree(trash)
    if folder.exists():
        folder.rename(trash)
        shutil.rmtree(trash)


def _part(run: OpenRun) -> AllocationPart:
    assert run.recipe.allocation is not None, "asked for only then"
    return run.recipe.allocation
