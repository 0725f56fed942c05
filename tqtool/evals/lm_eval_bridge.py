"""lm-evaluation-harness on our loaded models: its tasks and metrics, our forward passes. An optional extra.

``TextScorer`` answers the three questions that the harness asks of a model and knows nothing of it; ``run_harness``
wraps it in the harness's own base class, which is imported only there. Contexts and continuations are split as the
harness's own models split them (spaces at the end of a context go to the continuation, the cut is at the length of the
context's encoding), so that its numbers stay comparable; ``evals.prompts`` is more careful.

Run by hand against lm-eval 0.4.13, the lowest version that the extra takes: multiple choice, generation and rolling
likelihood from task files (``--include``), templated and raw. The package is no dependency of the tests: they score
texts against an oracle and put a stub of ``LM``, ``simple_evaluate`` and ``TaskManager`` in its place, which would not
notice if a later version called them differently. A report's ``versions`` say what it was made with.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tqtool.artifact.content import content_hash
from tqtool.errors import BackendError, NumericalError, UserError
from tqtool.evals.context import context_limit
from tqtool.evals.generative import complete
from tqtool.evals.logits import gather, log_sum_exp, vocabulary_size
from tqtool.evals.prefix import PrefixCache
from tqtool.evals.prompts import Format
from tqtool.evals.text import encode, opening_token
from tqtool.kv.scheme import FULL_CACHE, KVOptions
from tqtool.runtime.load import LoadedModel

DEFAULT_LIMIT = 2048
"""Positions of a model whose config names no limit, as the harness assumes."""
DEFAULT_MAX_TOKENS = 256
"""New tokens of an answer where the task says nothing, as the harness has it."""

Tick = Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class HarnessReport:
    """What the harness found, and on which weights.

    Attributes:
        results: By format, then task, then ``metric,filter``: numbers as the harness names them.
        configs: By task: version and settings, as the harness reports them.
        truncated: Requests that were cut on the left to the model's positions.
    """

    model: str
    model_hash: str
    tasks: tuple[str, ...]
    limit: int | None
    results: dict[str, dict[str, dict[str, Any]]]
    configs: dict[str, Any]
    truncated: int
    compute: str
    dtype: str | None
    versions: dict[str, str]
    kv: str | None = None


class TextScorer:
    """Log-likelihoods and greedy answers of texts under one model."""

    def __init__(self, model: LoadedModel, kv: KVOptions = FULL_CACHE) -> None:
        self._model, self._tokenizer = model, model.tokenizer
        self._cache = PrefixCache(model.model, kv)
        self._limit = context_limit(model.config) or DEFAULT_LIMIT
        self._width = vocabulary_size(model.model)
        self._opening = opening_token(model.tokenizer)
        self.truncated = 0

    def loglikelihood(self, context: str, continuation: str) -> tuple[float, bool]:
        """Log-likelihood of ``continuation`` after ``context``, and whether greedy decoding would give it."""
        kept = context.rstrip()
        continuation = context[len(kept) :] + continuation
        prefix = self._encode(kept)
        tokens = self._encode(kept + continuation)[len(prefix) :] if kept else encode(self._tokenizer, continuation)
        if not tokens:
            raise UserError(f"continuation {continuation!r} adds no token to its context")
        return self._score(prefix or [self._start()], tokens)

    def rolling(self, text: str) -> float:
        """Log-likelihood of the whole ``text``: each token once, each window as full as it can be."""
        tokens = encode(self._tokenizer, text)
        windows = rolling_windows(tokens, self._start(), self._limit)
        return sum(self._score(prefix, part)[0] for prefix, part in windows)

    def generate(self, context: str, stops: tuple[str, ...], max_tokens: int) -> str:
        """Greedy answer up to the first of ``stops``, which is left out."""
        tokens = self._encode(context) or [self._start()]
        kept = tokens[-max(1, self._limit - max_tokens) :]
        self.truncated += len(kept) < len(tokens)
        self._require_known(kept)
        text, _, _ = complete(self._model, tuple(kept), stops, self._cache, max_tokens=max_tokens, where="lm-eval")
        return text

    def template(self, turns: list[dict[str, str]], *, add_generation_prompt: bool) -> str:
        """``turns`` in the model's chat template."""
        options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": add_generation_prompt}
        if not add_generation_prompt:
            options["continue_final_message"] = True
        return str(self._tokenizer.apply_chat_template(turns, **options))

    def _encode(self, text: str) -> list[int]:
        """``text`` behind the token that opens a text, unless a template has written it already."""
        tokens = encode(self._tokenizer, text)
        is_open = self._opening is None or not text or tokens[:1] == [self._opening]
        return tokens if self._opening is None or is_open else [self._opening, *tokens]

    def _start(self) -> int:
        """What an empty context is: the token for the beginning of texts, used or not; else one for their end."""
        if self._opening is not None:
            return self._opening
        begin = getattr(self._tokenizer, "bos_token_id", None)
        return int(begin) if begin is not None else min(self._tokenizer.eos_token_ids)

    def _score(self, prefix: Sequence[int], tokens: Sequence[int]) -> tuple[float, bool]:
        import mlx.core as mx

        whole = [*prefix, *tokens]
        self._require_known(whole)
        kept = whole[-(self._limit + 1) :]
        self.truncated += len(kept) < len(whole)
        cut = max(1, len(kept) - len(tokens))
        self._cache.advance(tuple(kept[: cut - 1]))
        logits = self._model.model(mx.array([kept[cut - 1 : -1]]), cache=self._cache.copies(1)).astype(mx.float32)
        values = np.array(logits)[0]
        if not np.isfinite(values).all():
            raise NumericalError(f"{self._model.report.path}: logits that are not finite")
        targets = np.array(kept[cut:], np.uint32)
        found = gather(values, targets).astype(np.float64) - log_sum_exp(values)
        return float(found.sum()), bool(np.array_equal(values.argmax(axis=1), targets))

    def _require_known(self, tokens: Sequence[int]) -> None:
        """MLX would read outside the embedding."""
        if max(tokens) >= self._width:
            raise UserError(
                f"token {max(tokens)}, the model has {self._width}",
                hint="the tokenizer is of another model; copy the right one there",
            )


def rolling_windows(tokens: Sequence[int], start: int, limit: int) -> Iterator[tuple[list[int], list[int]]]:
    """Prefix and tokens to score of each window of ``limit`` positions; the last is filled up from the left."""
    whole = [start, *tokens]
    for begin in range(0, len(tokens), limit):
        end = min(begin + limit, len(tokens))
        yield list(whole[max(0, end - limit) : begin + 1]), list(tokens[begin:end])


def require_harness() -> None:
    """Raise BackendError unless lm-evaluation-harness can be imported."""
    if importlib.util.find_spec("lm_eval") is None:
        raise BackendError("--lm-eval needs lm-evaluation-harness", hint="pip install 'tqtool[lm-eval]'")


def run_harness(
    model: LoadedModel,
    tasks: Sequence[str],
    formats: Sequence[Format],
    tick: Tick,
    *,
    limit: int | None = None,
    include: Path | None = None,
    kv: KVOptions = FULL_CACHE,
) -> HarnessReport:
    """Run the harness's ``tasks``; ``tick(1)`` after each request.

    Args:
        model: Loaded.
        tasks: Names that the harness knows, or that a YAML file under ``include`` has.
        formats: ``raw``: texts as the task writes them; ``templated``: in the model's chat template.
        tick: Progress.
        limit: Items of a task at most.
        include: Folder with task files of one's own.
        kv: The KV cache.

    Raises:
        BackendError: the harness fails: an unknown task, a data set out of reach.
        UserError: a task that samples, or no chat template.
    """
    if "templated" in formats and not model.tokenizer.has_chat_template:
        raise UserError(f"{model.report.path}: the tokenizer has no chat template", hint="use --format raw")
    scorer = TextScorer(model, kv)
    harness_model = _harness_model(scorer, model, tick)
    results: dict[str, dict[str, dict[str, Any]]] = {}
    found: dict[str, Any] = {}
    for format_ in formats:
        found = _evaluate(harness_model, tasks, limit, include, templated=format_ == "templated")
        results[format_] = _plain(found["results"])
    return HarnessReport(
        model=str(model.report.path),
        model_hash=content_hash(model.report.path),
        tasks=tuple(tasks),
        limit=limit,
        results=results,
        configs=_plain({key: found.get(key, {}) for key in ("versions", "n-shot", "n-samples")}),
        truncated=scorer.truncated,
        compute=model.report.compute,
        dtype=model.report.dtype,
        versions={name: importlib.metadata.version(name) for name in ("tqtool", "mlx", "mlx-lm", "lm-eval")},
        kv=kv.name,
    )


def _evaluate(
    harness_model: Any, tasks: Sequence[str], limit: int | None, include: Path | None, *, templated: bool
) -> dict[str, Any]:
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    try:
        found: dict[str, Any] = simple_evaluate(
            model=harness_model,
            tasks=list(tasks),
            limit=limit,
            task_manager=TaskManager(include_path=None if include is None else str(include)),
            apply_chat_template=templated,
            log_samples=False,
        )
        return found
    except (UserError, NumericalError, MemoryError):
        raise
    except Exception as error:  # tasks are programs of others, and so is the transport of their data
        reason = next(iter(str(error).strip().splitlines()), "")
        raise BackendError(
            f"lm-evaluation-harness: {type(error).__name__}: {reason}",
            hint="`lm_eval ls tasks` lists its tasks; their data must be reachable, or in the local cache",
        ) from error


def _plain(value: Any) -> Any:
    """What JSON can hold; the harness mixes numpy numbers and functions in."""
    return json.loads(json.dumps(value, default=lambda other: other.item() if hasattr(other, "item") else str(other)))


def _harness_model(scorer: TextScorer, model: LoadedModel, tick: Tick) -> Any:
    """``scorer`` as the harness's own kind of model."""
    from lm_eval.api.model import LM

    class TqtoolModel(LM):  # type: ignore[misc]
        """One request after the other: neighbours share their context, which is computed once."""

        tokenizer_name = str(model.report.path)

        def loglikelihood(self, requests: list[Any], **_: Any) -> list[tuple[float, bool]]:
            return [self._done(scorer.loglikelihood(*request.args)) for request in requests]

        def loglikelihood_rolling(self, requests: list[Any], **_: Any) -> list[float]:
            return [self._done(scorer.rolling(request.args[0])) for request in requests]

        def generate_until(self, requests: list[Any], **_: Any) -> list[str]:
            return [self._done(scorer.generate(request.args[0], *_greedy(request.args[1]))) for request in requests]

        def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
            return scorer.template(chat_history, add_generation_prompt=add_generation_prompt)

        def chat_template(self, chat_template: bool | str = False) -> str:
            return str(model.tokenizer.chat_template or "") if chat_template else ""

        def _done(self, answer: Any) -> Any:
            tick(1)
            return answer

    return TqtoolModel()


def _greedy(options: dict[str, Any]) -> tuple[tuple[str, ...], int]:
    """Stops and limit of a task's generation settings; UserError if it samples, which has no one answer."""
    if options.get("do_sample") and options.get("temperature", 1.0) != 0:
        raise UserError(f"the task samples its answers ({options}); only greedy answers are scored")
    until = options.get("until") or ()
    stops = (until,) if isinstance(until, str) else tuple(until)
    return tuple(stop for stop in stops if stop), int(options.get("max_gen_toks", DEFAULT_MAX_TOKENS))
