"""How fast a loaded model reads a prompt and writes tokens: one run, through mlx-lm's own generation step.

A run has a fresh cache and a prompt of seeded random tokens of the vocabulary, whose number is what counts. Time to the
first token is that from the call until it is there; the rate of the prompt is its tokens over that time, as mlx-lm
reports it. The rate of generation is that of the tokens after the first. End tokens end nothing, so every run writes as
many tokens as it was asked for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tqtool.errors import UserError
from tqtool.kv.scheme import FULL_CACHE, KVOptions
from tqtool.runtime.machine import PeakMemory

if TYPE_CHECKING:
    import mlx.nn as nn

Clock = Callable[[], float]
Steps = Callable[..., Iterator[Any]]
"""mlx-lm's ``generate_step``, or what stands in its place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What is run: tokens of the prompt, tokens to write, the KV cache.

    Raises:
        UserError: no prompt, or fewer than two tokens to write: the rate is that after the first.
    """

    prompt_tokens: int
    new_tokens: int
    kv: KVOptions = FULL_CACHE

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1:
            raise UserError(f"--prompt-tokens {self.prompt_tokens}: expected at least 1")
        if self.new_tokens < 2:
            raise UserError(
                f"--new-tokens {self.new_tokens}: expected at least 2", hint="the rate is that after the first"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run: seconds, and bytes.

    Attributes:
        prompt_tokens: Read.
        new_tokens: Written.
        first_token_s: From the call until the first token.
        rest_s: From the first token until the last.
        cache_bytes: Allocated for keys and values, and states, at the end.
        peak_rss_bytes: The most that the process held; since its start where ``is_peak_of_run`` is False.
        is_peak_of_run: See there.
        mlx_peak_bytes: The most that MLX's allocator held during the run, weights included.
    """

    prompt_tokens: int
    new_tokens: int
    first_token_s: float
    rest_s: float
    cache_bytes: int
    peak_rss_bytes: int
    is_peak_of_run: bool
    mlx_peak_bytes: int

    @property
    def prompt_tokens_per_s(self) -> float:
        """Prompt tokens over the time to the first token."""
        return self.prompt_tokens / self.first_token_s

    @property
    def new_tokens_per_s(self) -> float:
        """Tokens after the first over their time."""
        return (self.new_tokens - 1) / self.rest_s


def measure(
    model: nn.Module,
    vocabulary: int,
    point: Point,
    *,
    clock: Clock = time.perf_counter,
    steps: Steps | None = None,
) -> Run:
    """Run ``model`` once at ``point``; token ids below ``vocabulary``.

    Raises:
        UserError: the model cannot have such a cache.
    """
    import mlx.core as mx
    from mlx_lm.generate import generate_step

    from tqtool.kv.cache import make_caches

    caches = make_caches(model, point.kv.scheme, start=point.kv.start)
    prompt = mx.array(prompt_ids(point.prompt_tokens, vocabulary))
    mx.eval(prompt)
    mx.clear_cache()
    mx.reset_peak_memory()
    memory = PeakMemory()
    started = clock()
    stream = (steps or generate_step)(prompt, model, max_tokens=point.new_tokens, prompt_cache=caches)
    next(stream)
    first = clock()
    written = 1 + sum(1 for _ in stream)
    ended = clock()
    return Run(
        prompt_tokens=point.prompt_tokens,
        new_tokens=written,
        first_token_s=first - started,
        rest_s=ended - first,
        cache_bytes=sum(cache.nbytes for cache in caches),
        peak_rss_bytes=memory.read(),
        is_peak_of_run=memory.is_of_run,
        mlx_peak_bytes=mx.get_peak_memory(),
    )


def prompt_ids(count: int, vocabulary: int) -> list[int]:
    """Token ids of a prompt: the same ones for every run, and every model of that vocabulary."""
    found: list[int] = np.random.default_rng(count).integers(0, vocabulary, count).tolist()
    return found
