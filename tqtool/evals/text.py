"""Text → windows of tokens, the same for every model that is to be compared."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tqtool.errors import UserError, reason_of

CHARACTERS_PER_TOKEN = 6
"""First guess of how much text is needed; doubled until there are enough tokens."""

CUT_MARGIN = 64
"""Tokens thrown away before a cut in the text: further away, the cut cannot have changed them."""

PROBE = "Ümläute, 1234567890 + 3.14e-5\n\n\tdef f(x):  return x  # naïve 北京 🙂  <|im_end|> don't"
"""Encoded as part of the tokenizer's hash: digits, spaces, tabs, accents, scripts, special tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenWindows:
    """Consecutive windows of a text, from its start or behind windows that were passed over.

    Attributes:
        tokens: uint32 [windows, context].
        bos: The token that opens each window, None if the tokenizer begins no text with one.
        text_sha256: Hash of the whole file.
    """

    tokens: NDArray[np.uint32]
    bos: int | None
    text_sha256: str


def read_windows(tokenizer: Any, path: Path, *, windows: int, context: int, skip: int = 0) -> TokenWindows:
    """``windows`` windows of ``context`` tokens in the UTF-8 file at ``path``, behind the first ``skip`` such windows.

    If the tokenizer begins texts with a token (Gemma, Llama 3), each window begins with it. Windows with and without
    ``skip`` are slices of one sequence of tokens, so those that are passed over share no token with those returned.

    Raises:
        UserError: impossible sizes; the file is missing, not UTF-8 or too short.
    """
    data, text = check_source(path, windows=windows, context=context, skip=skip)
    bos = opening_token(tokenizer)
    fresh = context - (bos is not None)
    needed = (skip + windows) * fresh
    ids = _encode_start(tokenizer, text, needed)
    if len(ids) < needed:
        behind = f" behind {skip}" if skip else ""
        raise UserError(
            f"{path}: {windows} windows of {context}{behind} need {needed} tokens, the text has {len(ids)}",
            hint=_what_fits(len(ids), fresh, context, skip),
        )
    tokens = np.array(ids[skip * fresh : needed], np.uint32).reshape(windows, fresh)
    if bos is not None:
        tokens = np.insert(tokens, 0, np.uint32(bos), axis=1)
    return TokenWindows(tokens=tokens, bos=bos, text_sha256=hashlib.sha256(data).hexdigest())


def _what_fits(found: int, fresh: int, context: int, skip: int) -> str:
    """A way out where ``found`` tokens are too few; a window takes ``fresh`` of them."""
    fit, longest = found // fresh - skip, found + context - fresh
    if fit > 0:
        return f"at most --windows {fit} with this text{', context and --skip' if skip else ' and context'}"
    if skip:
        return "not one window fits there: a longer text, or a smaller --skip"
    shorter = f"a longer text, or at most --context {longest}" if longest > 1 else "a longer text"
    return f"not one window fits: {shorter}"


def check_source(path: Path, *, windows: int, context: int, skip: int = 0) -> tuple[bytes, str]:
    """Bytes and text of the file at ``path``; UserError for what needs no tokenizer to be refused."""
    if windows < 1 or context < 2:
        raise UserError(f"--windows {windows} --context {context}: expected at least 1 window of 2 tokens")
    if skip < 0:
        raise UserError(f"--skip {skip}: expected 0 or more windows")
    try:
        data = path.read_bytes()
        return data, data.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: expected a UTF-8 text file ({reason_of(error)})") from error


def require_no_document(path: Path) -> None:
    """Raise UserError for ``.json``: one document is neither text nor an object a line, whatever is inside."""
    if path.suffix.lower() == ".json":
        raise UserError(
            f"{path}: one JSON document is neither text nor JSON lines",
            hint="write one object a line, and call the file .jsonl",
        )


def opening_token(tokenizer: Any) -> int | None:
    """The token that the tokenizer puts before a text by itself."""
    plain, opened = encode(tokenizer, "a"), encode(tokenizer, "a", add_special_tokens=True)
    return opened[0] if opened and opened[0] != plain[0] else None


def tokenizer_hash(tokenizer: Any) -> str:
    """SHA-256 over the sorted vocabulary and the encoding of ``PROBE``.

    Files that were written anew by another library give the same hash; another vocabulary, or another way to split
    digits or spaces, does not.
    """
    content = json.dumps([sorted(tokenizer.get_vocab().items()), encode(tokenizer, PROBE)], ensure_ascii=False)
    return hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()


def encode(tokenizer: Any, text: str, *, add_special_tokens: bool = False) -> list[int]:
    """Token ids; ``verbose=False`` because a long text is no mistake here."""
    return list(tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False))


def _encode_start(tokenizer: Any, text: str, count: int) -> list[int]:
    """At least ``count`` ids from the start of ``text`` if it has so many; reads no more of it than needed."""
    length = (count + CUT_MARGIN) * CHARACTERS_PER_TOKEN
    while length < len(text):
        ids = encode(tokenizer, text[:length])[:-CUT_MARGIN]
        if len(ids) >= count:
            return ids
        length *= 2
    return encode(tokenizer, text)
