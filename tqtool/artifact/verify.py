"""Check an artifact against itself and against stock mlx-lm; every check runs, each says pass, fail or skip.

``files`` and ``tensors`` prove that nothing changed since it was written, ``config`` that names, shapes and settings
agree, ``decode`` that the bytes mean what docs/formats says on this machine, ``reload`` and ``forward`` that a
stranger's loader builds the planned model from it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tqtool.artifact.config_check import config_entries, config_problems
from tqtool.artifact.decode_check import decode_problems
from tqtool.artifact.model_file import model_file
from tqtool.artifact.reader import SHARD_GLOB, Artifact, open_artifact, read_manifest, read_object
from tqtool.artifact.reload import Depth, compare_modules, reload_stock
from tqtool.artifact.sidecar import VISION_NAME, sidecar_problems
from tqtool.artifact.writer import INDEX_NAME
from tqtool.errors import ArtifactError, TqError
from tqtool.formats.manifest import MANIFEST_NAME, Manifest, rotation_seeds

Status = Literal["pass", "fail", "skip"]
_OTHER_MODULE = (
    "model_file is not the module this version of tqtool ships: it was not executed (of another version? "
    "`tqtool card ARTIFACT --renew-module` puts this one's there)"
)
_HASH_BLOCK = 1 << 20
COMPANION_FOLDER = "mtp"
_COMPANION_KIND = "companion-"
_IGNORED = (".git", ".gitattributes", ".cache", ".DS_Store")
"""What hubs and file managers add to a folder; nothing loads them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One check's outcome; ``problems`` name the file or tensor, expected and found."""

    name: str
    status: Status
    detail: str
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """All checks of one artifact."""

    path: str
    checks: tuple[Check, ...]

    @property
    def is_good(self) -> bool:
        """True when no check failed."""
        return all(check.status != "fail" for check in self.checks)

    def require(self) -> None:
        """Raise ArtifactError naming the first problem."""
        for check in self.checks:
            if check.status == "fail":
                total = sum(len(each.problems) for each in self.checks)
                more = f" (and {total - 1} more)" if total > 1 else ""
                raise ArtifactError(f"{self.path}: {check.name}: {check.problems[0]}{more}")


def verify_artifact(path: Path, *, depth: Depth = "forward") -> VerifyReport:
    """Run every check on ``path``.

    Args:
        path: Folder of the artifact.
        depth: How far to go in stock mlx-lm.

    Raises:
        ArtifactError: there is no manifest to check against.
    """
    manifest = read_manifest(path)
    checks = [Check(name="manifest", status="pass", detail=f"format {manifest.format_version}, {manifest.kind}")]
    checks.append(_guarded("files", lambda: _check_files(path, manifest)))
    opened = _opened(path)
    if isinstance(opened, Check):
        skipped = ("tensors", "config", "decode", "reload")
        checks += [opened, *(Check(name=name, status="skip", detail="the artifact does not open") for name in skipped)]
        return VerifyReport(path=str(path), checks=tuple(checks))
    checks.append(_guarded("tensors", lambda: _check_tensors(opened)))
    checks.append(_guarded("config", lambda: _check_config(opened)))
    if checks[-1].status == "pass" and checks[-2].status == "pass":
        checks.append(_guarded("decode", lambda: _check_decode(opened)))
    else:
        checks.append(Check(name="decode", status="skip", detail="config and tensors disagree"))
    if VISION_NAME in manifest.files:
        checks.append(_guarded("sidecar", lambda: _check_sidecar(opened)))
    if f"{COMPANION_FOLDER}/{MANIFEST_NAME}" in manifest.files:
        checks.append(_guarded("companion", lambda: _check_companion(opened)))
    if manifest.kind.startswith(_COMPANION_KIND):
        checks.append(Check(name="reload", status="skip", detail="mlx-lm runs no companion"))
    elif depth == "none":
        checks.append(Check(name="reload", status="skip", detail="not asked for"))
    else:
        checks.append(_guarded("reload", lambda: _check_reload(opened, depth)))
    return VerifyReport(path=str(path), checks=tuple(checks))


def _guarded(name: str, check: Callable[[], tuple[str, list[str]]]) -> Check:
    """Run one check; an error inside, whatever it is, is its failure, so that the others still run."""
    try:
        detail, problems = check()
    except Exception as error:  # noqa: BLE001 - a report is due whatever happens
        return Check(name=name, status="fail", detail="stopped", problems=(_problem(error),))
    return Check(
        name=name,
        status="fail" if problems else "pass",
        detail=_printable(detail),
        problems=tuple(_printable(problem) for problem in problems),
    )


def _opened(path: Path) -> Artifact | Check:
    """The artifact, or the failed check that says why it does not open."""
    try:
        return open_artifact(path)
    except Exception as error:  # noqa: BLE001 - a report is due whatever happens
        return Check(name="open", status="fail", detail="cannot be opened", problems=(_problem(error),))


def _problem(error: Exception) -> str:
    if isinstance(error, TqError):
        return _printable(error.message)
    # Something about the artifact that no check foresaw: it is red all the same, and the type is what a report needs.
    return _printable(f"cannot be checked: {type(error).__name__}: {error}")


def _printable(text: str) -> str:
    """``text`` in one line that every terminal takes: names in a damaged file may hold lone surrogates."""
    return " ".join(text.encode("utf-8", "backslashreplace").decode().split("\n"))


def _check_files(path: Path, manifest: Manifest) -> tuple[str, list[str]]:
    problems = []
    for name, record in manifest.files.items():
        file = path / name
        if not file.is_file():
            problems.append(f"{name}: is missing")
        elif file.stat().st_size != record.size_bytes:
            problems.append(f"{name}: {file.stat().st_size:,} bytes, the manifest says {record.size_bytes:,}")
        elif (found := _file_sha256(file)) != record.sha256:
            problems.append(f"{name}: sha256 is {found[:12]}…, the manifest says {record.sha256[:12]}…")
    present = set(_files_below(path))
    for name in sorted(present - set(manifest.files) - {MANIFEST_NAME}):
        loaded = " and stock loaders would load it" if Path(name).match(SHARD_GLOB) else ""
        problems.append(f"{name}: is not in the manifest{loaded}")
    size = sum(record.size_bytes for record in manifest.files.values())
    return f"{len(manifest.files)} files, {size:,} bytes hashed", problems


def _check_tensors(artifact: Artifact) -> tuple[str, list[str]]:
    """Headers, index and manifest name the same tensors; each tensor has its hash."""
    expected = artifact.manifest.stored()
    problems = [
        f"{name}: planned in {record.file}, no shard holds it"
        for name, record in expected.items()
        if name not in artifact.tensors
    ]
    problems += [
        f"{name}: in {artifact.tensors[name].path.name}, but not in the manifest"
        for name in artifact.tensors
        if name not in expected
    ]
    weight_map = read_object(artifact.path / INDEX_NAME).get("weight_map")
    on_disk = {name: ref.path.name for name, ref in artifact.tensors.items()}
    if weight_map != on_disk:
        problems.append(f"{INDEX_NAME}: its weight_map differs from the shards on disk")
    for name, record in expected.items():
        ref = artifact.tensors.get(name)
        if ref is None:
            continue
        found = (ref.path.name, ref.dtype.value, list(ref.shape))
        if found != (record.file, record.dtype, record.shape):
            problems.append(f"{name}: {found}, the manifest says {(record.file, record.dtype, record.shape)}")
        elif (digest := _range_sha256(ref.path, ref.begin, ref.end)) != record.sha256:
            problems.append(f"{name}: sha256 is {digest[:12]}…, the manifest says {record.sha256[:12]}…")
    return f"{len(expected)} tensors, {len(artifact.shards)} shard(s)", problems


def _check_config(artifact: Artifact) -> tuple[str, list[str]]:
    entries = config_entries(artifact)
    packed = sum(1 for entry in entries.values() if entry)
    return f"{len(entries)} modules, {packed} packed by MLX", config_problems(artifact, entries)


def _check_decode(artifact: Artifact) -> tuple[str, list[str]]:
    n_modules, problems = decode_problems(artifact, config_entries(artifact))
    return f"rows of {n_modules} modules decoded", problems


def _check_sidecar(artifact: Artifact) -> tuple[str, list[str]]:
    n_tensors, problems = sidecar_problems(artifact)
    return f"{n_tensors} tensors of the vision tower as in the shards", problems


def _check_companion(artifact: Artifact) -> tuple[str, list[str]]:
    """It is whole, and carries the rotations of its trunk."""
    path = artifact.path / COMPANION_FOLDER
    report = verify_artifact(path, depth="none")
    problems = [f"{COMPANION_FOLDER}/ {each.name}: {line}" for each in report.checks for line in each.problems]
    inside = read_manifest(path)
    seeds, own = rotation_seeds(artifact.manifest.transforms), rotation_seeds(inside.transforms)
    if seeds != own:
        problems.append(f"{COMPANION_FOLDER}/ carries rotations of seeds {list(own)}, its trunk {list(seeds)}")
    tap = read_object(path / "config.json").get("hidden_tap")
    if not inside.kind.startswith(_COMPANION_KIND) or not isinstance(tap, str):
        problems.append(f"{COMPANION_FOLDER}/ holds {inside.kind}, whose config.json has hidden_tap {tap!r}")
    return f"{inside.kind} of {len(inside.tensors)} tensors, hidden state at {tap}", problems


def _check_reload(artifact: Artifact, depth: Depth) -> tuple[str, list[str]]:
    entries = config_entries(artifact)
    needs_code = artifact.config.get("model_file") is not None
    if needs_code and not _is_our_model_file(artifact):
        return "stock mlx-lm", [_OTHER_MODULE]
    report = reload_stock(artifact.path, depth=depth, trust_remote_code=needs_code)
    detail = f"mlx-lm {report.mlx_lm_version}, {len(report.modules)} modules as configured"
    if report.n_logits:
        detail += f", one forward with {report.n_logits:,} finite logits"
    if needs_code:
        detail += " (with its model_file: --trust-remote-code)"
    return detail, list(compare_modules(report, entries))


def _is_our_model_file(artifact: Artifact) -> bool:
    """Verifying must never run what it verifies: only the module that tqtool itself ships is trusted, byte for byte."""
    name = artifact.config["model_file"]
    if not isinstance(name, str) or Path(name).name != name:
        return False
    path = artifact.path / name
    return path.is_file() and path.read_bytes() == model_file()


def _files_below(path: Path) -> Iterator[str]:
    for file in sorted(path.rglob("*")):
        relative = file.relative_to(path)
        if not file.is_dir() and relative.parts[0] not in _IGNORED and relative.name not in _IGNORED:
            yield relative.as_posix()


def _file_sha256(file: Path) -> str:
    return _range_sha256(file, 0, file.stat().st_size)


def _range_sha256(file: Path, begin: int, end: int) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        stream.seek(begin)
        while begin < end and (block := stream.read(min(_HASH_BLOCK, end - begin))):
            digest.update(block)
            begin += len(block)
    return digest.hexdigest()
