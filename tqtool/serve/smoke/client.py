"""A client of the standard library: it can also do what good clients do not, such as leave in the middle."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

TIMEOUT = 600.0
"""Seconds without a byte; a large model on a small machine takes its time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """Status and body; ``value`` is None where the body is no JSON."""

    status: int
    value: Any
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """An answer, whichever way it came: text, why it ended, tokens."""

    text: str
    finish: str | None
    prompt_tokens: int
    new_tokens: int
    cached: int


class Client:
    """Asks one server."""

    def __init__(self, url: str, key: str | None = None, timeout: float = TIMEOUT) -> None:
        self._place = urlsplit(url).netloc
        self._timeout = timeout
        self._headers = {"content-type": "application/json"}
        if key is not None:
            self._headers["authorization"] = f"Bearer {key}"

    @contextmanager
    def open(
        self, method: str, path: str, body: bytes | None, headers: dict[str, str] | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        """A response whose body is still to be read; leaving closes the connection."""
        with closing(http.client.HTTPConnection(self._place, timeout=self._timeout)) as connection:
            connection.request(method, path, body, self._headers | (headers or {}))
            with closing(connection.getresponse()) as response:
                yield response

    def ask(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Reply:
        """One request; ``body`` is sent as it is when it is bytes, else as JSON."""
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        with self.open(method, path, data, headers) as response:
            text = response.read().decode()
            try:
                value = json.loads(text)
            except ValueError:
                value = None
            return Reply(status=response.status, value=value, text=text)

    def whole(self, path: str, body: dict[str, Any]) -> tuple[Said, dict[str, Any]]:
        """A complete answer and the object it came in."""
        reply = self.ask("POST", path, body)
        if reply.status != 200:
            raise BadAnswer(f"{path}: status {reply.status}: {reply.text[:300]}")
        (choice,) = reply.value["choices"]
        text = choice["message"]["content"] or "" if "message" in choice else choice["text"]
        if "message" in choice:
            text = (choice["message"].get("reasoning_content") or "") + text
        return _said(text, choice["finish_reason"], reply.value["usage"]), reply.value

    def events(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The objects of a stream; closing the iterator leaves it."""
        data = json.dumps(body | {"stream": True, "stream_options": {"include_usage": True}}).encode()
        with self.open("POST", path, data) as response:
            if response.status != 200:
                raise BadAnswer(f"{path}: status {response.status}: {response.read().decode()[:300]}")
            for line in response:
                payload = line.decode().strip().removeprefix("data: ")
                if payload == "[DONE]":
                    return
                if line.startswith(b"data: "):
                    yield json.loads(payload)
            raise BadAnswer(f"{path}: the stream ended without [DONE]")

    def streamed(self, path: str, body: dict[str, Any]) -> Said:
        """A streamed answer, put together."""
        text, reasoning, finish, usage = "", "", None, None
        for event in self.events(path, body):
            if "error" in event:
                raise BadAnswer(f"{path}: {event['error']['message']}")
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                delta = choice.get("delta", {})
                text += choice.get("text") or delta.get("content") or ""
                reasoning += delta.get("reasoning_content") or ""
                finish = choice["finish_reason"] or finish
        if usage is None:
            raise BadAnswer(f"{path}: no usage at the end of the stream")
        return _said(reasoning + text, finish, usage)


class BadAnswer(Exception):  # noqa: N818 - what it is
    """The server answered otherwise than it should."""


def _said(text: str, finish: str | None, usage: dict[str, Any]) -> Said:
    return Said(
        text=text,
        finish=finish,
        prompt_tokens=usage["prompt_tokens"],
        new_tokens=usage["completion_tokens"],
        cached=usage["prompt_tokens_details"]["cached_tokens"],
    )
