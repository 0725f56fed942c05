"""Calibration text → token sequences, never the part of a file that scoring reads.

Scoring verbs read windows from the start of a text, so plain text is taken from its end here, and the first byte that
was used is recorded. ``require_disjoint`` looks at the tokens themselves, whatever file they came from.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tqtool.errors import UserError, reason_of
from tqtool.evals.text import encode, opening_token, require_no_document
from tqtool.formats.hessians import TextRecord

Kind = Literal["text", "jsonl", "chat"]
Tokens = NDArray[np.uint32]

BYTES_PER_TOKEN = 6
SHARED_TOKENS = 24
"""Tokens in a row that two texts must share to count as overlapping (or a whole shorter sequence): longer than common
phrases."""
FEWEST_TOKENS = 8
"""Shorter sequences are common phrases and prove nothing."""
MIN_TOKENS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationRows:
    """Token sequences, each the start of a context of its own, and where they came from."""

    sequences: tuple[Tokens, ...]
    record: TextRecord


def read_rows(tokenizer: Any, path: Path, *, rows: int, context: int) -> CalibrationRows:
    """``rows`` sequences of up to ``context`` tokens.

    ``.jsonl`` files hold one object a line, with ``text`` or with ``messages`` (the chat template is applied): a
    sequence a line, cut at ``context``. ``.json`` is refused. Anything else is plain text: full windows from its end.

    Raises:
        UserError: impossible sizes, a file that cannot be read, a malformed line (with its number), too little text.
    """
    if rows < 1 or context < MIN_TOKENS:
        raise UserError(f"--rows {rows} --context {context}: expected at least 1 row of {MIN_TOKENS} tokens")
    try:
        data = path.read_bytes()
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from error
    require_no_document(path)
    if path.suffix.lower() == ".jsonl":
        kind, first_byte, sequences = _from_lines(tokenizer, path, data, rows, context)
    else:
        kind, (first_byte, sequences) = "text", _from_end(tokenizer, path, data, rows, context)
    record = TextRecord(
        name=path.name,
        kind=kind,
        sha256=hashlib.sha256(data).hexdigest(),
        first_byte=first_byte,
        sequences=len(sequences),
        tokens=sum(sequence.size for sequence in sequences),
    )
    return CalibrationRows(sequences=tuple(sequences), record=record)


def require_disjoint(rows: CalibrationRows, scored: Iterable[Tokens], where: str) -> None:
    """Raise UserError if ``scored`` windows share ``SHARED_TOKENS`` tokens in a row with the calibration."""
    index = first_shared(rows.sequences, scored)
    if index is not None:
        raise UserError(
            f"window {index} of {where} is part of the calibration text: the score would be flattered",
            hint="calibrate on another text, or on fewer rows of this one",
        )


def first_shared(sequences: Iterable[Tokens], scored: Iterable[Tokens]) -> int | None:
    """Index of the first of ``scored`` that shares ``SHARED_TOKENS`` tokens in a row with ``sequences``, or None."""
    seen: dict[int, set[bytes]] = {}
    for sequence in sequences:
        length = min(SHARED_TOKENS, sequence.size)
        if length >= FEWEST_TOKENS:
            seen.setdefault(length, set()).update(_grams(sequence, length))
    for index, window in enumerate(scored):
        if any(not grams.isdisjoint(_grams(window, length)) for length, grams in seen.items()):
            return index
    return None


def _grams(tokens: Tokens, length: int) -> Iterator[bytes]:
    raw = np.ascontiguousarray(tokens, "<u4").tobytes()
    return (raw[4 * at : 4 * (at + length)] for at in range(tokens.size - length + 1))


def _from_end(tokenizer: Any, path: Path, data: bytes, rows: int, context: int) -> tuple[int, list[Tokens]]:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: expected a UTF-8 text file ({reason_of(error)})") from error
    bos = opening_token(tokenizer)
    fresh = context - (bos is not None)
    needed = rows * fresh
    length = needed * BYTES_PER_TOKEN
    while True:
        begin = _line_start(data, len(data) - length)
        ids = encode(tokenizer, data[begin:].decode("utf-8"))
        if len(ids) >= needed:
            break
        if begin == 0:
            raise UserError(
                f"{path}: {rows} rows of {context} need {needed} tokens, the text has {len(ids)}",
                hint=_what_fits(len(ids), fresh, context),
            )
        length *= 2
    tokens = np.array(ids[-needed:], np.uint32).reshape(rows, fresh)
    if bos is not None:
        tokens = np.insert(tokens, 0, np.uint32(bos), axis=1)
    return begin, list(tokens)


def _what_fits(found: int, fresh: int, context: int) -> str:
    """A way out where ``found`` tokens are too few; a row takes ``fresh`` of them."""
    if found >= fresh:
        return f"at most --rows {found // fresh}, or a longer text"
    longest = found + context - fresh
    shorter = f", or at most --context {longest}" if longest >= MIN_TOKENS else ""
    return f"the text is {fresh - found} tokens too short for one row: a longer text{shorter}"


def _line_start(data: bytes, at: int) -> int:
    """Start of the first line at or after byte ``at``; 0 for ``at`` ≤ 0; the last line if there is none."""
    if at <= 0:
        return 0
    found = data.find(b"\n", at)
    return found + 1 if 0 <= found < len(data) - 1 else data.rfind(b"\n", 0, at) + 1


def _from_lines(tokenizer: Any, path: Path, data: bytes, rows: int, context: int) -> tuple[Kind, int, list[Tokens]]:
    sequences: list[Tokens] = []
    kinds: set[Kind] = set()
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        kind, ids = _line_tokens(tokenizer, f"{path}, line {number}", line)
        kinds.add(kind)
        if len(ids) >= MIN_TOKENS:
            sequences.append(np.array(ids[:context], np.uint32))
        if len(sequences) == rows:
            break
    if len(sequences) < rows:
        raise UserError(f"{path}: --rows {rows}, the file gives {len(sequences)}", hint="fewer rows, or a longer file")
    if len(kinds) > 1:
        raise UserError(f"{path}: some lines have 'text' and some 'messages'", hint="one kind a file")
    return kinds.pop(), 0, sequences


def _line_tokens(tokenizer: Any, where: str, line: bytes) -> tuple[Kind, Sequence[int]]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not JSON ({error})") from error
    if isinstance(value, dict) and "text" in value and "messages" in value:
        raise UserError(f"{where}: has both 'text' and 'messages'", hint="one of them a line, and one kind a file")
    if isinstance(value, dict) and isinstance(value.get("text"), str):
        try:
            return "jsonl", list(tokenizer.encode(value["text"], verbose=False))
        except Exception as error:  # half characters, for one
            raise UserError(f"{where}: the tokenizer refuses it ({type(error).__name__}: {error})") from error
    messages = value.get("messages") if isinstance(value, dict) else None
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages) or not messages:
        raise UserError(f"{where}: expected an object with 'text' (a string) or 'messages' (a list of objects)")
    if getattr(tokenizer, "chat_template", None) is None:
        raise UserError(f"{where}: has messages, and the tokenizer has no chat template", hint="use lines with 'text'")
    try:
        return "chat", list(tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False))
    except Exception as error:  # a template is code of the model's, and raises what it likes
        raise UserError(f"{where}: the chat template refuses it ({type(error).__name__}: {error})") from error
