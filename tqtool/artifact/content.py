"""Which weights a report is about: one hash for every model folder, whoever wrote it."""

from __future__ import annotations

import hashlib
from pathlib import Path

from tqtool.errors import ArtifactError


def content_hash(folder: Path) -> str:
    """SHA-256 over names and contents of ``config.json`` and the weight files.

    Headers would not do: two solvers write the same shapes, and these are the arms that get compared. Nor would a
    manifest, which says what was written and not what lies there now.

    Raises:
        ArtifactError: a file cannot be read.
    """
    digest = hashlib.sha256()
    for file in [folder / "config.json", *sorted(folder.glob("model*.safetensors"))]:
        try:
            with file.open("rb") as stream:
                digest.update(file.name.encode() + b"\0" + hashlib.file_digest(stream, "sha256").digest())
        except OSError as error:
            raise ArtifactError(f"{file}: cannot be read: {error.strerror or error}") from error
    return digest.hexdigest()
