"""``tqtool compare``: weighing, the frontier, refusals, one page that needs nothing else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from tests.support.command import Answer, run
from tests.support.conversions import Q4, convert
from tests.support.tiny_models import Tiny, write_tiny
from tqtool.artifact.content import content_hash
from tqtool.evals.proportions import mcnemar, wilson
from tqtool.evals.task_result import _hash

CONDITIONS = {"teacher": "t", "windows": 2, "context": 64, "tokens": 126, "top": 320, "vocab_size": 320}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A source, its 4-bit artifact, and a rotated one with an untied head."""
    folder = tmp_path_factory.mktemp("compare")
    source = write_tiny(folder / "source", Tiny(tied=True))
    convert(source, folder / "q4", packing=Q4)
    convert(source, folder / "rotated", packing=Q4, rotation_seed=42)
    return {name: folder / name for name in ("source", "q4", "rotated")}


@pytest.fixture
def tqtool(capsys, monkeypatch):
    def call(*arguments: object) -> Answer:
        return run(capsys, monkeypatch, "compare", *arguments)

    return call


def report(path: Path, model: Path, kl: float, **changes: Any) -> Path:
    estimate = {"mean": kl, "se_windows": 0.01, "se_tokens": 0.02}
    found = content_hash(model) if model.exists() else "0" * 64
    body = {**CONDITIONS, "teacher_ppl": 23.4, "model": str(model), "model_hash": found, "kl": estimate}
    body["ppl"] = 20 + 10 * kl
    top1 = {"mean": 1 - kl / 4, "se_windows": None, "se_tokens": None}
    path.write_text(json.dumps({**body, "top1": top1, **changes}))
    return path


def test_arms_are_weighed_and_the_frontier_is_what_nothing_beats(tqtool, models, tmp_path):
    reports = [
        report(tmp_path / "source.json", models["source"], 0.0),
        report(tmp_path / "q4.json", models["q4"], 0.5),
        report(tmp_path / "rotated.json", models["rotated"], 0.6),
    ]
    answer = tqtool(*reports, f"again={report(tmp_path / 'again.json', models['rotated'], 0.3)}", "--json")
    assert answer.code == 0, answer.err
    arms = {arm["name"]: arm for arm in json.loads(answer.out)["arms"]}
    weights = sum(tensor.size for tensor in Tiny(tied=True).tensors().values())
    for name, folder in (("q4", "q4"), ("rotated", "rotated"), ("again", "rotated"), ("source", "source")):
        size = (models[folder] / "model.safetensors").stat().st_size
        assert arms[name]["weight_bytes"] == size
        assert arms[name]["bits_per_weight"] == pytest.approx(8 * size / weights)
    assert {name for name, arm in arms.items() if arm["is_frontier"]} == {"source", "q4", "again"}
    assert arms["q4"]["distance"]["kl_se"] == 0.02
    sizes = [arm["weight_bytes"] for arm in json.loads(answer.out)["arms"]]
    assert sizes == sorted(sizes)


def test_the_length_of_a_header_puts_no_arm_on_the_frontier(tqtool, models, tmp_path):
    longer = shutil.copytree(models["q4"], tmp_path / "longer")
    file = longer / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors, file, metadata={"format": "mlx", "note": "x" * 100})
    assert file.stat().st_size > (models["q4"] / "model.safetensors").stat().st_size
    (longer / "tqtool" / "manifest.json").unlink()
    worse, better = report(tmp_path / "a.json", models["q4"], 0.5), report(tmp_path / "b.json", longer, 0.4)
    answer = tqtool(worse, better, "--json")
    assert answer.code == 0, answer.err
    assert [arm["name"] for arm in json.loads(answer.out)["arms"] if arm["is_frontier"]] == ["longer"]


def test_the_page_needs_nothing_else_and_is_the_same_twice(tqtool, models, tmp_path):
    one = report(tmp_path / "q4.json", models["q4"], 0.5)
    two = report(tmp_path / "r.json", models["rotated"], 0.6)
    answer = tqtool(f"<b>&={one}", two, "--html", tmp_path / "a.html")
    assert answer.code == 0, answer.err
    assert tqtool(f"<b>&={one}", two, "--html", tmp_path / "b.html").code == 0
    text = (tmp_path / "a.html").read_text()
    assert text == (tmp_path / "b.html").read_text()
    assert "&lt;b&gt;&amp;" in text
    assert "<b>" not in text
    assert "<svg" in text
    assert not [word for word in ("src=", "<script", "@import", 'href="http') if word in text]
    assert "0.5000 ± 0.0200" in answer.out


@pytest.mark.parametrize("key", ["teacher_hash", "text_sha256", "windows", "context", "skip", "teacher_ppl"])
def test_scores_of_other_conditions_are_refused(tqtool, models, tmp_path, key):
    one = report(tmp_path / "q4.json", models["q4"], 0.5)
    two = report(tmp_path / "r.json", models["rotated"], 0.6, **{key: 99})
    answer = tqtool(one, two)
    assert (answer.code, f"{key} is 99, of the arms before it it is" in answer.err) == (2, True), answer.err


def test_what_cannot_be_compared_is_named(tqtool, models, tmp_path):
    good = report(tmp_path / "q4.json", models["q4"], 0.5)
    (tmp_path / "text.json").write_text("{")
    (tmp_path / "other.json").write_text('{"kl": 5}')
    (tmp_path / "empty").mkdir()
    gone = report(tmp_path / "gone.json", tmp_path / "nowhere", 0.5)
    for arguments, message in (
        ((tmp_path / "none.json",), "cannot be read"),
        ((tmp_path / "text.json",), "not JSON"),
        ((tmp_path / "other.json",), "other.json: not a report"),
        ((tmp_path / "empty",), "kl.json: cannot be read"),
        ((gone,), "is not there, so it cannot be weighed"),
        ((good, good), "a second arm called 'q4'"),
        ((report(tmp_path / "nan.json", models["q4"], float("nan")),), "not finite numbers"),
        ((good, "--html", gone), "exists already"),
    ):
        answer = tqtool(*arguments)
        assert (answer.code, message in answer.err) == (2, True), answer.err


# -------------------------------------------------------------------------------------------- what was scored
def test_a_folder_that_no_longer_holds_what_was_scored_is_refused(tqtool, tmp_path):
    source = write_tiny(tmp_path / "source")
    convert(source, tmp_path / "arm", packing=Q4)
    one = report(tmp_path / "kl.json", tmp_path / "arm", 0.5)
    two = results(tmp_path / "tasks.json", tmp_path / "arm", [True, False])
    for arguments in ((one,), (two,), (one, two)):
        assert tqtool(*arguments).code == 0
    scored = content_hash(tmp_path / "arm")
    file = tmp_path / "arm" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1  # one weight; shapes, sizes and manifest stay
    file.write_bytes(data)
    for arguments in ((one,), (two,)):
        answer = tqtool(*arguments)
        expected = f"scored weights {scored[:12]}, {tmp_path / 'arm'} now holds {content_hash(tmp_path / 'arm')[:12]}"
        assert (answer.code, expected in answer.err) == (2, True), answer.err
    answer = tqtool(one, report(tmp_path / "again.json", tmp_path / "arm", 0.5))
    assert (answer.code, "a second arm called 'arm', and of other weights" in answer.err) == (2, True), answer.err


def test_a_report_that_names_no_weights_is_refused(tqtool, models, tmp_path):
    answer = tqtool(report(tmp_path / "old.json", models["q4"], 0.5, model_hash=None))
    assert (answer.code, "does not say which weights it scored" in answer.err) == (2, True), answer.err


def test_eval_kl_says_which_weights_it_scored(capsys, monkeypatch, models, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"w{3 + 7 * index % 317}" for index in range(100)))
    dump = tmp_path / "teacher.safetensors"
    made = run(capsys, monkeypatch, "teacher", models["source"], dump, "--text", text, "-n", 1, "-c", 32)
    assert made.code == 0, made.err
    scores = {}
    for name in ("source", "q4"):
        answer = run(capsys, monkeypatch, "eval", "kl", models[name], "--teacher", dump, "--json")
        (tmp_path / f"{name}.json").write_text(answer.out)
        scores[name] = json.loads(answer.out)["model_hash"]
    assert scores == {name: content_hash(models[name]) for name in ("source", "q4")}
    answer = run(capsys, monkeypatch, "compare", tmp_path / "source.json", tmp_path / "q4.json")
    assert answer.code == 0, answer.err


# ------------------------------------------------------------------------------------------------------ tasks
def results(path: Path, model: Path, right: list[bool], *, items: str = "1" * 64, **changes: Any) -> Path:
    """A result of ``eval tasks``: a choice an item, templated, and one answer that ended at once."""
    flags = [({"acc": value, "acc_norm": not value}, "pick") for value in right]
    flags.append(({"exact_match": False, "instant_eos": True, "truncated": False}, "sums"))
    outcomes = [
        {"id": str(index), "task": task, "format": "templated", "flags": found}
        for index, (found, task) in enumerate(flags)
    ]
    body = {
        "format": "tqtool-tasks",
        "format_version": 1,
        "model": str(model),
        "model_hash": content_hash(model),
        "items_sha256": items,
        "settings": {"formats": ["templated"], "items": len(outcomes), "max_tokens": 4},
        "outcomes": outcomes,
        "outcomes_sha256": _hash(outcomes),
    }
    path.write_text(json.dumps({**body, **changes}))
    return path


BASE = [True] * 14 + [False] * 6
OTHER = [True] * 5 + [False] * 13 + [True] * 2


def test_tasks_stand_beside_size_and_distance_paired_with_the_baseline(tqtool, models, tmp_path):
    arguments = [
        f"base={report(tmp_path / 'k1.json', models['source'], 0.0)}",
        f"small={report(tmp_path / 'k2.json', models['q4'], 0.5)}",
        results(tmp_path / "t1.json", models["source"], BASE),  # unnamed: goes to the arm of its weights
        f"small={results(tmp_path / 't2.json', models['q4'], OTHER)}",
        results(tmp_path / "t3.json", models["rotated"], BASE),  # an arm without a distance
    ]
    answer = tqtool(*arguments, "--baseline", "base", "--json")
    assert answer.code == 0, answer.err
    document = json.loads(answer.out)
    arms = {arm["name"]: arm for arm in document["arms"]}
    assert set(arms) == {"base", "small", "rotated"}
    assert arms["rotated"]["distance"] is None
    assert not arms["rotated"]["is_frontier"]
    picks = {name: arm["tasks"][0] for name, arm in arms.items()}
    assert [(pick["task"], pick["format"], pick["main"]) for pick in picks.values()] == [
        ("pick", "templated", "acc")
    ] * 3
    low, high = wilson(7, 20)
    assert picks["small"]["rates"]["acc"] == {"right": 7, "total": 20, "value": 0.35, "low": low, "high": high}
    assert picks["small"]["rates"]["acc_norm"]["right"] == 13
    assert picks["base"]["paired"] is None
    assert picks["small"]["paired"] == {"only_here": 2, "only_baseline": 9, "p": mcnemar(2, 9)}
    assert picks["rotated"]["paired"] == {"only_here": 0, "only_baseline": 0, "p": 1.0}
    assert document["baseline"] == "base"
    assert [task["task"] for task in document["task_conditions"]] == ["pick", "sums"]

    shown = tqtool(*arguments, "--baseline", "base", "--html", tmp_path / "page.html")
    assert shown.code == 0, shown.err
    cell = f"35.0 [{100 * low:.1f}, {100 * high:.1f}], p {mcnemar(2, 9):.2g}"
    page = (tmp_path / "page.html").read_text()
    for text in (shown.out, page):
        assert cell in text
        assert "pick templated" in text
        assert "EOS at once 100 %" in text
        assert "McNemar test against base" in text
        assert "items sha256 111111111111," in text
    assert "% right</text>" in page  # the third picture


def test_tasks_alone_can_be_compared(tqtool, models, tmp_path):
    one = results(tmp_path / "t1.json", models["source"], BASE)
    two = results(tmp_path / "t2.json", models["q4"], OTHER)
    answer = tqtool(one, two, "--html", tmp_path / "page.html")
    assert answer.code == 0, answer.err
    assert "p " not in answer.out.split("% right")[0]
    page = (tmp_path / "page.html").read_text()
    assert "nats per token</text>" not in page
    assert "% right</text>" in page


def test_tasks_that_cannot_be_compared_are_refused(tqtool, models, tmp_path):
    one = results(tmp_path / "t1.json", models["source"], BASE)
    twin = [f"{name}={report(tmp_path / f'{name}.json', models['q4'], 0.5)}" for name in ("x", "y")]
    settings = {"formats": ["templated"], "items": 21, "max_tokens": 8}
    damaged = json.loads(one.read_text())
    damaged["outcomes"][0]["flags"]["acc"] = False
    (tmp_path / "damaged.json").write_text(json.dumps(damaged))
    for code, arguments, message in (
        (
            2,
            (one, results(tmp_path / "i.json", models["q4"], OTHER, items="2" * 64)),
            "task pick on items 222222222222",
        ),
        (2, (one, results(tmp_path / "s.json", models["q4"], OTHER, settings=settings)), "'max_tokens': 8"),
        (2, (one, results(tmp_path / "o.json", models["source"], OTHER)), "a second result of task pick for one arm"),
        (2, (*twin, results(tmp_path / "t.json", models["q4"], OTHER)), "several arms have these weights"),
        (2, (one, "--baseline", "nobody"), "--baseline nobody: no such arm"),
        (2, (one, twin[0], "--baseline", "x"), "--baseline x: has no task result"),
        (2, (twin[0], f"x={one}"), "a second arm called 'x', and of other weights"),
        (4, (tmp_path / "damaged.json",), "do not have the hash"),
    ):
        answer = tqtool(*arguments)
        assert (answer.code, message in answer.err) == (code, True), answer.err
