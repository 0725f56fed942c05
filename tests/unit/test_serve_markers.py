"""Cutting text at markers: against a reader of one character at a time, in chunks of any size."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tqtool.serve.markers import STOP, MarkerSplitter, Segment

TRANSITIONS = {
    "a": [("ab", "b"), ("aab", STOP), ("cc", "a")],
    "b": [("ba", "a"), ("c", "b"), ("bcab", STOP)],
}


def read_slowly(text: str) -> tuple[list[tuple[str, str]], bool]:
    """States and their text, by looking after each character at the end of what came so far."""
    state, seen, parts = "a", "", []
    for character in text:
        seen += character
        ending = [edge for edge in TRANSITIONS[state] if seen.endswith(edge[0])]
        if not ending:
            continue
        marker, target = max(ending, key=lambda edge: len(edge[0]))
        parts.append((state, seen[: -len(marker)]))
        if target is STOP:
            return parts, True
        state, seen = target, ""
    return [*parts, (state, seen)], False


def joined(segments: list[Segment], initial: str = "a") -> list[tuple[str, str]]:
    parts = [[initial, ""]]
    for segment in segments:
        if segment.opens:
            parts.append([segment.state, ""])
        assert parts[-1][0] == segment.state
        parts[-1][1] += segment.text
    return [(state, text) for state, text in parts]


@given(st.text("abc", max_size=40), st.lists(st.integers(0, 40), max_size=8))
@example("abbcab", [])  # one marker inside another that began before it
@example("aab", [])
def test_chunks_make_no_difference(text, cuts):
    splitter = MarkerSplitter(TRANSITIONS, "a")
    segments = []
    for start, end in pairwise(sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})):
        segments += splitter.feed(text[start:end])
    segments += splitter.finish()
    parts, stopped = read_slowly(text)
    assert joined(segments) == parts
    assert splitter.stopped is stopped
    if not stopped:
        assert splitter.position == len(text)


@given(st.text("abc", max_size=30))
def test_only_what_may_become_a_marker_is_held_back(text):
    splitter = MarkerSplitter(TRANSITIONS, "a")
    given_out = "".join(segment.text for segment in splitter.feed(text))
    held = text[splitter.position :]
    assert len(given_out) <= len(text)
    if not splitter.stopped:
        assert held == "" or any(marker.startswith(held) for marker, _ in TRANSITIONS[splitter.state])


def test_an_empty_marker_is_none():
    splitter = MarkerSplitter({"a": [("", STOP), ("x", STOP)]}, "a")
    assert splitter.feed("ab") == [Segment("a", "ab")]


@pytest.mark.parametrize("text", ["STO", "a <thin"])
def test_an_unfinished_marker_is_text_at_the_end(text):
    splitter = MarkerSplitter({"a": [("STOP", STOP), ("<think>", "b")]}, "a")
    assert "".join(s.text for s in [*splitter.feed(text), *splitter.finish()]) == text
