"""Teacher dump, format v1: what a model said at every position of a text, in one safetensors file.

W windows of C tokens give W·(C-1) predictions; position i predicts token i+1. K is the vocabulary or less.

    tokens            U32 [W, C]
    log_sum_exp       F64 [W, C-1]      over the whole vocabulary
    tail_log_sum_exp  F64 [W, C-1]      over the ids that are not in top_ids; -inf if there are none
    target_logits     F32 [W, C-1]      logit of the token that follows
    top_ids           U32 [W, C-1, K]   by falling logit, equal logits by rising id
    top_logits        F32 [W, C-1, K]

The metadata has ``format``, ``format_version``, ``info``, the JSON of ``TeacherInfo``, and ``info_sha256``. The tail is
stored, not derived: 1 - Σp loses every digit of a small tail. See docs/formats/teacher.md.

``open_dump`` reads the file once, a window at a time. Hashes find damage; the rules of ``_promises`` find a dump that
was written wrongly: an id too high would read outside the model's arrays, a NaN would be averaged into a score.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from tqtool.errors import ArtifactError, SourceError, UserError
from tqtool.formats.dtypes import DType
from tqtool.formats.safetensors import Header, read_header

FORMAT = "tqtool-teacher"
FORMAT_VERSION = 1

AGAIN = "the dump is damaged or was written wrongly; make it again with `tqtool teacher`"
ROWS = 32
"""Positions checked per step: 32 rows of a 150k vocabulary in float64 are 40 MB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherInfo:
    """Provenance and sizes of a dump.

    Attributes:
        model: What was loaded, as the user named it.
        model_hash: SHA-256 over its config, the headers of its weight files and a sample of every tensor.
        dtype: Type of the arithmetic.
        text: Name of the text file.
        text_sha256: Hash of the whole text file.
        tokenizer_hash: Hash of vocabulary and behaviour, independent of how the files are formatted.
        bos: Token put before each window because the tokenizer begins every text with it; None without one.
        vocab_size: Width of the logits.
        windows: W.
        context: C.
        top: K.
        versions: Versions of the software that made it.
        sha256: Hash of each tensor's bytes.
        skip: Windows of the text passed over before the first. ``info`` has the key only where it is not 0: a dump from
            the start of a text has the bytes it always had.
    """

    model: str
    model_hash: str
    dtype: str
    text: str
    text_sha256: str
    tokenizer_hash: str
    bos: int | None
    vocab_size: int
    windows: int
    context: int
    top: int
    versions: dict[str, str]
    sha256: dict[str, str]
    skip: int = 0

    def metadata(self) -> dict[str, str]:
        """The safetensors metadata."""
        known = {name: value for name, value in asdict(self).items() if name != "skip" or value}
        info = json.dumps(known, sort_keys=True, ensure_ascii=False)
        return {
            "format": FORMAT,
            "format_version": str(FORMAT_VERSION),
            "info": info,
            "info_sha256": hashlib.sha256(info.encode()).hexdigest(),
        }

    def tensors(self) -> tuple[tuple[str, DType, tuple[int, ...]], ...]:
        """Name, type and shape of each tensor, in file order (the 8-byte type first, so that it is aligned)."""
        each = (self.windows, self.context - 1)
        return (
            ("log_sum_exp", DType.F64, each),
            ("tail_log_sum_exp", DType.F64, each),
            ("tokens", DType.U32, (self.windows, self.context)),
            ("target_logits", DType.F32, each),
            ("top_ids", DType.U32, (*each, self.top)),
            ("top_logits", DType.F32, (*each, self.top)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherWindow:
    """One window of a dump; P = C - 1 predictions. Field names are tensor names."""

    tokens: NDArray[np.uint32]
    log_sum_exp: NDArray[np.float64]
    tail_log_sum_exp: NDArray[np.float64]
    target_logits: NDArray[np.float32]
    top_ids: NDArray[np.uint32]
    top_logits: NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherDump:
    """An open dump: everything was checked once, windows are read (and their values checked) one at a time."""

    header: Header
    info: TeacherInfo

    def tokens(self, index: int) -> NDArray[np.uint32]:
        """Tokens of window ``index``, without reading the rest of it."""
        tokens = self._read(("tokens",), index)["tokens"]
        self._check_tokens(index, tokens)
        return tokens

    def window(self, index: int) -> TeacherWindow:
        """Window ``index`` in fresh arrays; ArtifactError if it breaks what the format promises."""
        window = TeacherWindow(**self._read(TENSORS, index))
        self._check_tokens(index, window.tokens)
        for start in range(0, self.info.context - 1, ROWS):
            for promise, kept in _promises(_rows(window, start, start + ROWS), self.info):
                if not kept.all():
                    self._refuse(index, f"position {start + int(np.argmin(kept))}: expected {promise}")
        return window

    def _check_tokens(self, index: int, tokens: NDArray[np.uint32]) -> None:
        if (tokens >= self.info.vocab_size).any():
            self._refuse(index, f"token {tokens.max()}: expected ids below vocab_size {self.info.vocab_size}")
        if self.info.bos is not None and tokens[0] != self.info.bos:
            self._refuse(index, f"opens with token {tokens[0]}: expected bos {self.info.bos}")

    def _refuse(self, index: int, what: str) -> None:
        raise ArtifactError(f"{self.header.path}: window {index}, {what}", hint=AGAIN)

    def _read(self, names: tuple[str, ...], index: int) -> dict[str, NDArray[Any]]:
        try:
            with self.header.path.open("rb") as file:
                return {name: self._read_one(file, name, index) for name in names}
        except (OSError, ValueError) as error:  # ValueError: the file got shorter since it was opened
            raise ArtifactError(f"{self.header.path}: window {index} cannot be read ({error})", hint=AGAIN) from error

    def _read_one(self, file: IO[bytes], name: str, index: int) -> NDArray[Any]:
        tensor = self.header.tensors[name]
        size = tensor.size_bytes // self.info.windows
        file.seek(tensor.begin + index * size)
        return np.frombuffer(file.read(size), tensor.dtype.numpy).reshape(tensor.shape[1:])


TENSORS = tuple(field.name for field in fields(TeacherWindow))


def open_dump(path: Path) -> TeacherDump:
    """Open a dump and check all of it: header, version, info, names, types, shapes, hashes, values.

    Reads the file once, one window in memory.

    Raises:
        UserError: the file is missing or cannot be opened.
        ArtifactError: it is not a dump, or of another version, or damaged, or was written wrongly.
    """
    try:
        path.open("rb").close()
    except OSError as error:
        hint = "make it with `tqtool teacher MODEL OUT --text FILE`"
        raise UserError(f"{path}: the dump cannot be read ({error.strerror})", hint=hint) from error
    try:
        header = read_header(path)
    except SourceError as error:
        raise ArtifactError(error.message, hint=AGAIN) from error
    if header.metadata.get("format") != FORMAT:
        raise ArtifactError(f"{path}: not a teacher dump", hint="make one with `tqtool teacher MODEL OUT --text FILE`")
    version = header.metadata.get("format_version")
    if version != str(FORMAT_VERSION):
        raise ArtifactError(
            f"{path}: teacher dump format_version: expected {FORMAT_VERSION}, found {str(version)[:40]}",
            hint="make the dump again with this version of tqtool",
        )
    info = _parse_info(path, header.metadata)
    expected = {name: (dtype, shape) for name, dtype, shape in info.tensors()}
    found = {name: (tensor.dtype, tensor.shape) for name, tensor in header.tensors.items()}
    if found != expected:
        wrong = next(name for name in sorted({*expected, *found}) if expected.get(name) != found.get(name))
        message = f"{path}: tensor {wrong}: expected {expected.get(wrong)}, found {found.get(wrong)}"
        raise ArtifactError(message, hint=AGAIN)
    dump = TeacherDump(header=header, info=info)
    _check_content(dump)
    return dump


def _check_content(dump: TeacherDump) -> None:
    digests = {name: hashlib.sha256() for name in TENSORS}
    for index in range(dump.info.windows):
        window = dump.window(index)
        for name, digest in digests.items():
            digest.update(getattr(window, name).data)
    for name, digest in digests.items():
        if digest.hexdigest() != dump.info.sha256[name]:
            raise ArtifactError(
                f"{dump.header.path}: tensor {name}: SHA-256 expected {dump.info.sha256[name][:12]}, "
                f"found {digest.hexdigest()[:12]}",
                hint=AGAIN,
            )


def _rows(window: TeacherWindow, start: int, stop: int) -> TeacherWindow:
    """Positions ``start`` to ``stop`` and the tokens they see and predict."""
    parts = {name: getattr(window, name)[start:stop] for name in TENSORS if name != "tokens"}
    return replace(window, tokens=window.tokens[start : stop + 1], **parts)


def _promises(window: TeacherWindow, info: TeacherInfo) -> Iterator[tuple[str, NDArray[np.bool_]]]:
    """Each promise of the format and the positions [P] that keep it; a NaN keeps none. Later ones rely on earlier."""
    ids, logits, target = window.top_ids, window.top_logits, window.target_logits
    whole, tail, following = window.log_sum_exp, window.tail_log_sum_exp, window.tokens[1:]
    yield f"top_ids below vocab_size {info.vocab_size}", _every(ids < info.vocab_size)
    ranked = np.sort(ids, axis=1)
    yield "distinct top_ids", _every(ranked[:, 1:] > ranked[:, :-1])
    yield "finite top_logits", _every(np.isfinite(logits))
    yield "a finite target_logits", np.isfinite(target)
    yield "a finite log_sum_exp", np.isfinite(whole)
    yield "a finite tail_log_sum_exp, or -inf", np.isfinite(tail) | np.isneginf(tail)
    falls, equal, rises = logits[:, :-1] > logits[:, 1:], logits[:, :-1] == logits[:, 1:], ids[:, :-1] < ids[:, 1:]
    yield "top_logits that fall, equal ones by rising id", _every(falls | equal & rises)
    highest, last = logits[:, 0].astype(np.float64), logits[:, -1].astype(np.float64)
    is_target = ids == following[:, None]
    below = (target < last) | ((target == last) & (following > ids[:, -1]))
    listed = np.where(is_target, logits, -np.inf).max(axis=1)
    yield "target_logits of the token that follows", np.where(is_target.any(axis=1), target == listed, below)
    # Σ exp ≥ exp(highest) holds in rounded arithmetic too: the highest is the 1 of a sum of terms ≥ 0.
    yield "log_sum_exp at or above the highest logit", whole >= highest
    # Float64 sums of up to 2^20 terms err by less than 1e-13, and by the rounding of the result; float32 by 1e-7.
    slack = 1e-9 + 8 * np.finfo(np.float64).eps * np.abs(highest)
    rest = info.vocab_size - info.top
    bound = last + np.log(rest) + slack if rest else np.full_like(tail, -np.inf)
    yield "tail_log_sum_exp of ids below the top, -inf if there are none", tail <= bound
    total = np.exp(logits - highest[:, None]).sum(axis=1) + np.exp(tail - highest)
    yield "log_sum_exp of the top and the tail together", np.abs(highest + np.log(total) - whole) <= slack


def _every(kept: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Rows of ``kept`` [P, n] that are all True."""
    rows: NDArray[np.bool_] = np.logical_and.reduce(kept, axis=1)
    return rows


def _parse_info(path: Path, metadata: dict[str, str]) -> TeacherInfo:
    """The ``info`` of a dump, every field checked."""
    where, text = f"{path}: metadata 'info'", metadata.get("info", "")
    try:
        found = hashlib.sha256(text.encode()).hexdigest()
        value: Any = json.loads(text)
    except (ValueError, RecursionError) as error:  # not JSON, absurd integers, lone surrogates, deep nesting
        raise ArtifactError(f"{where} is not JSON ({error})", hint=AGAIN) from error
    expected = metadata.get("info_sha256")
    if expected is None:
        raise ArtifactError(f"{path}: metadata has no info_sha256, an earlier version wrote it", hint=AGAIN)
    if found != expected:
        raise ArtifactError(f"{where}: SHA-256 expected {expected[:12]}, found {found[:12]}", hint=AGAIN)
    if not isinstance(value, dict) or set(value) - {"skip"} != set(_FIELDS) - {"skip"}:
        raise ArtifactError(f"{where}: expected the keys {sorted(_FIELDS)}", hint=AGAIN)
    for name, (kind, is_right) in _FIELDS.items():
        if name in value and not is_right(value[name]):
            raise ArtifactError(f"{where}: {name}: expected {kind}, found {ascii(value[name])[:80]}", hint=AGAIN)
    info = TeacherInfo(**value)
    for right, rule in (
        (info.context >= 2, f"context {info.context}: expected at least 2"),
        (info.top <= info.vocab_size, f"top {info.top}: expected at most vocab_size {info.vocab_size}"),
        (info.bos is None or info.bos < info.vocab_size, f"bos {info.bos}: expected below {info.vocab_size}"),
        (set(info.sha256) == set(TENSORS), f"sha256: expected the tensors {sorted(TENSORS)}"),
    ):
        if not right:
            raise ArtifactError(f"{where}: {rule}", hint=AGAIN)
    return info


def _is_text(value: Any) -> bool:
    """A string that can be written: JSON escapes can hold half characters."""
    return isinstance(value, str) and not re.search("[\ud800-\udfff]", value)


def _is_hash(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None


def _is_size(value: Any) -> bool:
    """A positive integer that U32 can hold; bool is an int to Python but not here."""
    return type(value) is int and 0 < value < 1 << 32


def _maps_to(is_right: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(_is_text(k) and is_right(v) for k, v in value.items())


_TEXT = ("text", _is_text)
_HASH = ("a SHA-256 in hex", _is_hash)
_SIZE = ("a positive integer below 2^32", _is_size)
_FIELDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "model": _TEXT,
    "model_hash": _HASH,
    "dtype": _TEXT,
    "text": _TEXT,
    "text_sha256": _HASH,
    "tokenizer_hash": _HASH,
    "bos": ("a token id or null", lambda value: value is None or (type(value) is int and value >= 0)),
    "vocab_size": _SIZE,
    "windows": _SIZE,
    "context": _SIZE,
    "top": _SIZE,
    "versions": ("names and versions, all text", _maps_to(_is_text)),
    "sha256": ("a SHA-256 in hex for each tensor", _maps_to(_is_hash)),
    "skip": _SIZE,
}
