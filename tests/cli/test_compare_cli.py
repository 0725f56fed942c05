"""``tqtool compare``: weighing, the frontier, refusals, one page that needs nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import Answer, run
from tests.support.conversions import Q4, convert
from tests.support.tiny_models import Tiny, write_tiny

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
    body = {**CONDITIONS, "teacher_ppl": 23.4, "model": str(model), "kl": estimate, "ppl": 20 + 10 * kl}
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
    assert arms["q4"]["kl_se"] == 0.02
    sizes = [arm["weight_bytes"] for arm in json.loads(answer.out)["arms"]]
    assert sizes == sorted(sizes)


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


@pytest.mark.parametrize("key", ["teacher", "windows", "context", "teacher_ppl"])
def test_scores_of_other_conditions_are_refused(tqtool, models, tmp_path, key):
    one = report(tmp_path / "q4.json", models["q4"], 0.5)
    two = report(tmp_path / "r.json", models["rotated"], 0.6, **{key: 99})
    answer = tqtool(one, two)
    assert (answer.code, f"{key} is 99, of q4 it is" in answer.err) == (2, True), answer.err


def test_what_cannot_be_compared_is_named(tqtool, models, tmp_path):
    good = report(tmp_path / "q4.json", models["q4"], 0.5)
    (tmp_path / "text.json").write_text("{")
    (tmp_path / "other.json").write_text('{"kl": 5}')
    (tmp_path / "empty").mkdir()
    gone = report(tmp_path / "gone.json", tmp_path / "nowhere", 0.5)
    for arguments, message in (
        ((tmp_path / "none.json",), "cannot be read"),
        ((tmp_path / "text.json",), "not JSON"),
        ((tmp_path / "other.json",), "not a report of `tqtool eval kl --json`"),
        ((tmp_path / "empty",), "kl.json: cannot be read"),
        ((gone,), "is not there, so it cannot be weighed"),
        ((good, good), "a second arm called 'q4'"),
        ((report(tmp_path / "nan.json", models["q4"], float("nan")),), "not finite numbers"),
        ((good, "--html", gone), "exists already"),
    ):
        answer = tqtool(*arguments)
        assert (answer.code, message in answer.err) == (2, True), answer.err
