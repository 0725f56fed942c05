"""Interrupt a piece of Python at every place where a signal could, one place a run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from itertools import count
from types import FrameType
from typing import Any


class Struck(BaseException):
    """What the handler of the signal raises."""


def interruptions(work: Callable[[], object], *files: str) -> Iterator[str]:
    """Run ``work`` again and again, struck at its first, second, ... place; yield the place after each such run.

    Places are where the interpreter looks for signals in the source files named: behind each call of a function in C,
    and at the start of each function in Python. Ends when a run was not struck.
    """
    for place in count(1):
        struck = _strike(work, place, files)
        if struck is None:
            return
        yield struck


def _strike(work: Callable[[], object], place: int, files: tuple[str, ...]) -> str | None:
    left = place
    ends = tuple(f"/{file}" for file in files)

    def look(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal left
        del argument
        if event in ("c_return", "call") and frame.f_code.co_filename.endswith(ends):
            left -= 1
            if left == 0:
                sys.setprofile(None)
                raise Struck(f"{frame.f_code.co_filename}:{frame.f_lineno} {event} in {frame.f_code.co_name}")

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        work()
    except Struck as struck:
        return str(struck)
    finally:
        sys.setprofile(before)
    return "swallowed by the interpreter, as in a generator that is being closed" if left <= 0 else None
