"""Folders beside an artifact that is being written, who owns them, and what to do with those that nobody owns.

``.NAME.partial-PID`` is filled and then renamed to ``NAME``; ``.NAME.replaced-PID`` is an artifact that is being
overwritten, for the moment between two renames. The writer holds an exclusive ``flock`` on each while it lives, and the
kernel lets go of it however the writer ends. So a leftover is dead if, and only if, its lock can be taken: process
numbers say nothing, another container counts its own.

Where a file system has no such locks (some network ones), nothing can be told apart and every leftover is left alone.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Literal

from tqtool.artifact.disk import disk_errors

Kind = Literal["partial", "replaced"]
_NAME = re.compile(r"\.(?P<name>.+)\.(?P<kind>partial|replaced)-\d+(\.\d+)?", re.DOTALL)


class Hold:
    """An exclusive lock on the folder ``path``, and on the same folder under any later name; see ``take``."""

    def __init__(self, handle: int) -> None:
        self._handle: int | None = handle

    @classmethod
    def take(cls, path: Path, *, wait: bool = False) -> Hold | None:
        """Lock the folder that is called ``path`` now; None if another process has it, or it is no folder any more.

        Raises:
            OSError: the file system has no locks, or the folder cannot be opened.
        """
        while True:
            try:
                handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            except (FileNotFoundError, NotADirectoryError):
                return None
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
                if _is_called(handle, path):
                    return cls(handle)
            except BlockingIOError:
                os.close(handle)
                return None
            except BaseException:
                os.close(handle)
                raise
            os.close(handle)  # renamed or removed between open and lock: look at what has the name now

    def release(self) -> None:
        """Let go; harmless when done twice."""
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)

    __del__ = release  # a run that was interrupted while it let go


def make_partial(out: Path) -> tuple[Path, Hold | None]:
    """A new folder for the writer of ``out``, held; without a hold where the file system has no locks.

    Whatever is raised in here, a signal's exit too, the folder is gone then: nobody else knows of it yet.
    """
    for path in _names(out, "partial"):
        try:
            path.mkdir()
            hold = Hold.take(path)
            if hold is not None:  # else someone who clears leftovers was faster
                return path, hold
        except FileExistsError:
            pass  # of another writer with our number
        except OSError:
            if path.is_dir():
                return path, None
            raise
        except BaseException:
            with suppress(OSError):
                path.rmdir()
            raise
    raise AssertionError("names do not run out")


def replaced_path(out: Path) -> Path:
    """A free name for the artifact that ``out`` was."""
    return next(path for path in _names(out, "replaced") if not path.exists())


def final_path(folder: Path) -> Path:
    """The artifact that ``folder`` is or, if it is a partial folder, will be: what to call it in a message."""
    match = _NAME.fullmatch(folder.name)
    return folder.with_name(match["name"]) if match else folder


def clear_leftovers(out: Path) -> list[str]:
    """Put right what dead writers of ``out`` left beside it; returns a note for each.

    Partial folders are removed. A kill between the two renames of an overwrite leaves only the old artifact, under
    another name: it gets its name back.
    """
    notes = []
    for path, kind in _leftovers(out):
        try:
            hold = Hold.take(path)
        except OSError:
            continue
        if hold is None:
            continue
        try:
            if kind == "replaced" and not out.exists():
                with disk_errors(out):
                    path.rename(out)
                notes.append(f"restored {out.name}, whose replacement was killed")
            else:
                shutil.rmtree(path, ignore_errors=True)
                notes.append(f"removed {path.name}, left by a run that was killed")
        finally:
            hold.release()
    return notes


def _leftovers(out: Path) -> list[tuple[Path, str]]:
    if not out.parent.is_dir():
        return []
    with disk_errors(out.parent):
        beside = sorted(out.parent.iterdir())  # no glob: the name may hold [ or *
    found = [(path, _NAME.fullmatch(path.name)) for path in beside]
    return [(path, match["kind"]) for path, match in found if match is not None and match["name"] == out.name]


def _names(out: Path, kind: Kind) -> Iterator[Path]:
    stem = f".{out.name}.{kind}-{os.getpid()}"
    yield out.parent / stem
    yield from (out.parent / f"{stem}.{number}" for number in count(1))


def _is_called(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.lstat())
    except FileNotFoundError:
        return False
