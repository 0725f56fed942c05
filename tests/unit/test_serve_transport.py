"""A stream and its client: whoever ends first, nothing stays behind."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field

import pytest

from tqtool.serve.answer import CONTENT, Piece
from tqtool.serve.jobs import Ended, Failed, Job, Request, Usage
from tqtool.serve.markers import Segment
from tqtool.serve.reply import CompletionReply, Head
from tqtool.serve.transport import EventStream

PIECE = Piece(segments=(Segment(CONTENT, "a"),))
ENDED = Ended(finish="stop", usage=Usage(prompt=1, cached=0, completion=1, reasoning=0))


@dataclass
class Client:
    """Events that are put in by hand, and a connection that is cut by hand."""

    queue: asyncio.Queue = field(default_factory=asyncio.Queue)
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    sent: list = field(default_factory=list)
    over: list = field(default_factory=list)
    job: Job = field(default_factory=lambda: Job(Request(prompt=(1,), max_tokens=1), lambda event: None))

    async def next(self):
        return await self.queue.get()

    async def receive(self):
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message):
        self.sent.append(message)

    def start(self):
        reply = CompletionReply(Head(kind="completion", model="m", fingerprint="f"), text=None)
        stream = EventStream(self, reply, include_usage=False, over=self.over.append)
        return asyncio.create_task(stream({}, self.receive, self.send))

    def data(self):
        text = b"".join(message.get("body", b"") for message in self.sent).decode()
        return [line.removeprefix("data: ") for line in text.split("\n\n") if line]


@pytest.mark.parametrize("ticks", range(8))
def test_a_client_that_leaves_as_an_event_comes(ticks):
    """Also in the same turn of the event loop: a cancellation that meets a result must not be lost."""

    async def session():
        client = Client()
        task = client.start()
        for _ in range(10):
            await asyncio.sleep(0)
        client.gone.set()
        for _ in range(ticks):
            await asyncio.sleep(0)
        client.queue.put_nowait(PIECE)
        await asyncio.wait_for(asyncio.shield(task), 5)
        assert client.over == [499]
        assert client.job.cancelled

    asyncio.run(session())


@pytest.mark.parametrize(
    ("last", "status", "line"),
    [
        (ENDED, 200, None),
        (Failed(message="broke"), 500, "broke"),
        (Failed(message="x", stopping=True), 503, "The server is shutting down."),
    ],
)
def test_every_stream_is_complete(last, status, line):
    async def session():
        client = Client()
        task = client.start()
        client.queue.put_nowait(PIECE)
        client.queue.put_nowait(last)
        await asyncio.wait_for(task, 5)
        return client

    client = asyncio.run(session())
    assert client.over == [status]
    assert client.sent[-1]["more_body"] is False
    *chunks, done = client.data()
    assert done == "[DONE]"
    if line is not None:
        assert json.loads(chunks[-1])["error"]["message"] == line


def test_silence_is_filled(monkeypatch):
    monkeypatch.setattr("tqtool.serve.transport.KEEP_ALIVE_SECONDS", 0.01)

    async def session():
        client = Client()
        task = client.start()
        while len(client.sent) < 3:
            await asyncio.sleep(0.01)
        client.queue.put_nowait(ENDED)
        await asyncio.wait_for(task, 5)
        assert client.data()[0] == ": waiting"

    asyncio.run(session())


def test_a_connection_that_breaks_while_sending_ends_the_work():
    async def session():
        client = Client()

        async def broken(message):
            raise OSError("reset")

        client.send = broken
        await asyncio.wait_for(client.start(), 5)
        assert client.over == [499]
        assert client.job.cancelled

    asyncio.run(session())


def test_a_fault_of_ours_in_a_stream_is_counted_as_one():
    async def session():
        client = Client()
        task = client.start()
        client.queue.put_nowait(Piece(segments=(None,)))
        with pytest.raises(AttributeError):
            await asyncio.wait_for(task, 5)
        assert client.over == [500]
        assert client.job.cancelled

    asyncio.run(session())
