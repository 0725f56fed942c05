"""Errors of the disk, said so that a user can act on them."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tqtool.errors import ArtifactError

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn an OSError while writing ``path`` into an ArtifactError that says what to do."""
    try:
        yield
    except OSError as error:
        hint = "free space on that disk or choose another output folder" if error.errno in _FULL else None
        raise ArtifactError(f"{path}: cannot be written: {error.strerror or error}", hint=hint) from error
