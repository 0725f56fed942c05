"""A file that appears whole or not at all, and cleans up after runs that were killed.

It is written as ``.NAME.partial-RANDOM`` beside its final name, under an flock held until it is renamed or removed. The
kernel drops the lock of a killed process, so a partial file whose lock can be taken is a leftover. A process id would
not do: one from another container looks dead here while its run is alive.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from tqtool.errors import ArtifactError

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def check_writable(out: Path) -> None:
    """Raise ArtifactError unless a file can be made where ``out`` is to be, by making one; nothing stays."""
    folder = next((parent for parent in out.absolute().parents if parent.exists()), Path("/"))
    probe = folder / _partial(out).name
    try:
        probe.open("xb").close()
        probe.unlink(missing_ok=True)
    except OSError as error:
        raise _cannot_write(out, error) from error


@contextmanager
def whole_file(out: Path) -> Iterator[tuple[IO[bytes], tuple[str, ...]]]:
    """Yield a file that takes the name ``out`` at the end, or vanishes, and the names of the leftovers removed.

    Raises:
        ArtifactError: an OSError in here or in the caller's block.
    """
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        removed = clear_leftovers(out)
        partial, file = _open_locked(out)
    except OSError as error:
        raise _cannot_write(out, error) from error
    try:
        yield file, removed
        file.flush()
        os.fsync(file.fileno())
        partial.replace(out)
    except OSError as error:
        raise _cannot_write(out, error) from error
    finally:
        # Closing flushes, which fails again on a full disk, and removing may be refused: the first error is the news.
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        with suppress(OSError):
            file.close()


def clear_leftovers(out: Path) -> tuple[str, ...]:
    """Remove the partial files of ``out`` that no living run writes; their names."""
    prefix = f".{out.name}.partial-"
    removed = []
    for path in sorted(path for path in out.parent.iterdir() if path.name.startswith(prefix)):
        # An OSError: somebody writes it, or it is gone, another user's, or on a disk without locks. It stays.
        with suppress(OSError):
            handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
                removed.append(path.name)
            finally:
                os.close(handle)
    return tuple(removed)


def _open_locked(out: Path) -> tuple[Path, IO[bytes]]:
    while True:
        partial = _partial(out)
        try:
            file = partial.open("xb")
            # Without locks (some network disks) nobody can take this one either, so nobody removes the file.
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
            if os.fstat(file.fileno()).st_nlink:
                return partial, file
        except BaseException:  # a signal's exit: nobody else knows of the file yet
            with suppress(OSError):
                partial.unlink()
            raise
        file.close()  # another run took it for a leftover between the two calls


def _partial(out: Path) -> Path:
    return out.with_name(f".{out.name}.partial-{secrets.token_hex(4)}")


def _cannot_write(out: Path, error: OSError) -> ArtifactError:
    hint = "free space on that disk" if error.errno in _FULL else "choose a place where you may write"
    return ArtifactError(f"{out}: cannot be written ({error.strerror or error})", hint=hint)
