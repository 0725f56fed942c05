"""Items → tokens: with the model's chat template or raw, and where a choice begins inside its encoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tqtool.errors import SourceError, UserError
from tqtool.evals.items import AnyItem, ChoiceItem, GenerateItem
from tqtool.evals.text import encode, opening_token

Format = Literal["templated", "raw"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoicePrompt:
    """``prefix`` (at least one token) and what each choice adds to it (at least one token each).

    ``merged``: tokens at the end of the prompt's own encoding that are scored with every choice, because some choice
    melts into them.
    """

    item: ChoiceItem
    format: Format
    prefix: tuple[int, ...]
    continuations: tuple[tuple[int, ...], ...]
    merged: int

    @property
    def length(self) -> int:
        """Positions that the model sees."""
        return len(self.prefix) + max(map(len, self.continuations))


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratePrompt:
    """The tokens to answer, at least one."""

    item: GenerateItem
    format: Format
    tokens: tuple[int, ...]


AnyPrompt = ChoicePrompt | GeneratePrompt


class Prompter:
    """Encodes items for one tokenizer.

    A raw text begins with the tokenizer's opening token if it has one; a template writes its own. Both are encoded as
    text, so that a choice meets the prompt as it would in training.
    """

    def __init__(self, tokenizer: Any, model: str) -> None:
        self._tokenizer, self._model = tokenizer, model
        opening = opening_token(tokenizer)
        self._opening = () if opening is None else (opening,)

    def prompt(self, item: AnyItem, format_: Format) -> AnyPrompt:
        """The tokens of ``item``.

        Raises:
            UserError: no chat template; an item without raw text; nothing to condition on; a choice without tokens.
            SourceError: the template refuses the messages.
        """
        text = self._raw(item) if format_ == "raw" else self._templated(item)
        opening = self._opening if format_ == "raw" else ()
        tokens = (*opening, *encode(self._tokenizer, text))
        if isinstance(item, GenerateItem):
            if not tokens:
                raise UserError(f"item {item.id!r}, {format_}: the prompt has no tokens")
            return GeneratePrompt(item=item, format=format_, tokens=tokens)
        separator = item.separator if format_ == "raw" else ""
        wholes = [(*opening, *encode(self._tokenizer, text + separator + choice)) for choice in item.choices]
        shared = shared_length([tokens, *wholes])
        if not shared:
            raise UserError(
                f"item {item.id!r}, {format_}: no token of the prompt stays the same with every choice",
                hint="a choice melts into the whole prompt; make the prompt longer",
            )
        continuations = tuple(whole[shared:] for whole in wholes)
        if not all(continuations):
            silent = item.choices[[bool(tokens) for tokens in continuations].index(False)]
            raise UserError(
                f"item {item.id!r}, {format_}: choice {silent!r} adds no token to the prompt",
                hint="this tokenizer drops it (white space?); change the choice",
            )
        return ChoicePrompt(
            item=item,
            format=format_,
            prefix=tokens[:shared],
            continuations=continuations,
            merged=len(tokens) - shared,
        )

    def _raw(self, item: AnyItem) -> str:
        if item.prompt is None:
            raise UserError(
                f"item {item.id!r} has messages and no prompt, so there is no raw form of it",
                hint="use --format templated, or give the item a prompt as well",
            )
        return item.prompt

    def _templated(self, item: AnyItem) -> str:
        if not self._tokenizer.has_chat_template:
            raise UserError(
                f"{self._model}: the tokenizer has no chat template",
                hint="a base model continues text: use --format raw",
            )
        turns = [{"role": turn.role, "content": turn.content} for turn in item.messages]
        try:
            return str(self._tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False))
        except Exception as error:  # the template is a program of the model's
            raise SourceError(
                f"{self._model}: its chat template fails on item {item.id!r} ({type(error).__name__}: {error})",
                hint="some templates know no system role, or want turns to alternate; use --format raw",
            ) from error


def shared_length(sequences: Sequence[Sequence[int]]) -> int:
    """How many tokens all ``sequences`` begin with alike."""
    count = 0
    for column in zip(*sequences, strict=False):
        if len(set(column)) > 1:
            break
        count += 1
    return count
