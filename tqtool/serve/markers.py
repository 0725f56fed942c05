"""Text cut at markers that may arrive in pieces: stop strings, ``<think>``, ``<tool_call>``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

STOP = None
"""Destination of a marker that ends the answer."""

Transitions = Mapping[str, Sequence[tuple[str, str | None]]]


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of text in one state; an empty one with ``opens`` says that a marker led there."""

    state: str
    text: str
    opens: bool = False


class MarkerSplitter:
    """Cuts a stream of text at markers and follows the states that they lead to.

    Nothing that may still become a marker is given out, and what is given out does not depend on how the text was cut
    into chunks: of several markers the one that ends first counts, among those that end together the longest.

    Args:
        transitions: For each state its markers and where each leads; ``STOP`` ends everything.
        initial: State of the first character.
    """

    def __init__(self, transitions: Transitions, initial: str) -> None:
        self._transitions = {
            state: [(marker, target) for marker, target in edges if marker] for state, edges in transitions.items()
        }
        self._held = ""
        self.state = initial
        self.stopped = False
        self.position = 0
        """Characters of the input that are settled: given out, or swallowed as markers; a stop string is neither."""

    def feed(self, text: str) -> list[Segment]:
        """Segments that are settled now; empty after a stop."""
        segments: list[Segment] = []
        if self.stopped:
            return segments
        self._held += text
        while found := self._first_marker():
            start, end, target = found
            segments += self._give(start)
            if target is STOP:
                self.stopped, self._held = True, ""
                return segments
            self._held = self._held[end - start :]
            self.position += end - start
            self.state = target
            segments.append(Segment(target, "", opens=True))
        return segments + self._give(len(self._held) - self._open_tail())

    def finish(self) -> list[Segment]:
        """What was held back: the text ended, so it is no marker."""
        return self._give(len(self._held))

    def _give(self, count: int) -> list[Segment]:
        text, self._held = self._held[:count], self._held[count:]
        if not text:
            return []
        self.position += count
        return [Segment(self.state, text)]

    def _first_marker(self) -> tuple[int, int, str | None] | None:
        """Start, end and target of the marker in the held text that ends first."""
        best: tuple[int, int, str | None] | None = None
        for marker, target in self._transitions.get(self.state, ()):
            start = self._held.find(marker)
            end = start + len(marker)
            if start >= 0 and (best is None or (end, start) < (best[1], best[0])):
                best = (start, end, target)
        return best

    def _open_tail(self) -> int:
        """Length of the longest end of the held text that begins a marker."""
        longest = 0
        for marker, _ in self._transitions.get(self.state, ()):
            for size in range(min(len(marker) - 1, len(self._held)), longest, -1):
                if self._held.endswith(marker[:size]):
                    longest = size
                    break
        return longest
