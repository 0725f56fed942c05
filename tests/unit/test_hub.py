"""Hub ids against a cache laid out as huggingface_hub lays it out; nothing here asks the network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import constants

from tests.support.tiny_models import write_tiny
from tqtool.errors import SourceError
from tqtool.source.checkpoint import open_checkpoint
from tqtool.source.hub import is_hub_id

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER = "f" * 40

OPEN = """
import sys
from tqtool.source.checkpoint import open_checkpoint
checkpoint = open_checkpoint(sys.argv[1])
print(checkpoint.origin.kind, checkpoint.origin.location, checkpoint.origin.revision, checkpoint.path)
"""


def cache_with_model(root: Path, *, commit: str = COMMIT, ref: str = "main", licence: bool = True) -> Path:
    """``models--org--tiny`` with one snapshot; the tree listing says what a complete one holds."""
    repo = root / "models--org--tiny"
    snapshot = write_tiny(repo / "snapshots" / commit)
    (repo / "refs").mkdir(exist_ok=True)
    (repo / "refs" / ref).write_text(commit)
    listing = {
        path.name: {"size": path.stat().st_size, "blob_id": "0" * 40} for path in snapshot.iterdir() if path.is_file()
    }
    if not licence:
        (snapshot / "LICENSE").unlink()
    (repo / "trees").mkdir(exist_ok=True)
    (repo / "trees" / f"{commit}.json").write_text(json.dumps({"format_version": 1, "files": listing}))
    return snapshot


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder that huggingface_hub uses, offline; its constants are read at each call."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_environment_is_honoured(tmp_path: Path) -> None:
    snapshot = cache_with_model(tmp_path)
    environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", OPEN, "org/tiny"], capture_output=True, text=True, check=True, env=environment
    )
    assert done.stdout.split() == ["hub", "org/tiny", COMMIT, str(snapshot)]


def test_a_cached_snapshot_opens_with_its_commit(offline: Path) -> None:
    snapshot = cache_with_model(offline)
    checkpoint = open_checkpoint("org/tiny")
    origin = checkpoint.origin
    assert (origin.kind, origin.location, origin.revision) == ("hub", "org/tiny", COMMIT)
    assert checkpoint.path == snapshot
    assert "LICENSE" in [path.name for path in checkpoint.files]


@pytest.mark.parametrize("revision", ["v2", OTHER])
def test_revision_picks_the_snapshot(offline: Path, revision: str) -> None:
    cache_with_model(offline)
    cache_with_model(offline, commit=OTHER, ref="v2")
    assert open_checkpoint("org/tiny", revision=revision).origin.revision == OTHER


def test_a_snapshot_made_by_a_loader_lacks_only_the_licence(offline: Path) -> None:
    cache_with_model(offline, licence=False)
    checkpoint = open_checkpoint("org/tiny")
    assert checkpoint.origin.revision == COMMIT
    assert "LICENSE" not in [path.name for path in checkpoint.files]


def test_a_partial_snapshot_is_refused(offline: Path) -> None:
    (cache_with_model(offline) / "model.safetensors").unlink()
    with pytest.raises(SourceError, match="org/tiny: only part of the snapshot is in the local cache"):
        open_checkpoint("org/tiny")


@pytest.mark.parametrize("revision", [None, "v9"])
def test_offline_and_not_cached(offline: Path, revision: str | None) -> None:
    if revision:
        cache_with_model(offline)
    name = f"org/tiny@{revision}" if revision else "org/tiny"
    with pytest.raises(
        SourceError, match=f"{name}: no such folder here, not in the local Hugging Face cache"
    ) as caught:
        open_checkpoint("org/tiny", revision=revision)
    assert "HF_HUB_OFFLINE" in (caught.value.hint or "")
    assert caught.value.exit_code == 2


def test_a_local_folder_of_that_name_wins(offline: Path) -> None:
    cache_with_model(offline)
    (offline / "org").mkdir()
    write_tiny(offline / "org" / "tiny")
    origin = open_checkpoint("org/tiny").origin
    assert (origin.kind, origin.revision) == ("folder", None)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("org/name", True),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", True),
        ("a.b/c_d", True),
        ("name", False),
        ("/org/name", False),
        ("./org/name", False),
        ("../name", False),
        ("org/name/more", False),
        ("org/na me", False),
        ("org/..", False),
        ("org/a--b", False),
    ],
)
def test_what_looks_like_a_hub_id(text: str, expected: bool) -> None:
    assert is_hub_id(text) is expected


def test_the_card_comes_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its front matter names the licence, without which the artifact's card states none."""
    asked: list[str] = []

    def download(repo: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.extend(allow_patterns)
        return str(write_tiny(tmp_path / "snapshots" / COMMIT))

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    open_checkpoint("org/absent")
    assert {"README.md", "LICENSE*"} <= set(asked)
