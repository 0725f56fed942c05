"""``tqtool upload``: an artifact goes to a hub repository whole, or nothing can load what is there of it.

Weights and all else are sent first, by huggingface_hub's own upload, which goes on where it was interrupted. What
loaders look for first, ``config.json``, comes in the last commit, when everything else is there; a repository that
holds another model loses its ``config.json`` in the first one. At the end names, sizes and hashes on the hub are
compared with the manifest.
"""

from __future__ import annotations

import glob
import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqtool.artifact.card import CARD_NAME, PLACE
from tqtool.artifact.card_check import check_card
from tqtool.artifact.reader import read_manifest
from tqtool.artifact.reload import Depth
from tqtool.artifact.verify import verify_artifact
from tqtool.errors import ArtifactError, BackendError, TqError, UserError
from tqtool.formats.manifest import MANIFEST_NAME, FileRecord
from tqtool.source.hub import is_hub_id

if TYPE_CHECKING:
    from huggingface_hub import HfApi

LAST = ("config.json", CARD_NAME, MANIFEST_NAME)
"""Sent when the rest is there: without them no loader finds a model."""
HUBS_OWN = (".gitattributes",)


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadRequest:
    """What is to go where.

    Attributes:
        artifact: Its folder.
        repo: ``organization/name``.
        is_public: Of a repository that is made; an existing one must be what this says.
        replaces: Take the place of another model that the repository holds.
        depth: How far ``verify`` goes before.
        message: Of the commits.
    """

    artifact: Path
    repo: str
    is_public: bool = False
    replaces: bool = False
    depth: Depth = "forward"
    message: str = "Upload a model with tqtool"


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadPlan:
    """An artifact that verified: its files with their sizes in bytes, and what to know of it."""

    request: UploadRequest
    files: Mapping[str, int]
    notes: tuple[str, ...]

    @property
    def total_bytes(self) -> int:
        """Of all files."""
        return sum(self.files.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Uploaded:
    """What is on the hub now; ``was_complete`` when it was there already."""

    url: str
    files: int
    total_bytes: int
    was_complete: bool


def plan_upload(request: UploadRequest) -> UploadPlan:
    """Verify the artifact and list what would be sent; asks no network.

    Raises:
        UserError: no hub id, or the card cannot be read by hubs.
        ArtifactError: the artifact does not verify.
    """
    if not is_hub_id(request.repo):
        raise UserError(
            f"{request.repo}: expected a repository, organization/name", hint="your own name on the hub is one too"
        )
    verify_artifact(request.artifact, depth=request.depth).require()
    manifest = read_manifest(request.artifact)
    if CARD_NAME not in manifest.files:
        raise UserError(f"{request.artifact}: has no {CARD_NAME}", hint=f"tqtool card {request.artifact} writes it")
    card = (request.artifact / CARD_NAME).read_bytes()
    front = check_card(card)
    files = {name: record.size_bytes for name, record in manifest.files.items()}
    files[MANIFEST_NAME] = (request.artifact / MANIFEST_NAME).stat().st_size
    missing = [name for name in ("base_model", "license") if name not in front]
    notes = [f"the card states no {name}" for name in missing]
    if missing:
        notes.append(f"`tqtool card {request.artifact}` states it: --base-model ORG/NAME, --license ID")
    if PLACE.encode() in card:
        notes.append(
            f"commands in the card say {PLACE}: `tqtool card {request.artifact} --repo {request.repo}` fills it in"
        )
    return UploadPlan(request=request, files=dict(sorted(files.items())), notes=tuple(notes))


def upload(plan: UploadPlan, api: HfApi | None = None) -> Uploaded:
    """Send what ``plan`` lists, with the token of the hub's own login, and hold the result against the manifest.

    Raises:
        UserError: not logged in, refused, the repository holds another model, or is not as public as asked for.
        BackendError: the hub cannot be reached, or broke off; the same call goes on.
        ArtifactError: what the hub holds afterwards is not the artifact.
    """
    from huggingface_hub import HfApi

    request, api = plan.request, api or HfApi(library_name="tqtool")
    with hub_errors(request.repo):
        url = str(api.create_repo(request.repo, private=not request.is_public, exist_ok=True))
        is_private = bool(api.repo_info(request.repo).private)
    if is_private == request.is_public:
        found, asked = ("private", "public") if is_private else ("public", "private")
        raise UserError(
            f"{request.repo}: the repository is {found}, asked for was {asked}; nothing was sent",
            hint="--public sends to a public one; visibility is changed in the repository's settings on the hub",
        )
    there = remote_files(api, request.repo)
    if not _differences(plan, there):
        return _done(plan, url, was_complete=True)
    stale = _stale(plan, there)
    _send(api, plan, stale)
    problems = _differences(plan, remote_files(api, request.repo))
    if problems:
        raise ArtifactError(
            f"{request.repo}: {problems[0]} ({len(problems)} in all)", hint="repeat the command; it goes on"
        )
    return _done(plan, url, was_complete=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFile:
    """A file on the hub: size in bytes; its SHA-256 if it is kept as a large file, else git's hash of it."""

    size: int
    sha256: str | None
    blob: str


def remote_files(api: HfApi, repo: str) -> dict[str, RemoteFile]:
    """What the repository's main branch holds."""
    with hub_errors(repo):
        entries: list[Any] = list(api.list_repo_tree(repo, recursive=True))
    return {
        entry.path: RemoteFile(size=entry.size, sha256=entry.lfs.sha256 if entry.lfs else None, blob=entry.blob_id)
        for entry in entries
        if hasattr(entry, "blob_id") and entry.path not in HUBS_OWN
    }


def _stale(plan: UploadPlan, there: Mapping[str, RemoteFile]) -> list[str]:
    """What has to go first: nothing if the repository is empty, or holds an upload of this that was interrupted."""
    foreign = sorted(set(there) - set(plan.files))
    if not foreign and "config.json" not in there:
        return []
    if not plan.request.replaces:
        what = f"{len(there)} files, {foreign[0] if foreign else 'config.json'} among them"
        raise UserError(
            f"{plan.request.repo}: the repository holds another model ({what}); nothing was sent",
            hint="--replace puts this one in its place, or name another repository",
        )
    return [*foreign, *(name for name in LAST if name in there)]


def _send(api: HfApi, plan: UploadPlan, stale: list[str]) -> None:
    request = plan.request
    first = [name for name in plan.files if name not in LAST]
    common: dict[str, Any] = {"repo_id": request.repo, "folder_path": request.artifact, "repo_type": "model"}
    with hub_errors(request.repo):
        if stale:
            api.delete_files(
                request.repo, [glob.escape(name) for name in stale], commit_message=f"{request.message}: make room"
            )
        for names in (first, [name for name in LAST if name in plan.files]):
            api.upload_folder(
                **common, allow_patterns=[glob.escape(name) for name in names], commit_message=request.message
            )


def _differences(plan: UploadPlan, there: Mapping[str, RemoteFile]) -> list[str]:
    """How the repository differs from the artifact, one line a file."""
    manifest = read_manifest(plan.request.artifact)
    problems = [f"{name}: is on the hub and not in the artifact" for name in sorted(set(there) - set(plan.files))]
    for name, size in plan.files.items():
        remote = there.get(name)
        if remote is None:
            problems.append(f"{name}: is not on the hub")
        elif remote.size != size:
            problems.append(f"{name}: {remote.size:,} bytes on the hub, {size:,} here")
        elif not _is_same(plan.request.artifact / name, remote, manifest.files.get(name)):
            problems.append(f"{name}: other content on the hub")
    return problems


def _is_same(path: Path, remote: RemoteFile, record: FileRecord | None) -> bool:
    """Large files by SHA-256, which the manifest knows of all but itself; others by git's hash."""
    if remote.sha256 is None:
        return remote.blob == _git_blob(path.read_bytes())
    return remote.sha256 == (hashlib.sha256(path.read_bytes()).hexdigest() if record is None else record.sha256)


def _git_blob(data: bytes) -> str:
    """Git's name of a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def _done(plan: UploadPlan, url: str, *, was_complete: bool) -> Uploaded:
    return Uploaded(url=url, files=len(plan.files), total_bytes=plan.total_bytes, was_complete=was_complete)


@contextmanager
def hub_errors(repo: str) -> Iterator[None]:
    """Whatever the hub or the way to it raises becomes one line of ours."""
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled

    try:
        yield
    except OfflineModeIsEnabled as error:
        raise UserError(f"{repo}: HF_HUB_OFFLINE is set", hint="unset it, or use --dry-run") from error
    except LocalTokenNotFoundError as error:
        raise UserError(f"{repo}: not logged in", hint="hf auth login") from error
    except HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        reason = " ".join(str(error).split())[:200]
        if status in (401, 403):
            raise UserError(
                f"{repo}: the hub refuses ({status}: {reason})",
                hint="hf auth login, with a token that may write to this repository",
            ) from error
        raise BackendError(
            f"{repo}: the hub answers {status}: {reason}", hint="repeat the command; it goes on"
        ) from error
    except TqError:
        raise
    except Exception as error:  # whatever the transport raises: another library for each hub version
        raise BackendError(
            f"{repo}: the hub cannot be reached, or the way to it broke ({type(error).__name__}: {error})",
            hint="check the connection and repeat the command; it goes on where it stopped",
        ) from error
