"""Artifacts of one model at different rates, and the groups of modules that can be swapped between them.

Encode once, mix later: the artifacts are made beforehand, each at one rate. What is equal in all of them is common;
what differs is what they are candidates for. The manifests say all of it, no tensor is read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from tqtool.artifact.reader import read_config, read_manifest
from tqtool.errors import UserError
from tqtool.formats.manifest import Manifest, TensorRecord, encode
from tqtool.formats.sensitivity import Candidate, tie
from tqtool.formats.teacher import TeacherDump
from tqtool.formats.trellis import TrellisSpec, specs_from_config
from tqtool.transform.plan import Role

TABLES = (Role.EMBEDDING.value, Role.HEAD.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How one module is stored; ``mode`` is ``trellis``, a mode of MLX, or ``dense``."""

    bits: int
    mode: str
    group_size: int | None

    def __str__(self) -> str:
        return f"{self.mode} {self.bits} bits" + (f" g{self.group_size}" if self.group_size else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class CodedArtifact:
    """One candidate: every measured module is stored at ``setting``."""

    folder: Path
    setting: Setting
    manifest: Manifest
    manifest_sha256: str
    records: Mapping[str, TensorRecord]

    def stored_bits(self, modules: Sequence[str]) -> int:
        """Bits of everything stored for the weights of ``modules``."""
        return sum(8 * stored.size_bytes for name in modules for stored in self.records[name].stored)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Artifacts by rising bits, and what can be swapped between them.

    Attributes:
        artifacts: Two or more, no two of the same bits.
        groups: Modules that take one rate together, in the model's order.
        protected: Embedding and head, which are not swapped.
    """

    artifacts: tuple[CodedArtifact, ...]
    groups: tuple[tuple[str, ...], ...]
    protected: tuple[str, ...]

    def parameters(self, modules: Sequence[str]) -> list[int]:
        """Weights of each of ``modules``."""
        return [self.artifacts[0].records[name].parameters for name in modules]

    def described(self) -> list[Candidate]:
        """What a sensitivity file says of the artifacts."""
        modules = [name for group in self.groups for name in group]
        total = sum(self.parameters(modules))
        return [
            Candidate(
                bits=artifact.setting.bits,
                mode=artifact.setting.mode,
                group_size=artifact.setting.group_size,
                bits_per_weight=artifact.stored_bits(modules) / total,
                manifest_sha256=artifact.manifest_sha256,
            )
            for artifact in self.artifacts
        ]


def open_candidates(folders: Sequence[Path], *, include_head: bool = False) -> Candidates:
    """Read the manifests and configs of ``folders`` and hold them against each other.

    Args:
        folders: Artifacts, in any order.
        include_head: An untied head may be swapped too.

    Raises:
        UserError: fewer than two; another source or transform; a module that only some have; an artifact that codes
            the modules that differ at more than one setting; two of the same bits; nothing that differs.
        ArtifactError: a folder is damaged or no artifact of tqtool.
    """
    if len(folders) < 2:
        raise UserError(f"{len(folders)} artifact: expected two or more, each at another rate")
    manifests = [read_manifest(folder) for folder in folders]
    for folder, manifest in zip(folders[1:], manifests[1:], strict=True):
        _require_same_model(folders[0], manifests[0], folder, manifest)
    records = [_modules(manifest) for manifest in manifests]
    first = records[0]
    tables = [name for name, record in first.items() if record.role in TABLES]
    swapped = [name for name in tables if include_head and first[name].role == Role.HEAD.value]
    free = [name for name in first if (name not in tables or name in swapped) and _differs(name, records)]
    if not free:
        raise UserError(f"{folders[0]} and {folders[1]}: no module is stored differently", hint="give two rates")
    artifacts = [
        CodedArtifact(
            folder=folder,
            setting=_only_setting(folder, free, found),
            manifest=manifest,
            manifest_sha256=hashlib.sha256(encode(manifest)).hexdigest(),
            records=found,
        )
        for folder, manifest, found in zip(folders, manifests, records, strict=True)
    ]
    artifacts.sort(key=lambda artifact: artifact.setting.bits)
    _require_rising(artifacts)
    return Candidates(
        artifacts=tuple(artifacts),
        groups=tuple(tuple(group) for group in tie(free)),
        protected=tuple(name for name in tables if name not in swapped),
    )


def teacher_notes(candidates: Candidates, dump: TeacherDump) -> tuple[str, ...]:
    """A note where ``dump`` is not of the weights that the candidates were made from: another model, or a copy."""
    source, info = candidates.artifacts[0].manifest.source, dump.info
    if info.model_hash == source.sample_sha256:
        return ()
    return (
        f"the teacher is not the source of the candidates: {Path(info.model).name}, sample {info.model_hash[:12]}; "
        f"{source.location}, sample {source.sample_sha256[:12]}",
    )


def _require_same_model(first: Path, one: Manifest, other: Path, two: Manifest) -> None:
    hint = "candidates are made from one source with one transform"
    if one.source.content_sha256 != two.source.content_sha256:
        raise UserError(
            f"{other}: another source than {first}: {two.source.location}, {one.source.location}", hint=hint
        )
    if one.transforms != two.transforms:
        raise UserError(f"{other}: another transform than {first}: {_folded(two)}, {_folded(one)}", hint=hint)
    ours, theirs = _modules(one), _modules(two)
    missing = ours.keys() ^ theirs.keys()
    if missing:
        raise UserError(f"{other}: {min(missing)} is in only one of it and {first}", hint=hint)
    for module, record in ours.items():
        if record.folds != theirs[module].folds:  # channels in another order: what reads them would get others
            raise UserError(f"{other}: {module} is folded in another way than in {first}", hint=hint)


def _require_rising(artifacts: Sequence[CodedArtifact]) -> None:
    for low, high in pairwise(artifacts):
        if low.setting.bits == high.setting.bits:
            raise UserError(f"{low.folder} and {high.folder}: both {low.setting.bits} bits", hint="leave one out")
        if (low.setting.mode == "trellis") != (high.setting.mode == "trellis"):
            raise UserError(
                f"{low.folder}: {low.setting}, {high.folder}: {high.setting}",
                hint="a mix is written by one verb: all on the trellis, or none",
            )


def _modules(manifest: Manifest) -> dict[str, TensorRecord]:
    return {record.module: record for record in manifest.tensors if record.module is not None}


def _differs(module: str, records: Sequence[Mapping[str, TensorRecord]]) -> bool:
    return len({tuple(stored.sha256 for stored in found[module].stored) for found in records}) > 1


def _only_setting(folder: Path, modules: Sequence[str], records: Mapping[str, TensorRecord]) -> Setting:
    config = read_config(folder)
    specs = specs_from_config(config)
    found: dict[Setting, str] = {}
    for module in modules:
        found.setdefault(
            _setting(specs.get(module), config.get("quantization", {}).get(module), records[module]), module
        )
    if len(found) > 1:
        (one, first), (two, second), *_ = found.items()
        raise UserError(
            f"{folder}: {first} is {one}, {second} is {two}: a candidate codes all that differs at one rate",
            hint="make the artifacts with equal --modules and --rule, and one rate each",
        )
    return next(iter(found))


def _setting(spec: TrellisSpec | None, entry: Any, record: TensorRecord) -> Setting:
    if spec is not None:
        return Setting(bits=spec.k, mode="trellis", group_size=None)
    if isinstance(entry, dict):
        return Setting(bits=entry["bits"], mode=entry["mode"], group_size=entry["group_size"])
    bits = 8 * sum(stored.size_bytes for stored in record.stored) // record.parameters
    return Setting(bits=bits, mode="dense", group_size=None)


def _folded(manifest: Manifest) -> str:
    return ", ".join(f"{record.id} seed {record.seed}" for record in manifest.transforms) or "no transform"
