"""Greedy answers: generated, cut at stop strings, compared with the item's answer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from tqtool.errors import NumericalError
from tqtool.evals.prefix import PrefixCache
from tqtool.evals.prompts import Format, GeneratePrompt
from tqtool.runtime.load import LoadedModel

Finish = Literal["eos", "stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOutcome:
    """One item in one format.

    Attributes:
        id: The item's.
        task: The item's.
        format: ``templated`` or ``raw``.
        flags: ``exact_match``; ``instant_eos``: the first token ended the answer; ``truncated``: the limit of tokens
            did.
        text: The answer, without the stop string.
        extracted: What the extractor found in it.
        tokens: New tokens, the end token not counted.
        finish: An end token, a stop string, or the limit of tokens.
    """

    id: str
    task: str
    format: Format
    flags: dict[str, bool]
    text: str
    extracted: str | None
    tokens: int
    finish: Finish


def answer(model: LoadedModel, prompt: GeneratePrompt, cache: PrefixCache, *, max_tokens: int) -> GenerateOutcome:
    """Answer ``prompt`` greedily; NumericalError for logits that are not finite."""
    item = prompt.item
    where = f"item {item.id!r}, {prompt.format}"
    text, tokens, finish = complete(model, prompt.tokens, item.stop, cache, max_tokens=max_tokens, where=where)
    extracted = item.extractor.find(text)
    return GenerateOutcome(
        id=item.id,
        task=item.task,
        format=prompt.format,
        flags={
            "exact_match": item.extractor.is_right(extracted, item.answer),
            "instant_eos": finish == "eos" and tokens == 0,
            "truncated": finish == "length",
        },
        text=text,
        extracted=extracted,
        tokens=tokens,
        finish=finish,
    )


def complete(
    model: LoadedModel,
    prompt: tuple[int, ...],
    stops: tuple[str, ...],
    cache: PrefixCache,
    *,
    max_tokens: int,
    where: str,
) -> tuple[str, int, Finish]:
    """Continue ``prompt`` greedily: the text before a stop, its number of tokens, what ended it.

    Raises:
        NumericalError: logits that are not finite; the message begins with ``where``.
    """
    from mlx_lm.generate import stream_generate

    cache.advance(prompt[:-1])
    stream = stream_generate(
        model.model,
        model.tokenizer,
        [prompt[-1]],
        max_tokens=max_tokens,
        prompt_cache=cache.copies(1),
    )
    text = ""
    for count, response in enumerate(stream, start=1):
        if not math.isfinite(response.logprobs[response.token].item()):
            raise NumericalError(f"{where}: the model's logits are not finite")
        text += response.text
        ended = response.finish_reason == "stop"
        cut = first_stop(text, stops)
        if cut is not None:
            return text[:cut], count - ended, "stop"
        if ended:
            return text, count - 1, "eos"
    return text, count, "length"


def first_stop(text: str, stops: tuple[str, ...]) -> int | None:
    """Where the earliest of ``stops`` begins in ``text``, None if there is none."""
    places = [place for stop in stops if (place := text.find(stop)) >= 0]
    return min(places, default=None)
