"""``tqtool run``: every shipped recipe on a tiny model, equal bytes twice, and after kills at random moments."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.calibrations import write_words
from tests.support.command import run
from tests.support.tensors import raw_tensors
from tests.support.tiny_models import Tiny, write_tiny
from tqtool.artifact.leftovers import Hold

pytestmark = pytest.mark.usefixtures("reload_by_fork")

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipes")
    write_tiny(folder / "source", Tiny(layers=3, tied=False))
    write_words(folder / "text.txt", 2500)
    return folder


def settings(work: Path, recipe: Path) -> list[str]:
    changes = [f"source={work / 'source'}"]
    text = recipe.read_text()
    if "calibration:" in text:
        changes += [f"calibration.text={work / 'text.txt'}", "calibration.rows=4", "calibration.context=100"]
    if "allocation:" in text:
        changes += [f"allocation.text={work / 'text.txt'}", "allocation.windows=2", "allocation.context=48"]
    changes += [f"evaluation.text={work / 'text.txt'}", "evaluation.windows=2", "evaluation.context=64"]
    return [part for change in changes for part in ("--set", change)]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_recipes_run(work, tmp_path, capsys, monkeypatch, recipe):
    arguments = ("run", recipe, tmp_path / "out", *settings(work, recipe))
    answer = run(capsys, monkeypatch, *arguments, "--json")
    assert answer.code == 0, answer.err
    report = json.loads(answer.out)
    assert report["kl"]["kl"]["mean"] > 0
    assert (tmp_path / "out" / "recipe.yaml").is_file()
    inside = (tmp_path / "out" / "artifact" / "tqtool" / "recipe.yaml").read_text()
    assert "source: source" in inside
    assert str(tmp_path) not in inside
    assert str(work) not in inside
    assert not (tmp_path / "out" / "journal").exists()
    assert not list((tmp_path / "out").glob("*candidates*"))
    assert run(capsys, monkeypatch, *arguments).code == 2
    again = run(capsys, monkeypatch, *arguments, "--resume", "--json")
    assert set(json.loads(again.out)["steps"].values()) == {"found"}
    other = run(capsys, monkeypatch, *arguments, "--resume", "--set", "name=b")
    assert (other.code, "another recipe was begun here" in other.err) == (2, True)


@pytest.mark.slow
def test_killed_at_random_moments_it_ends_in_the_same_bytes(work, tmp_path, capsys, monkeypatch):
    recipe = ROOT / "recipes" / "trellis-k3-ldlq.yaml"
    assert run(capsys, monkeypatch, "run", recipe, tmp_path / "whole", *settings(work, recipe)).code == 0
    command = [str(Path(sys.executable).with_name("tqtool")), "run", str(recipe), str(tmp_path / "out")]
    command += [*settings(work, recipe), "--resume"]
    chance = random.Random(3)
    for file in ("calibration/progress.json", "calibration/calibration.json", "journal"):
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            deadline = time.monotonic() + 90
            while process.poll() is None and not (tmp_path / "out" / file).exists() and time.monotonic() < deadline:
                time.sleep(0.005)
            time.sleep(chance.random() * 0.2)
            process.send_signal(signal.SIGKILL)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert raw_tensors(tmp_path / "out" / "artifact") == raw_tensors(tmp_path / "whole" / "artifact")
    manifests = [(tmp_path / name / "artifact" / "tqtool" / "manifest.json").read_bytes() for name in ("whole", "out")]
    assert manifests[0] == manifests[1]


def test_dry_run_prints_the_resolved_recipe(work, tmp_path, capsys, monkeypatch):
    recipe = ROOT / "recipes" / "rtn4.yaml"
    arguments = ("run", recipe, tmp_path / "out", "--dry-run", *settings(work, recipe), "--set", "quantize.bits=3")
    answer = run(capsys, monkeypatch, *arguments)
    assert (answer.code, "bits: 3" in answer.out, "top: 2048" in answer.out) == (0, True, True)
    for form in ((), ("--json",)):
        answer = run(capsys, monkeypatch, *arguments, *form, "--set", "evaluation.text=/nope")
        assert (answer.code, "/nope" in answer.err, "bits" in answer.out) == (2, True, True), answer.err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_two_runs_in_one_folder(work, tmp_path, capsys, monkeypatch):
    recipe = ROOT / "recipes" / "rtn4.yaml"
    out = tmp_path / "parent" / "out"
    arguments = ("run", recipe, out, *settings(work, recipe))
    out.mkdir(parents=True)
    first = Hold.take(out)
    assert first is not None
    answer = run(capsys, monkeypatch, *arguments)
    assert (answer.code, "another run works here" in answer.err) == (2, True), answer.err
    assert not list(out.iterdir())
    first.release()
    assert run(capsys, monkeypatch, *arguments).code == 0
    link = tmp_path / "link"
    link.symlink_to(out)
    again = ("run", recipe, link, *settings(work, recipe), "--resume")
    assert run(capsys, monkeypatch, *again).code == 0
    first = Hold.take(out)
    assert run(capsys, monkeypatch, *again).code == 2


def test_what_is_wrong_is_found_before_anything_is_written(work, tmp_path, capsys, monkeypatch):
    recipe = ROOT / "recipes" / "gptq4.yaml"
    for change, message in (
        ("evaluation.text=/nope", "/nope"),
        ("evaluation.windows=100000", "100000 windows"),
        ("quantize.bits=99", "99 bits"),
        ("quantize.rules=['nomatch*=bits:8']", "matches no module"),
        ("calibration.text=/nope", "/nope"),
        ("calibration.rows=24", "is part of the calibration text"),
    ):
        arguments = ("run", recipe, tmp_path / "out", *settings(work, recipe), "--set", change)
        answer = run(capsys, monkeypatch, *arguments)
        assert (answer.code, message in answer.err) == (2, True), (change, answer.err)
        assert not (tmp_path / "out").exists(), change


@pytest.mark.slow
def test_what_another_run_left_is_not_taken(work, tmp_path, capsys, monkeypatch):
    """A foreign calibration, artifact, dump or score, or a damaged one, under the names of a run is refused."""
    recipe = ROOT / "recipes" / "gptq4.yaml"
    mine = ("run", recipe, tmp_path / "mine", *settings(work, recipe))
    assert run(capsys, monkeypatch, *mine).code == 0
    changes = ("quantize.bits=3", "evaluation.windows=3", "calibration.rows=5")
    other = ("run", recipe, tmp_path / "other", *settings(work, recipe))
    other += tuple(part for change in changes for part in ("--set", change))
    assert run(capsys, monkeypatch, *other).code == 0
    for name, later in (
        ("kl.json", ()),
        ("teacher.safetensors", ("kl.json",)),
        ("artifact", ("kl.json",)),
        ("calibration", ("kl.json", "artifact")),
    ):
        shutil.copytree(tmp_path / "mine", tmp_path / name)
        for gone in (name, *later):
            path = tmp_path / name / gone
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        source = tmp_path / "other" / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, tmp_path / name / name)
        answer = run(capsys, monkeypatch, *mine[:2], tmp_path / name, *mine[3:], "--resume")
        assert (answer.code, name in answer.err) == (4, True), (name, answer.err)
    scores = json.loads((tmp_path / "mine" / "kl.json").read_text())
    scores["kl"]["mean"] /= 2
    (tmp_path / "mine" / "kl.json").write_text(json.dumps(scores))
    answer = run(capsys, monkeypatch, *mine, "--resume")
    assert (answer.code, "kl.json: was edited since" in answer.err) == (4, True), answer.err
    for text in ("{", "{}", "[]"):
        (tmp_path / "mine" / "kl.json").write_text(text)
        answer = run(capsys, monkeypatch, *mine, "--resume")
        assert (answer.code, "kl.json: damaged" in answer.err) == (4, True), answer.err
