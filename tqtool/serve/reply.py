"""Events of the engine as objects of OpenAI's API. A whole answer is the sum of the chunks that a stream would send."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from tqtool.serve.answer import CONTENT, REASONING, TOOL, Piece, TokenChoice
from tqtool.serve.jobs import Ended, Event, PromptDone, Usage
from tqtool.serve.markers import Segment
from tqtool.serve.token_text import TokenText

ParseTool = Callable[[str], list[dict[str, str]] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What every object of one answer begins with."""

    kind: str
    model: str
    fingerprint: str
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, choices: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        """A complete answer."""
        return self._object(False, choices) | {"usage": usage_object(usage)}

    def chunk(self, choices: list[dict[str, Any]], usage: Usage | None, *, with_usage: bool) -> dict[str, Any]:
        """One chunk; streams that end with usage carry the field, null, from the beginning."""
        found = self._object(True, choices)
        return found | ({"usage": usage_object(usage) if usage else None} if with_usage else {})

    def _object(self, chunk: bool, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chat = self.kind == "chat"
        name = ("chat.completion.chunk" if chunk else "chat.completion") if chat else "text_completion"
        return {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{self.id}",
            "object": name,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
        }


class Reply(Protocol):
    """One answer in the making."""

    head: Head
    usage: Usage | None

    def take(self, event: Event) -> list[dict[str, Any]]:
        """Choices of the chunks that ``event`` makes a stream send."""

    def whole(self) -> dict[str, Any]:
        """The complete answer, after ``Ended``."""


def usage_object(usage: Usage) -> dict[str, Any]:
    """OpenAI's ``usage``."""
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning},
    }


class CompletionReply:
    """``/v1/completions``.

    Args:
        head: Begin of every object.
        text: What tokens say.
        echo: The prompt as it was sent (text, or None for token ids) when it is to come back before the answer.
        prompt: Its tokens.
        logprobs: Report them.
    """

    def __init__(
        self,
        head: Head,
        text: TokenText,
        *,
        prompt: tuple[int, ...] = (),
        echo: bool = False,
        echoed: str | None = None,
        logprobs: bool = False,
    ) -> None:
        self.head = head
        self.usage: Usage | None = None
        self._table = text
        self._logprobs = logprobs
        self._echo = echo
        self._prompt = prompt
        self._echoed = echoed
        self._offset = 0
        self._text: list[str] = []
        self._choices: list[dict[str, Any]] = []
        self._finish: str | None = None

    def take(self, event: Event) -> list[dict[str, Any]]:
        """Choices of the chunks that ``event`` makes a stream send."""
        if isinstance(event, PromptDone) and self._echo:
            return self._echo_chunks(event.scores)
        if isinstance(event, Piece):
            text = "".join(segment.text for segment in event.segments)
            return [self._chunk(text, event.choices)] if text or event.choices else []
        if isinstance(event, Ended):
            self.usage, self._finish = event.usage, event.finish
            return [self._choice("", None, event.finish)]
        return []

    def whole(self) -> dict[str, Any]:
        """The complete answer."""
        assert self.usage is not None
        logprobs: dict[str, Any] | None = None
        if self._logprobs:
            parts = [choice["logprobs"] for choice in self._choices if choice["logprobs"]]
            names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
            logprobs = {name: [value for part in parts for value in part[name]] for name in names}
        choice = self._choice("".join(self._text), logprobs, self._finish)
        return self.head.whole([choice], self.usage)

    def _chunk(self, text: str, choices: tuple[TokenChoice, ...]) -> dict[str, Any]:
        self._text.append(text)
        logprobs = (
            self._scores(choices, [choice.offset + self._offset for choice in choices]) if self._logprobs else None
        )
        found = self._choice(text, logprobs, None)
        self._choices.append(found)
        return found

    def _echo_chunks(self, scores: tuple[TokenChoice, ...]) -> list[dict[str, Any]]:
        """The prompt, token by token through the same decoder as answers, so that it comes back as it was sent."""
        stream = self._table.stream((), begins_text=False)
        texts = [stream.add(token) for token in self._prompt]
        if self._echoed is not None and "".join(texts) != self._echoed:
            # A token that the tokenizer put before the text is none of it.
            texts = ["", *texts[1:]] if "".join(texts[1:]) == self._echoed else [self._echoed]
        offsets, at = [], 0
        for text in [*texts, *[""] * (len(scores) - len(texts))]:
            offsets.append(at)
            at += len(text)
        chunks = []
        for index, text in enumerate(texts):
            logprobs = self._scores(scores[index : index + 1], offsets[index:]) if self._logprobs else None
            self._text.append(text)
            chunks.append(self._choice(text, logprobs, None))
        if self._logprobs and len(scores) > len(texts):
            chunks.append(self._choice("", self._scores(scores[len(texts) :], offsets[len(texts) :]), None))
        self._choices += chunks
        self._offset = at
        return chunks

    def _scores(self, choices: Iterable[TokenChoice], offsets: list[int]) -> dict[str, Any]:
        table, found = self._table, list(choices)
        return {
            "tokens": [table.token_string(choice.token) for choice in found],
            "token_logprobs": [_finite(choice.logprob) for choice in found],
            "top_logprobs": [
                {table.token_string(token): _finite(value) for token, value in choice.top}
                if choice.logprob is not None
                else None
                for choice in found
            ],
            "text_offset": offsets[: len(found)],
        }

    @staticmethod
    def _choice(text: str, logprobs: dict[str, Any] | None, finish: str | None) -> dict[str, Any]:
        return {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": finish}


class ChatReply:
    """``/v1/chat/completions``.

    Args:
        head: Begin of every object.
        text: What tokens say.
        tool: The model's markers around a tool call.
        parse: Text between them to calls.
        logprobs: Report them.
        one_call: Only the first tool call counts.
    """

    def __init__(
        self,
        head: Head,
        text: TokenText,
        *,
        tool: tuple[str, str] | None = None,
        parse: ParseTool = lambda text: None,
        logprobs: bool = False,
        one_call: bool = False,
    ) -> None:
        self.head = head
        self.usage: Usage | None = None
        self._table = text
        self._tool = tool or ("", "")
        self._parse = parse
        self._one_call = one_call
        self._logprobs = logprobs
        self._scores: list[dict[str, Any]] = []
        self._unsent: list[dict[str, Any]] = []
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._call_text: str | None = None
        self._at_begin = False  # of a part: white space after a marker belongs to the marker
        self._finish: str | None = None
        self._begun = False

    def take(self, event: Event) -> list[dict[str, Any]]:
        """Choices of the chunks that ``event`` makes a stream send."""
        deltas: list[dict[str, Any]] = []
        if not self._begun:
            self._begun = True
            deltas.append({"role": "assistant", "content": ""})
        if isinstance(event, Piece):
            for segment in event.segments:
                deltas += self._segment(segment)
            self._add_scores(event.choices)
        if isinstance(event, Ended):
            deltas += self._call_ended(closed=False)
            self.usage = event.usage
            self._finish = "tool_calls" if self._calls else event.finish
            return [*self._with_scores(deltas), self._choice({}, self._finish, self._rest())]
        return self._with_scores(deltas)

    def whole(self) -> dict[str, Any]:
        """The complete answer."""
        assert self.usage is not None
        content = "".join(self._content)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if self._calls and not content.strip() else content,
            "refusal": None,
        }
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if self._calls:
            message["tool_calls"] = [{k: v for k, v in call.items() if k != "index"} for call in self._calls]
        logprobs = {"content": self._scores, "refusal": None} if self._logprobs else None
        choice = {"index": 0, "message": message, "logprobs": logprobs, "finish_reason": self._finish}
        return self.head.whole([choice], self.usage)

    def _segment(self, segment: Segment) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        if segment.opens:
            self._at_begin = True
            deltas += self._call_ended(closed=True)
            if segment.state == TOOL:
                self._call_text = ""
        if segment.state == TOOL:
            self._call_text = (self._call_text or "") + segment.text
            return deltas
        text = segment.text.lstrip() if self._at_begin else segment.text
        if text:
            self._at_begin = False
            deltas.append(self._text(segment.state, text))
        return deltas

    def _text(self, state: str, text: str) -> dict[str, Any]:
        (self._reasoning if state == REASONING else self._content).append(text)
        return {"reasoning_content" if state == REASONING else CONTENT: text}

    def _call_ended(self, *, closed: bool) -> list[dict[str, Any]]:
        """A tool call as one delta; what is none goes back into the text, markers and all, so that nothing is lost."""
        if self._call_text is None:
            return []
        text, self._call_text = self._call_text, None
        calls = self._parse(text)
        if calls is None:
            self._at_begin = False
            return [self._text(CONTENT, self._tool[0] + text + (self._tool[1] if closed else ""))]
        if self._one_call:
            calls = calls[: 1 - len(self._calls)]
        made = [
            {
                "index": len(self._calls) + rank,
                "id": f"call_{secrets.token_hex(12)}",
                "type": "function",
                "function": call,
            }
            for rank, call in enumerate(calls)
        ]
        self._calls += made
        return [{"tool_calls": made}] if made else []

    def _add_scores(self, choices: Iterable[TokenChoice]) -> None:
        if self._logprobs:
            scores = [chat_score(self._table, choice) for choice in choices]
            self._scores += scores
            self._unsent += scores

    def _with_scores(self, deltas: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """One chunk a delta; tokens go with the first one after them that has text."""
        return [self._choice(delta, None, self._rest() if "role" not in delta else None) for delta in deltas]

    def _rest(self) -> dict[str, Any] | None:
        if not self._unsent:
            return None
        scores, self._unsent = self._unsent, []
        return {"content": scores, "refusal": None}

    @staticmethod
    def _choice(delta: dict[str, Any], finish: str | None, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        return {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish}


def chat_score(table: TokenText, choice: TokenChoice) -> dict[str, Any]:
    """One token in the shape of chat completions."""
    return _score(table, choice.token, choice.logprob) | {
        "top_logprobs": [_score(table, token, value) for token, value in choice.top]
    }


def _score(table: TokenText, token: int, logprob: float | None) -> dict[str, Any]:
    return {
        "token": table.token_string(token),
        "logprob": _finite(logprob),
        "bytes": list(table.token_bytes(token)),
    }


def _finite(logprob: float | None) -> float | None:
    """JSON has no -inf: OpenAI writes -9999 for what cannot happen."""
    return None if logprob is None else max(logprob, -9999.0)
