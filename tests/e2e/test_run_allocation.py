"""``allocation:`` in a recipe: one run from calibration to the measured mix, on tiny models; kills, refusals, disk."""

from __future__ import annotations

import json
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support.calibrations import write_words
from tests.support.command import Answer, run
from tests.support.tensors import raw_tensors
from tests.support.tiny_models import Tiny, write_tiny
from tqtool.artifact.reader import read_manifest
from tqtool.evals.kl import score_kl
from tqtool.formats.kmap import read_kmap
from tqtool.formats.sensitivity_file import read_sensitivity
from tqtool.formats.teacher import open_dump
from tqtool.pipeline import preflight
from tqtool.pipeline.reuse import Journal
from tqtool.runtime.load import load

pytestmark = pytest.mark.usefixtures("reload_by_fork")

TRELLIS = """\
name: mix
source: {work}/source
rotation: {{seed: 42}}
calibration: {{text: {work}/text.txt, rows: 4, context: 64}}
allocation: {{candidates: [4, 2, 3], k_budget: 2.9, text: {work}/text.txt, windows: 2, context: 40}}
quantize: {{verb: trellis, ldlq: true, fold_channels: true, warmup: 16}}
evaluation: {{text: {work}/text.txt, windows: 3, context: 32}}
"""
CONVERT = """\
name: mix
source: {work}/source
allocation: {{candidates: [3, 6], target_bpw: 5.0, text: {work}/text.txt, windows: 2, context: 40,
  keep_candidates: true}}
quantize: {{verb: convert, group_size: 64}}
"""
ROUNDING = 1e-13
"""As tests/e2e/test_sensitivity.py has it."""


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("allocation")
    write_tiny(folder / "source", Tiny(layers=2, tied=False))
    write_words(folder / "text.txt", 1200)
    (folder / "copy.txt").write_text((folder / "text.txt").read_text() + " w5")  # another file, the same start
    (folder / "trellis.yaml").write_text(TRELLIS.format(work=folder))
    (folder / "convert.yaml").write_text(CONVERT.format(work=folder))
    return folder


@pytest.fixture(scope="module")
def whole(work: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of the trellis recipe."""
    out = tmp_path_factory.mktemp("whole") / "out"
    done = subprocess.run(command(work, out), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return out


def command(work: Path, out: Path, *options: str) -> list[str]:
    return [str(Path(sys.executable).with_name("tqtool")), "run", str(work / "trellis.yaml"), str(out), *options]


def written_kl(folder: Path, dump: Path) -> float:
    return score_kl(load(folder, compute="expand"), open_dump(dump), lambda windows: None).kl.mean


# ------------------------------------------------------------------------------------------------- from end to end
@pytest.mark.slow
def test_one_run_measures_allocates_writes_and_measures_again(whole):
    artifact = whole / "artifact"
    mix = json.loads((whole / "mix.json").read_text())
    assert (mix["mean_bits"] <= 2.9, mix["reference"], mix["reference_bits"], mix["uniform_bits"]) == (
        True,
        "high",
        4,
        2,
    )
    assert abs(mix["measured_kl"] - written_kl(artifact, whole / "measuring.safetensors")) <= ROUNDING
    assert json.loads((whole / "kl.json").read_text())["kl"]["mean"] == pytest.approx(
        written_kl(artifact, whole / "teacher.safetensors"), abs=ROUNDING
    )
    rates = read_kmap(artifact / "tqtool" / "kmap.json")
    request = read_manifest(artifact).request
    assert (request["k_map"], request["fold_channels"]) == (rates, True)
    assert len(set(rates.values())) > 1
    report = json.loads((artifact / "tqtool" / "kmap.json").read_text())["report"]
    assert report["predicted_kl"] == pytest.approx(mix["predicted_kl"], abs=ROUNDING)
    assert report["mean_bits"] == pytest.approx(mix["mean_bits"], rel=1e-15)
    sensitivity = read_sensitivity(artifact / "tqtool" / "sensitivity.json")
    assert (sensitivity.candidate_bits, sensitivity.reference) == ([2, 3, 4], "high")
    assert {name for group in sensitivity.groups for name in group.modules} == set(rates)
    inside = (artifact / "tqtool" / "recipe.yaml").read_text()
    assert "text: text.txt" in inside
    assert str(whole.parent) not in inside
    left = {path.name for path in whole.iterdir()}
    wanted = {"recipe.yaml", "calibration", "artifact", "teacher.safetensors", "kl.json", "mix.json", "kmap.json"}
    assert left == wanted | {"sensitivity.json", "measuring.safetensors", "source.json"}


@pytest.mark.slow
def test_the_measuring_windows_are_behind_the_evaluation_and_no_part_of_the_calibration(work, whole):
    words = [int(word[1:]) for word in (work / "text.txt").read_text().split()]
    dumps = {name: open_dump(whole / f"{name}.safetensors") for name in ("measuring", "teacher")}
    assert (dumps["measuring"].info.skip, dumps["teacher"].info.skip) == (3, 0)  # 3 x 32 tokens: 3 windows of 40
    read = {
        name: np.concatenate([dump.tokens(index) for index in range(dump.info.windows)]) for name, dump in dumps.items()
    }
    np.testing.assert_array_equal(read["teacher"], words[:96])
    np.testing.assert_array_equal(read["measuring"], words[120:200])
    assert json.loads((whole / "mix.json").read_text())["skip"] == 3
    teacher = read_sensitivity(whole / "sensitivity.json").teacher
    assert teacher is not None
    assert teacher.skip == 3


@pytest.mark.slow
def test_the_artifact_is_made_of_the_candidates_tensors(work, tmp_path, capsys, monkeypatch):
    """Nothing is coded a second time: what is made anew goes through a journal; that of the artifact stays empty."""
    made: list[str] = []
    keep = Journal.keep

    def counted(journal: Journal, key: str, *rest: Any) -> None:
        made.append(journal._path(key).parent.name)
        keep(journal, key, *rest)

    monkeypatch.setattr(Journal, "keep", counted)
    arguments = ("--set", "evaluation=null", "--set", "allocation.windows=1")
    answer = run(capsys, monkeypatch, "run", work / "trellis.yaml", tmp_path / "out", *arguments)
    assert answer.code == 0, answer.err
    assert set(made) == {"k2.journal", "k3.journal", "k4.journal"}


@pytest.mark.slow
def test_affine_candidates_keep_the_target_and_can_be_kept(work, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    answer = run(capsys, monkeypatch, "run", work / "convert.yaml", out, "--json")
    assert answer.code == 0, answer.err
    mix = json.loads(answer.out)["mix"]
    assert mix["uniform_bits"] == 3
    rows = [record for record in read_manifest(out / "artifact").tensors if record.quantizer.startswith("affine")]
    stored = 8 * sum(stored.size_bytes for record in rows for stored in record.stored)
    assert stored <= 5.0 * sum(record.parameters for record in rows)
    assert len({record.quantizer for record in rows}) > 1
    assert sorted(path.name for path in (out / "candidates").iterdir()) == ["b3", "b6"]
    assert abs(mix["measured_kl"] - written_kl(out / "artifact", out / "measuring.safetensors")) <= ROUNDING
    again = run(capsys, monkeypatch, "run", work / "convert.yaml", out, "--resume")
    assert (again.code, "the mix, as written" in again.out, "mix: found" in again.out) == (0, True, True)


# ---------------------------------------------------------------------------------------------------- interruptions
@pytest.mark.slow
def test_killed_at_random_moments_it_ends_in_the_same_bytes(work, whole, tmp_path):
    out, chance = tmp_path / "out", random.Random(11)
    for file in (
        "calibration/progress.json",
        "candidates/k2.journal",
        "candidates/k2/tqtool/manifest.json",
        "candidates/k3.journal",
        "candidates/k4/tqtool/manifest.json",
        "measuring.safetensors",
        "sensitivity.json.progress",
        "sensitivity.json",
        "journal",
        "artifact",
        "mix.json",
        "teacher.safetensors",
    ):
        with subprocess.Popen(
            command(work, out, "--resume"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as process:
            deadline = time.monotonic() + 120
            while process.poll() is None and not (out / file).exists() and time.monotonic() < deadline:
                time.sleep(0.005)
            time.sleep(chance.random() * 0.2)
            process.send_signal(signal.SIGKILL)
    done = subprocess.run(command(work, out, "--resume"), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert raw_tensors(out / "artifact") == raw_tensors(whole / "artifact")
    for name in ("artifact/tqtool/manifest.json", "sensitivity.json", "kmap.json", "mix.json"):
        assert (out / name).read_bytes() == (whole / name).read_bytes(), name
    assert not list(out.glob("*candidates*"))


@pytest.mark.slow
def test_a_kill_while_the_candidates_are_removed_leaves_no_half_of_one(work, whole, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    (out / ".candidates.removed" / "k2").mkdir(parents=True)
    (out / "mix.json").unlink()
    answer = run(capsys, monkeypatch, "run", work / "trellis.yaml", out, "--resume", "--json")
    assert answer.code == 0, answer.err
    report = json.loads(answer.out)
    assert (report["steps"]["artifact"], report["steps"]["mix"]) == ("found", "done")
    assert "uniform_kl" not in report["mix"]  # that candidate is gone
    assert not (out / ".candidates.removed").exists()


@pytest.mark.slow
def test_what_another_run_left_is_not_taken(work, whole, tmp_path, capsys, monkeypatch):
    """A candidate, a dump, a measurement and scores of other runs under the names of this one."""

    def resume(out: Path) -> Answer:
        return run(capsys, monkeypatch, "run", work / "trellis.yaml", out, "--resume")

    out, other = tmp_path / "out", tmp_path / "other"
    changes = ("--set", "allocation.candidates=[2, 4]", "--set", "allocation.k_budget=3.1")
    answer = run(capsys, monkeypatch, "run", work / "trellis.yaml", other, *changes)
    assert answer.code == 0, answer.err
    for name in ("kl.json", "mix.json"):  # of the same dumps, and of another artifact
        shutil.copytree(whole, out)
        shutil.copy(other / name, out / name)
        answer = resume(out)
        assert (answer.code, f"{name}: scores of another artifact" in answer.err) == (4, True), answer.err
        shutil.rmtree(out)
    shutil.copytree(whole, out)
    assert resume(out).code == 0
    (out / "mix.json").write_text("{}")
    assert ("mix.json: damaged" in resume(out).err, resume(out).code) == (True, 4)
    (out / "mix.json").unlink()
    shutil.copy(out / "teacher.safetensors", out / "measuring.safetensors")
    answer = resume(out)
    assert (answer.code, "measuring.safetensors: a dump of another" in answer.err) == (4, True), answer.err
    (out / "sensitivity.json").write_bytes((out / "sensitivity.json").read_bytes() + b" ")
    answer = resume(out)
    assert (answer.code, "sensitivity.json: not the one in" in answer.err) == (4, True), answer.err
    for gone in ("artifact", "measuring.safetensors", "sensitivity.json"):
        shutil.rmtree(out / gone) if (out / gone).is_dir() else (out / gone).unlink()
    shutil.copytree(whole / "artifact", out / "candidates" / "k2")
    answer = resume(out)
    assert (answer.code, "k2: made by another recipe" in answer.err) == (4, True), answer.err


# -------------------------------------------------------------------------------------------------- what is refused
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("allocation.skip=0", "the evaluation reads the first 3 windows"),
        ("allocation.skip=2", "the evaluation reads the first 3 windows"),  # by 16 tokens
        ("allocation.text={work}/copy.txt", "is part of the evaluation: the score would be flattered"),
        ("allocation.skip=23", "is part of the calibration text"),
        ("allocation.windows=100", "100 windows of 40 behind 3 need"),
        ("allocation.text=/nope", "/nope"),
        ("allocation.k_budget=1.9", "the lowest candidate has 2 bits"),
        ("allocation.k_budget=null", "one budget"),
        ("allocation.target_bpw=4", "one budget"),
        ("allocation={candidates: [2, 3], target_bpw: 4, text: t}", "k_budget is for verb: trellis"),
        ("allocation.candidates=[3]", "at least 2 items"),
        ("allocation.candidates=[3, 3]", "one of each rate"),
        ("allocation.candidates=[2, 6]", "trellis has 1, 2, 3, 4"),
        ("quantize.k_map={'*': 3}", "allocation decides the bits"),
        ("quantize.form=carrier", "form: packed"),
    ],
)
def test_what_is_wrong_is_found_before_anything_is_written(work, tmp_path, capsys, monkeypatch, change, message):
    arguments = ("run", work / "trellis.yaml", tmp_path / "out", "--set", change.replace("{work}", str(work)))
    answer = run(capsys, monkeypatch, *arguments)
    assert (answer.code, message in answer.err) == (2, True), answer.err
    assert not (tmp_path / "out").exists()


def test_a_target_below_the_lowest_candidate_is_found_before_the_work(work, tmp_path, capsys, monkeypatch):
    arguments = ("run", work / "convert.yaml", tmp_path / "out", "--set", "allocation.target_bpw=3.4")
    answer = run(capsys, monkeypatch, *arguments)
    assert (answer.code, "the 3-bit candidate stores 3." in answer.err) == (2, True), answer.err
    assert not (tmp_path / "out").exists()


def test_disk_for_the_candidates_is_counted_before_the_work(work, tmp_path, capsys, monkeypatch):
    """Enough for an artifact, its journal and all else but the candidates is not enough for a run that makes them."""
    needed: dict[str, float] = {}
    for name, change in (("all", "name=mix"), ("two", "allocation.candidates=[2, 4]"), ("none", "allocation=null")):
        arguments = ("run", work / "trellis.yaml", tmp_path / name, "--set", change)
        monkeypatch.setattr(preflight.shutil, "disk_usage", lambda parent: SimpleNamespace(free=1000))
        answer = run(capsys, monkeypatch, *arguments)
        found = re.search(r"the run needs ([0-9.]+) MB, 1.0 kB are free", answer.err)
        assert (answer.code, found is not None) == (4, True), answer.err
        needed[name] = float(found[1]) if found else 0.0
        assert not (tmp_path / name).exists()
    smallest = 2 * 3 * 128 * 256 * 2 / 8 / 1e6  # the MLPs of both layers at 2 bits: less than a candidate
    assert needed["none"] + smallest < needed["two"] < needed["all"] - smallest


def test_dry_run_prints_every_step(work, tmp_path, capsys, monkeypatch):
    answer = run(capsys, monkeypatch, "run", work / "trellis.yaml", tmp_path / "out", "--dry-run")
    steps = [line for line in answer.out.splitlines() if line.startswith("# ")]
    assert [line.split(". ")[1].split(":")[0] for line in steps] == [
        "calibration",
        *["candidate"] * 3,
        "measuring dump",
        "sensitivity",
        "k-map",
        "artifact",
        "verify",
        "mix",
        "candidates",
        "evaluation",
    ]
    assert "candidates/k2/" in answer.out
    structured = json.loads(
        run(capsys, monkeypatch, "run", work / "convert.yaml", tmp_path / "out", "--dry-run", "--json").out
    )
    assert structured["recipe"]["allocation"]["candidates"] == [3, 6]
    assert "candidate: convert -> candidates/b6/, verified" in structured["steps"]
    assert not (tmp_path / "out").exists()
