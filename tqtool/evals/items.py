"""Items of a task as JSON lines (``docs/formats/items.md``): read strictly, each error with its line."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from tqtool.errors import SourceError, UserError
from tqtool.evals.extract import Extractor, read_number
from tqtool.evals.text import require_no_document
from tqtool.source.hub import is_hub_id

Kind = Literal["choice", "generate"]

ROLES = ("system", "user", "assistant")
DEFAULT_TASK = "items"
COMMON = frozenset({"id", "kind", "task", "prompt", "messages", "answer"})
FIELDS = {
    "choice": COMMON | {"choices", "separator"},
    "generate": COMMON | {"extractor", "stop"},
}
HINT = "docs/formats/items.md states the schema"


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn of a chat."""

    role: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """What both kinds share.

    Attributes:
        id: Unique in its file; pairs the outcomes of two models.
        task: Items of one task are summed up together.
        prompt: Text that the raw format continues; None if the item is a chat only.
        messages: Turns for the chat template, the user's last; ``prompt`` as one user turn if not given.
    """

    id: str
    task: str
    prompt: str | None
    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceItem(Item):
    """Which of ``choices`` is the likeliest continuation; ``separator`` stands between prompt and choice when raw."""

    choices: tuple[str, ...]
    answer: int
    separator: str = " "
    kind: Literal["choice"] = field(default="choice", init=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateItem(Item):
    """What ``extractor`` finds in the greedy answer must be ``answer``; each of ``stop`` ends the answer."""

    answer: str
    extractor: Extractor
    stop: tuple[str, ...]
    kind: Literal["generate"] = field(default="generate", init=False)


AnyItem = ChoiceItem | GenerateItem


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemFile:
    """The items of one file, in its order; ``sha256`` is of the whole file whatever part of it is used."""

    name: str
    sha256: str
    items: tuple[AnyItem, ...]

    def first(self, limit: int | None) -> ItemFile:
        """At most ``limit`` items from the start; UserError unless it is positive."""
        if limit is None:
            return self
        if limit < 1:
            raise UserError(f"--limit {limit}: expected at least 1")
        return replace(self, items=self.items[:limit])


def open_items(source: str) -> ItemFile:
    """The items of a file, or of a file in a hub data set, written ``ORG/NAME:PATH.jsonl``.

    Raises:
        UserError: no such file, or a line that is not of the schema.
        SourceError: the hub has no such file or cannot be reached.
    """
    path = Path(source)
    repo, colon, inside = source.partition(":")
    if not path.exists() and colon and is_hub_id(repo):
        path = _from_hub(repo, inside)
    require_no_document(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(
            f"{source}: cannot be read ({error.strerror or error})",
            hint="give a file of JSON lines, or ORG/NAME:PATH.jsonl for one in a hub data set",
        ) from error
    return ItemFile(name=path.name, sha256=hashlib.sha256(data).hexdigest(), items=parse_items(data, source))


def parse_items(data: bytes, source: str) -> tuple[AnyItem, ...]:
    """Items of UTF-8 JSON lines; ``source`` names them in errors.

    Raises:
        UserError: with the line: no JSON object, an empty line, a missing, unknown or wrong field, a repeated id; or
            there is no item at all.
    """
    try:
        lines = data.decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        number = data[: error.start].count(b"\n") + 1
        raise UserError(f"{source}:{number}: expected UTF-8 ({error.reason})", hint=HINT) from error
    if lines[-1] == "":
        lines.pop()
    items: list[AnyItem] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        try:
            item = parse_item(_parse_object(line))
        except ValueError as error:
            raise UserError(f"{source}:{number}: {error}", hint=HINT) from error
        if item.id in seen:
            message = f"{source}:{number}: id {item.id!r} is also that of line {seen[item.id]}"
            raise UserError(message, hint="each item needs its own id: it pairs the outcomes of two models")
        seen[item.id] = number
        items.append(item)
    if not items:
        raise UserError(f"{source}: no items in it", hint=HINT)
    return tuple(items)


def parse_item(value: dict[str, Any]) -> AnyItem:
    """The item of one JSON object; ValueError says which field is wrong."""
    kind = value.get("kind")
    if not isinstance(kind, str) or kind not in FIELDS:
        raise ValueError(f"kind: expected one of {', '.join(FIELDS)}, found {kind!r}")
    unknown = sorted(set(value) - FIELDS[kind])
    if unknown:
        raise ValueError(
            f"{', '.join(unknown)}: not a field of kind {kind}; known are {', '.join(sorted(FIELDS[kind]))}"
        )
    prompt = _text(value, "prompt") if "prompt" in value else None
    common: dict[str, Any] = {
        "id": _text(value, "id"),
        "task": _text(value, "task") if "task" in value else DEFAULT_TASK,
        "prompt": prompt,
        "messages": _messages(value, prompt),
    }
    return _choice_item(value, common) if kind == "choice" else _generate_item(value, common)


def _choice_item(value: dict[str, Any], common: dict[str, Any]) -> ChoiceItem:
    choices = _texts(value, "choices")
    if len(choices) < 2 or len(set(choices)) < len(choices):
        raise ValueError(f"choices: expected at least 2, all different, found {list(choices)!r}")
    answer = value.get("answer")
    if type(answer) is not int or not 0 <= answer < len(choices):
        raise ValueError(f"answer: expected an index from 0 to {len(choices) - 1}, found {answer!r}")
    separator = _text(value, "separator", empty=True) if "separator" in value else " "
    prompt = common["prompt"]
    if prompt is not None and prompt[-1].isspace() and separator[:1].isspace():
        raise ValueError(
            f"prompt ends in white space and separator {separator!r} begins with it; "
            "give separator as '' or cut the prompt"
        )
    return ChoiceItem(**common, choices=choices, answer=answer, separator=separator)


def _generate_item(value: dict[str, Any], common: dict[str, Any]) -> GenerateItem:
    extractor = Extractor.parse(value.get("extractor"))
    answer = _text(value, "answer")
    if extractor.kind == "last_number" and read_number(answer) is None:
        raise ValueError(f"answer: expected a number, as the extractor is last_number, found {answer!r}")
    stop = _texts(value, "stop") if "stop" in value else ()
    return GenerateItem(**common, answer=answer, extractor=extractor, stop=stop)


def _messages(value: dict[str, Any], prompt: str | None) -> tuple[Message, ...]:
    if "messages" not in value:
        if prompt is None:
            raise ValueError("prompt, messages: expected at least one of them, found neither")
        return (Message(role="user", content=prompt),)
    turns = value["messages"]
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"messages: expected a list of turns, found {turns!r}")
    messages = []
    for index, turn in enumerate(turns):
        if not isinstance(turn, dict) or set(turn) != {"role", "content"} or turn["role"] not in ROLES:
            expected = f"expected {{role, content}} with a role of {', '.join(ROLES)}"
            raise ValueError(f"messages[{index}]: {expected}, found {turn!r}")
        messages.append(Message(role=turn["role"], content=_text(turn, "content")))
    if messages[-1].role != "user":
        raise ValueError(f"messages: expected the user's turn at the end, found {messages[-1].role}")
    return tuple(messages)


def _texts(value: dict[str, Any], name: str) -> tuple[str, ...]:
    found = value.get(name)
    if not isinstance(found, list):
        raise ValueError(f"{name}: expected a list of texts, found {found!r}")
    return tuple(_text({f"{name}[{index}]": text}, f"{name}[{index}]") for index, text in enumerate(found))


def _text(value: dict[str, Any], name: str, *, empty: bool = False) -> str:
    found = value.get(name)
    if not isinstance(found, str) or not (found or empty):
        raise ValueError(f"{name}: expected a text{'' if empty else ', not empty'}, found {found!r}")
    if re.search("[\ud800-\udfff]", found):
        raise ValueError(f"{name}: expected Unicode text, found half of a surrogate pair in {found!r}")
    return found


def _parse_object(line: str) -> dict[str, Any]:
    """JSON without what Python's parser lets through: repeated names, NaN."""

    def unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for name, value in pairs:
            if name in result:
                raise ValueError(f"{name}: given twice")
            result[name] = value
        return result

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    if not line.strip():
        raise ValueError("expected an item, found an empty line")
    try:
        value = json.loads(line, object_pairs_hook=unique, parse_constant=refuse)
    except json.JSONDecodeError as error:
        raise ValueError(f"expected one JSON object ({error.msg} at column {error.colno})") from error
    except RecursionError as error:
        raise ValueError("expected one JSON object, found lists in lists without end") from error
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, found {type(value).__name__}")
    return value


def _from_hub(repo: str, inside: str) -> Path:
    if not inside.lower().endswith(".jsonl"):
        raise UserError(
            f"{repo}:{inside}: expected the path of a .jsonl file in the data set",
            hint="other forms (parquet, loading scripts, other schemas) are not read: convert them to the schema",
        )
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(repo, inside, repo_type="dataset"))
    except Exception as error:  # the transport raises what it likes, another library for each hub version
        reason = next(iter(str(error).strip().splitlines()), "")
        raise SourceError(
            f"{repo}:{inside}: cannot be fetched from the hub ({type(error).__name__}: {reason})",
            hint="check name and path, HF_TOKEN for a gated data set, and HF_HUB_OFFLINE; or give a local copy",
        ) from error
