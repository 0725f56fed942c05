"""Every error tqtool raises on purpose, and the exit code of each.

    TqError
    ├── UserError      2   wrong argument, path, rule, unsupported model
    │   └── SourceError    the checkpoint is malformed or cannot be used
    ├── NumericalError 3   non-finite values, a metric or bound that does not hold
    ├── ArtifactError  4   an artifact is damaged or disagrees with its manifest; writing failed
    └── BackendError   5   a device, library or compiled kernel is missing or refused

A message says what, where, expected, found; ``hint`` says the next step.
"""

from __future__ import annotations


class TqError(Exception):
    """Base of all deliberate errors. ``exit_code`` is what the command line returns."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message


def reason_of(error: Exception) -> str:
    """What went wrong, without the number and path that an OSError repeats."""
    return getattr(error, "strerror", None) or str(error)


class UserError(TqError):
    """The request cannot be carried out as asked."""

    exit_code = 2


class SourceError(UserError):
    """The source checkpoint is malformed, incomplete or of a kind that cannot be used."""


class NumericalError(TqError):
    """A value is not finite or a stated bound does not hold."""

    exit_code = 3


class ArtifactError(TqError):
    """An artifact is damaged, disagrees with its manifest, or could not be written."""

    exit_code = 4


class BackendError(TqError):
    """A device, library or compiled kernel is missing or refused the work."""

    exit_code = 5
