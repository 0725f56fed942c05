"""Where a choice begins: whatever the texts, prefix and continuation are the tokens of the text and no others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.tiny_bpe import write_bpe
from tests.support.tiny_models import write_tiny
from tqtool.errors import UserError
from tqtool.evals.items import ChoiceItem, Message
from tqtool.evals.prompts import ChoicePrompt, Prompter
from tqtool.runtime.load import load_tokenizer

# The letters of the merges, white space, digits, and characters of two and four bytes.
TEXT = st.text(st.sampled_from("catdogblé🙂 \n1!"), min_size=1, max_size=8)


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "bos"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("bpe") / "m"
    write_tiny(folder, tokenizer=False)
    write_bpe(folder, bos=request.param)
    return load_tokenizer(folder)


def harness_split(tokenizer: Any, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """lm-evaluation-harness 0.4.13, ``TemplateLM._encode_pair`` for causal models, written down again."""
    spaces = len(context) - len(context.rstrip())
    if spaces:
        continuation, context = context[-spaces:] + continuation, context[:-spaces]
    whole = tokenizer.encode(context + continuation)
    ours = tokenizer.encode(context)
    return ours, whole[len(ours) :]


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(start=TEXT, choices=st.lists(TEXT, min_size=2, max_size=4, unique=True), separator=st.sampled_from(["", " "]))
def test_prefix_and_continuation_are_the_text(tokenizer: Any, start: str, choices: list[str], separator: str) -> None:
    def prompt(texts: list[str]) -> ChoicePrompt:
        item = ChoiceItem(
            id="i",
            task="t",
            prompt=start,
            messages=(Message(role="user", content=start),),
            choices=tuple(texts),
            answer=0,
            separator=separator,
        )
        made = Prompter(tokenizer, "m").prompt(item, "raw")
        assert isinstance(made, ChoicePrompt)
        return made

    refused = ""
    try:
        made = prompt(choices)
    except UserError as error:
        refused = error.message
    if refused:
        assert "no token of the prompt stays the same" in refused
        assert tokenizer.encode("a") == tokenizer.encode("a", add_special_tokens=False)  # an opening token does stay
        return
    for choice, continuation in zip(choices, made.continuations, strict=True):
        assert [*made.prefix, *continuation] == tokenizer.encode(start + separator + choice)
    assert made.merged == len(tokenizer.encode(start)) - len(made.prefix)
    splits = [harness_split(tokenizer, start, separator + choice) for choice in choices]
    honest = all(
        before + after == tokenizer.encode(start + separator + choice)
        for (before, after), choice in zip(splits, choices, strict=True)
    )
    if honest and not start[-1].isspace():
        assert [(list(made.prefix), list(tokens)) for tokens in made.continuations] == splits
    turned = prompt(choices[::-1])
    assert (turned.prefix, turned.continuations) == (made.prefix, made.continuations[::-1])
