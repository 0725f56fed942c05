"""``tqtool card``: the model card of an artifact written again, with what was measured and what its owner states.

Only the card, ``tqtool/measured.json``, a licence file and the manifest's rows of these change; the manifest is
written last, so a run that is killed leaves an artifact that does not verify until it is repeated.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqtool.artifact.card import (
    CARD_NAME,
    LICENCE_NAMES,
    PLACE,
    STATED,
    CardFacts,
    card_title,
    render_card,
    stated_fields,
)
from tqtool.artifact.card_check import check_card
from tqtool.artifact.content import content_hash
from tqtool.artifact.model_file import MODEL_FILE, model_file
from tqtool.artifact.output import whole_file
from tqtool.artifact.reader import read_config, read_manifest
from tqtool.errors import UserError
from tqtool.formats.json_file import read_file
from tqtool.formats.manifest import MANIFEST_NAME, Manifest, encode, with_files
from tqtool.formats.measured import MEASURED_NAME, Measured, MeasuredArm, encode_measured, parse_measured
from tqtool.reports.compare import Arm, Comparison, compare, report_hash
from tqtool.source.hub import is_hub_id

OWN_TAGS = ("mlx", "tqtool")
_PLACE = re.compile(r"^mlx_lm\.generate --model (\S+)", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class CardRequest:
    """What the card is to say.

    Attributes:
        artifact: Its folder.
        results: Reports of ``eval kl``, of ``eval tasks``, folders of ``run``; one of them of this artifact.
        base_model: Hub id of the source, where the artifact does not know it.
        stated: Licence fields that the owner states in place of the source's card.
        licence_file: Copied into the artifact.
        place: Repository or folder in the commands.
        renews_model_file: Put this version's module file in the place of a packed artifact's.
        force: Replace a card that was edited since.
    """

    artifact: Path
    results: tuple[str, ...] = ()
    base_model: str | None = None
    stated: Mapping[str, str] | None = None
    licence_file: Path | None = None
    place: str | None = None
    renews_model_file: bool = False
    force: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NewCard:
    """A card that is ready: ``files`` to write, the manifest last; ``notes`` for whoever publishes it."""

    artifact: Path
    text: str
    files: Mapping[str, bytes]
    notes: tuple[str, ...]

    def write(self) -> None:
        """Put the files in their places; ArtifactError if that fails."""
        for name, data in self.files.items():
            with whole_file(self.artifact / name) as (file, _):
                file.write(data)


def plan_card(request: CardRequest) -> NewCard:
    """Make the card of ``request``; nothing is written.

    Raises:
        UserError: no artifact, reports about other weights, a card that was edited, a malformed hub id.
        ArtifactError: the manifest, the config or the measurements are damaged.
    """
    folder, manifest = request.artifact, read_manifest(request.artifact)
    if request.base_model is not None and not is_hub_id(request.base_model):
        raise UserError(f"--base-model {request.base_model}: expected a hub id, organization/name")
    _require_unedited(folder, manifest, force=request.force)
    notes: list[str] = []
    added: dict[str, bytes] = {}
    measured = _measured(request, notes)
    if measured is not None:
        added[MEASURED_NAME] = encode_measured(measured)
    if request.licence_file is not None:
        added[_licence_name(request.licence_file)] = read_file(request.licence_file)
    config = read_config(folder)
    if request.renews_model_file:
        added[_module_name(folder, config)] = model_file()
    facts = _facts(request, manifest, config, measured)
    bare = manifest.model_copy(
        update={
            "files": {name: each for name, each in manifest.files.items() if name not in (CARD_NAME, MEASURED_NAME)}
        }
    )
    listed = with_files(bare, added)
    card = render_card(listed, facts)
    check_card(card)
    notes += _missing(facts, listed)
    files = {**added, CARD_NAME: card, MANIFEST_NAME: encode(with_files(listed, {CARD_NAME: card}))}
    return NewCard(artifact=folder, text=card.decode(), files=files, notes=tuple(notes))


def _require_unedited(folder: Path, manifest: Manifest, *, force: bool) -> None:
    path, record = folder / CARD_NAME, manifest.files.get(CARD_NAME)
    if force or not path.is_file() or record is None:
        return
    if hashlib.sha256(path.read_bytes()).hexdigest() != record.sha256:
        raise UserError(
            f"{path}: is not what the manifest lists: it was edited since tqtool wrote it",
            hint="keep a copy of what you wrote, then --force replaces it",
        )


def _module_name(folder: Path, config: Mapping[str, Any]) -> str:
    if config.get("model_file") != MODEL_FILE:
        raise UserError(f"{folder}: ships no module file: only packed trellis artifacts do", hint="drop --renew-module")
    return MODEL_FILE


def _facts(request: CardRequest, manifest: Manifest, config: Mapping[str, Any], measured: Measured | None) -> CardFacts:
    before = stated_fields(request.artifact / CARD_NAME, (*STATED, "base_model", "tags"))
    known = manifest.source.location if manifest.source.kind == "hub" else before.get("base_model")
    base_model = request.base_model or (known if isinstance(known, str) else None)
    name = (base_model or manifest.source.location).rpartition("/")[2]
    kept: Mapping[str, Any] = {key: before[key] for key in STATED if key in before}
    if request.stated:  # one licence's name or link says nothing about another
        kept = {key: value for key, value in kept.items() if not key.startswith("license")} | dict(request.stated)
    return CardFacts(
        title=card_title(name, manifest),
        base_model=base_model,
        stated=kept,
        is_quantized=manifest.kind != "float",
        needs_code=config.get("model_file") is not None,
        place=request.place or _place_before(request.artifact / CARD_NAME),
        tags=tuple(tag for tag in before.get("tags", ()) if tag not in OWN_TAGS),
        measured=measured,
    )


def _place_before(card: Path) -> str:
    """Where the card before this one said that the model lies."""
    found = _PLACE.search(card.read_text(encoding="utf-8", errors="replace")) if card.is_file() else None
    return found[1] if found else PLACE


def _measured(request: CardRequest, notes: list[str]) -> Measured | None:
    """From the reports given; else from the scores that ``tqtool run`` left beside the artifact; else as before."""
    folder = request.artifact
    model_hash = content_hash(folder)
    if request.results:
        return _table(compare(request.results, at={model_hash: folder}), model_hash, folder)
    beside = folder.absolute().parent / "kl.json"
    if beside.is_file() and report_hash(beside) == model_hash:
        notes.append(f"measured: {beside}, which tqtool run left there")
        return _table(
            compare([f"{folder.absolute().parent.name}={beside}"], at={model_hash: folder}), model_hash, folder
        )
    kept = folder / MEASURED_NAME
    if not kept.is_file():
        return None
    measured = parse_measured(kept.read_bytes(), str(kept))
    if measured.model_hash != model_hash:
        raise UserError(
            f"{kept}: is about weights {measured.model_hash[:12]}, the artifact holds {model_hash[:12]}",
            hint="give the reports of this artifact with --results, or remove the file",
        )
    return measured


def _table(comparison: Comparison, model_hash: str, folder: Path) -> Measured:
    if all(arm.model_hash != model_hash for arm in comparison.arms):
        raise UserError(
            f"{folder}: none of the results is about these weights",
            hint="score this artifact: `tqtool eval kl` or `tqtool eval tasks`",
        )
    paired = [] if comparison.baseline is None else [f"p: exact McNemar test against {comparison.baseline}"]
    lines = [_line(conditions) for conditions in (comparison.conditions, *comparison.task_conditions) if conditions]
    return Measured(
        model_hash=model_hash, arms=[_arm(arm, model_hash) for arm in comparison.arms], conditions=[*lines, *paired]
    )


def _arm(arm: Arm, model_hash: str) -> MeasuredArm:
    found = arm.distance
    return MeasuredArm(
        name=arm.name,
        is_this=arm.model_hash == model_hash,
        weight_bytes=arm.weight_bytes,
        bits_per_weight=arm.bits_per_weight,
        kl=None if found is None else found.kl,
        kl_se=None if found is None else found.kl_se,
        ppl=None if found is None else found.ppl,
        top1=None if found is None else found.top1,
        tasks={" ".join(score.column): score.text for score in arm.tasks},
    )


def _line(conditions: Mapping[str, Any]) -> str:
    """Conditions as one line to be published: of a path only the name."""
    parts = []
    for key, value in conditions.items():
        if value is None:
            continue
        text = f"{value:.6g}" if isinstance(value, float) else str(value)
        is_path = isinstance(value, str) and os.sep in text and (not is_hub_id(text) or Path(text).exists())
        parts.append(f"{key.replace('_', ' ')} {Path(text).name if is_path else text}")
    return ", ".join(parts)


def _licence_name(path: Path) -> str:
    """The name it gets in the artifact: its own where that says what it is."""
    return path.name if path.name.upper().startswith(LICENCE_NAMES) else "LICENSE"


def _missing(facts: CardFacts, manifest: Manifest) -> list[str]:
    """What whoever publishes this should know."""
    notes = []
    if facts.base_model is None:
        notes.append("no base model: the source was a folder; --base-model ORG/NAME names it")
    if "license" not in facts.stated:
        notes.append("no licence: the source's card states none; --license ID states it")
    elif facts.stated["license"] == "other" and not {"license_name", "license_link"} <= set(facts.stated):
        notes.append("license: other: hubs want --license-name and --license-link with it")
    if not any(name.upper().startswith(LICENCE_NAMES) for name in manifest.files):
        notes.append("no licence text: the source's folder has none; --license-file FILE copies it")
    if facts.measured is None:
        notes.append(
            "nothing measured: --results takes reports of `tqtool eval kl --json` and `tqtool eval tasks --out`"
        )
    return notes
