"""A hub in memory that answers what ``tqtool upload`` asks of ``huggingface_hub.HfApi``."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace
from typing import Any

LARGE = 2000
"""Bytes from which a file is kept as a large one, with its SHA-256."""


@dataclass
class FakeHub:
    """``files`` by path; ``commits`` lists what each call sent or removed; breaks before the file ``breaks_at``."""

    files: dict[str, bytes] = field(default_factory=dict)
    private: bool | None = None
    commits: list[tuple[str, list[str]]] = field(default_factory=list)
    breaks_at: str | None = None
    spoils: str | None = None

    def create_repo(self, repo: str, *, private: bool, exist_ok: bool) -> str:
        assert exist_ok
        if self.private is None:
            self.private = private
            self.files[".gitattributes"] = b"*.safetensors filter=lfs\n"
        return f"https://hub.test/{repo}"

    def repo_info(self, repo: str) -> Any:
        return SimpleNamespace(private=self.private)

    def list_repo_tree(self, repo: str, *, recursive: bool) -> Iterator[Any]:
        assert recursive
        yield SimpleNamespace(path="tqtool", tree_id="a folder")
        for path, data in self.files.items():
            lfs = SimpleNamespace(sha256=hashlib.sha256(data).hexdigest()) if len(data) >= LARGE else None
            blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
            yield SimpleNamespace(path=path, size=len(data), lfs=lfs, blob_id="pointer" if lfs else blob)

    def delete_files(self, repo: str, patterns: list[str], *, commit_message: str) -> None:
        for name in patterns:
            del self.files[name]
        self.commits.append(("delete", sorted(patterns)))

    def upload_folder(
        self, *, repo_id: str, folder_path: Path, repo_type: str, allow_patterns: list[str], commit_message: str
    ) -> None:
        names = [path.relative_to(folder_path).as_posix() for path in sorted(folder_path.rglob("*")) if path.is_file()]
        names = [name for name in names if any(fnmatchcase(name, pattern) for pattern in allow_patterns)]
        for name in names:
            if name == self.breaks_at:
                self.breaks_at = None
                raise ConnectionResetError("the line went dead")
            data = (folder_path / name).read_bytes()
            self.files[name] = data[:-1] + bytes([data[-1] ^ 1]) if name == self.spoils else data
        self.commits.append(("upload", names))
