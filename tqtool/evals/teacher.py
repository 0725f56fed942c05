"""Write a teacher dump: one forward pass per window, one window in memory, the file whole or not at all."""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tqtool.artifact.output import check_writable, whole_file
from tqtool.errors import UserError
from tqtool.evals.context import context_warnings
from tqtool.evals.estimate import perplexity
from tqtool.evals.logits import gather, top_ids, vocabulary_sums, window_logits
from tqtool.evals.text import TokenWindows, check_source, read_windows, tokenizer_hash
from tqtool.formats.safetensors import build_header
from tqtool.formats.teacher import TENSORS, TeacherInfo, TeacherWindow
from tqtool.pipeline.preflight import require_disk
from tqtool.runtime.load import LoadedModel, load_tokenizer, model_folder
from tqtool.source.checkpoint import open_checkpoint
from tqtool.source.config import CONFIG_NAME, read_config, text_config
from tqtool.source.fingerprint import fingerprint

if TYPE_CHECKING:
    from collections.abc import Iterator

DEFAULT_TOP = 2048
"""Logits kept per position: 99.8 % of a large model's KL (the design's measurement), 16 kB a token."""

HEADER_BYTES = 4096
"""Allowance for the header of a dump in an estimate."""

Tick = Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherRequest:
    """What to dump: ``windows`` × ``context`` tokens of ``text``, the ``top`` highest logits of each position.

    The first ``skip`` windows of the text are passed over: a dump that begins there shares none of theirs.
    """

    text: Path
    windows: int
    context: int
    top: int = DEFAULT_TOP
    replace: bool = False
    skip: int = 0

    def tokens(self, tokenizer: Any) -> TokenWindows:
        """The windows; errors as ``read_windows``."""
        return read_windows(tokenizer, self.text, windows=self.windows, context=self.context, skip=self.skip)


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherReport:
    """What was written, how well the teacher itself predicts the text, and the leftovers of killed runs removed."""

    path: str
    info: TeacherInfo
    size_bytes: int
    nll: float
    ppl: float
    mass_outside_top: float
    warnings: tuple[str, ...]
    removed: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherPlan:
    """What a dump would hold, from config and tokenizer alone."""

    path: str
    tokens: int
    top: int
    vocab_size: int
    size_bytes: int
    warnings: tuple[str, ...]


def plan_dump(model: str | Path, out: Path, request: TeacherRequest) -> TeacherPlan:
    """Check everything that can be without the weights, and say how large the dump becomes.

    Raises:
        UserError: no model there, bad sizes or text, ``out`` is taken, or config.json states no vocabulary.
        ArtifactError: ``out`` cannot be written, or the disk is too small.
    """
    check_target(out, request)
    folder = model_folder(model)
    config = read_config(folder)
    vocab = text_config(config).get("vocab_size", config.get("vocab_size"))
    if type(vocab) is not int or vocab < 1:
        raise UserError(f"{folder / CONFIG_NAME}: vocab_size: expected a positive integer, found {vocab!r}")
    text = request.tokens(load_tokenizer(folder))
    top = min(request.top, vocab)
    size = dump_bytes(windows=request.windows, context=request.context, top=top)
    require_disk(out.absolute().parent, size)
    return TeacherPlan(
        path=str(out),
        tokens=text.tokens.size,
        top=top,
        vocab_size=vocab,
        size_bytes=size,
        warnings=context_warnings(config, request.context),
    )


def dump_bytes(*, windows: int, context: int, top: int) -> int:
    """Size of a dump: two float64, one float32 and ``top`` ids and logits a position, the tokens, and the header."""
    return windows * ((context - 1) * (20 + 8 * top) + 4 * context) + HEADER_BYTES


def dump_teacher(source: LoadedModel, out: Path, request: TeacherRequest, tick: Tick) -> TeacherReport:
    """Write the dump of ``source`` to ``out``; ``tick(1)`` after each window.

    Peak memory beside the model: the logits of two windows and one window of the dump.

    Raises:
        UserError: bad sizes or text; ``out`` is a folder, or exists and ``request.replace`` is False.
        NumericalError: logits that are not finite.
        ArtifactError: writing failed.
    """
    check_target(out, request)
    text = request.tokens(source.tokenizer)
    warnings = context_warnings(source.config, request.context)
    stream = window_logits(source.model, text.tokens)
    first = next(stream)
    top = min(request.top, first.shape[1])
    require_disk(out.absolute().parent, dump_bytes(windows=request.windows, context=request.context, top=top))
    info = TeacherInfo(
        model=_unicode(source.report.path),
        model_hash=fingerprint(open_checkpoint(str(source.report.path), allow_quantized=True)),
        dtype=source.report.dtype or "stored",
        text=_unicode(Path(request.text.name)),
        text_sha256=text.text_sha256,
        tokenizer_hash=tokenizer_hash(source.tokenizer),
        bos=text.bos,
        vocab_size=first.shape[1],
        windows=request.windows,
        context=request.context,
        top=top,
        versions={name: importlib.metadata.version(name) for name in ("tqtool", "mlx", "mlx-lm", "numpy")},
        sha256=dict.fromkeys(TENSORS, "0" * 64),
        skip=request.skip,
    )
    nll, outside = [], []
    with whole_file(out) as (file, removed):
        writer = _DumpFile(file, info)
        for index, logits in enumerate(_chain(first, stream)):
            window = summarize(logits, text.tokens[index], info.top)
            writer.write(index, window)
            nll.append(float(np.mean(window.log_sum_exp - window.target_logits)))
            outside.append(float(np.mean(np.exp(window.tail_log_sum_exp - window.log_sum_exp))))
            tick(1)
        info = writer.finish()
        mean_nll = float(np.mean(nll))
        ppl = perplexity(mean_nll)  # raises before the file gets its name
    return TeacherReport(
        path=str(out),
        info=info,
        size_bytes=out.stat().st_size,
        nll=mean_nll,
        ppl=ppl,
        mass_outside_top=float(np.mean(outside)),
        warnings=warnings,
        removed=removed,
    )


def check_target(out: Path, request: TeacherRequest) -> None:
    """Refuse what needs no model to be refused: UserError, ArtifactError where ``out`` cannot be written."""
    if out.is_dir():
        raise UserError(f"{out}: is a folder", hint="name a file")
    if out.exists() and not request.replace:
        raise UserError(f"{out}: exists already", hint="give another name, or --force to replace it")
    if request.top < 1:
        raise UserError(f"--top {request.top}: expected at least 1")
    check_source(request.text, windows=request.windows, context=request.context, skip=request.skip)
    check_writable(out)


def summarize(logits: NDArray[np.float32], tokens: NDArray[np.uint32], top: int) -> TeacherWindow:
    """What the dump keeps of ``logits`` [C - 1, V] of a window of ``tokens`` [C]."""
    ids = top_ids(logits, top)
    sums = vocabulary_sums(logits, ids)
    return TeacherWindow(
        tokens=tokens,
        log_sum_exp=sums.all,
        tail_log_sum_exp=sums.tail,
        target_logits=gather(logits, tokens[1:]),
        top_ids=ids,
        top_logits=gather(logits, ids),
    )


class _DumpFile:
    """Writes windows, in order, at their places in a dump; its hashes are zeros, which no reader takes, to the end."""

    def __init__(self, file: IO[bytes], info: TeacherInfo) -> None:
        self._file, self._info = file, info
        self._digests = {name: hashlib.sha256() for name in TENSORS}
        header, self._spans = build_header(info.tensors(), info.metadata())
        file.write(header)
        file.truncate(max(end for _, end in self._spans.values()))

    def write(self, index: int, window: TeacherWindow) -> None:
        for name, dtype, _ in self._info.tensors():
            begin, end = self._spans[name]
            data = np.ascontiguousarray(getattr(window, name), dtype.numpy)
            self._file.seek(begin + index * ((end - begin) // self._info.windows))
            self._file.write(data.data)
            self._digests[name].update(data.data)

    def finish(self) -> TeacherInfo:
        info = replace(self._info, sha256={name: digest.hexdigest() for name, digest in self._digests.items()})
        header, spans = build_header(info.tensors(), info.metadata())
        assert spans == self._spans, "the hashes are as long as their placeholders"
        self._file.seek(0)
        self._file.write(header)
        return info


def _unicode(path: Path) -> str:
    """``path`` as text that JSON can hold: bytes of a name that are not UTF-8 become U+FFFD."""
    return str(path).encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _chain(first: NDArray[np.float32], rest: Iterator[NDArray[np.float32]]) -> Iterator[NDArray[np.float32]]:
    yield first
    yield from rest
