"""One thread that owns the model and makes all answers, a few at a time, token by token in turn.

Every request is computed alone, with a batch of one: its answer does not depend on what else is being served. (A batch
would be faster on a GPU, and change sums in their last bits with its size.) Requests beyond ``parallel`` wait in order,
and beyond ``queue`` are refused.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from tqtool.runtime.load import LoadedModel
from tqtool.serve.generation import Generation, NotFinite, NoWatcher, Tools, Watcher
from tqtool.serve.jobs import Begun, Event, Failed, Job, Request
from tqtool.serve.prefix_store import PrefixStore
from tqtool.serve.sampling import Sampling
from tqtool.serve.token_text import TokenText

log = logging.getLogger(__name__)


class Busy(Exception):  # noqa: N818 - it is no fault
    """The queue is full; ``retry_after`` is a guess in seconds."""

    def __init__(self, retry_after: int) -> None:
        super().__init__(f"queue full, try again in {retry_after} s")
        self.retry_after = retry_after


class Stopping(Exception):  # noqa: N818 - it is no fault
    """The server is about to end and takes nothing new."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How the engine runs.

    Attributes:
        parallel: Requests computed in turn.
        queue: Requests that may wait for those.
        chunk: Tokens of a prompt computed at once.
        prefix_bytes: Bound of the store of prompt caches; 0 is off.
        make_caches: An empty cache for the model.
    """

    parallel: int = 4
    queue: int = 32
    chunk: int = 512
    prefix_bytes: int = 1 << 30
    make_caches: Callable[[], list[Any]]


class Engine:
    """Starts with ``start``, ends with ``stop``; ``submit`` from any thread."""

    def __init__(self, loaded: LoadedModel, options: EngineOptions, watcher: Watcher | None = None) -> None:
        self.loaded = loaded
        self.options = options
        self.text = TokenText(loaded.tokenizer)
        self.prefixes = PrefixStore(options.chunk, options.prefix_bytes)
        self._tools = Tools(
            model=loaded.model,
            end_tokens=frozenset(loaded.tokenizer.eos_token_ids),
            text=self.text,
            make_caches=options.make_caches,
            prefixes=self.prefixes,
            watcher=watcher or NoWatcher(),
            succeeded=self._succeeded,
        )
        self._hello = tuple(loaded.tokenizer.encode("Hello")) or (0,)
        self.ready = False
        self.failure: str | None = None
        """Why the last completion that was tried did not run; None when it did."""
        self._waiting: deque[Job] = deque()
        self._running: list[Generation] = []
        self._changed = threading.Condition()
        self._draining = False
        self._aborting = False
        self._seconds = 1.0  # of a request, running mean
        self._thread = threading.Thread(target=self._work, name="tqtool-engine", daemon=True)

    def start(self) -> None:
        """Start the thread; its first work is a completion of its own, after which ``ready`` is true."""
        self._waiting.append(self._self_check())
        self._thread.start()

    def submit(self, request: Request, emit: Callable[[Event], None]) -> Job:
        """Queue ``request``.

        Raises:
            Busy: too many wait already.
            Stopping: the server is about to end.
        """
        job = Job(request, emit)
        with self._changed:
            if self._draining:
                raise Stopping
            if self.full:
                raise Busy(self.retry_after)
            self._waiting.append(job)
            self._changed.notify()
        return job

    @property
    def full(self) -> bool:
        """Whether another request would be refused."""
        return self.waiting + self.running >= self.options.parallel + self.options.queue

    @property
    def waiting(self) -> int:
        """Requests in the queue that somebody still waits for."""
        return sum(not job.cancelled and not isinstance(job, _SelfCheck) for job in list(self._waiting))

    @property
    def running(self) -> int:
        """Requests that are being computed; the engine's own checks are none."""
        return sum(not isinstance(generation.job, _SelfCheck) for generation in list(self._running))

    @property
    def retry_after(self) -> int:
        """Seconds until a place in the queue should be free, from 1 to 60: a request's mean time, so many at once."""
        return max(1, min(60, round(self._seconds / self.options.parallel)))

    @property
    def stopping(self) -> bool:
        """Whether new requests are refused because the server ends."""
        return self._draining

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def drain(self) -> None:
        """Take nothing new; what is there goes on."""
        with self._changed:
            self._draining = True
            self._changed.notify()

    def abort(self) -> None:
        """End all requests: each gets ``Failed(stopping=True)``."""
        with self._changed:
            self._draining = self._aborting = True
            self._changed.notify()

    def stop(self, timeout: float = 30.0) -> None:
        """Abort, and wait for the thread."""
        self.abort()
        if self._thread.is_alive():
            self._thread.join(timeout)

    # ----------------------------------------------------------------------------------------------- in the thread

    def _work(self) -> None:
        import mlx.core as mx
        from mlx_lm.generate import generation_stream, wired_limit

        try:
            with wired_limit(self.loaded.model, [generation_stream]), mx.stream(generation_stream):
                while self._admit():
                    for generation in list(self._running):
                        if not self._advance(generation):
                            self._running.remove(generation)
                            generation.close()
                            mx.clear_cache()
        except BaseException as error:
            # Not one request's fault but the thread's: nobody may wait for it any longer.
            log.exception("the engine stopped")
            with self._changed:
                self._draining, self.ready, self.failure = True, False, f"the engine stopped: {type(error).__name__}"
                self._end_all(Failed(message=self.failure))

    def _admit(self) -> bool:
        """Fill free places from the queue; sleep while there is nothing to do; False when the thread is to end."""
        with self._changed:
            while True:
                if self._aborting:
                    self._end_all(Failed(message="the server is shutting down", stopping=True))
                    return False
                while self._waiting and len(self._running) < self.options.parallel:
                    job = self._waiting.popleft()
                    if not job.cancelled:
                        self._running.append(Generation(self._tools, job))
                        self._emit(job, Begun())
                if self._running:
                    return True
                self._changed.wait()

    def _advance(self, generation: Generation) -> bool:
        """One more token (or chunk of the prompt); False when the request is over."""
        job = generation.job
        if job.cancelled:
            return False
        try:
            going_on = generation.step()
        except NotFinite as error:
            self._failed(job, str(error))
            return False
        except Exception as error:
            log.exception("a request failed")
            self._failed(job, f"{type(error).__name__}: {error}".splitlines()[0])
            return False
        return going_on

    def _succeeded(self, job: Job) -> None:
        self.ready, self.failure = True, None
        self._seconds += 0.2 * (time.monotonic() - job.created - self._seconds)

    def _failed(self, job: Job, reason: str) -> None:
        was_check = isinstance(job, _SelfCheck)
        self.ready, self.failure = False, reason
        self._emit(job, Failed(message=reason))
        if not was_check:
            self._waiting.appendleft(self._self_check())  # ready again once a completion has run

    def _emit(self, job: Job, event: Event) -> None:
        if not job.cancelled:
            with suppress(RuntimeError):  # the event loop it goes to is closed
                job.emit(event)

    def _end_all(self, event: Failed) -> None:
        for job in [*(generation.job for generation in self._running), *self._waiting]:
            self._emit(job, event)
        for generation in self._running:
            generation.close()
        self._running.clear()
        self._waiting.clear()

    def _self_check(self) -> Job:
        """A short completion: the model's logits are finite, and a token comes out."""
        request = Request(prompt=self._hello, max_tokens=2, sampling=Sampling(temperature=0))
        return _SelfCheck(request, lambda event: None)


class _SelfCheck(Job):
    pass
