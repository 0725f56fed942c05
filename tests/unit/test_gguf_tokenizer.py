"""Tokenizers rebuilt from GGUF: equal to the tokenizer they came from, and to SentencePiece's rule done by hand."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tests.support.tiny_gguf import CHAT_TEMPLATE, SAMPLE, byte_level_fields, train_byte_level
from tqtool.errors import SourceError
from tqtool.source.gguf.reader import GgufFile
from tqtool.source.gguf.tokenizer import TokenKind, build_tokenizer_files

TEXTS = [
    "",
    " ",
    "hello  world",
    SAMPLE,
    "\t\ttabs\n\n\n  1 22 333 4444 55555",
    "3.14159 1,000,000 0x1F",
    "I'm you're THEY'LL it's",
    "café vs cafe\u0301 (NFC and NFD)",
    "emoji 🙂👩‍👩‍👧 flags 🇩🇪",
    "日本語 中文 한국어 العربية עברית",
    "\u00a0\u2003 odd spaces \u200b",
    "<|im_start|>user\nhi<|im_end|>",
    "a\r\nb\rc\n",
    "▁ mark ▁▁",
]


def gguf_file(fields: dict[str, Any]) -> GgufFile:
    metadata = {f"tokenizer.{key}": value for key, value in fields.items()}
    return GgufFile(path=Path("m.gguf"), version=3, metadata=metadata, tensors={}, file_bytes=0)


def rebuilt(fields: dict[str, Any]) -> Tokenizer:
    files = build_tokenizer_files(gguf_file(fields), context_length=512).files
    return Tokenizer.from_str(files["tokenizer.json"].decode())


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "qwen2", "llama-bpe"])
def test_byte_level_equals_its_origin(pre: str) -> None:
    origin = train_byte_level(600, pre)
    ours = rebuilt({**byte_level_fields(600, pre=pre, merges=True), "ggml.add_bos_token": False})
    assert ours.get_vocab() == origin.get_vocab()
    for text in TEXTS:
        ids = origin.encode(text).ids
        assert ours.encode(text).ids == ids, text
        for special in (True, False):
            assert ours.decode(ids, skip_special_tokens=special) == origin.decode(ids, skip_special_tokens=special)


@given(text=st.text(max_size=40))
@settings(max_examples=200, deadline=None)
def test_byte_level_round_trip(text: str) -> None:
    ours = ROUND_TRIP.setdefault("smollm", rebuilt(byte_level_fields(600, merges=True)))
    assert ours.decode(ours.encode(text).ids, skip_special_tokens=False) == text


ROUND_TRIP: dict[str, Tokenizer] = {}


def test_pre_tokenizers_differ() -> None:
    """What a wrong name would do: digits are cut apart or not."""
    cuts = {}
    for pre in ("smollm", "qwen2", "llama-bpe", "gpt-2"):
        split = rebuilt(byte_level_fields(600, pre=pre, merges=True)).pre_tokenizer
        cuts[pre] = [piece for piece, _ in split.pre_tokenize_str("a 12345")]
    assert cuts["smollm"] == ["a", "Ġ", "1", "2", "3", "4", "5"]
    assert cuts["qwen2"] == ["a", "Ġ", "1", "2", "3", "4", "5"]
    assert cuts["llama-bpe"] == ["a", "Ġ", "123", "45"]
    assert cuts["gpt-2"] == ["a", "Ġ12345"]


@pytest.mark.parametrize(("pre", "expected"), [("llama-bpe", 1), ("qwen2", 5)])
def test_whole_words_need_no_merges_in_llama_3(pre: str, expected: int) -> None:
    fields = byte_level_fields(400, pre=pre, merges=True)
    fields["ggml.tokens"][-1] = "Ġzqxj"  # no merge makes it
    known = set(fields["ggml.tokens"])
    fields["ggml.merges"] = [m for m in fields["ggml.merges"] if {*m.split(" "), m.replace(" ", "")} <= known]
    ours = rebuilt({**fields, "ggml.add_bos_token": False})
    assert len(ours.encode(" zqxj").ids) == expected


def test_filler_rows_are_left_out_and_added_tokens_kept() -> None:
    fields = byte_level_fields(400, pre="qwen2", merges=True)
    n = len(fields["ggml.tokens"])
    fields["ggml.tokens"] = [*fields["ggml.tokens"], "<tool_call>", "<|box|>", "[PAD402]", "[PAD403]"]
    fields["ggml.token_type"] = [*fields["ggml.token_type"], 4, 3, 5, 5]
    ours = rebuilt(fields)
    assert ours.get_vocab_size() == n + 2
    assert ours.encode("x<tool_call>y<|box|>").ids[1::2] == [n, n + 1]
    assert ours.decode([n, n + 1], skip_special_tokens=True) == "<tool_call>"


@pytest.mark.parametrize(
    ("pre", "flag", "expected"), [("smollm", None, False), ("smollm", True, True), ("llama-bpe", None, True)]
)
def test_bos_as_the_file_says_or_the_scheme_does(pre: str, flag: bool | None, expected: bool) -> None:
    fields = byte_level_fields(400, pre=pre, merges=True)
    del fields["ggml.add_bos_token"]
    if flag is not None:
        fields["ggml.add_bos_token"] = flag
    ours = rebuilt(fields)
    assert (ours.encode("hello").ids[0] == 1) is expected
    assert ours.encode("hello", add_special_tokens=False).ids[0] != 1
    assert (ours.encode("a", "b").ids.count(1) == 2) is expected


def test_eos_is_added_if_the_file_says_so() -> None:
    ours = rebuilt({**byte_level_fields(400, merges=True), "ggml.add_eos_token": True})
    assert ours.encode("hello").ids[-1] == 2


# SentencePiece BPE.

PIECES = ["▁the", "▁", "t", "h", "e", "th", "he", "▁t", "the", "▁th", "r", "re", "er", "ere", "the▁", "▁▁", "é"]


def sentencepiece_fields(**changes: Any) -> dict[str, Any]:
    texts = ["<unk>", "<s>", "</s>", "<pad>", *(f"<0x{byte:02X}>" for byte in range(256)), "<tag>", *PIECES]
    kinds = [2, 3, 3, 3] + [6] * 256 + [4] + [1] * len(PIECES)
    scores = [0.0] * 261 + [-float(rank) for rank in range(len(PIECES))]
    fields = {
        "ggml.model": "llama",
        "ggml.pre": "default",
        "ggml.tokens": texts,
        "ggml.token_type": kinds,
        "ggml.scores": scores,
        "ggml.bos_token_id": 1,
        "ggml.eos_token_id": 2,
        "ggml.unknown_token_id": 0,
        "ggml.padding_token_id": 3,
        "ggml.add_bos_token": False,
        "ggml.add_space_prefix": False,
    }
    return {**fields, **changes}


def sentencepiece_by_hand(text: str, fields: dict[str, Any]) -> list[int]:
    """Merge the neighbours whose joined piece has the best score, leftmost first, until none joins."""
    ids = {t: i for i, t in enumerate(fields["ggml.tokens"])}
    scores = {t: fields["ggml.scores"][i] for t, i in ids.items() if fields["ggml.token_type"][i] == TokenKind.NORMAL}
    parts = list(text.replace(" ", "▁"))
    while True:
        joins = [(-scores[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in scores]
        if not joins:
            break
        _, i = min(joins)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    found: list[int] = []
    for part in parts:
        found += [ids[part]] if part in ids else [ids[f"<0x{byte:02X}>"] for byte in part.encode()]
    return found


@given(text=st.text("ther é🙂x", max_size=24))
@settings(max_examples=300, deadline=None)
def test_sentencepiece_by_hand(text: str) -> None:
    fields = sentencepiece_fields()
    ours = ROUND_TRIP.setdefault("sentencepiece", rebuilt(fields))
    expected = sentencepiece_by_hand(text, fields)
    found = ours.encode(text).ids
    assert found == expected
    assert ours.decode(found) == text


def test_space_prefix_is_put_and_taken_away() -> None:
    ours = rebuilt(sentencepiece_fields(**{"ggml.add_space_prefix": True}))
    assert ours.encode("the").tokens == ["▁the"]
    assert ours.decode(ours.encode("the there").ids) == "the there"
    default = sentencepiece_fields()
    del default["ggml.add_space_prefix"]
    assert rebuilt(default).encode("the").tokens == ["▁the"]


def test_sentencepiece_starts_with_bos_unless_told_otherwise() -> None:
    fields = sentencepiece_fields()
    del fields["ggml.add_bos_token"]
    assert rebuilt(fields).encode("the").ids[0] == 1


def test_user_defined_pieces_are_never_cut() -> None:
    assert rebuilt(sentencepiece_fields()).encode("th<tag>e").tokens == ["th", "<tag>", "e"]


def test_runs_of_spaces_grow_before_anything_else() -> None:
    fields = sentencepiece_fields()
    # The converter writes the marks of user-defined pieces as spaces; in Gemma all runs are such pieces.
    fields["ggml.token_type"][fields["ggml.tokens"].index("▁▁")] = 4
    fields["ggml.tokens"][fields["ggml.tokens"].index("▁▁")] = "  "
    fields["ggml.tokens"] = [*fields["ggml.tokens"], "   ", "    "]
    fields["ggml.token_type"] = [*fields["ggml.token_type"], 4, 4]
    fields["ggml.scores"] = [*fields["ggml.scores"], -1000.0, -1000.0]
    ours = rebuilt(fields)
    assert ours.encode("   the").tokens == ["▁▁▁", "the"]
    assert ours.encode("a" + " " * 9 + "the").tokens == ["<0x61>", "▁▁▁▁", "▁▁▁▁", "▁the"]
    assert ours.decode(ours.encode("th    e").ids) == "th    e"


def test_merges_come_best_score_first_longer_left_part_first() -> None:
    state = json.loads(rebuilt(sentencepiece_fields()).to_str())
    merges = [tuple(pair) for pair in state["model"]["merges"]]
    assert merges[:3] == [("▁th", "e"), ("▁t", "he"), ("▁", "the")]
    assert ("e", "r") in merges
    assert len(set(merges)) == len(merges)


# Files, stop tokens, refusals.


def test_files_agree_with_each_other() -> None:
    built = build_tokenizer_files(gguf_file(byte_level_fields(400, merges=True)), context_length=512)
    files = {name: json.loads(data) for name, data in built.files.items() if name.endswith(".json")}
    names = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": "<|endoftext|>"}
    assert files["special_tokens_map.json"] == {**names, "pad_token": "<|im_end|>"}
    assert names.items() <= files["tokenizer_config.json"].items()
    assert files["tokenizer_config.json"]["chat_template"] == CHAT_TEMPLATE
    assert built.files["chat_template.jinja"].decode() == CHAT_TEMPLATE
    assert files["tokenizer_config.json"]["model_max_length"] == 512
    assert files["generation_config.json"] == {"bos_token_id": 1, "eos_token_id": [2, 0], "pad_token_id": 2}
    assert built.eos_token_ids == (2, 0)


def test_end_of_turn_ids_of_the_file_are_stop_tokens() -> None:
    fields = {**byte_level_fields(400, merges=True), "ggml.eot_token_id": 7}
    assert build_tokenizer_files(gguf_file(fields), context_length=1).eos_token_ids == (2, 7, 0)


def test_named_templates_are_mentioned() -> None:
    fields = {**byte_level_fields(400, merges=True), "chat_templates": ["tool_use"]}
    assert build_tokenizer_files(gguf_file(fields), context_length=1).notes == (
        "named chat templates left out: tool_use",
    )


def test_no_template_no_file() -> None:
    fields = byte_level_fields(400, merges=True)
    del fields["chat_template"]
    built = build_tokenizer_files(gguf_file(fields), context_length=1)
    assert "chat_template.jinja" not in built.files
    assert "chat_template" not in json.loads(built.files["tokenizer_config.json"])


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown model": ({"ggml.model": "bert"}, "tokenizer model 'bert' cannot be rebuilt; known: gpt2, llama"),
    "no model": ({"ggml.model": None}, "tokenizer model None cannot be rebuilt"),
    "unknown pre": ({"ggml.pre": "deepseek-coder"}, "pre-tokenizer 'deepseek-coder' is not known for 'gpt2'"),
    "default pre": ({"ggml.pre": "default"}, "pre-tokenizer 'default' is not known for 'gpt2'"),
    "no tokens": ({"ggml.tokens": []}, "carries no tokenizer"),
    "tokens of numbers": ({"ggml.tokens": [1, 2]}, "tokenizer.ggml.tokens must be an array of str"),
    "types of another length": ({"ggml.token_type": [1, 1]}, "400 tokens but 2 of tokenizer.ggml.token_type"),
    "merge without space": ({"ggml.merges": ["ab"]}, "merge 'ab' is not two pieces"),
    "merge of unknown pieces": ({"ggml.merges": ["zz zz"]}, "merge 'zz' [+] 'zz' uses pieces the vocabulary"),
    "eos outside": ({"ggml.eos_token_id": 400}, "eos_token_id is 400, not one of 400 ids"),
    "template not text": ({"chat_template": 3}, "chat_template must be text"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_each_refusal_has_its_message(case: str) -> None:
    changes, message = REFUSED[case]
    fields = {**byte_level_fields(400, merges=True), **changes}
    fields = {key: value for key, value in fields.items() if value is not None}
    with pytest.raises(SourceError, match=message):
        build_tokenizer_files(gguf_file(fields), context_length=1)


def test_token_twice_is_refused() -> None:
    fields = byte_level_fields(400, merges=True)
    fields["ggml.tokens"] = [*fields["ggml.tokens"][:-1], "<|im_end|>"]
    with pytest.raises(SourceError, match=r"'<\|im_end\|>' occurs twice"):
        build_tokenizer_files(gguf_file(fields), context_length=1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ggml.scores": []}, "tokenizer.ggml.scores is missing"),
        ({"ggml.pre": "qwen2"}, "pre-tokenizer 'qwen2' is not known for 'llama'; known|text would be cut wrongly"),
    ],
)
def test_sentencepiece_refusals(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SourceError, match=message):
        build_tokenizer_files(gguf_file(sentencepiece_fields(**changes)), context_length=1)
