"""The process: one socket, uvicorn, signals, and an end in good order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import uvicorn

from tqtool.errors import ArtifactError, UserError
from tqtool.serve.app import Access, build_app
from tqtool.serve.engine import Engine, EngineOptions
from tqtool.serve.metrics import Metrics
from tqtool.serve.served import Served

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where to listen and how to end.

    Attributes:
        host: Name or address.
        port: 0 takes a free one.
        grace: Seconds that running requests get when the server is told to end.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    grace: float = 30.0


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach ``host``."""
    return host in ("localhost", "::1") or host.startswith("127.")


def listen(place: Place) -> socket.socket:
    """A listening socket; UserError where that cannot be."""
    family = socket.AF_INET6 if ":" in place.host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((place.host, place.port))
        found.listen(2048)
    except OSError as error:
        found.close()
        raise UserError(
            f"cannot listen on {place.host} port {place.port}: {error.strerror or error}",
            hint="another --port, or --port 0 for a free one; --host takes an address of this machine",
        ) from error
    return found


def url_of(place: Place, listening: socket.socket) -> str:
    """``http://127.0.0.1:8080``."""
    host = f"[{place.host}]" if ":" in place.host else place.host
    return f"http://{host}:{listening.getsockname()[1]}"


class Server:
    """A model on a socket.

    Args:
        served: The model.
        options: Of the engine.
        access: Who may ask.
        place: Grace.
        listening: The socket.
        ready: Called in the server's thread when the first completion has run.
    """

    def __init__(
        self,
        served: Served,
        options: EngineOptions,
        access: Access,
        place: Place,
        listening: socket.socket,
        *,
        ready: Callable[[], None] = lambda: None,
    ) -> None:
        metrics = Metrics()
        self.url = url_of(place, listening)
        self.engine = Engine(served.loaded, options, metrics)
        metrics.watch(self.engine)
        config = uvicorn.Config(
            build_app(self.engine, served, metrics, access),
            log_config=None,
            access_log=False,
            lifespan="on",
            server_header=False,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=round(place.grace) + 5,
        )
        self._path = served.loaded.report.path
        self._listening = listening
        self._uvicorn = _Uvicorn(config, self.engine, place.grace, ready)

    def run(self) -> None:
        """Serve until ``stop``, SIGTERM or SIGINT.

        Then nothing new is taken and what runs gets the grace; what still runs after it is ended, a stream by an
        error event.

        Raises:
            ArtifactError: the model's first completion did not run.
        """
        self._uvicorn.run(sockets=[self._listening])
        if self.engine.failure is not None and not self.engine.ready:
            raise ArtifactError(
                f"{self._path}: no completion runs: {self.engine.failure}",
                hint="`tqtool verify` checks the artifact's files; `tqtool generate --traceback` shows where it fails",
            )

    def stop(self) -> None:
        """Tell ``run``, in another thread, to end."""
        self._uvicorn.should_exit = True


class _Uvicorn(uvicorn.Server):
    """Ends requests in order; a signal is an order to end, not an error."""

    def __init__(self, config: uvicorn.Config, engine: Engine, grace: float, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._engine = engine
        self._grace = grace
        self._ready = ready
        self._first: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, without raising the signal again at the end: the process then exits with 0."""
        previous: dict[int, Any] = {}
        with contextlib.suppress(ValueError):  # not in the main thread: whoever runs it there ends it himself
            for heard in (signal.SIGINT, signal.SIGTERM):
                previous[heard] = signal.signal(heard, self.handle_exit)
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and watch for the engine's first completion."""
        await super().startup(sockets)
        self._first = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        engine = self._engine
        while not engine.ready and engine.failure is None and engine.alive:
            await asyncio.sleep(0.02)
        if engine.ready:
            self._ready()
        else:
            self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Nothing new; after the grace, an end for what still runs."""
        running = self._engine.running + self._engine.waiting
        if running:
            log.info("ending: %d requests have %.0f s", running, self._grace)
        self._engine.drain()
        timer = asyncio.get_running_loop().call_later(self._grace, self._engine.abort)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()
