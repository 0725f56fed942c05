"""What the smoke test knows of the model beforehand: its tokenizer, its template's end of turn, its context."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqtool.runtime.load import load_tokenizer, loading_config
from tqtool.serve.model_format import context_length
from tqtool.source.config import text_config

PASSAGE = (
    "The sun rose over the quiet village. Farmers walked to their fields, and children ran to school with books under "
    "their arms. At noon the market was full of people who bought bread, fruit and fish. In the evening the lamps were "
    "lit, and the old men sat in front of their houses and told stories about the war and the sea."
)
"""Plain English, written for this test, that any model of language finds likelier than the same tokens mixed up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Of the model under test.

    Attributes:
        context: Tokens of prompt and answer together.
        vocab: Rows of the embedding.
        has_template: Whether it chats.
        takes_tools: Whether its template has a place for tools.
        end_of_turn: The token its template puts after an assistant's message; None where there is no one token.
        passage: Token ids of ``PASSAGE``.
    """

    context: int
    vocab: int
    has_template: bool
    takes_tools: bool
    end_of_turn: int | None
    passage: tuple[int, ...]


def read_facts(folder: Path, context: int | None) -> ModelFacts:
    """Facts of a model folder; ``context`` where it is said by hand."""
    tokenizer, config = load_tokenizer(folder), loading_config(folder)
    template = str(getattr(tokenizer, "chat_template", "") or "")
    return ModelFacts(
        context=context or context_length(config) or 2048,
        vocab=int(text_config(config)["vocab_size"]),
        has_template=bool(tokenizer.has_chat_template),
        takes_tools="tools" in template,
        end_of_turn=end_of_turn(tokenizer) if tokenizer.has_chat_template else None,
        passage=tuple(tokenizer.encode(PASSAGE, add_special_tokens=False)),
    )


def end_of_turn(tokenizer: Any) -> int | None:
    """The token of its own that the chat template puts right after what the assistant said."""
    word = "smoke"
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": word}]
    try:
        text = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=False))
    except Exception:  # noqa: BLE001 - a template is a program, and may want other messages
        return None
    _, found, rest = text.rpartition(word)
    if not found or not rest.strip():
        return None
    ids = tokenizer.encode(rest.lstrip(), add_special_tokens=False)
    first = int(ids[0]) if ids else None
    return first if first in set(tokenizer.get_added_vocab().values()) | set(tokenizer.eos_token_ids) else None
