"""Token ids to text, one at a time: characters that are split across tokens appear when they are complete.

The bytes of every token are known for byte-level BPE and for SentencePiece with byte fallback, and then an incremental
UTF-8 decoder does the rest. Other tokenizers go through the decode stream of the ``tokenizers`` package, and those
written in Python through mlx-lm's detokenizer.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from typing import Any, Protocol

REPLACEMENT = "\ufffd"


class TextStream(Protocol):
    """Text of one answer as it grows."""

    def add(self, token: int) -> str:
        """Characters that ``token`` completes; may be empty."""


def byte_alphabet() -> dict[str, int]:
    """The printable characters that byte-level BPE writes for the 256 bytes.

    Source: GPT-2's ``bytes_to_unicode``: printable Latin-1 stands for itself, the others follow from U+0100 on.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + rank): byte for rank, byte in enumerate(others)}


class TokenText:
    """What each token of a tokenizer says.

    Args:
        tokenizer: mlx-lm's wrapper.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        stored = json.loads(self._backend.to_str()) if self._backend is not None else {}
        self._kind, self.strips_first_space = _kind(stored.get("decoder"))
        self._added: dict[int, bytes] = {
            token["id"]: token["content"].encode() for token in stored.get("added_tokens", [])
        }
        self._alphabet = byte_alphabet()

    def token_bytes(self, token: int) -> bytes:
        """The bytes ``token`` stands for; empty for an id without a token (padding of the vocabulary)."""
        if token in self._added:
            return self._added[token]
        if self._backend is None:
            return str(self._tokenizer.decode([token])).encode()
        piece: str | None = self._backend.id_to_token(token)
        if piece is None:
            return b""
        if self._kind == "byte-level":
            values = [self._alphabet.get(character) for character in piece]
            return piece.encode() if None in values else bytes(value for value in values if value is not None)
        if self._kind == "sentencepiece":
            if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
                return bytes([int(piece[3:5], 16)])
            return piece.replace("▁", " ").encode()
        return str(self._backend.decode([token], skip_special_tokens=False)).encode()

    def token_string(self, token: int) -> str:
        """The token as text; a part of a character as ``bytes:`` and its bytes in hex, which is how OpenAI does it."""
        value = self.token_bytes(token)
        try:
            return value.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in value)

    def stream(self, prompt: Sequence[int], *, begins_text: bool) -> TextStream:
        """A stream for an answer to ``prompt``.

        ``begins_text``: the answer is a text of its own (a chat message), whose first space a SentencePiece decoder
        drops; False: it continues the prompt, and the space belongs to it.
        """
        if self._backend is None:
            return _Detokenizer(self._tokenizer)
        if self._kind == "other":
            return _DecodeStream(self._backend, prompt)
        return _ByteStream(self, strip=begins_text and self.strips_first_space)


class _ByteStream:
    def __init__(self, table: TokenText, *, strip: bool) -> None:
        self._table = table
        self._strip = strip
        # What the model wrote that is no UTF-8 at all becomes U+FFFD; what only is incomplete waits, and is dropped at
        # the end of the answer.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, token: int) -> str:
        text = self._decoder.decode(self._table.token_bytes(token))
        if self._strip and text:
            text, self._strip = text.removeprefix(" "), False
        return text


class _DecodeStream:
    def __init__(self, backend: Any, prompt: Sequence[int]) -> None:
        from tokenizers.decoders import DecodeStream

        self._backend = backend
        # Some of the prompt gives the decoder its context: whether a space belongs before the first word.
        self._stream = DecodeStream(ids=list(prompt[-8:]), skip_special_tokens=False)

    def add(self, token: int) -> str:
        return self._stream.step(self._backend, token) or ""


class _Detokenizer:
    def __init__(self, tokenizer: Any) -> None:
        self._stream = tokenizer.detokenizer  # a new one each time

    def add(self, token: int) -> str:
        self._stream.add_token(token)
        return str(self._stream.last_segment)


def _kind(decoder: Any) -> tuple[str, bool]:
    """``byte-level``, ``sentencepiece`` or ``other``, and whether decoding drops the first space."""
    steps = decoder.get("decoders", [decoder]) if isinstance(decoder, dict) else []
    types = [step.get("type") for step in steps]
    if types == ["ByteLevel"]:
        return "byte-level", False
    spaces = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    if types[:3] == ["Replace", "ByteFallback", "Fuse"] and steps[0] == spaces and types[3:] in ([], ["Strip"]):
        strips = bool(types[3:]) and steps[3].get("content") == " " and steps[3].get("start") == 1
        return "sentencepiece", strips
    return "other", False
