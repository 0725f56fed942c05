"""Text of the GPU kernels: files below ``kernels/``, read when a kernel is first used.

A kernel file is what MLX wants as ``source``, the *body* of a function whose signature MLX writes itself. Its first
lines may say ``#include "common/trellis_decode.h"`` and the like: the text up to the last of them, with the files in
place, is the ``header``.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from tqtool.errors import BackendError

_INCLUDE = re.compile(r'^#include "([\w./]+)"[^\n]*$', re.MULTILINE)
_PROBE = "common/trellis_decode.h"
CARRIED: dict[str, str] = {}
"""Texts by file name that are taken before any file: what a model file carries (``tqtool.artifact.model_file``)."""


@dataclass(frozen=True, slots=True)
class KernelText:
    """What a backend compiles: ``header`` stands before the function, ``body`` in it."""

    header: str
    body: str


@lru_cache(maxsize=1)
def source_root() -> Path:
    """The folder that holds ``common/``, ``metal/`` … : in the package if it was installed, else in the checkout.

    Raises:
        BackendError: the installation has no kernel sources.
    """
    here = Path(__file__).resolve()
    installed, checkout = here.parent / "source", here.parents[2] / "kernels"
    for root in (installed, checkout):
        if (root / _PROBE).is_file():
            return root
    raise BackendError(f"no kernel sources in {installed} or {checkout}", hint="reinstall tqtool")


@lru_cache(maxsize=64)
def kernel_text(source: str, before: str = "") -> KernelText:
    """Header and body of the kernel file ``source``; BackendError if it, or a file that it includes, is missing.

    ``before`` is a file that is included first.
    """
    return split((f'#include "{before}"\n' if before else "") + raw_text(source))


def split(text: str) -> KernelText:
    """Header and body of a kernel file's ``text``, with the included files in the header, each of them once."""
    end = max((found.end() for found in _INCLUDE.finditer(text)), default=0)
    return KernelText(_resolve(text[:end], set()), text[end:])


def _resolve(text: str, seen: set[str]) -> str:
    def included(match: re.Match[str]) -> str:
        name = match.group(1)
        if name in seen:
            return ""
        seen.add(name)
        return _resolve(raw_text(name), seen)

    return _INCLUDE.sub(included, text)


def raw_text(name: str) -> str:
    """The file ``name`` as it stands; BackendError if it is missing."""
    if name in CARRIED:
        return CARRIED[name]
    path = source_root() / name
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise BackendError(f"kernel source {path}: {error.strerror}", hint="reinstall tqtool") from error


@lru_cache(maxsize=8)
def digest(names: tuple[str, ...], before: str = "") -> str:
    """Sixteen hex digits of what the kernel files ``names`` compile to, after ``before``: others for other texts."""
    texts = (kernel_text(name, before) for name in names)
    return hashlib.sha256("\0".join(text.header + text.body for text in texts).encode()).hexdigest()[:16]
