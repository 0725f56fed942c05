"""The file ``eval tasks --out`` writes, read back strictly, and two of them paired."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqtool.artifact.output import check_writable, whole_file
from tqtool.errors import ArtifactError, UserError
from tqtool.evals.proportions import mcnemar
from tqtool.evals.tasks import TaskReport

FORMAT = "tqtool-tasks"
VERSION = 1

Key = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskResult:
    """What pairing needs of a result; ``outcomes`` maps (id, format) to the task and the flags."""

    name: str
    model: str
    model_hash: str
    items_sha256: str
    settings: dict[str, Any]
    outcomes: Mapping[Key, tuple[str, dict[str, bool]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairing:
    """One flag of one task in one format in two arms: how many items have it in both, in one, in none; exact p."""

    task: str
    format: str
    flag: str
    items: int
    both: int
    only_a: int
    only_b: int
    neither: int
    p: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two arms paired by item; ``same_model``: their weights and configs are the same bytes."""

    a: str
    b: str
    same_model: bool
    items_sha256: str
    settings: dict[str, Any]
    pairings: tuple[Pairing, ...]


def check_target(out: Path, *, replace: bool) -> None:
    """Refuse a name that cannot be written before any work is done."""
    if out.is_dir():
        raise UserError(f"{out}: is a folder", hint="name a file")
    if out.exists() and not replace:
        raise UserError(f"{out}: exists already", hint="give another name, or --force to replace it")
    check_writable(out)


def to_json(report: TaskReport) -> dict[str, Any]:
    """The file's object: plain JSON values."""
    body: dict[str, Any] = json.loads(json.dumps(asdict(report)))
    return {"format": FORMAT, "format_version": VERSION, **body, "outcomes_sha256": _hash(body["outcomes"])}


def write_result(report: TaskReport, out: Path) -> tuple[str, ...]:
    """Write ``report``, whole or not at all; the names of leftovers removed. ArtifactError if it cannot be written."""
    data = json.dumps(to_json(report), indent=1, ensure_ascii=False).encode("utf-8", "backslashreplace")
    with whole_file(out) as (file, removed):
        file.write(data + b"\n")
    return removed


def read_result(path: Path) -> TaskResult:
    """Read a result.

    Raises:
        UserError: no such file.
        ArtifactError: not a result, of another version, or changed since it was written.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from error
    try:
        value = json.loads(data)
        if not isinstance(value, dict) or value.get("format") != FORMAT:
            raise ArtifactError(f"{path}: expected a result of `tqtool eval tasks --out`, found other JSON")
        if value.get("format_version") != VERSION:
            raise ArtifactError(f"{path}: format_version: expected {VERSION}, found {value.get('format_version')!r}")
        if value["outcomes_sha256"] != _hash(value["outcomes"]):
            raise ArtifactError(f"{path}: its outcomes do not have the hash that was written with them")
        return _result(path, value)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ArtifactError(
            f"{path}: not a readable result ({reason})", hint="run `tqtool eval tasks` again"
        ) from error


def _result(path: Path, value: dict[str, Any]) -> TaskResult:
    outcomes: dict[Key, tuple[str, dict[str, bool]]] = {}
    for outcome in value["outcomes"]:
        key, flags = (str(outcome["id"]), str(outcome["format"])), outcome["flags"]
        if key in outcomes or not flags or not all(type(flag) is bool for flag in flags.values()):
            raise ValueError(f"outcome {key}: repeated, or with flags that are not true or false")
        outcomes[key] = str(outcome["task"]), dict(flags)
    return TaskResult(
        name=str(path),
        model=str(value["model"]),
        model_hash=str(value["model_hash"]),
        items_sha256=str(value["items_sha256"]),
        settings=dict(value["settings"]),
        outcomes=outcomes,
    )


def from_report(report: TaskReport, name: str) -> TaskResult:
    """A report as if it had been written and read."""
    return _result(Path(name), to_json(report))


def check_pairable(a: TaskResult, *, items_sha256: str, settings: dict[str, Any], name: str) -> None:
    """Raise UserError unless ``a`` is of these items and settings; ``name`` is what it would be paired with."""
    if a.items_sha256 != items_sha256:
        raise UserError(
            f"{a.name}: made from items {a.items_sha256[:12]}, {name} from {items_sha256[:12]}",
            hint="McNemar's test pairs outcomes of the same items; run both models on one file",
        )
    for key in sorted({*a.settings, *settings}):
        if a.settings.get(key) != settings.get(key):
            raise UserError(
                f"{a.name}: {key} is {a.settings.get(key)!r}, in {name} it is {settings.get(key)!r}",
                hint="run both models with the same --format, --limit and --max-tokens",
            )


def compare(a: TaskResult, b: TaskResult) -> Comparison:
    """Pair two results by item and format.

    Raises:
        UserError: other items or settings.
        ArtifactError: outcomes that do not pair although they should.
    """
    check_pairable(a, items_sha256=b.items_sha256, settings=b.settings, name=b.name)
    if a.outcomes.keys() != b.outcomes.keys():
        odd = min(a.outcomes.keys() ^ b.outcomes.keys())
        raise ArtifactError(f"{a.name}, {b.name}: item {odd[0]!r}, {odd[1]}: only one of them has it")
    counts: dict[tuple[str, str, str], list[int]] = {}
    for key, (task, flags) in a.outcomes.items():
        others = b.outcomes[key][1]
        if others.keys() != flags.keys():
            raise ArtifactError(f"{a.name}, {b.name}: item {key[0]!r}, {key[1]}: flags {[*flags]} and {[*others]}")
        for flag, mine in flags.items():
            cells = counts.setdefault((task, key[1], flag), [0, 0, 0, 0])
            cells[2 * (not mine) + (not others[flag])] += 1
    pairings = tuple(
        Pairing(
            task=task,
            format=format_,
            flag=flag,
            items=sum(cells),
            both=cells[0],
            only_a=cells[1],
            only_b=cells[2],
            neither=cells[3],
            p=mcnemar(cells[1], cells[2]),
        )
        for (task, format_, flag), cells in counts.items()
    )
    return Comparison(
        a=a.name,
        b=b.name,
        same_model=a.model_hash == b.model_hash,
        items_sha256=a.items_sha256,
        settings=a.settings,
        pairings=pairings,
    )


def settings_json(report_settings: Any) -> dict[str, Any]:
    """Settings as a result file holds them."""
    value: dict[str, Any] = json.loads(json.dumps(asdict(report_settings)))
    return value


def _hash(outcomes: Any) -> str:
    text = json.dumps(outcomes, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()
