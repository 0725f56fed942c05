"""k-map, format v1: bits per weight for modules of a trellis artifact.

    {"k": {"model.layers.0.mlp.*": 4, "model.layers.*.mlp.up_proj": 2}}

Keys are module paths or globs, the last that matches a module wins; modules that none matches keep ``--k``. A
``report`` beside ``k`` says where the map comes from and is for people: no reader looks into it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from tqtool.errors import UserError
from tqtool.formats.json_file import read_json_object

RATES = (1, 2, 3, 4)


def read_kmap(path: Path) -> dict[str, int]:
    """The map in ``path``.

    Raises:
        UserError: it cannot be read, is no such map, names a module twice, or a rate that the trellis does not have.
    """
    rates = read_json_object(path).get("k")
    if not isinstance(rates, dict):
        raise UserError(f'{path}: expected {{"k": {{"module path or glob": bits}}}}')
    for glob, k in rates.items():
        if type(k) is not int or k not in RATES:
            raise UserError(f"{path}: {glob}: expected 1, 2, 3 or 4 bits, found {k!r}")
    return dict(rates)


def encode_kmap(rates: Mapping[str, int], report: Mapping[str, Any]) -> bytes:
    """The bytes of a map, keys in the order of ``rates``."""
    body = {"k": dict(rates), "report": dict(report)}
    return (json.dumps(body, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


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
