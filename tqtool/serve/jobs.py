"""What goes into the engine and what comes out of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tqtool.serve.answer import Finish, Format, Piece, TokenChoice
from tqtool.serve.sampling import Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One answer to make.

    Attributes:
        prompt: Token ids, at least one.
        max_tokens: Upper limit of new tokens; 0 only with ``score_prompt``.
        sampling: Of the next token.
        stops: Strings that end the answer.
        format: The model's markers that are to be followed.
        begins_text: The answer is a text of its own, not the continuation of the prompt.
        top: How many of the likeliest tokens are reported with each; None reports no probabilities.
        score_prompt: Report the probabilities of the prompt's own tokens first.
        one_tool_call: End after the first tool call.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stops: tuple[str, ...] = ()
    format: Format = field(default_factory=Format)
    begins_text: bool = False
    top: int | None = None
    score_prompt: bool = False
    one_tool_call: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """The request left the queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptDone:
    """The prompt was computed: ``cached`` of its tokens came from an earlier one; its scores if they were asked for."""

    cached: int
    scores: tuple[TokenChoice, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of a request; an end token counts, as it was computed."""

    prompt: int
    cached: int
    completion: int
    reasoning: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The last event of a request that succeeded."""

    finish: Finish
    usage: Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The last event of a request that did not: ``stopping`` when the server ended it, else something broke."""

    message: str
    stopping: bool = False


Event = Begun | PromptDone | Piece | Ended | Failed


class Job:
    """A request in the engine's hands.

    Args:
        request: What to do.
        emit: Called in the engine's thread with each event; must not block.
    """

    def __init__(self, request: Request, emit: Callable[[Event], None]) -> None:
        self.request = request
        self.emit = emit
        self.created = time.monotonic()
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        """Nobody waits for this any more: it ends at the next token, or chunk of the prompt, without another event."""
        self._cancelled.set()

    @property
    def cancelled(self) -> bool:
        """Whether ``cancel`` was called."""
        return self._cancelled.is_set()
