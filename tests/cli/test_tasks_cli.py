"""eval tasks and eval mcnemar as a user runs them, and the result file between them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import binomtest

from tests.support.command import Answer, run
from tests.support.eos_first import write_eos_first
from tests.support.tiny_bpe import write_bpe
from tests.support.tiny_models import Tiny, write_tiny

COMPARED = ("acc", "acc_norm", "acc_token", "exact_match", "instant_eos", "truncated")


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models that answer, one that ends at once, a base model; items of both kinds in two tasks."""
    folder = tmp_path_factory.mktemp("tasks")
    for name, seed in (("a", 1), ("b", 2)):
        write_tiny(folder / name, Tiny(seed=seed), tokenizer=False)
        write_bpe(folder / name)
    write_eos_first(folder / "eos")
    write_tiny(folder / "base", tokenizer=False)
    write_bpe(folder / "base", template=None)
    rng = np.random.default_rng(0)
    items: list[dict[str, Any]] = []
    for index in range(24):
        word = "".join(rng.choice(list("abcdt "), 9)).strip() + "."
        choices = ["dog", "cat", "bog bog", "t" * (1 + index % 3)]
        items.append(
            {
                "id": f"c{index}",
                "kind": "choice",
                "task": "pick",
                "prompt": word,
                "choices": choices,
                "answer": index % 4,
            }
        )
    sum_ = {"kind": "generate", "task": "sums", "answer": "7", "extractor": "last_number"}
    items += [{"id": f"g{index}", "prompt": f"{index}+1=", **sum_} for index in range(3)]
    (folder / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    (folder / "choices.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items[:24]))
    (folder / "chat.jsonl").write_text(
        json.dumps(
            {
                "id": "x",
                "kind": "generate",
                "messages": [{"role": "user", "content": "U"}],
                "answer": "a",
                "extractor": "text",
            }
        )
    )
    (folder / "broken.jsonl").write_text(json.dumps(items[0]) + "\n{}\n")
    return folder


@pytest.fixture
def tqtool(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, work: Path) -> Any:
    monkeypatch.chdir(work)

    def call(*arguments: object) -> Answer:
        return run(capsys, monkeypatch, "eval", *arguments)

    return call


@pytest.fixture(scope="module")
def results(work: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """a.json and b.json of all items in both formats."""
    from tqtool.evals.items import open_items
    from tqtool.evals.task_result import write_result
    from tqtool.evals.tasks import FORMATS, plan_settings, run_tasks
    from tqtool.runtime.load import load

    folder = tmp_path_factory.mktemp("results")
    items = open_items(str(work / "items.jsonl"))
    settings = plan_settings(items, FORMATS, 4)
    for name in ("a", "b"):
        done: list[int] = []
        report = run_tasks(load(work / name, compute="expand"), items, settings, done.append)
        assert sum(done) == 2 * 27
        write_result(report, folder / f"{name}.json")
    return folder


def test_a_model_that_ends_at_once_has_that_rate_and_no_right_answers(tqtool: Any, work: Path) -> None:
    done = tqtool("tasks", "eos", "--items", "items.jsonl", "--max-tokens", 4, "--json")
    assert done.code == 0, done.err
    assert "tasks: 100%" in done.err
    report = json.loads(done.out)
    sums = [summary for summary in report["summaries"] if summary["task"] == "sums"]
    assert [(summary["format"], summary["mean_tokens"]) for summary in sums] == [("templated", 0.0), ("raw", 0.0)]
    for summary in sums:
        rates = {share["name"]: (share["right"], share["total"]) for share in summary["shares"]}
        assert rates == {"exact_match": (0, 3), "instant_eos": (3, 3), "truncated": (0, 3)}


def test_an_answer_of_items_has_256_new_tokens_unless_told(tqtool: Any) -> None:
    done = tqtool("tasks", "eos", "--items", "chat.jsonl", "--format", "templated", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["settings"]["max_tokens"] == 256


def test_the_report_states_model_items_settings_and_every_outcome(results: Path, work: Path) -> None:
    import hashlib

    report = json.loads((results / "a.json").read_text())
    assert (report["format"], report["format_version"]) == ("tqtool-tasks", 1)
    assert report["items_sha256"] == hashlib.sha256((work / "items.jsonl").read_bytes()).hexdigest()
    assert report["settings"] == {"formats": ["templated", "raw"], "items": 27, "max_tokens": 4}
    assert len(report["outcomes"]) == 54
    assert len({(outcome["id"], outcome["format"]) for outcome in report["outcomes"]}) == 54
    assert report["model_hash"] != json.loads((results / "b.json").read_text())["model_hash"]
    for summary in report["summaries"]:
        group = [o for o in report["outcomes"] if (o["task"], o["format"]) == (summary["task"], summary["format"])]
        assert summary["items"] == len(group)
        for share in summary["shares"]:
            assert share["right"] == sum(outcome["flags"][share["name"]] for outcome in group)
            assert share["low"] <= share["value"] <= share["high"]


def test_mcnemar_counts_and_p_are_those_of_the_outcomes(tqtool: Any, results: Path) -> None:
    done = tqtool("mcnemar", results / "a.json", results / "b.json", "--json")
    assert done.code == 0, done.err
    comparison = json.loads(done.out)
    assert comparison["same_model"] is False
    a, b = (json.loads((results / name).read_text())["outcomes"] for name in ("a.json", "b.json"))
    theirs = {(outcome["id"], outcome["format"]): outcome["flags"] for outcome in b}
    assert len(comparison["pairings"]) == 2 * 3 + 2 * 3
    assert {pairing["flag"] for pairing in comparison["pairings"]} == set(COMPARED)
    for pairing in comparison["pairings"]:
        pairs = [
            (outcome["flags"][pairing["flag"]], theirs[outcome["id"], outcome["format"]][pairing["flag"]])
            for outcome in a
            if (outcome["task"], outcome["format"]) == (pairing["task"], pairing["format"])
        ]
        counts = [pairs.count(cell) for cell in ((True, True), (True, False), (False, True), (False, False))]
        assert [pairing[name] for name in ("both", "only_a", "only_b", "neither")] == counts
        n = counts[1] + counts[2]
        assert pairing["p"] == pytest.approx(binomtest(counts[1], n).pvalue if n else 1.0, rel=1e-12)
    assert any(pairing["only_a"] + pairing["only_b"] for pairing in comparison["pairings"])


def test_against_is_run_then_mcnemar(tqtool: Any, results: Path, tmp_path: Path) -> None:
    out = tmp_path / "again.json"
    run_ = ("tasks", "a", "--items", "items.jsonl", "--max-tokens", 4, "--out", out)
    done = tqtool(*run_, "--against", results / "b.json", "--json")
    assert done.code == 0, done.err
    pairings = json.loads(done.out)["comparison"]["pairings"]
    assert pairings == json.loads(tqtool("mcnemar", out, results / "b.json", "--json").out)["pairings"]
    same = tqtool("mcnemar", out, results / "a.json")
    assert "A and B are the same model" in same.out
    assert "p (McNemar, exact)" in same.out
    first, second = (json.loads(path.read_text())["outcomes"] for path in (out, results / "a.json"))
    assert first == second  # the same model and items give the same outcomes


def test_tables_for_people_and_a_limit(tqtool: Any) -> None:
    done = tqtool("tasks", "base", "--items", "choices.jsonl", "--format", "raw", "--limit", 4, "--compute", "packed")
    assert done.code == 0, done.err
    assert "base: 4 items of choices.jsonl" in done.out
    rows = [line.split() for line in done.out.splitlines()[2:]]
    assert [row[:3] for row in rows] == [["pick", "raw", name] for name in ("acc", "acc_norm", "acc_token")]
    assert all(row[3].endswith("/4") for row in rows)


def test_an_existing_result_is_replaced_only_by_force(tqtool: Any, tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    command = ("tasks", "a", "--items", "choices.jsonl", "--format", "raw", "--limit", 1, "--out", out)
    assert tqtool(*command).code == 0
    before = out.read_bytes()
    again = tqtool(*command)
    assert (again.code, "r.json: exists already" in again.err) == (2, True)
    assert out.read_bytes() == before
    assert tqtool(*command, "--force").code == 0


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("absent", "--items", "absent.jsonl"), 2, "absent.jsonl: cannot be read"),
        (("absent", "--items", "broken.jsonl"), 2, "broken.jsonl:2: kind: expected one of choice, generate"),
        (("absent", "--items", "items.jsonl"), 2, "absent: expected a model folder"),
        (("absent", "--items", "items.jsonl", "--limit", 0), 2, "--limit 0: expected at least 1"),
        (("absent", "--items", "items.jsonl", "--max-tokens", 0), 2, "--max-tokens 0: expected at least 1"),
        (("absent", "--items", "items.jsonl", "--format", "chat"), 2, "'chat' is not one of"),
        (("absent", "--items", "items.jsonl", "--out", "a"), 2, "a: is a folder"),
        (("absent", "--items", "items.jsonl", "--out", "items.jsonl/r"), 4, "items.jsonl/r: cannot be written"),
        (("absent", "--items", "items.jsonl", "--against", "nothing"), 2, "nothing: cannot be read"),
        (("absent", "--items", "items.jsonl", "--against", "items.jsonl"), 4, "items.jsonl: not a readable result"),
        (("base", "--items", "items.jsonl"), 2, "base: the tokenizer has no chat template"),
        (("a", "--items", "chat.jsonl"), 2, "item 'x' has messages and no prompt"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, tuple) else None,
)
def test_mistakes(tqtool: Any, work: Path, arguments: tuple[object, ...], code: int, message: str) -> None:
    done = tqtool("tasks", *arguments)
    assert done.code == code, done.err
    assert message in done.err
    assert "Traceback" not in done.err


def changed(source: Path, target: Path, **fields: Any) -> Path:
    target.write_text(json.dumps(json.loads(source.read_text()) | fields))
    return target


@pytest.mark.parametrize(
    ("fields", "code", "message"),
    [
        ({"items_sha256": "0" * 64}, 2, "from 000000000000"),
        ({"settings": {"formats": ["raw"], "items": 27, "max_tokens": 4}}, 2, "formats is ['templated', 'raw']"),
        ({"settings": {"formats": ["templated", "raw"], "items": 9, "max_tokens": 4}}, 2, "items is 27"),
        ({"settings": {"formats": ["templated", "raw"], "items": 27, "max_tokens": 5}}, 2, "max_tokens is 4"),
        ({"format": "other"}, 4, "expected a result of"),
        ({"format_version": 2}, 4, "format_version: expected 1, found 2"),
        ({"outcomes": []}, 4, "its outcomes do not have the hash"),
        ({"outcomes_sha256": None}, 4, "its outcomes do not have the hash"),
        ({"settings": 3}, 4, "not a readable result (TypeError"),
    ],
)
def test_what_does_not_pair_is_refused(
    tqtool: Any, results: Path, tmp_path: Path, fields: dict[str, Any], code: int, message: str
) -> None:
    other = changed(results / "b.json", tmp_path / "other.json", **fields)
    done = tqtool("mcnemar", results / "a.json", other)
    assert done.code == code, done.err
    assert message in done.err
    # --against says the same before any model is looked at.
    early = tqtool("tasks", "absent", "--items", "items.jsonl", "--max-tokens", 4, "--against", other)
    assert early.code == code, early.err
    assert "expected a model folder" not in early.err


def test_an_outcome_that_was_edited_by_hand_is_found(tqtool: Any, results: Path, tmp_path: Path) -> None:
    value = json.loads((results / "b.json").read_text())
    flags = value["outcomes"][5]["flags"]
    flags["acc"] = not flags["acc"]
    other = changed(results / "b.json", tmp_path / "other.json", outcomes=value["outcomes"])
    done = tqtool("mcnemar", results / "a.json", other)
    assert (done.code, "do not have the hash" in done.err) == (4, True)
    (tmp_path / "cut.json").write_bytes((results / "b.json").read_bytes()[:1000])
    assert tqtool("mcnemar", results / "a.json", tmp_path / "cut.json").code == 4
    assert tqtool("mcnemar", results / "a.json", tmp_path / "absent.json").code == 2


def test_the_hash_of_a_model_sees_weights_not_only_shapes(work: Path, tmp_path: Path) -> None:
    import shutil

    from tqtool.artifact.content import content_hash

    copy = shutil.copytree(work / "a", tmp_path / "copy")
    assert content_hash(copy) == content_hash(work / "a")
    data = bytearray((copy / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (copy / "model.safetensors").write_bytes(data)
    assert content_hash(copy) != content_hash(work / "a")


def test_a_tokenizer_of_another_model_is_refused(tqtool: Any, work: Path, tmp_path: Path) -> None:
    small = write_tiny(tmp_path / "small", Tiny(vocab=200), tokenizer=False)
    write_bpe(small)
    done = tqtool("tasks", small, "--items", "choices.jsonl", "--format", "raw")
    assert done.code == 2, done.err
    assert "the model has 200" in done.err
