"""The JSONL schema: what is read, and that everything else is refused with its line."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from tqtool.errors import SourceError, UserError
from tqtool.evals.items import ChoiceItem, GenerateItem, Message, open_items, parse_items

CHOICE: dict[str, Any] = {"id": "c", "kind": "choice", "prompt": "P:", "choices": ["x", "y"], "answer": 1}
GENERATE: dict[str, Any] = {
    "id": "g",
    "kind": "generate",
    "messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}],
    "answer": "1,000",
    "extractor": "last_number",
    "stop": ["Q:"],
    "task": "sums",
}


def lines(*values: Any) -> bytes:
    return "".join(json.dumps(value) + "\n" for value in values).encode()


def without(value: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: field for name, field in value.items() if name not in names}


def test_both_kinds_and_their_defaults(tmp_path: Path) -> None:
    data = lines(CHOICE, GENERATE)
    (tmp_path / "t.jsonl").write_bytes(data)
    file = open_items(str(tmp_path / "t.jsonl"))
    assert (file.name, file.sha256) == ("t.jsonl", hashlib.sha256(data).hexdigest())
    choice, generate = file.items
    assert isinstance(choice, ChoiceItem)
    assert (choice.id, choice.task, choice.prompt, choice.separator, choice.answer) == ("c", "items", "P:", " ", 1)
    assert choice.messages == (Message(role="user", content="P:"),)
    assert isinstance(generate, GenerateItem)
    assert (generate.task, generate.prompt, generate.stop) == ("sums", None, ("Q:",))
    assert [turn.role for turn in generate.messages] == ["system", "user"]


def test_a_limit_keeps_the_hash_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(lines(CHOICE, GENERATE))
    file = open_items(str(tmp_path / "t"))
    assert [item.id for item in file.first(1).items] == ["c"]
    assert file.first(1).sha256 == file.sha256
    assert file.first(9) == file.first(None) == file
    with pytest.raises(UserError, match="--limit 0: expected at least 1"):
        file.first(0)


def test_the_last_line_may_lack_its_end() -> None:
    assert len(parse_items(lines(CHOICE, GENERATE).rstrip(b"\n"), "t")) == 2
    assert parse_items(lines(CHOICE).replace(b"\n", b"\r\n"), "t") == parse_items(lines(CHOICE), "t")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"", "expected an item, found an empty line"),
        (b"{", "expected one JSON object"),
        (b"[1]", "expected a JSON object, found list"),
        (b'{"id": "a", "id": "b"}', "id: given twice"),
        (b'{"id": NaN}', "NaN is not JSON"),
        (b"[" * 100_000, "expected one JSON object"),
        (b'{"id": "\xff"}', "expected UTF-8"),
        (lines(without(CHOICE, "kind")), "kind: expected one of choice, generate, found None"),
        (lines(CHOICE | {"kind": ["choice"]}), "kind: expected one of choice, generate, found ['choice']"),
        (lines(without(CHOICE, "id")), "id: expected a text, not empty, found None"),
        (lines(CHOICE | {"id": ""}), "id: expected a text, not empty, found ''"),
        (lines(CHOICE | {"id": 7}), "id: expected a text, not empty, found 7"),
        (lines(CHOICE | {"id": "\ud800"}), "id: expected Unicode text"),
        (lines(CHOICE | {"extra": 1, "stop": []}), "extra, stop: not a field of kind choice"),
        (lines(without(CHOICE, "prompt")), "prompt, messages: expected at least one of them"),
        (lines(CHOICE | {"prompt": ""}), "prompt: expected a text, not empty"),
        (lines(CHOICE | {"prompt": None}), "prompt: expected a text, not empty, found None"),
        (lines(CHOICE | {"prompt": "P: "}), "prompt ends in white space and separator ' ' begins with it"),
        (lines(CHOICE | {"choices": ["x"]}), "choices: expected at least 2, all different, found ['x']"),
        (lines(CHOICE | {"choices": ["x", "x"]}), "choices: expected at least 2, all different"),
        (lines(CHOICE | {"choices": ["x", ""]}), "choices[1]: expected a text, not empty"),
        (lines(CHOICE | {"choices": "xy"}), "choices: expected a list of texts, found 'xy'"),
        (lines(CHOICE | {"answer": 2}), "answer: expected an index from 0 to 1, found 2"),
        (lines(CHOICE | {"answer": -1}), "answer: expected an index from 0 to 1, found -1"),
        (lines(CHOICE | {"answer": True}), "answer: expected an index from 0 to 1, found True"),
        (lines(CHOICE | {"answer": "x"}), "answer: expected an index from 0 to 1, found 'x'"),
        (lines(CHOICE | {"separator": None}), "separator: expected a text, found None"),
        (lines(GENERATE | {"answer": "one"}), "answer: expected a number, as the extractor is last_number"),
        (lines(GENERATE | {"answer": 1000}), "answer: expected a text, not empty, found 1000"),
        (lines(without(GENERATE, "extractor")), "extractor: expected"),
        (lines(GENERATE | {"stop": "Q:"}), "stop: expected a list of texts"),
        (lines(GENERATE | {"messages": []}), "messages: expected a list of turns"),
        (lines(GENERATE | {"messages": [{"role": "bot", "content": "x"}]}), "messages[0]: expected {role, content}"),
        (lines(GENERATE | {"messages": [{"role": "user"}]}), "messages[0]: expected {role, content}"),
        (lines(GENERATE | {"messages": [{"role": "user", "content": ""}]}), "content: expected a text, not empty"),
        (
            lines(GENERATE | {"messages": [{"role": "assistant", "content": "x"}]}),
            "messages: expected the user's turn at the end",
        ),
        (lines(CHOICE), "id 'c' is also that of line 1"),
    ],
)
def test_every_refusal_names_its_line(line: bytes, message: str) -> None:
    good = lines(CHOICE, GENERATE)
    with pytest.raises(UserError) as caught:
        parse_items(good + line.rstrip(b"\n") + b"\n", "t.jsonl")
    assert caught.value.message.startswith(f"t.jsonl:3: {message}")
    assert caught.value.hint


@pytest.mark.parametrize("data", [b"", b"\n"])
def test_no_items_at_all(data: bytes) -> None:
    with pytest.raises(UserError, match=r"t\.jsonl"):
        parse_items(data, "t.jsonl")


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    for source in (tmp_path / "absent", tmp_path):
        with pytest.raises(UserError, match="cannot be read") as caught:
            open_items(str(source))
        assert "ORG/NAME:PATH.jsonl" in str(caught.value.hint)


def test_one_json_document_is_no_file_of_lines(tmp_path: Path) -> None:
    item = {"id": "c", "kind": "generate", "prompt": "1+1=", "answer": "2", "extractor": "last_number"}
    for name in ("t.json", "t.JSON"):
        (tmp_path / name).write_text(json.dumps(item) + "\n")
        with pytest.raises(UserError, match="one JSON document") as error:
            open_items(str(tmp_path / name))
        assert ".jsonl" in (error.value.hint or "")
    (tmp_path / "t.JSONL").write_text(json.dumps(item) + "\n")
    assert open_items(str(tmp_path / "t.JSONL")).items[0].id == "c"


def test_a_file_of_a_hub_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    commit = "0123456789abcdef0123456789abcdef01234567"
    repo = tmp_path / "datasets--org--sums"
    (repo / "snapshots" / commit / "data").mkdir(parents=True)
    (repo / "snapshots" / commit / "data" / "t.jsonl").write_bytes(lines(CHOICE))
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    assert [item.id for item in open_items("org/sums:data/t.jsonl").items] == ["c"]
    with pytest.raises(SourceError, match=r"org/sums:data/u\.jsonl: cannot be fetched from the hub"):
        open_items("org/sums:data/u.jsonl")
    with pytest.raises(UserError, match=r"expected the path of a \.jsonl file") as caught:
        open_items("org/sums:data/t.parquet")
    assert "parquet" in str(caught.value.hint)
