"""Hub ids against a cache laid out as huggingface_hub lays it out; nothing here asks the network.

huggingface_hub reads its environment when it is imported, so each case runs in a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tiny_models import write_tiny
from tqtool.source.hub import is_hub_id

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER = "f" * 40

OPEN = """
import json, sys
from tqtool.errors import TqError
from tqtool.source.checkpoint import open_checkpoint
try:
    checkpoint = open_checkpoint(sys.argv[1], revision=sys.argv[2] or None)
except TqError as error:
    print(json.dumps({"code": error.exit_code, "message": error.message, "hint": error.hint}))
else:
    origin = checkpoint.origin
    print(json.dumps({"kind": origin.kind, "location": origin.location, "revision": origin.revision,
                      "path": str(checkpoint.path), "files": [f.name for f in checkpoint.files]}))
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


def open_offline(root: Path, repo: str, revision: str = "") -> dict[str, object]:
    environment = {**os.environ, "HF_HUB_CACHE": str(root), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", OPEN, repo, revision],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
        cwd=root,
    )
    result: dict[str, object] = json.loads(done.stdout)
    return result


def test_a_cached_snapshot_opens_with_its_commit(tmp_path: Path) -> None:
    snapshot = cache_with_model(tmp_path)
    result = open_offline(tmp_path, "org/tiny")
    assert (result["kind"], result["location"], result["revision"]) == ("hub", "org/tiny", COMMIT)
    assert result["path"] == str(snapshot)
    assert "LICENSE" in result["files"]  # type: ignore[operator]


@pytest.mark.parametrize("revision", ["v2", OTHER])
def test_revision_picks_the_snapshot(tmp_path: Path, revision: str) -> None:
    cache_with_model(tmp_path)
    cache_with_model(tmp_path, commit=OTHER, ref="v2")
    assert open_offline(tmp_path, "org/tiny", revision)["revision"] == OTHER


def test_a_snapshot_made_by_a_loader_lacks_only_the_licence(tmp_path: Path) -> None:
    cache_with_model(tmp_path, licence=False)
    result = open_offline(tmp_path, "org/tiny")
    assert result["revision"] == COMMIT
    assert "LICENSE" not in result["files"]  # type: ignore[operator]


def test_a_partial_snapshot_is_refused(tmp_path: Path) -> None:
    (cache_with_model(tmp_path) / "model.safetensors").unlink()
    result = open_offline(tmp_path, "org/tiny")
    assert result["code"] == 2
    assert "only part of the snapshot is in the local cache" in str(result["message"])


@pytest.mark.parametrize("revision", ["", "v9"])
def test_offline_and_not_cached(tmp_path: Path, revision: str) -> None:
    if revision:
        cache_with_model(tmp_path)
    result = open_offline(tmp_path, "org/tiny", revision)
    assert result["code"] == 2
    name = f"org/tiny@{revision}" if revision else "org/tiny"
    assert str(result["message"]).startswith(f"{name}: no such folder here, not in the local Hugging Face cache")
    assert "HF_HUB_OFFLINE" in str(result["hint"])


def test_a_local_folder_of_that_name_wins(tmp_path: Path) -> None:
    cache_with_model(tmp_path)
    (tmp_path / "org").mkdir()
    write_tiny(tmp_path / "org" / "tiny")
    result = open_offline(tmp_path, "org/tiny")
    assert (result["kind"], result["revision"]) == ("folder", None)


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
