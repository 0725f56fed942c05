"""Perplexity of a model on the first windows of a text."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tqtool.evals.context import context_warnings
from tqtool.evals.estimate import Estimate, estimate, perplexity
from tqtool.evals.logits import gather, log_sum_exp, window_logits
from tqtool.evals.text import read_windows
from tqtool.kv.scheme import FULL_CACHE, KVOptions
from tqtool.runtime.load import LoadedModel

Tick = Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PplReport:
    """``nll`` in nats per predicted token; each window is scored on its own; ``ppl`` = exp(nll)."""

    model: str
    text: str
    text_sha256: str
    windows: int
    context: int
    tokens: int
    nll: Estimate
    ppl: float
    ppl_se: float | None
    compute: str
    dtype: str | None
    elapsed_s: float
    tokens_per_s: float
    warnings: tuple[str, ...]
    kv: str | None = None


def score_ppl(
    model: LoadedModel, text: Path, *, windows: int, context: int, tick: Tick, kv: KVOptions = FULL_CACHE
) -> PplReport:
    """Score ``windows`` windows of ``context`` tokens from the start of ``text``, with the KV cache ``kv``.

    ``ppl_se`` is ppl times the larger standard error of nll.

    Raises:
        UserError: the text is missing or too short.
        NumericalError: logits that are not finite.
    """
    source = read_windows(model.tokenizer, text, windows=windows, context=context)
    warnings = context_warnings(model.config, context)
    started = time.monotonic()
    losses = []
    for tokens, logits in zip(source.tokens, window_logits(model.model, source.tokens, kv), strict=True):
        losses.append(log_sum_exp(logits) - gather(logits, tokens[1:]))
        tick(1)
    elapsed_s = time.monotonic() - started
    nll = estimate(np.stack(losses))
    ppl = perplexity(nll.mean)
    return PplReport(
        model=str(model.report.path),
        text=text.name,
        text_sha256=source.text_sha256,
        windows=windows,
        context=context,
        tokens=windows * (context - 1),
        nll=nll,
        ppl=ppl,
        ppl_se=None if nll.se is None else ppl * nll.se,
        compute=model.report.compute,
        dtype=model.report.dtype,
        elapsed_s=elapsed_s,
        tokens_per_s=windows * (context - 1) / elapsed_s,
        warnings=warnings,
        kv=kv.name,
    )
