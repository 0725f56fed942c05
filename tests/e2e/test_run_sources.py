"""A resumed run takes nothing of another source: two fine-tunes, one recipe, files copied as they are."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from tests.support.calibrations import write_words
from tests.support.command import Answer, run
from tests.support.tiny_models import Tiny, write_tiny
from tqtool.recipes.steps import write_sealed
from tqtool.source import checkpoint, hub
from tqtool.source.fingerprint import fingerprint

pytestmark = pytest.mark.usefixtures("reload_by_fork")

PLAIN = """\
name: plain
source: {work}/source
quantize: {{verb: convert, bits: 4, group_size: 64}}
evaluation: {{text: {work}/text.txt, windows: 2, context: 32}}
"""
MIX = """\
name: mix
source: {work}/source
allocation: {{candidates: [3, 4], target_bpw: {target}, text: {work}/text.txt, windows: 2, context: 40,
  reference: {reference}, keep_candidates: true}}
quantize: {{verb: convert, group_size: 64}}
"""
CALIBRATED = """\
name: calibrated
source: {work}/source
calibration: {{text: {work}/text.txt, rows: 2, context: 40}}
quantize: {{verb: convert, bits: 4, group_size: 64, method: gptq}}
"""
ROUNDING = 1e-13
"""As tests/e2e/test_sensitivity.py has it."""

Resume = Callable[[Path], Answer]


class Works:
    """A folder with a source that can be exchanged for its fine-tune, and the command line."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self._capsys, self._monkeypatch = folder, capsys, monkeypatch
        write_tiny(folder / "source", Tiny(layers=1, tied=False))
        write_words(folder / "text.txt", 600)

    def write(self, text: str, **values: object) -> Path:
        recipe = self.folder / "recipe.yaml"
        recipe.write_text(text.format(work=self.folder, **values))
        return recipe

    def run(self, out: Path, *options: str) -> Answer:
        return run(self._capsys, self._monkeypatch, "run", self.folder / "recipe.yaml", out, *options)

    def done(self, out: Path, *options: str) -> Path:
        answer = self.run(out, *options)
        assert answer.code == 0, answer.err
        return out

    def tune(self) -> None:
        """One matrix of the source gets other values; config, names, types, shapes and all else stay."""
        file = self.folder / "source" / "model.safetensors"
        tensors = load_file(file)
        name = "model.layers.0.mlp.down_proj.weight"
        tensors[name] = -tensors[name]
        save_file(tensors, file, metadata={"format": "pt"})


@pytest.fixture
def works(tmp_path, capsys, monkeypatch) -> Works:
    return Works(tmp_path, capsys, monkeypatch)


def reseal(path: Path, scores: dict[str, Any]) -> None:
    """Scores that another run might have left: sealed as it would have."""
    write_sealed(path, {name: value for name, value in scores.items() if name != "seal"})


def refused(answer: Answer, message: str) -> None:
    assert (answer.code, message in answer.err) == (4, True), answer.err


def put(source: Path, target: Path) -> None:
    """``target`` is gone, ``source`` in its place."""
    if target.is_dir():
        shutil.rmtree(target)
    (shutil.copytree if source.is_dir() else shutil.copy)(source, target)


# ------------------------------------------------------------------------------------- the source changes under a run
@pytest.mark.slow
def test_a_run_goes_on_with_the_source_it_was_begun_on_and_no_other(works, tmp_path):
    works.write(PLAIN)
    out = works.done(tmp_path / "out")
    (out / "kl.json").unlink()
    works.tune()
    for _ in range(2):
        answer = works.run(out, "--resume")
        assert (answer.code, "was begun on other weights" in answer.err) == (2, True), answer.err
    (out / "source.json").write_text("{}")
    refused(works.run(out, "--resume"), "source.json: damaged")


@pytest.mark.slow
def test_a_run_of_an_older_version_goes_on_and_says_what_it_does_not_know(works, tmp_path):
    works.write(PLAIN)
    out = works.done(tmp_path / "out")
    (out / "source.json").unlink()
    steps = json.loads(works.run(out, "--resume", "--json").out)["steps"]
    assert "did not note it" in steps["source"]
    assert "source" not in json.loads(works.run(out, "--resume", "--json").out)["steps"]
    for path in out.iterdir():  # killed between the recipe and the note: nothing is there that could be of another
        if path.name != "recipe.yaml":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert "source" not in json.loads(works.run(out, "--resume", "--json").out)["steps"]


# ----------------------------------------------------------------------------------------- files of the run of another
@pytest.mark.slow
def test_artifact_dump_and_scores_of_another_fine_tune_are_not_taken(works, tmp_path):
    """One recipe, one layout, one text: nothing but the weights tells what is of which run."""
    works.write(PLAIN)
    own = works.done(tmp_path / "own")
    shutil.copytree(tmp_path / "source", tmp_path / "kept")
    works.tune()
    other = works.done(tmp_path / "other")
    layouts = {checkpoint.open_checkpoint(str(tmp_path / name)).content_hash() for name in ("source", "kept")}
    assert len(layouts) == 1
    put(tmp_path / "kept", tmp_path / "source")
    for name, message in (
        ("artifact", "artifact: made from another source"),
        ("teacher.safetensors", "teacher.safetensors: a dump of another source"),
        ("kl.json", "kl.json: scores of another artifact"),
    ):
        out = tmp_path / f"with-{name}"
        shutil.copytree(own, out)
        put(other / name, out / name)
        refused(works.run(out, "--resume"), message)
        if name != "kl.json":
            (out / "kl.json").unlink()
            refused(works.run(out, "--resume"), message)
    assert set(json.loads(works.run(own, "--resume", "--json").out)["steps"].values()) == {"found"}


@pytest.mark.slow
def test_scores_on_another_dump_are_not_taken_whether_the_dump_is_there_or_not(works, tmp_path):
    """What is scored is the same, bit for bit: only the windows differ, or how many logits are kept."""
    works.write(PLAIN)
    own = works.done(tmp_path / "own")
    for change in ("evaluation.windows=3", "evaluation.top=7"):
        other = works.done(tmp_path / change, "--set", change)
        scores = json.loads((other / "kl.json").read_bytes())
        scores["scored"]["manifest_sha256"] = hashlib.sha256(
            (own / "artifact" / "tqtool" / "manifest.json").read_bytes()  # the other's has another recipe inside
        ).hexdigest()
        out = tmp_path / f"with-{change}"
        shutil.copytree(own, out)
        reseal(out / "kl.json", scores)
        refused(works.run(out, "--resume"), "kl.json: scores on another dump")
        (out / "teacher.safetensors").unlink()
        refused(works.run(out, "--resume"), "kl.json: scores on a dump of another")
        put(other / "teacher.safetensors", out / "teacher.safetensors")
        refused(works.run(out, "--resume"), "teacher.safetensors: a dump of another")
    (own / "teacher.safetensors").unlink()  # large; what was scored on it stays known
    assert set(json.loads(works.run(own, "--resume", "--json").out)["steps"].values()) == {"found"}
    scores = json.loads((own / "kl.json").read_bytes())
    del scores["scored"]
    reseal(own / "kl.json", scores)
    refused(works.run(own, "--resume"), "does not say what it scored")


@pytest.mark.slow
def test_an_artifact_of_the_same_tensors_under_another_config_is_not_taken(works, tmp_path):
    works.write(PLAIN)
    own, config = works.done(tmp_path / "own", "--set", "evaluation=null"), tmp_path / "source" / "config.json"
    stored = config.read_text()
    config.write_text(stored.replace("10000.0", "20000.0"))
    other = works.done(tmp_path / "other", "--set", "evaluation=null")
    config.write_text(stored)
    put(other / "artifact", own / "artifact")
    answer = works.run(own, "--resume", "--set", "evaluation=null")
    refused(answer, "equal tensors, another config.json")


@pytest.mark.slow
def test_an_artifact_under_another_calibration_is_not_taken(works, tmp_path):
    """The text has its old name and other words."""
    works.write(CALIBRATED)
    own = works.done(tmp_path / "own")
    text = tmp_path / "text.txt"
    words = text.read_text()
    text.write_text(" ".join(reversed(words.split())))
    other = works.done(tmp_path / "other")
    text.write_text(words)
    put(other / "artifact", own / "artifact")
    refused(works.run(own, "--resume"), "artifact: made under another calibration")


@pytest.mark.slow
def test_candidates_and_mix_of_another_fine_tune_are_not_taken(works, tmp_path):
    works.write(MIX, target=4.2, reference="high")
    own = works.done(tmp_path / "own")
    shutil.copytree(tmp_path / "source", tmp_path / "kept")
    works.tune()
    other = works.done(tmp_path / "other")
    put(tmp_path / "kept", tmp_path / "source")
    for names, gone, message in (
        (("candidates/b3",), ("artifact", "mix.json"), "b3: made from another source"),
        (("candidates",), ("artifact", "mix.json"), "b3: made from another source"),
        (("candidates/b4",), ("mix.json",), "b4: not the candidate that was measured"),
        (("measuring.safetensors",), (), "measuring.safetensors: a dump of another source"),
        (("mix.json",), (), "mix.json: scores of another artifact"),
    ):
        out = tmp_path / "out"
        shutil.copytree(own, out)
        for name in gone:
            shutil.rmtree(out / name) if (out / name).is_dir() else (out / name).unlink()
        for name in names:
            put(other / name, out / name)
        refused(works.run(out, "--resume"), message)
        shutil.rmtree(out)


# --------------------------------------------------------------------------------------------- one hub id, two commits
@pytest.mark.slow
def test_the_dump_is_of_the_revision_that_was_asked_for(works, tmp_path, monkeypatch):
    """A hub id without a revision is another model than at one: the resolver has both."""
    shutil.copytree(tmp_path / "source", tmp_path / "asked")
    works.tune()
    resolved: list[str | None] = []

    def resolve(repo: str, *, revision: str | None) -> tuple[Path, str | None]:
        resolved.append(revision)
        return (tmp_path / "asked" if revision == "asked" else tmp_path / "source"), None

    for module in (hub, checkpoint):
        monkeypatch.setattr(module, "resolve_snapshot", resolve)
    monkeypatch.setattr("tqtool.runtime.load.resolve_snapshot", resolve)
    works.write(PLAIN.replace("source: {work}/source", "source: some/model\nrevision: asked"))
    out = works.done(tmp_path / "out")
    assert set(resolved) == {"asked"}
    scores = json.loads((out / "kl.json").read_bytes())
    assert Path(scores["teacher"]) == tmp_path / "asked"
    assert scores["scored"]["model_hash"] == fingerprint(checkpoint.open_checkpoint(str(tmp_path / "asked")))
    (out / "kl.json").unlink()
    works.done(out, "--resume")
    assert set(resolved) == {"asked"}


# --------------------------------------------------------------------------------------------- like against like
TABLE, HEAD, LAYER = 320 * 128, 320 * 128, 128 * 128 * 2 + 2 * 64 * 128 + 3 * 128 * 256
"""Weights of embedding, head, and the layer; each is packed in groups of 64, whose scale and bias are half a bit."""


@pytest.mark.slow
@pytest.mark.parametrize("reference", ["high", "low"])
def test_what_a_trivial_map_predicts_is_what_its_artifact_has(works, tmp_path, reference):
    """All groups at the reference: the prediction is the KL of a candidate, and the artifact must be that candidate.

    Both go through the same float32 operations on the same weights if embedding and head are alike in them.
    """
    least = (3.5 * TABLE + 6.5 * HEAD + 3.5 * LAYER) / (TABLE + HEAD + LAYER)
    works.write(MIX, target=7.0 if reference == "high" else least + 1e-6, reference=reference)
    out = works.done(tmp_path / "out")
    mix = json.loads((out / "mix.json").read_bytes())
    assert mix["mean_bits"] == mix["reference_bits"] == mix["uniform_bits"] == (4 if reference == "high" else 3)
    assert mix["predicted_kl"] == mix["reference_kl"]
    assert abs(mix["measured_kl"] - mix["predicted_kl"]) <= ROUNDING
    assert abs(mix["measured_kl"] - mix["uniform_kl"]) <= ROUNDING
    sensitivity = json.loads((out / "sensitivity.json").read_bytes())
    assert mix["reference_kl_standard_error"] == sensitivity["reference_kl"]["standard_error"] > 0


@pytest.mark.slow
def test_the_best_candidate_within_the_budget_is_weighed_with_its_embedding_and_head(works, tmp_path):
    """4 bits in all that is measured fit the budget; with a head of 6 bits they do not."""
    whole = (3.5 * TABLE + 6.5 * HEAD + 4.5 * LAYER) / (TABLE + HEAD + LAYER)
    target = 4.55
    assert 4.5 < target < whole
    works.write(MIX, target=target, reference="high")
    mix = json.loads((works.done(tmp_path / "out") / "mix.json").read_bytes())
    assert mix["uniform_bits"] == 3
