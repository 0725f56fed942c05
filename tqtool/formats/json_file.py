"""A JSON object in a file that the user named: what is wrong with it is a UserError."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tqtool.errors import UserError


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in ``path``.

    Raises:
        UserError: it cannot be read, is not JSON (NaN is not), names a key twice, or holds something else.
    """
    return parse_json_object(read_file(path), str(path))


def read_file(path: Path) -> bytes:
    """The bytes of ``path``; UserError if there are none to read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error


def parse_json_object(data: bytes, where: str) -> dict[str, Any]:
    """The object in ``data``, as ``read_json_object``."""
    try:
        value: Any = json.loads(data, object_pairs_hook=_once, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not JSON ({error})") from error
    if not isinstance(value, dict):
        raise UserError(f"{where}: expected an object, found {type(value).__name__}")
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Python keeps the last of two equal keys and says nothing."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"it names {key!r} twice")
        found[key] = value
    return found


def _no_constant(name: str) -> float:
    raise ValueError(f"it holds {name}")
