"""How the next token is chosen: mlx-lm's filters and penalties, with random numbers of each request's own.

mlx-lm's samplers draw from one global state. Here every request has a key, so a seed gives the same answer whatever
else is being served.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import mlx.core as mx

Sampler = Callable[["mx.array"], "mx.array"]
Processor = Callable[["mx.array", "mx.array"], "mx.array"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Parameters of one request.

    Attributes:
        temperature: 0 is greedy.
        top_p: Nucleus; 1 (or 0) is off.
        top_k: Only so many of the likeliest tokens; 0 is off.
        min_p: Only tokens at least so probable, as a share of the likeliest; 0 is off.
        seed: Of this request's random numbers.
        repetition_penalty: Logits of recent tokens are divided by it (multiplied where negative); 1 is off.
        repetition_context: How many recent tokens, of prompt and answer.
        presence_penalty: Subtracted from the logit of every token that the answer has.
        frequency_penalty: Subtracted once for each time that the answer has it.
        logit_bias: Added to logits, by token id.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    repetition_context: int = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)


def make_sampler(sampling: Sampling) -> Sampler:
    """log-probabilities [1, vocab] → token [1]; call it once a token, in order."""
    import mlx.core as mx
    from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p

    if sampling.temperature == 0:
        return lambda logprobs: mx.argmax(logprobs, axis=-1)
    key = mx.random.key(sampling.seed)

    def sample(logprobs: mx.array) -> mx.array:
        nonlocal key
        # mlx-lm's order: nucleus, min-p, top-k on the model's own probabilities, the temperature last.
        if 0 < sampling.top_p < 1:
            logprobs = apply_top_p(logprobs, sampling.top_p)
        if sampling.min_p > 0:
            logprobs = apply_min_p(logprobs, sampling.min_p)
        if 0 < sampling.top_k < logprobs.shape[-1]:
            logprobs = apply_top_k(logprobs, sampling.top_k)
        key, now = mx.random.split(key)
        return mx.random.categorical(logprobs * (1 / sampling.temperature), key=now)

    return sample


def make_processors(sampling: Sampling, prompt: tuple[int, ...], fed: int) -> list[Processor]:
    """Penalties and biases in the form that mlx-lm's generation loop calls.

    Args:
        sampling: Parameters.
        prompt: The whole prompt.
        fed: How many of its last tokens the loop is given; the others come from a cache, and must count all the same.
    """
    import mlx.core as mx
    from mlx_lm.sample_utils import make_logits_processors

    unseen = mx.array(prompt[: len(prompt) - fed][-sampling.repetition_context :], dtype=mx.int32)
    processors: list[Processor] = []
    if sampling.logit_bias:
        processors += make_logits_processors(logit_bias=sampling.logit_bias)
    if sampling.repetition_penalty != 1:
        (repetition,) = make_logits_processors(
            repetition_penalty=sampling.repetition_penalty, repetition_context_size=sampling.repetition_context
        )
        processors.append(lambda tokens, logits: repetition(mx.concatenate([unseen, tokens]), logits))
    additive = make_logits_processors(
        presence_penalty=sampling.presence_penalty,
        presence_context_size=_ALL,
        frequency_penalty=sampling.frequency_penalty,
        frequency_context_size=_ALL,
    )
    # As OpenAI defines them: only tokens of the answer count.
    processors += [_on_answer(processor, fed) for processor in additive]
    return processors


_ALL = 1 << 30


def _on_answer(processor: Processor, fed: int) -> Processor:
    return lambda tokens, logits: processor(tokens[fed:], logits)
