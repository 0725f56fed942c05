"""Between a job's events and one client: whole answers and server-sent events, both ended when the client leaves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import Any

from tqtool.serve.api_error import ApiError, broken, unavailable
from tqtool.serve.engine import Busy, Engine, Stopping
from tqtool.serve.jobs import Ended, Event, Failed, Job, Request
from tqtool.serve.reply import Reply

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
KEEP_ALIVE_SECONDS = 10.0
"""After so long without an event a comment goes out, so that nothing between takes the connection for dead."""

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Events:
    """A job's events, carried from the engine's thread into the event loop."""

    def __init__(self, engine: Engine, request: Request) -> None:
        self._queue: asyncio.Queue[Event] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def emit(event: Event) -> None:
            loop.call_soon_threadsafe(self._queue.put_nowait, event)

        try:
            self.job: Job = engine.submit(request, emit)
        except Busy as error:
            message = "The server is busy: its queue is full. Please try again later."
            raise unavailable(message, error.retry_after) from error
        except Stopping as error:
            raise unavailable("The server is shutting down.", 5) from error

    async def next(self) -> Event:
        """The next event."""
        return await self._queue.get()


def failure(event: Failed) -> ApiError:
    """How a failed request is told."""
    return unavailable("The server is shutting down.", 5) if event.stopping else broken(event.message)


async def left(receive: Receive) -> None:
    """Return when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def collect(events: Events, reply: Reply, receive: Receive) -> dict[str, Any] | None:
    """The whole answer; None when the client left before it was there. ApiError when it failed."""

    async def all_events() -> dict[str, Any]:
        while True:
            event = await events.next()
            reply.take(event)
            if isinstance(event, Failed):
                raise failure(event)
            if isinstance(event, Ended):
                return reply.whole()

    work, gone = asyncio.ensure_future(all_events()), asyncio.ensure_future(left(receive))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        return await work if work.done() else None
    finally:
        await _drop(work, gone)
        events.job.cancel()


class EventStream:
    """An ASGI application that streams one answer.

    Args:
        events: Of the job.
        reply: Makes chunks of them.
        include_usage: A last chunk with the usage.
        over: Called with the HTTP status that tells how it ended (499: the client left; after a 200
            went out, an error event's status, or 500 where a fault of ours broke the stream off).
    """

    def __init__(self, events: Events, reply: Reply, *, include_usage: bool, over: Callable[[int], None]) -> None:
        self._events = events
        self._reply = reply
        self._include_usage = include_usage
        self._over = over

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Send until the answer is over or the client is gone."""
        del scope
        pump, gone = asyncio.ensure_future(self._pump(send)), asyncio.ensure_future(left(receive))
        status = 499
        try:
            await asyncio.wait({pump, gone}, return_when=asyncio.FIRST_COMPLETED)
            if pump.done():
                status = await pump
        except OSError:
            pass  # the connection broke while sending
        except Exception:
            status = 500
            raise
        finally:
            self._events.job.cancel()
            await _drop(pump, gone)
            self._over(status)

    async def _pump(self, send: Send) -> int:
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        status = 200
        while True:
            try:
                # Not wait_for: before Python 3.12 it can lose a cancellation that comes together with an event.
                async with asyncio.timeout(KEEP_ALIVE_SECONDS):
                    event = await self._events.next()
            except TimeoutError:
                await _send_text(send, ": waiting\n\n")
                continue
            if isinstance(event, Failed):
                error = failure(event)
                status = error.status
                await _send_text(send, _data(error.body()))
                break
            chunks = [
                self._reply.head.chunk([choice], None, with_usage=self._include_usage)
                for choice in self._reply.take(event)
            ]
            if isinstance(event, Ended) and self._include_usage:
                chunks.append(self._reply.head.chunk([], event.usage, with_usage=True))
            if chunks:
                await _send_text(send, "".join(map(_data, chunks)))
            if isinstance(event, Ended):
                break
        # Also after an error: the stream is complete, and clients that only wait for this do not hang.
        await _send_text(send, "data: [DONE]\n\n")
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return status


async def _send_text(send: Send, text: str) -> None:
    await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
    await asyncio.sleep(0)  # when events have piled up: a lost connection must be noticed between two of them


def _data(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False, separators=(',', ':'), allow_nan=False)}\n\n"


async def _drop(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await task
