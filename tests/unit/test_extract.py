"""Extraction from answers: numbers as people write them, patterns, whole texts."""

from __future__ import annotations

from decimal import Decimal

import pytest

from tqtool.evals.extract import Extractor, read_number

LAST = Extractor.parse("last_number")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("So 6 - 2 = 4. The answer is 4.", "4"),
        ("He pays $1,234.50!", "$1,234.50"),
        ("between 5-3 and so on", "3"),
        ("it is -3", "-3"),
        ("x = −7 degrees", "−7"),
        ("(9)-2", "2"),
        ("lists 1,2,3", "3"),
        ("1,2345", "2345"),
        ("**42**", "42"),
        ("half is .5", ".5"),
        ("3.", "3"),
        ("42 apples", "42"),
        ("no number", None),
        ("", None),
    ],
)
def test_the_last_number(text: str, found: str | None) -> None:
    assert LAST.find(text) == found


@pytest.mark.parametrize(
    ("found", "answer", "right"),
    [("1,200.0", "1200", True), ("$18", "18", True), ("−5", "-5", True), ("5", "-5", False), (None, "5", False)],
)
def test_numbers_are_compared_by_value(found: str | None, answer: str, right: bool) -> None:
    assert LAST.is_right(found, answer) is right


@pytest.mark.parametrize(
    ("text", "value"), [(" 1,000 ", Decimal(1000)), ("1 2", None), ("four", None), ("٣", None), (".5", Decimal("0.5"))]
)
def test_what_is_a_number(text: str, value: Decimal | None) -> None:
    assert read_number(text) == value


def test_a_pattern_takes_its_first_group_and_the_match_asked_for() -> None:
    text = "answer is (B). No, the answer is (C)."
    assert Extractor.parse({"regex": r"answer is \((\w)\)"}).find(text) == "C"
    assert Extractor.parse({"regex": r"answer is \((\w)\)", "take": "first"}).find(text) == "B"
    assert Extractor.parse({"regex": r"answer is \(\w\)"}).find(text) == "answer is (C)"
    assert Extractor.parse({"regex": r"(x)|No"}).find(text) is None  # matched, but not the group
    assert Extractor.parse({"regex": "zzz"}).find(text) is None


def test_the_whole_text() -> None:
    whole = Extractor.parse("text")
    assert whole.is_right(whole.find(" Paris\n"), "Paris")
    assert whole.find("  ") is None


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, 'expected "last_number"'),
        ("first_number", 'expected "last_number"'),
        ({"regex": "("}, "missing ), unterminated"),
        ({"regex": ""}, "expected a pattern"),
        ({"regex": 3}, "expected a pattern"),
        ({"regex": "x", "take": "all"}, "take: expected first or last"),
        ({"regex": "x", "flags": "i"}, 'expected "last_number"'),
    ],
)
def test_no_extractor(value: object, message: str) -> None:
    with pytest.raises(ValueError, match="extractor") as caught:
        Extractor.parse(value)
    assert message in str(caught.value)
