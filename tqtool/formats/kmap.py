"""k-map, format v1: bits per weight for modules of a trellis artifact.

    {"k": {"model.layers.0.mlp.*": 4, "model.layers.*.mlp.up_proj": 2}}

Keys are module paths or globs, the last that matches a module wins; modules that none matches keep ``--k``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from tqtool.errors import UserError

RATES = (1, 2, 3, 4)


def read_kmap(path: Path) -> dict[str, int]:
    """The map in ``path``.

    Raises:
        UserError: it cannot be read, is no such map, or names a rate that the trellis does not have.
    """
    try:
        value: Any = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON ({error})") from error
    rates = value.get("k") if isinstance(value, dict) else None
    if not isinstance(rates, dict):
        raise UserError(f'{path}: expected {{"k": {{"module path or glob": bits}}}}')
    for glob, k in rates.items():
        if type(k) is not int or k not in RATES:
            raise UserError(f"{path}: {glob}: expected 1, 2, 3 or 4 bits, found {k!r}")
    return dict(rates)


def rates_of(rates: Mapping[str, int], modules: Iterable[str], default: int) -> dict[str, int]:
    """Bits of each of ``modules``; UserError for a glob that matches none of them."""
    names = list(modules)
    for glob in rates:
        if not any(fnmatchcase(name, glob) for name in names):
            raise UserError(f"k-map: {glob!r} matches no coded module", hint="--modules says which modules are coded")
    found = dict.fromkeys(names, default)
    for glob, k in rates.items():
        found.update({name: k for name in names if fnmatchcase(name, glob)})
    return found
