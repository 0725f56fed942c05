"""Encode once, mix later: tensors of earlier artifacts, or of an interrupted run, spliced in when nothing differs.

What decides a stored tensor is its source, its folds with the norm gains they use, the quantizer's recipe (which names
the Hessian by its content) and the version of tqtool. The hash of all that is the row's ``key`` in the manifest. An
artifact made with reuse is byte for byte the one made without.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tqtool.artifact.output import check_writable, whole_file
from tqtool.artifact.reader import Artifact, open_artifact
from tqtool.errors import ArtifactError, SourceError, TqError, UserError
from tqtool.formats.manifest import PartRecord, StoredRecord, TensorRecord
from tqtool.formats.safetensors import build_header, read_header
from tqtool.pipeline.plan import Work
from tqtool.solve.quantizer import QuantResult, Reusable
from tqtool.source.checkpoint import TensorRef
from tqtool.transform.folds import ScaleInput, op_to_json

KEY_VERSION = 3
"""Raise it when equal facts give other bytes than before: a solver's rule, or how Hessians are weighted, changed.

2: sinks shortened before they are weighted, dampings by role, outlier columns tamed.
3: dampings by rows too.
"""


_KEPT = re.compile(r"[0-9a-f]{64}\.safetensors|\..+\.partial-[0-9a-f]+")
"""What a journal holds: tensors by key, and what a kill in the middle of one leaves."""


def tensor_key(work: Work, sha256_of: Callable[[str], str]) -> str | None:
    """Hash of all that decides what is stored for ``work``; None where making it anew is as cheap as copying.

    Args:
        work: The tensor and its quantizer.
        sha256_of: Hash of a source tensor's bytes.
    """
    if not isinstance(work.quantizer, Reusable):
        return None
    ops = work.output.ops
    facts = {
        "key_version": KEY_VERSION,
        "tqtool": importlib.metadata.version("tqtool"),
        "source": sha256_of(work.output.source),
        **({} if work.output.rows is None else {"rows": list(work.output.rows)}),
        "shape": list(work.output.shape),
        "ops": [op_to_json(op) | _gain(op, sha256_of) for op in ops],
        "recipe": work.quantizer.recipe(work.output.name),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _gain(op: Any, sha256_of: Callable[[str], str]) -> dict[str, str]:
    """A gain counts by its values; the layer it stands in does not matter."""
    return {"gain": sha256_of(op.gain)} if isinstance(op, ScaleInput) else {}


def check_shelf(folders: Sequence[Path], journal: Path | None, out: Path) -> None:
    """Refuse, before any work, what a ``Shelf`` could not be made of.

    Raises:
        UserError: no such folder; a journal that is a file, holds anything but kept tensors, or lies where
            ``out`` does.
        ArtifactError: a folder is damaged or no artifact of tqtool; a journal that cannot be written.
    """
    for folder in folders:
        _open(folder)
    if journal is None:
        return
    if journal.exists() and not journal.is_dir():
        raise UserError(f"--journal {journal}: is a file", hint="name a folder; it is made if it is not there")
    here, there = journal.resolve(), out.resolve()
    if here == there or here.is_relative_to(there) or there.is_relative_to(here):
        raise UserError(
            f"--journal {journal}: it and the artifact {out} lie in one another", hint="name a folder beside it"
        )
    others = [] if not journal.exists() else [p.name for p in journal.iterdir() if not _KEPT.fullmatch(p.name)]
    if others:
        raise UserError(
            f"--journal {journal}: is not empty and no journal, it holds {min(others)}",
            hint="name a folder of its own; it is made if it is not there, and removed when the artifact is whole",
        )
    check_writable(journal / "tensor")


def _open(folder: Path) -> Artifact:
    try:
        return open_artifact(folder)
    except TqError as error:
        raise type(error)(f"--reuse {error.message}", hint=error.hint) from error


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a piece lies: a row of an artifact, or part ``index`` of the stack that the row is about."""

    artifact: Artifact
    record: TensorRecord
    piece: TensorRecord | PartRecord
    index: int | None


class Shelf:
    """Tensors of finished artifacts, and of the journal of an interrupted run, by key."""

    def __init__(self, folders: Sequence[Path], journal: Path | None = None) -> None:
        """Open ``folders``; UserError or ArtifactError as ``check_shelf``."""
        self._places: dict[str, _Place] = {}
        self._sound: set[tuple[Path, str]] = set()
        self._journal = None if journal is None else Journal(journal)
        self.taken = 0
        for folder in folders:
            artifact = _open(folder)
            for record in artifact.manifest.tensors:
                pieces: Sequence[TensorRecord | PartRecord] = record.parts or [record]
                for index, piece in enumerate(pieces):
                    if piece.key is not None:
                        place = _Place(artifact, record, piece, index if record.parts else None)
                        self._places.setdefault(piece.key, place)

    def take(self, key: str | None, work: Work, known_notes: Sequence[str]) -> QuantResult | None:
        """What was stored under ``key``, named for ``work``; None if no artifact has it.

        Raises:
            ArtifactError: the bytes are not those of that artifact's manifest.
        """
        if key is None:
            return None
        if self._journal is not None and (kept := self._journal.take(key, work)) is not None:
            self.taken += 1
            return kept
        if key not in self._places:
            return None
        place = self._places[key]
        stored = zip(work.stored, place.record.stored, strict=True)
        tensors = {wanted.name: self._read(place, found) for wanted, found in stored}
        self.taken += 1
        notes = tuple(note for note in place.piece.notes if note not in known_notes)
        return QuantResult(tensors=tensors, stats=place.piece.stats, notes=notes)

    def _read(self, place: _Place, stored: StoredRecord) -> NDArray[Any]:
        """A stored tensor, or one part of it; the whole is held against its hash once."""
        artifact, name = place.artifact, stored.name
        if place.index is not None and (artifact.path, name) in self._sound:
            return np.asarray(artifact.read_rows(name, place.index, place.index + 1)[0])
        array = artifact.read(name)
        if _sha256(array) != stored.sha256:
            raise ArtifactError(f"{artifact.path}: {name}: its bytes are not those of its manifest")
        self._sound.add((artifact.path, name))
        return array if place.index is None else np.ascontiguousarray(array[place.index])

    def keep(self, key: str | None, work: Work, result: QuantResult) -> None:
        """Write a fresh result into the journal, if there is one; ArtifactError when that fails."""
        if self._journal is not None and key is not None:
            self._journal.keep(key, work, result)

    def clear(self) -> None:
        """Empty the journal: the artifact is whole."""
        if self._journal is not None:
            self._journal.clear()


class Journal:
    """One file a finished tensor, under its key: what a killed run need not make again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._mine: set[Path] = set()

    def keep(self, key: str, work: Work, result: QuantResult) -> None:
        """Write ``result``; the file appears whole or not at all."""
        arrays = [np.ascontiguousarray(array) for array in result.tensors.values()]
        header, _ = build_header(
            [(str(number), stored.dtype, stored.shape) for number, stored in enumerate(work.stored)],
            {
                "sha256": json.dumps([_sha256(array) for array in arrays]),
                "stats": json.dumps({name: value for name, value in result.stats.items() if math.isfinite(value)}),
                "notes": json.dumps(result.notes),
            },
        )
        path = self._path(key)
        self._mine.add(path)
        with whole_file(path) as (file, _):
            file.write(header)
            for array in arrays:
                file.write(array.reshape(-1).view(np.uint8).data)

    def take(self, key: str, work: Work) -> QuantResult | None:
        """What was kept under ``key``; None if nothing was. ArtifactError if it is damaged."""
        path = self._path(key)
        if not path.exists():
            return None
        self._mine.add(path)
        try:
            header = read_header(path)
            hashes, stats, notes = (json.loads(header.metadata[name]) for name in ("sha256", "stats", "notes"))
            if not isinstance(stats, dict) or any(type(value) not in (int, float) for value in stats.values()):
                raise ValueError("stats are no numbers")
            if not isinstance(notes, list) or any(not isinstance(note, str) for note in notes):
                raise ValueError("notes are no text")
            tensors: dict[str, NDArray[Any]] = {}
            for number, stored in enumerate(work.stored):
                info = header.tensors[str(number)]
                ref = TensorRef(
                    name=stored.name, dtype=info.dtype, shape=info.shape, path=path, begin=info.begin, end=info.end
                )
                tensors[stored.name] = ref.read()
                if _sha256(tensors[stored.name]) != hashes[number]:
                    raise ValueError(f"{stored.name} has other bytes than were written")
        except (SourceError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise ArtifactError(f"{path}: damaged ({error})", hint="remove it; the tensor is made again") from error
        return QuantResult(tensors=tensors, stats=stats, notes=tuple(notes))

    def clear(self) -> None:
        """Remove what this run kept or took, and the folder if nothing else is in it, of another job say."""
        for path in self._mine:
            path.unlink(missing_ok=True)
        with suppress(OSError):
            self._folder.rmdir()

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}.safetensors"


def _sha256(array: NDArray[Any]) -> str:
    return hashlib.sha256(array.reshape(-1).view(np.uint8).data).hexdigest()
