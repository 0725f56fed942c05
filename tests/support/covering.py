"""Few combinations of many choices, such that any two choices meet in one of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any


def pairwise(factors: dict[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Rows that contain every pair of values of every two ``factors``; the same rows every time.

    Greedy: each row starts from a pair that is missing still, and takes for every other factor the value that brings
    the most missing pairs.
    """
    names = list(factors)
    missing = {
        ((a, x), (b, y)): None for a, b in itertools.combinations(names, 2) for x in factors[a] for y in factors[b]
    }
    rows = []
    while missing:
        row = dict(next(iter(missing)))
        for name in names:
            if name not in row:
                row[name] = max(
                    factors[name], key=lambda value: sum(pair in missing for pair in _pairs(row, name, value, names))
                )
        row = {name: row[name] for name in names}
        for pair in itertools.combinations(row.items(), 2):
            missing.pop(pair, None)
        rows.append(row)
    return rows


def _pairs(row: dict[str, Any], name: str, value: Any, names: list[str]) -> list[tuple[Any, Any]]:
    """The pairs that ``name: value`` would add to ``row``, as ``pairwise`` writes them."""
    at = names.index(name)
    return [
        (((other, chosen), (name, value)) if names.index(other) < at else ((name, value), (other, chosen)))
        for other, chosen in row.items()
    ]
