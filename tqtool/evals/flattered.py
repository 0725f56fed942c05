"""Scores that flatter: an artifact on text that it was calibrated on, or that its bits were chosen on.

``run`` and ``calibrate --disjoint-from`` hold the tokens themselves against each other beforehand. Here only what an
artifact says of itself is at hand, so this is a warning and no proof: the same file, and where in it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from tqtool.artifact.reader import read_manifest
from tqtool.errors import UserError
from tqtool.formats.manifest import MANIFEST_NAME
from tqtool.formats.sensitivity_file import read_sensitivity
from tqtool.formats.teacher import TeacherDump

SENSITIVITY_INSIDE: Final = "tqtool/sensitivity.json"


def flattered(folder: Path, dump: TeacherDump, tokenizer: Any) -> tuple[str, ...]:
    """Warnings for an artifact on a dump; ``tokenizer``, the dump's, says how far into its text that reads."""
    found = []
    if (folder / MANIFEST_NAME).exists():
        text = read_manifest(folder).request.get("calibration", {}).get("text", {})
        if text.get("sha256") == dump.info.text_sha256 and _end(dump, tokenizer) > text["first_byte"]:
            found.append("the artifact was calibrated on this text, or on part of it: the score is flattered")
    if (folder / SENSITIVITY_INSIDE).exists() and _shares_windows(folder / SENSITIVITY_INSIDE, dump):
        found.append("the artifact's bits were chosen on these windows, or on some of them: the score is flattered")
    return tuple(found)


def _end(dump: TeacherDump, tokenizer: Any) -> int:
    """About the byte where the dump's last window ends: its windows are as long as those passed over."""
    count = dump.info.windows
    read = sum(len(tokenizer.decode([int(token) for token in dump.tokens(at)]).encode()) for at in range(count))
    return read * (dump.info.skip + count) // count


def _shares_windows(path: Path, dump: TeacherDump) -> bool:
    try:
        measured = read_sensitivity(path).teacher
    except UserError:  # damaged: `verify` says so
        return False
    if measured is None or measured.text_sha256 != dump.info.text_sha256:
        return False
    ours = dump.info.skip * dump.info.context, (dump.info.skip + dump.info.windows) * dump.info.context
    theirs = measured.skip * measured.context, (measured.skip + measured.windows) * measured.context
    return ours[0] < theirs[1] and theirs[0] < ours[1]
