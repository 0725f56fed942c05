"""Arms side by side: what each weighs, what it costs in quality, and which of them nothing beats.

An arm is a report of ``eval kl --json`` (of any artifact, or any mlx-lm model), a folder that ``tqtool run`` filled,
results of ``eval tasks --out``, or several of these about the same weights. Only scores made under the same conditions
are compared, and only while the model's folder still holds the weights that were scored.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tqtool.artifact.content import content_hash
from tqtool.artifact.reader import read_manifest
from tqtool.errors import UserError
from tqtool.evals.task_result import FORMAT as TASKS_FORMAT
from tqtool.evals.task_result import TaskResult, read_result
from tqtool.formats.manifest import MANIFEST_NAME
from tqtool.pipeline.inspection import inspect_model
from tqtool.reports.tasks import TaskScore, default_name, require_alike, scores_of

CONDITIONS = ("windows", "context", "tokens", "top", "vocab_size", "teacher_ppl", "skip")
"""Fields of a report that are printed and must agree."""
CONTENTS = ("teacher_hash", "text_sha256")
"""Fields that must agree: the same weights and text may have lain in two places."""
SAME_SIZE = 1.001
"""Files that differ by less are as small as each other: headers name the same tensors at different lengths."""
EXPECTED = "a report of `tqtool eval kl --json`, a result of `tqtool eval tasks --out`, or a folder of `tqtool run`"


@dataclass(frozen=True, slots=True, kw_only=True)
class Distance:
    """Scores against a teacher: mean KL in nats per token with its error, perplexity, share of the same first token."""

    kl: float
    kl_se: float
    ppl: float
    top1: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One model.

    Attributes:
        name: As given, or the folder's.
        path: Folder of the model.
        model_hash: Of the config and weights that were scored, and lie there now.
        weight_bytes: Size of its weight files.
        bits_per_weight: That over the weights of the source, so that an untied head is no free parameter.
        distance: From the teacher; None without a report of ``eval kl``.
        tasks: What it gets right.
        is_frontier: No other arm with a distance is as small and as near to the teacher.
    """

    name: str
    path: str
    model_hash: str
    weight_bytes: int
    bits_per_weight: float
    distance: Distance | None = None
    tasks: tuple[TaskScore, ...] = ()
    is_frontier: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Arms from small to large; the conditions of their distances and of each task; whom tasks are paired with."""

    arms: tuple[Arm, ...]
    conditions: Mapping[str, Any]
    task_conditions: tuple[Mapping[str, Any], ...]
    baseline: str | None


@dataclass(slots=True, kw_only=True)
class _Draft:
    """Reports of one arm, as they are found."""

    folder: str
    model_hash: str
    where: Path
    distance: Distance | None = None
    results: list[TaskResult] = field(default_factory=list)


def compare(inputs: Sequence[str], *, baseline: str | None = None, at: Mapping[str, Path] | None = None) -> Comparison:
    """Read the arms named in ``inputs``, each ``[NAME=]PATH``; pair tasks with the arm ``baseline``.

    Task results without a name belong to the arm with the same weights, if there is one. ``at`` says where weights of a
    hash lie, for models that were moved since their reports.

    Raises:
        UserError: a path is no report and no run, its model is gone or is no longer what was scored, a name is given
            twice, conditions differ, or there is no such baseline.
        ArtifactError: a task result is damaged.
    """
    if not inputs:
        raise UserError("nothing to compare", hint=f"give {EXPECTED}")
    drafts, conditions = _gather(inputs)
    task_conditions = require_alike([result for draft in drafts.values() for result in draft.results])
    if baseline is not None and not (baseline in drafts and drafts[baseline].results):
        raise UserError(
            f"--baseline {baseline}: {'has no task result' if baseline in drafts else 'no such arm'}",
            hint=f"arms with task results: {', '.join(name for name, d in drafts.items() if d.results) or 'none'}",
        )
    arms = []
    for name, draft in drafts.items():
        partner = drafts[baseline].results if baseline is not None and name != baseline else None
        folder = (at or {}).get(draft.model_hash, Path(draft.folder))
        arms.append(replace(_weighed(name, draft, folder), tasks=scores_of(draft.results, partner)))
    arms.sort(key=lambda arm: (arm.weight_bytes, math.inf if arm.distance is None else arm.distance.kl))
    return Comparison(
        arms=tuple(_marked(arms)), conditions=conditions, task_conditions=task_conditions, baseline=baseline
    )


def _gather(inputs: Sequence[str]) -> tuple[dict[str, _Draft], dict[str, Any]]:
    drafts: dict[str, _Draft] = {}
    conditions: dict[str, Any] = {}
    unnamed: list[tuple[Path, TaskResult]] = []
    for text in inputs:
        name, file, value = _read(text)
        if value.get("format") == TASKS_FORMAT:
            result = read_result(file)
            if name:
                _draft(drafts, name, result.model, result.model_hash, file).results.append(result)
            else:
                unnamed.append((file, result))
            continue
        found = {key: value.get(key) for key in (*CONTENTS, *CONDITIONS)}
        conditions = conditions or {**found, "teacher": value.get("teacher")}
        key = next((key for key in found if found[key] != conditions[key]), None)
        if key is not None:
            raise UserError(
                f"{file}: {key} is {found[key]!r}, of the arms before it it is {conditions[key]!r}",
                hint="score all arms against one teacher dump, with the same number of windows",
            )
        name = name or (Path(text).name if Path(text).is_dir() else Path(value["model"]).name)
        draft = _draft(drafts, name, value["model"], _hash_of(value, file), file)
        if draft.distance is not None:
            raise UserError(f"{text}: a second arm called {name!r}", hint="NAME=PATH gives it another name")
        draft.distance = _distance(value, file)
    for file, result in unnamed:
        owners = [draft for draft in drafts.values() if draft.model_hash == result.model_hash]
        if len(owners) > 1:
            raise UserError(f"{file}: several arms have these weights", hint="NAME=PATH says which one is meant")
        name = default_name(result)
        owner = owners[0] if owners else _draft(drafts, name, result.model, result.model_hash, file)
        owner.results.append(result)
    return drafts, {key: conditions[key] for key in ("teacher", *CONDITIONS) if key in conditions}


def _draft(drafts: dict[str, _Draft], name: str, folder: str, model_hash: str, where: Path) -> _Draft:
    """The arm ``name``; UserError if it is another model."""
    draft = drafts.setdefault(name, _Draft(folder=folder, model_hash=model_hash, where=where))
    if draft.model_hash != model_hash:
        raise UserError(
            f"{where}: a second arm called {name!r}, and of other weights than in {draft.where}",
            hint="NAME=PATH gives it another name",
        )
    return draft


def _read(text: str) -> tuple[str, Path, dict[str, Any]]:
    given, equals, rest = text.partition("=")
    name, path = (given, Path(rest)) if equals and not Path(text).exists() else ("", Path(text))
    file = path / "kl.json" if path.is_dir() else path
    try:
        value = json.loads(file.read_bytes())
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror})", hint=f"expected {EXPECTED}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file}: not JSON ({error})") from error
    is_tasks = isinstance(value, dict) and value.get("format") == TASKS_FORMAT
    if not is_tasks and not (
        isinstance(value, dict) and isinstance(value.get("kl"), dict) and isinstance(value.get("model"), str)
    ):
        raise UserError(f"{file}: not a report", hint=f"expected {EXPECTED}")
    return name, file, value


def report_hash(file: Path) -> str:
    """Which weights the report ``file`` is about; UserError if it is none."""
    _, where, value = _read(str(file))
    return _hash_of(value, where)


def _hash_of(report: Mapping[str, Any], where: Path) -> str:
    found = report.get("model_hash")
    if not isinstance(found, str):
        raise UserError(f"{where}: does not say which weights it scored", hint="score them again with this tqtool")
    return found


def _distance(report: Mapping[str, Any], where: Path) -> Distance:
    try:
        kl, top1 = report["kl"], report["top1"]
        errors = [float(error) for error in (kl["se_windows"], kl["se_tokens"]) if error is not None]
        found = Distance(
            kl=float(kl["mean"]), kl_se=max(errors, default=0.0), ppl=float(report["ppl"]), top1=float(top1["mean"])
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{where}: not a report of `tqtool eval kl --json` ({error})") from error
    figures = (found.kl, found.kl_se, found.ppl, found.top1)
    if not all(math.isfinite(figure) for figure in figures):
        raise UserError(f"{where}: its scores are not finite numbers: {figures}")
    return found


def _weighed(name: str, draft: _Draft, folder: Path) -> Arm:
    """The arm without its tasks, weighed; UserError unless ``folder`` holds what was scored."""
    if not (folder / "config.json").is_file():
        raise UserError(f"{draft.where}: its model {folder} is not there, so it cannot be weighed")
    found = content_hash(folder)
    if found != draft.model_hash:
        raise UserError(
            f"{draft.where}: scored weights {draft.model_hash[:12]}, {folder} now holds {found[:12]}",
            hint="score that folder again, or give the one that was scored",
        )
    weight_bytes = sum(file.stat().st_size for file in folder.glob("model*.safetensors"))
    return Arm(
        name=name,
        path=str(folder),
        model_hash=found,
        weight_bytes=weight_bytes,
        bits_per_weight=8 * weight_bytes / _source_weights(folder),
        distance=draft.distance,
    )


def _source_weights(folder: Path) -> int:
    """Weights of the model that ``folder`` was made from; its own where it does not say."""
    if (folder / MANIFEST_NAME).exists():
        return read_manifest(folder).totals.source_parameters
    weights = inspect_model(str(folder)).parameters
    if not weights:
        raise UserError(f"{folder}: how many weights it packs is not known, so it cannot be rated")
    return weights


def _marked(arms: Sequence[Arm]) -> list[Arm]:
    """Arms with ``is_frontier`` set where no other is as small and as near."""
    points = {arm.name: (arm.weight_bytes, arm.distance.kl) for arm in arms if arm.distance is not None}

    def leads(arm: Arm) -> bool:
        mine = points.get(arm.name)
        return mine is not None and not any(
            (size <= mine[0] * SAME_SIZE and kl < mine[1]) or (size < mine[0] and kl <= mine[1])
            for size, kl in points.values()
        )

    return [replace(arm, is_frontier=leads(arm)) for arm in arms]


def facts(conditions: Mapping[str, Any]) -> str:
    """Conditions on one line; hashes cut short."""
    parts = (f"{key.replace('_', ' ')} {_short(value)}" for key, value in conditions.items() if value is not None)
    return ", ".join(parts)


def _short(value: Any) -> str:
    if isinstance(value, list):
        return " and ".join(map(str, value))
    return value[:12] if isinstance(value, str) and len(value) == 64 else str(value)
