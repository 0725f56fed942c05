"""One request being computed: the prompt chunk by chunk, then token by token through mlx-lm's generation loop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from tqtool.serve.answer import REASONING, TOOL, Answer, Finish, Piece, TokenChoice
from tqtool.serve.jobs import Ended, Job, PromptDone, Usage
from tqtool.serve.prefix_store import PrefixStore
from tqtool.serve.sampling import make_processors, make_sampler
from tqtool.serve.token_text import TokenText

if TYPE_CHECKING:
    import mlx.core as mx

SCORED_AT_ONCE = 128
"""Positions whose logits over the whole vocabulary are held at a time when a prompt is scored."""


class NotFinite(Exception):  # noqa: N818 - named for what it says
    """The model's logits are NaN or infinite."""


class Watcher(Protocol):
    """Told about progress; what metrics need."""

    def prompt(self, tokens: int, cached: int, seconds: float) -> None:
        """A prompt was computed."""

    def first_token(self, seconds: float) -> None:
        """A first token came, so long after the request."""

    def token(self, seconds: float) -> None:
        """A token came, so long after the one before."""


class NoWatcher:
    """Nobody is told."""

    def prompt(self, tokens: int, cached: int, seconds: float) -> None:
        """Nothing."""

    def first_token(self, seconds: float) -> None:
        """Nothing."""

    def token(self, seconds: float) -> None:
        """Nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """What generations share.

    Attributes:
        model: mlx-lm's model.
        end_tokens: Ids that end an answer.
        text: Of tokens.
        make_caches: An empty cache.
        prefixes: Caches of earlier prompts.
        watcher: Told about progress.
        succeeded: Called with each job that ran to its end, before its last event goes out: whoever has that may ask
            at once how the server is.
    """

    model: Any
    end_tokens: frozenset[int]
    text: TokenText
    make_caches: Callable[[], list[Any]]
    prefixes: PrefixStore
    watcher: Watcher
    succeeded: Callable[[Job], None]


class Generation:
    """Progress of one job; every method runs in the engine's thread."""

    def __init__(self, tools: Tools, job: Job) -> None:
        self.job = job
        self._tools = tools
        self._begun = time.monotonic()
        self._cached = 0
        self._steps = self._run()

    def step(self) -> bool:
        """Compute one token or one chunk of the prompt; False after the last event."""
        return next(self._steps, None) is not None

    def close(self) -> None:
        """Let go of the cache."""
        self._steps.close()

    def _run(self) -> Generator[bool, None, None]:
        request = self.job.request
        if request.score_prompt:
            cache, scores = self._tools.make_caches(), list[TokenChoice]()
            for scored in self._score(cache):
                scores += scored
                yield True
            self.job.emit(PromptDone(cached=0, scores=tuple(scores)))
            done = len(request.prompt) - 1
            if request.max_tokens == 0:
                self._end("length", 0, 0)
                return
        else:
            found, self._cached = self._tools.prefixes.take(request.prompt)
            cache, done = found or self._tools.make_caches(), self._cached
            for done in self._prefill(cache):  # noqa: B007 - read after the loop
                yield True
        yield from self._answer(cache, request.prompt[done:])

    def _prefill(self, cache: list[Any]) -> Iterator[int]:
        """Whole chunks, as mlx-lm's loop would cut them; yields how far. The last border goes into the store."""
        import mlx.core as mx

        prompt, prefixes = self.job.request.prompt, self._tools.prefixes
        border = prefixes.border(prompt)
        for start in range(self._cached, border, prefixes.chunk):
            self._tools.model(_row(prompt[start : start + prefixes.chunk]), cache=cache)
            mx.eval([layer.state for layer in cache])
            mx.clear_cache()
            if start + prefixes.chunk == border:
                prefixes.put(prompt[:border], cache)
            yield start + prefixes.chunk

    def _score(self, cache: list[Any]) -> Iterator[list[TokenChoice]]:
        """All of the prompt but its last token into the cache; the log-probabilities of its tokens."""
        import mlx.core as mx

        prompt, top = self.job.request.prompt, self.job.request.top or 0
        yield [TokenChoice(token=prompt[0], logprob=None)]
        for start in range(0, len(prompt) - 1, SCORED_AT_ONCE):
            end = min(start + SCORED_AT_ONCE, len(prompt) - 1)
            logits = self._tools.model(_row(prompt[start:end]), cache=cache)[0].astype(mx.float32)
            logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
            yield [choose(token, row, top) for token, row in zip(prompt[start + 1 : end + 1], logprobs, strict=True)]

    def _answer(self, cache: list[Any], rest: Sequence[int]) -> Iterator[bool]:
        from mlx_lm.generate import generate_step

        request = self.job.request
        loop = generate_step(
            _row(rest)[0],
            self._tools.model,
            max_tokens=request.max_tokens,
            sampler=make_sampler(request.sampling),
            logits_processors=make_processors(request.sampling, request.prompt, len(rest)) or None,
            prompt_cache=cache,
            prefill_step_size=self._tools.prefixes.chunk,
        )
        stream = self._tools.text.stream(request.prompt, begins_text=request.begins_text)
        answer = Answer(stream, request.format, request.stops)
        finish: Finish = "length"
        count = reasoning = 0
        before = self.job.created
        try:
            for token, logprobs in loop:
                count += 1
                before = self._timed(count, before)
                choice = choose(token, logprobs, request.top or 0)
                if token in self._tools.end_tokens:
                    finish = "stop"
                    break
                reasoning += answer.state == REASONING
                if self._add(answer, choice):
                    finish = "stop"
                    break
                yield True
        finally:
            loop.close()
        self._give(answer.finish())
        self._end(finish, count, reasoning)

    def _add(self, answer: Answer, choice: TokenChoice) -> bool:
        """Give out what ``choice`` settled; True when the answer is complete by its text."""
        was = answer.state
        self._give(answer.add(choice))
        called = was == TOOL and answer.state != TOOL
        return answer.stopped or (called and self.job.request.one_tool_call)

    def _give(self, piece: Piece) -> None:
        if piece.segments or piece.choices:
            self.job.emit(piece)

    def _timed(self, count: int, before: float) -> float:
        now, watcher = time.monotonic(), self._tools.watcher
        if count > 1:
            watcher.token(now - before)
            return now
        if not self.job.request.score_prompt:
            self.job.emit(PromptDone(cached=self._cached))
        watcher.prompt(len(self.job.request.prompt), self._cached, now - self._begun)
        watcher.first_token(now - self.job.created)
        return now

    def _end(self, finish: Finish, count: int, reasoning: int) -> None:
        usage = Usage(prompt=len(self.job.request.prompt), cached=self._cached, completion=count, reasoning=reasoning)
        self._tools.succeeded(self.job)
        self.job.emit(Ended(finish=finish, usage=usage))


def choose(token: int, logprobs: mx.array, top: int) -> TokenChoice:
    """A token with its log-probability out of ``logprobs`` [vocab] and the ``top`` likeliest; NotFinite for NaN."""
    import mlx.core as mx

    value: Any = logprobs[token].item()
    logprob = float(value)
    if math.isnan(logprob) or logprob == math.inf:
        raise NotFinite("the model's logits are not finite: the artifact is damaged, or a kernel is at fault")
    best: tuple[tuple[int, float], ...] = ()
    if top:
        found = mx.argpartition(-logprobs, kth=top - 1)[:top]
        ids: Any = found.tolist()
        values: Any = logprobs[found].tolist()
        pairs = zip(ids, values, strict=True)
        best = tuple(sorted(pairs, key=lambda pair: -pair[1]))
    return TokenChoice(token=token, logprob=logprob, top=best)


def _row(tokens: Sequence[int]) -> mx.array:
    import mlx.core as mx

    return mx.array(list(tokens), dtype=mx.int32)[None]
