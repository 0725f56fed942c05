"""Tokens to text for every kind of decoder: as the tokenizer decodes the whole, and never half a character."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from tqtool.serve.model_format import parse_tool_call
from tqtool.serve.token_text import REPLACEMENT, TokenText

TEXT = "Grüße, 世界 😀👩‍👩‍👧 the the end"


class Wrapped:
    """What of mlx-lm's wrapper is read."""

    def __init__(self, backend: Tokenizer) -> None:
        self.backend_tokenizer = backend


def byte_level() -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*letters, "Ġt", "he"]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [("Ġ", "t"), ("h", "e")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


def sentencepiece(*, strip: bool) -> Tokenizer:
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"Grefandthi,", "▁t", "he"]
    merges = [("▁", "t"), ("h", "e")]
    vocabulary = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


def metaspace() -> Tokenizer:
    words = ["<unk>", *dict.fromkeys("▁" + TEXT.replace(" ", ""))]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


KINDS = {
    "byte-level": byte_level,
    "sentencepiece": lambda: sentencepiece(strip=False),
    "sentencepiece-strip": lambda: sentencepiece(strip=True),
    "metaspace": metaspace,
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_says_what_the_tokenizer_decodes(kind):
    tokenizer = KINDS[kind]()
    ids = tokenizer.encode(TEXT).ids
    assert len(ids) > len(TEXT.split())
    stream = TokenText(Wrapped(tokenizer)).stream((), begins_text=True)
    pieces = [stream.add(token) for token in ids]
    assert "".join(pieces) == tokenizer.decode(ids)
    assert not any(REPLACEMENT in piece for piece in pieces)


@pytest.mark.parametrize("kind", KINDS)
def test_a_continuation_keeps_its_space(kind):
    tokenizer = KINDS[kind]()
    ids = tokenizer.encode(TEXT).ids
    cut = next(at for at in range(len(ids) // 2, len(ids)) if tokenizer.id_to_token(ids[at]).startswith(("▁", "Ġ")))
    stream = TokenText(Wrapped(tokenizer)).stream(ids[:cut], begins_text=False)
    assert tokenizer.decode(ids[:cut]) + "".join(map(stream.add, ids[cut:])) == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
def test_bytes_of_all_tokens_are_the_text(kind):
    tokenizer = KINDS[kind]()
    table = TokenText(Wrapped(tokenizer))
    ids = tokenizer.encode(TEXT).ids
    assert b"".join(map(table.token_bytes, ids)).decode() == tokenizer.decode(ids)
    emoji = next(token for token in ids if table.token_bytes(token) == b"\xf0")
    assert table.token_string(emoji) == "bytes:\\xf0"
    assert table.token_string(tokenizer.token_to_id("<end>")) == "<end>"
    assert table.token_bytes(10**6) == b""


def test_a_tokenizer_written_in_python_goes_through_mlx_lm():
    from mlx_lm.tokenizer_utils import NaiveStreamingDetokenizer

    class Bytes:
        """Token ids are bytes; there is no backend."""

        def encode(self, text, **_):
            return list(text.encode())

        def decode(self, ids):
            return bytes(ids).decode(errors="replace")

        @property
        def detokenizer(self):
            return NaiveStreamingDetokenizer(self)

    table = TokenText(Bytes())
    stream = table.stream((), begins_text=True)
    pieces = [stream.add(token) for token in TEXT.encode()]
    assert "".join(pieces) == TEXT
    assert not any(REPLACEMENT in piece for piece in pieces)
    assert table.token_bytes(ord("a")) == b"a"


def test_a_call_that_is_no_unicode_is_text():
    tokenizer = SimpleNamespace(has_tool_calling=False)
    call = '{"name": "f", "arguments": {"a": "%s"}}'
    assert parse_tool_call(tokenizer, call % r"\ud83d\ude00", []) == [{"name": "f", "arguments": '{"a": "😀"}'}]
    assert parse_tool_call(tokenizer, call % r"\ud83d", []) is None


def test_the_alphabet_is_the_one_of_the_library():
    from tqtool.serve.token_text import byte_alphabet

    assert set(byte_alphabet()) == set(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(byte_alphabet().values()) == list(range(256))
