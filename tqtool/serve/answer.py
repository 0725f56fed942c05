"""One answer as it grows: tokens in, settled text and its tokens out, in the states of the model's format."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal

from tqtool.serve.markers import STOP, MarkerSplitter, Segment, Transitions
from tqtool.serve.token_text import TextStream

CONTENT, REASONING, TOOL = "content", "reasoning", "tool"
Finish = Literal["stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenChoice:
    """A token of the answer (or of the prompt, where that is scored).

    Attributes:
        token: Its id.
        logprob: Natural log of its probability after penalties and biases, before temperature and filters; None for
            the first token of a prompt.
        top: The likeliest ids there with theirs, best first.
        offset: Characters of the text before it.
    """

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()
    offset: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """How a model marks the parts of its answers; None where it has no such part.

    Attributes:
        think: Begin and end of reasoning.
        tool: Begin and end of a tool call; the end may be empty, when a call goes on to the end of the answer.
        initial: State of the first character.
    """

    think: tuple[str, str] | None = None
    tool: tuple[str, str] | None = None
    initial: str = CONTENT

    def transitions(self, stops: tuple[str, ...]) -> Transitions:
        """Markers of each state, and the stop strings in all of them."""
        edges: dict[str, list[tuple[str, str | None]]] = {CONTENT: [], REASONING: [], TOOL: []}
        if self.think:
            edges[CONTENT].append((self.think[0], REASONING))
            edges[REASONING].append((self.think[1], CONTENT))
        if self.tool:
            edges[CONTENT].append((self.tool[0], TOOL))
            edges[REASONING].append((self.tool[0], TOOL))
            edges[TOOL].append((self.tool[1], CONTENT))
        for state in edges.values():
            state.extend((stop, STOP) for stop in stops)
        return edges


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What became settled: text by state, and the tokens that begin in it."""

    segments: tuple[Segment, ...] = ()
    choices: tuple[TokenChoice, ...] = ()


class Answer:
    """Follows one answer.

    Args:
        text: Of the tokens.
        format: The model's markers.
        stops: Strings that end the answer and do not appear in it.
    """

    def __init__(self, text: TextStream, format: Format, stops: tuple[str, ...]) -> None:
        self._text = text
        self._splitter = MarkerSplitter(format.transitions(stops), format.initial)
        self._waiting: deque[TokenChoice] = deque()
        self._length = 0

    @property
    def stopped(self) -> bool:
        """A stop string was met."""
        return self._splitter.stopped

    @property
    def state(self) -> str:
        """The state that the last character left the answer in."""
        return self._splitter.state

    def add(self, choice: TokenChoice) -> Piece:
        """Take one more token."""
        self._waiting.append(
            TokenChoice(token=choice.token, logprob=choice.logprob, top=choice.top, offset=self._length)
        )
        text = self._text.add(choice.token)
        self._length += len(text)
        segments = self._splitter.feed(text)
        return Piece(segments=tuple(segments), choices=self._settled())

    def finish(self) -> Piece:
        """The answer ended: what was held back, unless a stop string cut it off."""
        if self.stopped:
            return Piece()
        segments = tuple(self._splitter.finish())
        choices, self._waiting = tuple(self._waiting), deque()
        return Piece(segments=segments, choices=choices)

    def _settled(self) -> tuple[TokenChoice, ...]:
        settled = []
        while self._waiting and self._waiting[0].offset < self._splitter.position:
            settled.append(self._waiting.popleft())
        return tuple(settled)
