"""KL(teacher ‖ model) per position, from a teacher dump.

The teacher's K highest ids are scored one by one, everything else as a single bucket. Merging outcomes can only
lower a divergence, so the result is a lower bound of the KL over the whole vocabulary, and equal to it when K is
the vocabulary. Both sides go through the same operations: a model scored against its own dump gives exactly 0.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tqtool.artifact.content import content_hash
from tqtool.errors import NumericalError, UserError
from tqtool.evals.context import context_warnings
from tqtool.evals.estimate import Estimate, estimate, perplexity
from tqtool.evals.logits import gather, vocabulary_size, vocabulary_sums, window_logits
from tqtool.evals.text import tokenizer_hash
from tqtool.formats.teacher import TeacherDump, TeacherWindow
from tqtool.kv.scheme import FULL_CACHE, KVOptions
from tqtool.runtime.load import LoadedModel

LOG_TINY = -745.0
"""Log of the smallest positive float64. A tail below it counts as this: the bound gets lower, never infinite."""

Tick = Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Flip:
    """A position where the two models put different tokens first. Margins are in logits and not negative."""

    window: int
    position: int
    teacher_token: int
    model_token: int
    teacher_margin: float
    model_margin: float


@dataclass(frozen=True, slots=True, kw_only=True)
class KlReport:
    """Scores of one model against one dump; KL in nats per token.

    Attributes:
        model_hash: Of the config and weights that were scored (``tqtool.artifact.content``).
        teacher: Path of the teacher; ``teacher_hash``, ``text_sha256`` and ``skip`` as in its dump.
        kl: Mean KL, with standard errors.
        top1: Share of positions with the same first token, with standard errors.
        nll: Mean negative log-likelihood of the text under the model; ``teacher_nll`` under the teacher.
        ppl: exp(nll); ``teacher_ppl`` likewise.
        mass_outside_top: Teacher's mean probability outside its top K (the bucket), and the model's there.
        flips: The flips with the largest teacher margin; ``flip_count`` counts all of them.
        flip_margin_median: Median teacher margin of all flips, in logits.
        warnings: What makes the numbers doubtful; logged too.
        kv: The quantized KV cache, None for the full one.
    """

    model: str
    model_hash: str
    teacher: str
    teacher_hash: str
    text_sha256: str
    skip: int
    windows: int
    context: int
    tokens: int
    top: int
    vocab_size: int
    kl: Estimate
    kl_median: float
    kl_p95: float
    kl_p99: float
    kl_max: float
    top1: Estimate
    nll: Estimate
    ppl: float
    teacher_nll: float
    teacher_ppl: float
    mass_outside_top: float
    model_mass_outside_top: float
    flip_count: int
    flip_margin_median: float | None
    flips: tuple[Flip, ...]
    compute: str
    dtype: str | None
    elapsed_s: float
    tokens_per_s: float
    warnings: tuple[str, ...]
    kv: str | None = None

    @property
    def kl_quantiles(self) -> tuple[float, float, float, float]:
        """Median, 95 %, 99 %, maximum."""
        return self.kl_median, self.kl_p95, self.kl_p99, self.kl_max


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowScore:
    """Per-position results of one window, each [P]."""

    kl: NDArray[np.float64]
    nll: NDArray[np.float64]
    teacher_nll: NDArray[np.float64]
    teacher_tail: NDArray[np.float64]
    model_tail: NDArray[np.float64]
    flips: tuple[Flip, ...]


def score_kl(
    model: LoadedModel,
    dump: TeacherDump,
    tick: Tick,
    *,
    windows: int | None = None,
    keep_flips: int = 20,
    kv: KVOptions = FULL_CACHE,
) -> KlReport:
    """Score ``model``, with the KV cache ``kv``, on the first ``windows`` windows of ``dump`` (all by default).

    Raises:
        UserError: another tokenizer or vocabulary than the teacher's; more windows than there are; a KV cache that the
            model cannot have.
        NumericalError: logits or a KL that are not finite; a KL below zero by more than rounding.
        ArtifactError: the dump changed since it was opened.
    """
    count = dump.info.windows if windows is None else windows
    if not 1 <= count <= dump.info.windows:
        raise UserError(f"--windows {count}: the dump has {dump.info.windows}")
    check_tokenizer(model, dump)
    check_width(model, dump)
    warnings = context_warnings(model.config, dump.info.context)
    started = time.monotonic()
    scores = []
    stream = window_logits(model.model, (dump.tokens(index) for index in range(count)), kv)
    for index, logits in enumerate(stream):
        scores.append(score_window(index, dump.window(index), logits))
        tick(1)
    return _report(model, dump, scores, time.monotonic() - started, keep_flips, warnings, kv)


def check_width(model: LoadedModel, dump: TeacherDump) -> None:
    """Raise UserError unless ``model`` has as many logits as the teacher had."""
    found = vocabulary_size(model.model)
    if found != dump.info.vocab_size:
        raise UserError(
            f"the model has {found} logits, the teacher had {dump.info.vocab_size}",
            hint="score models of one vocabulary against each other",
        )


def check_tokenizer(model: LoadedModel, dump: TeacherDump) -> None:
    """Raise UserError unless ``model`` has the teacher's tokenizer."""
    found = tokenizer_hash(model.tokenizer)
    if found != dump.info.tokenizer_hash:
        raise UserError(
            f"{model.report.path}: its tokenizer ({found[:12]}) is not the teacher's "
            f"({dump.info.tokenizer_hash[:12]}, of {dump.info.model})",
            hint="token ids would mean other words; make a dump from a model of the same family",
        )


def check_text(dump: TeacherDump, text: Path) -> None:
    """Raise UserError unless ``dump`` was made from the file ``text``."""
    try:
        found = hashlib.sha256(text.read_bytes()).hexdigest()
    except OSError as error:
        raise UserError(f"{text}: cannot be read ({error.strerror})") from error
    if found != dump.info.text_sha256:
        raise UserError(
            f"{text}: SHA-256 {found[:12]}, the dump was made from {dump.info.text} {dump.info.text_sha256[:12]}",
            hint="make the dump again from this text",
        )


def score_window(index: int, teacher: TeacherWindow, logits: NDArray[np.float32]) -> WindowScore:
    """Score float32 ``logits`` [P, V] against one window of the dump; NumericalError for a KL that cannot be."""
    sums = vocabulary_sums(logits, teacher.top_ids)
    log_p = teacher.top_logits.astype(np.float64) - teacher.log_sum_exp[:, None]
    log_q = gather(logits, teacher.top_ids).astype(np.float64) - sums.all[:, None]
    log_p_tail = np.maximum(teacher.tail_log_sum_exp - teacher.log_sum_exp, LOG_TINY)
    log_q_tail = np.maximum(sums.tail - sums.all, LOG_TINY)
    kl = np.sum(np.exp(log_p) * (log_p - log_q), axis=1) + np.exp(log_p_tail) * (log_p_tail - log_q_tail)
    check_kl(index, kl, teacher.log_sum_exp, sums.all)
    return WindowScore(
        kl=kl,
        nll=sums.all - gather(logits, teacher.tokens[1:]),
        teacher_nll=teacher.log_sum_exp - teacher.target_logits,
        teacher_tail=np.exp(teacher.tail_log_sum_exp - teacher.log_sum_exp),
        model_tail=np.exp(sums.tail - sums.all),
        flips=tuple(_flips(index, teacher, logits)),
    )


def check_kl(index: int, kl: NDArray[np.float64], teacher: NDArray[np.float64], model: NDArray[np.float64]) -> None:
    """Raise NumericalError unless each ``kl`` [P] is finite and not below zero by more than rounding.

    Args:
        index: Window, for the message.
        kl: Divergences.
        teacher: The teacher's log Σ exp; how large they are says what rounding can do.
        model: The model's.

    A log Σ exp errs by at most ε(|lse| + 2·log V + 40): rounding of the result, of the exponentials' arguments, and of
    a pairwise sum; V < 2^20 makes that ε(|lse| + 70). It shifts every log p or log q of a position alike, and thereby
    the KL once by the error of log q and three times by that of log p (Σ p·|log p - log q| ≤ KL + 2). The sum over the
    top adds 64 ε.
    """
    tolerance = 4 * np.finfo(np.float64).eps * (np.abs(teacher) + np.abs(model) + 160)
    right = np.isfinite(kl) & (kl >= -tolerance)
    if not right.all():
        position = int(np.argmin(right))
        raise NumericalError(
            f"window {index}, position {position}: KL {kl[position]:.6g}, "
            f"expected finite and at least {-tolerance[position]:.1e} ({np.count_nonzero(~right)} such positions)",
            hint="the dump is not of this format's arithmetic, or this is a bug of tqtool: please report it",
        )


def _flips(index: int, teacher: TeacherWindow, logits: NDArray[np.float32]) -> Iterator[Flip]:
    expected, found = teacher.top_ids[:, 0], logits.argmax(axis=1)
    for position in np.flatnonzero(expected != found):
        theirs, ours = int(expected[position]), int(found[position])
        place = np.flatnonzero(teacher.top_ids[position] == ours)
        # A token outside the teacher's top K lies at least as low as the last of them.
        teacher_of_ours = teacher.top_logits[position, place[0] if place.size else -1]
        yield Flip(
            window=index,
            position=int(position),
            teacher_token=theirs,
            model_token=ours,
            teacher_margin=float(teacher.top_logits[position, 0] - teacher_of_ours),
            model_margin=float(logits[position, ours] - logits[position, theirs]),
        )


def _report(
    model: LoadedModel,
    dump: TeacherDump,
    scores: list[WindowScore],
    elapsed_s: float,
    keep_flips: int,
    warnings: tuple[str, ...],
    kv: KVOptions,
) -> KlReport:
    kl = np.stack([score.kl for score in scores])
    nll = np.stack([score.nll for score in scores])
    teacher_nll = float(np.mean([score.teacher_nll for score in scores]))
    agree = np.ones_like(kl)
    flips = sorted((flip for score in scores for flip in score.flips), key=lambda flip: -flip.teacher_margin)
    for flip in flips:
        agree[flip.window, flip.position] = 0.0
    return KlReport(
        model=str(model.report.path),
        model_hash=content_hash(model.report.path),
        teacher=dump.info.model,
        teacher_hash=dump.info.model_hash,
        text_sha256=dump.info.text_sha256,
        skip=dump.info.skip,
        windows=len(scores),
        context=dump.info.context,
        tokens=kl.size,
        top=dump.info.top,
        vocab_size=dump.info.vocab_size,
        kl=estimate(kl),
        kl_median=float(np.median(kl)),
        kl_p95=float(np.quantile(kl, 0.95)),
        kl_p99=float(np.quantile(kl, 0.99)),
        kl_max=float(kl.max()),
        top1=estimate(agree),
        nll=estimate(nll),
        ppl=perplexity(float(nll.mean())),
        teacher_nll=teacher_nll,
        teacher_ppl=perplexity(teacher_nll),
        mass_outside_top=float(np.mean([score.teacher_tail for score in scores])),
        model_mass_outside_top=float(np.mean([score.model_tail for score in scores])),
        flip_count=len(flips),
        flip_margin_median=float(np.median([flip.teacher_margin for flip in flips])) if flips else None,
        flips=tuple(flips if keep_flips < 0 else flips[:keep_flips]),
        compute=model.report.compute,
        dtype=model.report.dtype,
        elapsed_s=elapsed_s,
        tokens_per_s=kl.size / elapsed_s,
        warnings=warnings,
        kv=kv.name,
    )
