"""Arms side by side: what each weighs, what it costs in quality, and which of them nothing beats.

An arm is a report of ``eval kl --json`` (of any artifact, or any mlx-lm model), or a folder that ``tqtool run`` filled.
Only scores made under the same conditions are compared.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tqtool.artifact.reader import read_manifest
from tqtool.errors import UserError
from tqtool.formats.manifest import MANIFEST_NAME
from tqtool.pipeline.inspection import inspect_model

CONDITIONS = ("teacher", "windows", "context", "tokens", "top", "vocab_size", "teacher_ppl")
"""Fields of a report that must agree; the teacher's own perplexity tells two texts apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One model.

    Attributes:
        name: As given, or the folder's.
        path: Folder of the model.
        weight_bytes: Size of its weight files.
        bits_per_weight: That over the weights of the source, so that an untied head is no free parameter.
        kl: Mean KL to the teacher, with ``kl_se``; nats per token.
        ppl: Perplexity.
        top1: Share of positions with the teacher's first token.
        is_frontier: No other arm is as small and as near to the teacher.
    """

    name: str
    path: str
    weight_bytes: int
    bits_per_weight: float
    kl: float
    kl_se: float
    ppl: float
    top1: float
    is_frontier: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Arms from small to large, and the conditions that all of them were scored under."""

    arms: tuple[Arm, ...]
    conditions: Mapping[str, Any]


def compare(inputs: Sequence[str]) -> Comparison:
    """Read the arms named in ``inputs``, each ``[NAME=]PATH``.

    Raises:
        UserError: a path is no report and no run, its model is gone, a name is given twice, or conditions differ.
    """
    if not inputs:
        raise UserError(
            "nothing to compare", hint="give reports of `tqtool eval kl --json`, or folders of `tqtool run`"
        )
    arms: list[Arm] = []
    conditions: dict[str, Any] = {}
    for text in inputs:
        name, report, where = _read(text)
        found = {key: report.get(key) for key in CONDITIONS}
        conditions = conditions or found
        differing = [key for key in CONDITIONS if found[key] != conditions[key]]
        if differing:
            key = differing[0]
            raise UserError(
                f"{where}: {key} is {found[key]!r}, of {arms[0].name} it is {conditions[key]!r}",
                hint="score all arms against one teacher dump, with the same number of windows",
            )
        if any(arm.name == name for arm in arms):
            raise UserError(f"{text}: a second arm called {name!r}", hint="NAME=PATH gives it another name")
        arms.append(_arm(name, report, where))
    arms.sort(key=lambda arm: (arm.weight_bytes, arm.kl))
    return Comparison(arms=tuple(_marked(arms)), conditions=conditions)


def _read(text: str) -> tuple[str, dict[str, Any], Path]:
    given, equals, rest = text.partition("=")
    name, path = (given, Path(rest)) if equals and not Path(text).exists() else ("", Path(text))
    file = path / "kl.json" if path.is_dir() else path
    try:
        report = json.loads(file.read_bytes())
    except OSError as error:
        hint = "expected a report of `tqtool eval kl --json`, or a folder of `tqtool run` with an evaluation"
        raise UserError(f"{file}: cannot be read ({error.strerror})", hint=hint) from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file}: not JSON ({error})") from error
    if (
        not isinstance(report, dict)
        or not isinstance(report.get("kl"), dict)
        or not isinstance(report.get("model"), str)
    ):
        raise UserError(f"{file}: not a report of `tqtool eval kl --json`")
    model = Path(report["model"])
    return name or (path.name if path.is_dir() else model.name), report, file


def _arm(name: str, report: Mapping[str, Any], where: Path) -> Arm:
    folder = Path(report["model"])
    figures = (report["kl"].get("mean"), report.get("ppl"), report["top1"].get("mean"))
    if not all(isinstance(figure, int | float) and math.isfinite(figure) for figure in figures):
        raise UserError(f"{where}: its scores are not finite numbers: {figures}")
    if not (folder / "config.json").is_file():
        raise UserError(f"{where}: its model {folder} is not there, so it cannot be weighed")
    weight_bytes = sum(file.stat().st_size for file in folder.glob("model*.safetensors"))
    weights = _source_weights(folder)
    try:
        kl, top1 = report["kl"], report["top1"]
        errors = [error for error in (kl["se_windows"], kl["se_tokens"]) if error is not None]
        return Arm(
            name=name,
            path=str(folder),
            weight_bytes=weight_bytes,
            bits_per_weight=8 * weight_bytes / weights,
            kl=float(kl["mean"]),
            kl_se=max(errors, default=0.0),
            ppl=float(report["ppl"]),
            top1=float(top1["mean"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{where}: not a report of `tqtool eval kl --json` ({error})") from error


def _source_weights(folder: Path) -> int:
    """Weights of the model that ``folder`` was made from; its own where it does not say."""
    if (folder / MANIFEST_NAME).exists():
        return read_manifest(folder).totals.source_parameters
    weights = inspect_model(str(folder)).parameters
    if not weights:
        raise UserError(f"{folder}: how many weights it packs is not known, so it cannot be rated")
    return weights


def _marked(arms: Sequence[Arm]) -> list[Arm]:
    """Arms with ``is_frontier`` set where no other has as few bytes and as little KL."""

    def beaten(arm: Arm) -> bool:
        return any(
            other.weight_bytes <= arm.weight_bytes
            and other.kl <= arm.kl
            and (other.weight_bytes, other.kl) != (arm.weight_bytes, arm.kl)
            for other in arms
        )

    return [replace(arm, is_frontier=not beaten(arm)) for arm in arms]
