"""Faults to plant in the generated text of a kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.support.trellis_cases import Case

WRONG = r"beyond the bound|not equal"
"""What ``check`` says of wrong numbers."""
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"


@dataclass(frozen=True)
class Fault:
    """``old`` becomes ``new`` in the text of ``kernel``, the ``nth`` time that it stands there (-1: everywhere).

    ``message`` is what must be found; ``where`` picks the cases that can find it at all.
    """

    name: str
    kernel: str
    old: str
    new: str
    message: str = WRONG
    nth: int = -1
    where: Callable[[Case], bool] = lambda case: True

    def __str__(self) -> str:
        return f"{self.kernel}-{self.name.replace(' ', '_')}"

    def plant(self, text: str) -> str:
        parts = text.split(self.old)
        assert len(parts) > max(1, self.nth + 1), f"{self.old!r} is not in the text"
        if self.nth < 0:
            return self.new.join(parts)
        return self.old.join(parts[: self.nth + 1]) + self.new + self.old.join(parts[self.nth + 1 :])
