"""Text to token windows, and the tokenizer's hash."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tokenizers import Tokenizer, processors

from tests.support.tiny_models import write_tokenizer
from tqtool.errors import UserError
from tqtool.evals import text as text_module
from tqtool.evals.text import read_windows, tokenizer_hash


def tokenizer(folder, *, vocab=320, bos=False):
    from transformers import AutoTokenizer

    folder.mkdir()
    write_tokenizer(folder, vocab)
    if bos:
        raw = Tokenizer.from_file(str(folder / "tokenizer.json"))
        raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
        raw.save(str(folder / "tokenizer.json"))
    return AutoTokenizer.from_pretrained(folder)


def write(path, count):
    words = np.random.default_rng(0).integers(3, 320, count)
    path.write_text(" ".join(f"w{word}" for word in words))
    return words


def test_windows_are_the_start_of_the_text(tmp_path):
    words = write(tmp_path / "t", 100)
    found = read_windows(tokenizer(tmp_path / "k"), tmp_path / "t", windows=3, context=20)
    np.testing.assert_array_equal(found.tokens, words[:60].reshape(3, 20))
    assert found.bos is None


def test_an_opening_token_opens_each_window(tmp_path):
    words = write(tmp_path / "t", 100)
    found = read_windows(tokenizer(tmp_path / "k", bos=True), tmp_path / "t", windows=3, context=20)
    assert found.bos == 1
    np.testing.assert_array_equal(found.tokens[:, 0], 1)
    np.testing.assert_array_equal(found.tokens[:, 1:], words[:57].reshape(3, 19))


@pytest.mark.parametrize("bos", [False, True])
def test_windows_behind_those_passed_over_share_no_token_with_them(tmp_path, bos):
    words = write(tmp_path / "t", 100)
    reader, fresh = tokenizer(tmp_path / "k", bos=bos), 20 - bos
    found = read_windows(reader, tmp_path / "t", windows=2, context=20, skip=3)
    np.testing.assert_array_equal(found.tokens[:, int(bos) :], words[3 * fresh : 5 * fresh].reshape(2, fresh))
    whole = read_windows(reader, tmp_path / "t", windows=5, context=20)
    np.testing.assert_array_equal(found.tokens, whole.tokens[3:])


def test_no_window_is_left_behind_those_passed_over(tmp_path):
    write(tmp_path / "t", 100)
    reader = tokenizer(tmp_path / "k")
    for skip, windows, message, hint in (
        (3, 3, "3 windows of 20 behind 3 need 120 tokens", "at most --windows 2 with this text, context and --skip"),
        (5, 1, "1 windows of 20 behind 5 need 120 tokens", "a longer text, or a smaller --skip"),
        (-1, 1, "--skip -1: expected 0 or more", None),
    ):
        with pytest.raises(UserError, match=message) as caught:
            read_windows(reader, tmp_path / "t", windows=windows, context=20, skip=skip)
        assert hint is None or hint in str(caught.value.hint)


@pytest.mark.parametrize("count", [70, 2000])
def test_reading_only_the_start_changes_nothing(tmp_path, monkeypatch, count):
    words = write(tmp_path / "t", count)
    monkeypatch.setattr(text_module, "CHARACTERS_PER_TOKEN", 1)  # far too little: it has to double several times
    found = read_windows(tokenizer(tmp_path / "k"), tmp_path / "t", windows=7, context=10)
    np.testing.assert_array_equal(found.tokens.reshape(-1), words[:70])


def test_a_word_that_the_cut_breaks_is_never_used(tmp_path, monkeypatch):
    words = write(tmp_path / "t", 500)
    reader = tokenizer(tmp_path / "k")
    monkeypatch.setattr(text_module, "CHARACTERS_PER_TOKEN", 1)
    for count in range(2, 90):  # some of them end exactly at the cut
        found = read_windows(reader, tmp_path / "t", windows=1, context=count)
        np.testing.assert_array_equal(found.tokens[0], words[:count])


def test_too_short_missing_or_binary(tmp_path):
    write(tmp_path / "t", 50)
    with pytest.raises(UserError, match="6 windows of 10 need 60 tokens, the text has 50") as caught:
        read_windows(tokenizer(tmp_path / "k"), tmp_path / "t", windows=6, context=10)
    assert caught.value.hint == "at most --windows 5 with this text and context"
    with pytest.raises(UserError, match="1 windows of 60 need 60 tokens, the text has 50") as caught:
        read_windows(tokenizer(tmp_path / "k1"), tmp_path / "t", windows=1, context=60)
    assert caught.value.hint == "not one window fits: a longer text, or at most --context 50"
    with pytest.raises(UserError, match="1 windows of 60 need 59 tokens, the text has 50") as caught:
        read_windows(tokenizer(tmp_path / "k2", bos=True), tmp_path / "t", windows=1, context=60)
    assert caught.value.hint == "not one window fits: a longer text, or at most --context 51"
    (tmp_path / "e").write_text("w5")
    with pytest.raises(UserError) as caught:
        read_windows(tokenizer(tmp_path / "k3"), tmp_path / "e", windows=1, context=2)
    assert caught.value.hint == "not one window fits: a longer text"
    (tmp_path / "b").write_bytes(b"\xff\xfe")
    for name in ("b", "absent"):
        with pytest.raises(UserError, match="expected a UTF-8 text file"):
            read_windows(tokenizer(tmp_path / f"k{name}"), tmp_path / name, windows=1, context=10)


@pytest.mark.parametrize(("windows", "context"), [(0, 10), (1, 1)])
def test_impossible_sizes(tmp_path, windows, context):
    with pytest.raises(UserError, match="at least 1 window of 2 tokens"):
        read_windows(None, tmp_path / "t", windows=windows, context=context)


def test_the_hash_is_of_meaning_not_of_bytes(tmp_path):
    first = tokenizer(tmp_path / "a")
    path = tmp_path / "b" / "tokenizer.json"
    second = tokenizer(tmp_path / "b")
    path.write_text(json.dumps(json.loads(path.read_text()), indent=8))
    second = type(second).from_pretrained(tmp_path / "b")
    assert tokenizer_hash(first) == tokenizer_hash(second)
    assert tokenizer_hash(first) != tokenizer_hash(tokenizer(tmp_path / "c", vocab=319))


def test_the_hash_sees_another_splitting(tmp_path):
    from tokenizers import pre_tokenizers

    first = tokenizer(tmp_path / "a")
    other = tokenizer(tmp_path / "b")
    raw = Tokenizer.from_file(str(tmp_path / "b" / "tokenizer.json"))
    raw.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Digits(True)])
    raw.save(str(tmp_path / "b" / "tokenizer.json"))
    changed = type(other).from_pretrained(tmp_path / "b")
    assert changed.get_vocab() == first.get_vocab()
    assert tokenizer_hash(changed) != tokenizer_hash(first)
