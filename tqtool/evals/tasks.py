"""Run a file of items through a model: outcomes by item, shares with their intervals."""

from __future__ import annotations

import hashlib
import importlib.metadata
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import get_args

from tqtool.artifact.content import content_hash
from tqtool.errors import UserError
from tqtool.evals.choice import ChoiceOutcome, ChoiceScorer
from tqtool.evals.context import context_warnings
from tqtool.evals.generative import GenerateOutcome, answer
from tqtool.evals.items import GenerateItem, ItemFile
from tqtool.evals.prefix import PrefixCache
from tqtool.evals.prompts import AnyPrompt, ChoicePrompt, Format, Prompter
from tqtool.evals.proportions import wilson
from tqtool.evals.text import tokenizer_hash
from tqtool.kv.scheme import FULL_CACHE, KVOptions
from tqtool.runtime.load import LoadedModel

Tick = Callable[[int], None]
Outcome = ChoiceOutcome | GenerateOutcome

FORMATS: tuple[Format, ...] = get_args(Format)
DEFAULT_MAX_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSettings:
    """What two runs must share to be paired. ``max_tokens`` is None where no item is generative."""

    formats: tuple[Format, ...]
    items: int
    max_tokens: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """``right`` of ``total`` outcomes have a flag; ``low`` and ``high`` are Wilson's 95 % interval."""

    name: str
    right: int
    total: int
    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSummary:
    """One task in one format; ``mean_tokens`` is the mean length of answers, None for choices."""

    task: str
    format: Format
    items: int
    shares: tuple[Share, ...]
    mean_tokens: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskReport:
    """What ``eval tasks`` says and writes (``docs/formats/items.md``)."""

    model: str
    model_hash: str
    tokenizer_hash: str
    chat_template_sha256: str | None
    items: str
    items_sha256: str
    settings: TaskSettings
    compute: str
    dtype: str | None
    versions: dict[str, str]
    summaries: tuple[TaskSummary, ...]
    outcomes: tuple[Outcome, ...]
    tokens_computed: int
    elapsed_s: float
    warnings: tuple[str, ...]
    kv: str | None = None


def plan_settings(items: ItemFile, formats: Sequence[Format], max_tokens: int) -> TaskSettings:
    """The settings of a run over ``items``; UserError for ``max_tokens`` below 1."""
    if max_tokens < 1:
        raise UserError(f"--max-tokens {max_tokens}: expected at least 1")
    generates = any(isinstance(item, GenerateItem) for item in items.items)
    return TaskSettings(formats=tuple(formats), items=len(items.items), max_tokens=max_tokens if generates else None)


def run_tasks(
    model: LoadedModel, items: ItemFile, settings: TaskSettings, tick: Tick, kv: KVOptions = FULL_CACHE
) -> TaskReport:
    """Score every item in every format, with the KV cache ``kv``; ``tick(1)`` after each.

    All items are encoded before the first is scored.

    Raises:
        UserError: an item that has no such format, or nothing to score; a tokenizer of another model.
        SourceError: the chat template fails.
        NumericalError: logits that are not finite.
    """
    prompts = encode_items(model, items, settings.formats)
    longest = max(_positions(prompt, settings) for prompt in prompts)
    warnings = context_warnings(model.config, longest)
    started = time.monotonic()
    cache = PrefixCache(model.model, kv)
    scorer = ChoiceScorer(model.model, cache)
    check_tokens(prompts, scorer.width)
    outcomes: list[Outcome] = []
    for prompt in prompts:
        if isinstance(prompt, ChoicePrompt):
            outcomes.append(scorer.score(prompt))
        else:
            assert settings.max_tokens is not None
            outcomes.append(answer(model, prompt, cache, max_tokens=settings.max_tokens))
        tick(1)
    template = getattr(model.tokenizer, "chat_template", None)
    return TaskReport(
        model=str(model.report.path),
        model_hash=content_hash(model.report.path),
        tokenizer_hash=tokenizer_hash(model.tokenizer),
        chat_template_sha256=None if template is None else hashlib.sha256(str(template).encode()).hexdigest(),
        items=items.name,
        items_sha256=items.sha256,
        settings=settings,
        compute=model.report.compute,
        dtype=model.report.dtype,
        versions={name: importlib.metadata.version(name) for name in ("tqtool", "mlx", "mlx-lm", "numpy")},
        summaries=summarize(outcomes),
        outcomes=tuple(outcomes),
        tokens_computed=cache.computed,
        elapsed_s=time.monotonic() - started,
        warnings=warnings,
        kv=kv.name,
    )


def encode_items(model: LoadedModel, items: ItemFile, formats: Sequence[Format]) -> list[AnyPrompt]:
    """All prompts, one format after the other, so that neighbours share what they can."""
    prompter = Prompter(model.tokenizer, str(model.report.path))
    return [prompter.prompt(item, format_) for format_ in formats for item in items.items]


def check_tokens(prompts: Sequence[AnyPrompt], width: int) -> None:
    """Raise UserError for a token the model does not have: MLX would read outside the embedding."""
    for prompt in prompts:
        parts = [prompt.prefix, *prompt.continuations] if isinstance(prompt, ChoicePrompt) else [prompt.tokens]
        highest = max(max(part) for part in parts)
        if highest >= width:
            raise UserError(
                f"item {prompt.item.id!r}: token {highest}, the model has {width}",
                hint="the tokenizer is of another model; copy the right one there",
            )


def summarize(outcomes: Sequence[Outcome]) -> tuple[TaskSummary, ...]:
    """One summary a task, kind of item and format, in the order of their first outcomes."""
    groups: dict[tuple[str, Format, tuple[str, ...]], list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault((outcome.task, outcome.format, tuple(outcome.flags)), []).append(outcome)
    summaries = []
    for (task, format_, names), group in groups.items():
        shares = []
        for name in names:
            right, total = sum(outcome.flags[name] for outcome in group), len(group)
            low, high = wilson(right, total)
            shares.append(Share(name=name, right=right, total=total, value=right / total, low=low, high=high))
        lengths = [outcome.tokens for outcome in group if isinstance(outcome, GenerateOutcome)]
        mean = sum(lengths) / len(lengths) if lengths else None
        summary = TaskSummary(task=task, format=format_, items=len(group), shares=tuple(shares), mean_tokens=mean)
        summaries.append(summary)
    return tuple(summaries)


def _positions(prompt: AnyPrompt, settings: TaskSettings) -> int:
    if isinstance(prompt, ChoicePrompt):
        return prompt.length
    return len(prompt.tokens) + (settings.max_tokens or 0)
