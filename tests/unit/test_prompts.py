"""Items → tokens: the boundary between prompt and choice, templates, opening tokens, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny_bpe import write_bpe
from tests.support.tiny_models import write_tiny
from tqtool.errors import SourceError, UserError
from tqtool.evals.items import AnyItem, parse_item
from tqtool.evals.prompts import ChoicePrompt, GeneratePrompt, Prompter, shared_length
from tqtool.runtime.generate import GenerateRequest, encode_prompt
from tqtool.runtime.load import load, load_tokenizer


def tokenizer(folder: Path, **options: Any) -> Any:
    write_tiny(folder, tokenizer=False)
    write_bpe(folder, **options)
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tokenizer(tmp_path_factory.mktemp("bpe") / "m")


def choice(prompt: str | None, choices: list[str], **fields: Any) -> AnyItem:
    text = {} if prompt is None else {"prompt": prompt}
    return parse_item({"id": "i", "kind": "choice", **text, "choices": choices, "answer": 0, **fields})


def raw(tokens: Any, item: AnyItem) -> ChoicePrompt:
    prompt = Prompter(tokens, "m").prompt(item, "raw")
    assert isinstance(prompt, ChoicePrompt)
    return prompt


def pieces(tokens: Any, ids: tuple[int, ...]) -> list[str]:
    return [tokens.decode([token]) for token in ids]


def test_the_separator_goes_into_the_choice_as_the_tokenizer_wants_it(bpe: Any) -> None:
    prompt = raw(bpe, choice("a cat", ["bog", "dog", "c"]))
    assert pieces(bpe, prompt.prefix) == ["a", " ", "cat"]
    assert [pieces(bpe, tokens) for tokens in prompt.continuations] == [[" b", "og"], [" dog"], [" ", "c"]]
    assert prompt.merged == 0


def test_a_choice_that_melts_into_the_prompt_is_scored_from_where_all_choices_part(bpe: Any) -> None:
    prompt = raw(bpe, choice("a cat", ["alog", "og", "!"], separator=""))
    # "cat" alone is a token, "catalog" has none of it: the model is asked for all of " cat…" under each choice.
    assert pieces(bpe, prompt.prefix) == ["a", " "]
    expected = [["ca", "ta", "l", "og"], ["cat", "og"], ["cat", "!"]]
    assert [pieces(bpe, tokens) for tokens in prompt.continuations] == expected
    assert prompt.merged == 1
    for tokens, text in zip(prompt.continuations, prompt.item.choices, strict=True):
        assert bpe.decode(prompt.prefix + tokens) == "a cat" + text


def test_white_space_at_the_end_of_a_prompt_belongs_to_the_choice_that_takes_it(bpe: Any) -> None:
    prompt = raw(bpe, choice("a: ", ["dog", "x"], separator=""))
    assert pieces(bpe, prompt.prefix) == ["a", ":"]
    assert [pieces(bpe, tokens) for tokens in prompt.continuations] == [[" dog"], [" ", "x"]]
    assert prompt.merged == 1


def test_what_choices_share_among_themselves_is_still_theirs(bpe: Any) -> None:
    prompt = raw(bpe, choice("a", ["x1", "x2"]))
    assert [pieces(bpe, tokens) for tokens in prompt.continuations] == [[" ", "x", "1"], [" ", "x", "2"]]


def test_the_whole_prompt_must_not_melt(bpe: Any) -> None:
    with pytest.raises(UserError, match="item 'i', raw: no token of the prompt stays the same"):
        raw(bpe, choice("cat", ["alog", "s"], separator=""))


def test_an_opening_token_begins_raw_texts_once(tmp_path: Path) -> None:
    opened = tokenizer(tmp_path / "m", bos=True)
    prompt = raw(opened, choice("cat", ["alog", "s"], separator=""))
    assert prompt.prefix == (1,)  # now there is something to condition on
    assert all(1 not in tokens for tokens in prompt.continuations)
    templated = Prompter(opened, "m").prompt(choice("cat", ["alog", "s"]), "templated")
    assert isinstance(templated, ChoicePrompt)
    assert 1 not in templated.prefix  # templates write their own


def test_a_choice_that_the_tokenizer_drops(tmp_path: Path) -> None:
    words = load_tokenizer(write_tiny(tmp_path / "m"))  # splits at white space and forgets it
    with pytest.raises(UserError, match=r"item 'i', raw: choice '\\n' adds no token to the prompt"):
        raw(words, choice("w3 w4", ["w5", "\n"]))


def test_templated_is_what_generate_feeds(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "m", tokenizer=False)
    write_bpe(folder)
    loaded = load(folder)
    item = parse_item({"id": "g", "kind": "generate", "prompt": "a cat", "answer": "x", "extractor": "text"})
    for format_, is_raw in (("templated", False), ("raw", True)):
        prompt = Prompter(loaded.tokenizer, "m").prompt(item, format_)  # type: ignore[arg-type]
        assert isinstance(prompt, GeneratePrompt)
        assert list(prompt.tokens) == encode_prompt(loaded, GenerateRequest(prompt="a cat", raw=is_raw))


def test_templated_choices_follow_the_template_without_separator(bpe: Any) -> None:
    turns = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    prompt = Prompter(bpe, "m").prompt(choice("raw text", ["dog", "b"], messages=turns), "templated")
    assert isinstance(prompt, ChoicePrompt)
    assert bpe.decode(prompt.prefix) == "<|system|>S</s><|user|>U</s><|assistant|>"
    assert [bpe.decode(tokens) for tokens in prompt.continuations] == ["dog", "b"]


def test_formats_that_an_item_or_a_model_does_not_have(tmp_path: Path, bpe: Any) -> None:
    chat = choice(None, ["x", "y"], messages=[{"role": "user", "content": "U"}])
    with pytest.raises(UserError, match="item 'i' has messages and no prompt") as caught:
        Prompter(bpe, "m").prompt(chat, "raw")
    assert "--format templated" in str(caught.value.hint)
    base = tokenizer(tmp_path / "base", template=None)
    with pytest.raises(UserError, match="m: the tokenizer has no chat template") as caught:
        Prompter(base, "m").prompt(chat, "templated")
    assert "--format raw" in str(caught.value.hint)
    angry = tokenizer(tmp_path / "angry", template="{{ raise_exception('no system role') }}")
    with pytest.raises(SourceError, match=r"its chat template fails on item 'i' .*no system role"):
        Prompter(angry, "m").prompt(chat, "templated")


def test_a_prompt_without_tokens(tmp_path: Path) -> None:
    words = load_tokenizer(write_tiny(tmp_path / "m"))
    item = parse_item({"id": "g", "kind": "generate", "prompt": " ", "answer": "x", "extractor": "text"})
    with pytest.raises(UserError, match="item 'g', raw: the prompt has no tokens"):
        Prompter(words, "m").prompt(item, "raw")


@pytest.mark.parametrize(
    ("sequences", "count"), [([[1, 2], [1, 2, 3]], 2), ([[1], [2]], 0), ([[], [1]], 0), ([[1, 2, 3], [1, 5, 3]], 1)]
)
def test_shared_length(sequences: list[list[int]], count: int) -> None:
    assert shared_length(sequences) == count
