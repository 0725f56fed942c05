"""JSON as RFC 8259 has it: no NaN, no Infinity; strings that are no Unicode are found."""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

_SURROGATE = re.compile("[\ud800-\udfff]")
_NAMES: dict[type, str] = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "an array"}
_HOLDERS = frozenset({str, dict, list})


def parse(text: str | bytes) -> Any:
    """The value of ``text``; ValueError with the reason where it is no JSON or nested too deeply."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def kind(value: Any) -> str:
    """What JSON calls ``value``, which came out of ``parse``."""
    return "null" if value is None else _NAMES.get(type(value), "an object")


def lone_surrogate(value: Any) -> tuple[str | int, ...] | None:
    r"""Where in ``value`` a string holds half of a surrogate pair (``"\ud800"``), as keys and indices; None: nowhere.

    JSON can write one, Unicode has no such character, and neither a tokenizer nor UTF-8 takes it. A key that holds one
    is told by the place of its object.
    """
    # Not recursive: bodies may be nested as deeply as the parser allows. A place is its parent's and one step, as whole
    # paths would be copied for every string.
    waiting: list[tuple[Any, Any]] = [(None, value)]
    while waiting:
        place, item = waiting.pop()
        if isinstance(item, str):
            if _SURROGATE.search(item):
                return _path(place)
        elif isinstance(item, dict):
            if any(map(_SURROGATE.search, item)):
                return _path(place)
            waiting += [((place, key), inner) for key, inner in item.items() if type(inner) in _HOLDERS]
        elif isinstance(item, list):
            waiting += [((place, n), inner) for n, inner in enumerate(item) if type(inner) in _HOLDERS]
    return None


def _path(place: Any) -> tuple[str | int, ...]:
    steps: list[str | int] = []
    while place is not None:
        place, step = place
        steps.append(step)
    return tuple(reversed(steps))


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
