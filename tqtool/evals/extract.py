"""What an answer says: the last number, a pattern, or all of it; and whether that is the right one."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal

NUMBER = re.compile(
    r"(?:(?<![\w)])[-−])?\$?(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![0-9])\.[0-9]+)"
)
"""A minus counts unless it follows a word, a digit or a bracket (``5-3``); thousands may be grouped; no exponents."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extractor:
    """How to find the result in an answer.

    ``last_number`` compares values (``1,200.0`` is ``1200``), ``regex`` and ``text`` compare stripped texts.
    ``pattern``'s first group counts, or all of it if it has none; ``take`` says which match.
    """

    kind: Literal["last_number", "regex", "text"]
    pattern: str = ""
    take: Literal["first", "last"] = "last"

    @classmethod
    def parse(cls, value: Any) -> Extractor:
        """From JSON: ``"last_number"``, ``"text"`` or ``{"regex": PATTERN, "take": "first"}``; ValueError."""
        if value == "last_number":
            return cls(kind="last_number")
        if value == "text":
            return cls(kind="text")
        if not isinstance(value, dict) or "regex" not in value or set(value) - {"regex", "take"}:
            raise ValueError(f'extractor: expected "last_number", "text" or {{"regex": …}}, found {value!r}')
        pattern, take = value["regex"], value.get("take", "last")
        if take not in ("first", "last"):
            raise ValueError(f"extractor: take: expected first or last, found {take!r}")
        if not isinstance(pattern, str) or not pattern:
            raise ValueError(f"extractor: regex: expected a pattern, found {pattern!r}")
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"extractor: regex {pattern!r}: {error}") from error
        return cls(kind="regex", pattern=pattern, take=take)

    def find(self, text: str) -> str | None:
        """What ``text`` says, None if it says nothing."""
        if self.kind == "text":
            return text.strip() or None
        pattern = NUMBER if self.kind == "last_number" else re.compile(self.pattern)
        matches = list(pattern.finditer(text))
        if not matches:
            return None
        match = matches[-1 if self.take == "last" else 0]
        found = match[1] if pattern.groups else match[0]
        return None if found is None else found.strip()

    def is_right(self, found: str | None, answer: str) -> bool:
        """Exact match."""
        if found is None:
            return False
        if self.kind == "last_number":
            return read_number(found) == read_number(answer)
        return found == answer.strip()


def read_number(text: str) -> Decimal | None:
    """The value of a text that is one number as ``NUMBER`` writes it, None otherwise."""
    if NUMBER.fullmatch(text.strip()) is None:
        return None
    return Decimal(text.strip().replace(",", "").replace("$", "").replace("−", "-"))
