"""``--reuse``: the artifact made with it is byte for byte the one made without, and nothing else is taken."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.support.calibrations import calibrate_rows, write_words
from tests.support.command import run
from tests.support.tensors import all_files
from tests.support.tiny_models import Tiny, write_tiny, write_weights
from tqtool.pipeline import calibrated
from tqtool.solve import trellis as solver

TINY = Tiny(layers=2, tied=False)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reuse")
    write_tiny(folder / "source", TINY)
    write_words(folder / "text.txt", 1500)
    calibrate_rows(folder, "plain", rotation_seed=None, rows=6)
    calibrate_rows(folder, "rotated", rotation_seed=42, rows=6)
    return folder


@pytest.fixture
def tqtool(capsys, monkeypatch, work):
    def call(*arguments: object) -> str:
        answer = run(capsys, monkeypatch, arguments[0], work / "source", *arguments[1:], "--check", "none")
        assert answer.code == 0, answer.err
        return answer.err

    return call


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("command", "coded"),
    [
        (("trellis", "-k", "2", "--modules", "all"), 14),
        (("trellis", "-k", "2", "--fake-quant"), 6),
        (("trellis", "-k", "2", "--carrier"), 6),
        (("trellis", "-k", "2", "--ldlq", "rotated"), 15),
        (("convert", "--bits", "3", "--method", "gptq", "--hessians", "plain"), 15),
    ],
    ids=["packed", "fake", "carrier", "ldlq", "gptq"],
)
def test_a_spliced_artifact_is_the_one_made_anew(tqtool, work, tmp_path, command, coded):
    verb, *options = [work / part if part in ("plain", "rotated") else part for part in command]
    tqtool(verb, tmp_path / "first", *options)
    err = tqtool(verb, tmp_path / "second", *options, "--reuse", tmp_path / "first")
    assert f"note: {coded} tensors reused" in err
    assert contents(tmp_path / "second") == contents(tmp_path / "first")


def test_only_what_is_equal_is_taken(tqtool, work, tmp_path):
    """Another rate, window, layout, order of channels, seed, form or Hessian weight: nothing is taken."""
    axis = ("--layout", "axis")
    tqtool("trellis", tmp_path / "shelf", "-k", "2", *axis, "--ldlq", work / "rotated")
    shelf = ("--reuse", tmp_path / "shelf")
    for number, options in enumerate(
        (
            ("-k", "3", *axis, "--ldlq", work / "rotated"),
            ("-k", "2", *axis, "--warmup", "16", "--ldlq", work / "rotated"),
            ("-k", "2", *axis, "--code", "1mad", "--ldlq", work / "rotated"),
            ("-k", "2", *axis, "--ldlq", work / "rotated", "--sink-weight", "3"),
            ("-k", "2", *axis, "--ldlq", work / "rotated", "--fold-channels"),
            ("-k", "2", "--ldlq", work / "rotated"),
            ("-k", "2"),
            ("-k", "2", "--rotation-seed", "7"),
            ("-k", "2", *axis, "--fake-quant", "--ldlq", work / "rotated"),
        )
    ):
        tqtool("trellis", tmp_path / str(number), *options, *shelf)
        taken = [row for row in keys(tmp_path / str(number)) & keys(tmp_path / "shelf") if "mlp" in row[0]]
        assert not taken, options
    tqtool("trellis", tmp_path / "axis", "-k", "2", *axis, "--down-axis", "in", "--ldlq", work / "rotated", *shelf)
    shared = {module for module, _ in keys(tmp_path / "axis") & keys(tmp_path / "shelf")}
    assert {module.rpartition(".")[2] for module in shared} >= {"gate_proj", "up_proj"}
    assert not any(module.endswith("down_proj") for module in shared)


@pytest.mark.parametrize(
    "command",
    [("trellis", "-k", 2, "--ldlq", "rotated"), ("convert", "--bits", 3, "--method", "gptq", "--hessians", "plain")],
    ids=["ldlq", "gptq"],
)
def test_other_dampings_are_other_tensors(tqtool, work, tmp_path, monkeypatch, command):
    verb, *options = [work / part if part in ("plain", "rotated") else part for part in command]
    tqtool(verb, tmp_path / "first", *options)
    monkeypatch.setattr(calibrated, "FIRST_DAMPING_DOWN", 1.0)
    err = tqtool(verb, tmp_path / "second", *options, "--reuse", tmp_path / "first")
    assert "note: 13 tensors reused" in err
    changed = {module for module, _ in keys(tmp_path / "second") - keys(tmp_path / "first")}
    assert changed == {f"model.layers.{layer}.mlp.down_proj" for layer in range(TINY.layers)}
    tqtool(verb, tmp_path / "anew", *options)
    assert contents(tmp_path / "second") == contents(tmp_path / "anew")


def keys(folder: Path) -> set[tuple[str, str]]:
    manifest = json.loads((folder / "tqtool" / "manifest.json").read_text())
    return {(record["module"], record["key"]) for record in manifest["tensors"] if record["key"]}


def test_a_changed_gain_changes_the_key(tqtool, work, tmp_path, capsys, monkeypatch):
    """The weight is the same; the norm that is folded into it is not."""
    tqtool("trellis", tmp_path / "first", "-k", "2")
    other = write_tiny(tmp_path / "other", TINY)
    tensors = TINY.tensors()
    tensors["model.layers.0.post_attention_layernorm.weight"][5] += 1
    write_weights(other, tensors)
    arguments = ("trellis", other, tmp_path / "second", "-k", "2", "--check", "none", "--reuse", tmp_path / "first")
    assert "note: 4 tensors reused" in run(capsys, monkeypatch, *arguments).err
    changed = {module for module, _ in keys(tmp_path / "second") - keys(tmp_path / "first")}
    assert changed == {"model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"}


def test_mixing_two_rates_codes_nothing(tqtool, tmp_path):
    for k in (2, 3):
        tqtool("trellis", tmp_path / f"k{k}", "-k", k)
    shelves = ("--reuse", tmp_path / "k2", "--reuse", tmp_path / "k3")
    (tmp_path / "map.json").write_text(json.dumps({"k": {"model.layers.0.mlp.*": 3, "*.up_proj": 2}}))
    err = tqtool("trellis", tmp_path / "mix", "-k", "2", "--k-map", tmp_path / "map.json", *shelves)
    assert "note: 6 tensors reused" in err
    modules = json.loads((tmp_path / "mix" / "config.json").read_text())["trellis"]["modules"]
    rates = {path.removeprefix("model.layers."): spec["k"] for path, spec in modules.items()}
    assert rates == {
        f"{i}.mlp.{p}_proj": 3 if (i, p) in ((0, "gate"), (0, "down")) else 2
        for i in (0, 1)
        for p in ("gate", "up", "down")
    }


def test_a_damaged_shelf_is_refused_and_nothing_is_left(tqtool, work, tmp_path, capsys, monkeypatch):
    tqtool("trellis", tmp_path / "first", "-k", "2")
    shard = tmp_path / "first" / "model.safetensors"
    data = bytearray(shard.read_bytes())
    data[-50_000:] = bytes(50_000)
    shard.write_bytes(data)
    before = all_files(tmp_path)
    arguments = (
        "trellis",
        work / "source",
        tmp_path / "out",
        "-k",
        "2",
        "--check",
        "none",
        "--reuse",
        tmp_path / "first",
    )
    answer = run(capsys, monkeypatch, *arguments)
    assert (answer.code, "its bytes are not those of its manifest" in answer.err) == (4, True), answer.err
    assert all_files(tmp_path) == before
    answer = run(capsys, monkeypatch, *arguments[:-1], work / "source")
    assert answer.code == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ('{"k": {"model.layers.9.mlp.up_proj": 3}}', "matches no coded module"),
        ('{"k": {"*": 5}}', "expected 1, 2, 3 or 4"),
        ('{"k": {"*": 2.0}}', "expected 1, 2, 3 or 4"),
        ('{"k": []}', 'expected {"k"'),
        ('{"rates": {}}', 'expected {"k"'),
    ],
)
def test_a_malformed_map_is_refused(work, tmp_path, capsys, monkeypatch, text, message):
    (tmp_path / "map.json").write_text(text)
    answer = run(
        capsys, monkeypatch, "trellis", work / "source", tmp_path / "out", "--k-map", tmp_path / "map.json", "--dry-run"
    )
    assert (answer.code, message in answer.err) == (2, True), answer.err


def test_a_run_that_is_killed_goes_on_from_its_journal(work, tmp_path, capsys, monkeypatch):
    """Stopped inside the fifth of 14 coded tensors: four are kept, the rest is coded, the bytes are the same."""
    options = ("-k", "2", "--modules", "all", "--check", "none")
    assert run(capsys, monkeypatch, "trellis", work / "source", tmp_path / "whole", *options).code == 0
    done = []
    encode = solver.encode_weight

    def stopping(name, *arguments, **named):
        if len(done) == 4:
            raise KeyboardInterrupt
        done.append(name)
        return encode(name, *arguments, **named)

    again = ("trellis", work / "source", tmp_path / "out", *options, "--journal", tmp_path / "journal")
    with monkeypatch.context() as patch:
        patch.setattr(solver, "encode_weight", stopping)
        run(capsys, patch, *again)
    kept = list((tmp_path / "journal").iterdir())
    assert len(kept) == 4
    assert not (tmp_path / "out").exists()
    shutil.copytree(tmp_path / "journal", tmp_path / "copy")
    answer = run(capsys, monkeypatch, *again)
    assert (answer.code, "note: 4 tensors reused" in answer.err) == (0, True), answer.err
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert not (tmp_path / "journal").exists()
    damaged = tmp_path / "copy" / kept[0].name
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\xff")
    wrong = run(capsys, monkeypatch, *again[:2], tmp_path / "third", *options, "--journal", tmp_path / "copy")
    assert (wrong.code, "damaged" in wrong.err) == (4, True), wrong.err


@pytest.mark.parametrize("verb", ["convert", "trellis"])
def test_a_place_for_the_journal_is_checked_while_planning(work, tmp_path, capsys, monkeypatch, verb):
    (tmp_path / "file").write_text("mine")
    options = ("--bits", "4") if verb == "convert" else ("-k", "2")
    for place, code, message in (
        (tmp_path / "file", 2, f"--journal {tmp_path / 'file'}: is a file"),
        (tmp_path / "file" / "inside", 4, "cannot be written"),
    ):
        answer = run(
            *(capsys, monkeypatch, verb, work / "source", tmp_path / "out", *options),
            *("--journal", place, "--dry-run"),
        )
        assert (answer.code, message in answer.err) == (code, True), answer.err
    assert (tmp_path / "file").read_text() == "mine"


def test_only_a_journal_is_taken_for_one(work, tmp_path, capsys, monkeypatch):
    """It is removed in the end: a model, an artifact or a folder of anything else is refused, and nothing touched."""
    options = ("-k", "2", "--modules", "*.0.mlp.down_proj", "--check", "none")
    model = shutil.copytree(work / "source", tmp_path / "model")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "backup.safetensors").write_bytes(b"mine")
    before = all_files(tmp_path)
    for place, message in (
        (model, "is not empty and no journal, it holds LICENSE"),
        (tmp_path / "mine", "is not empty and no journal, it holds backup.safetensors"),
        (tmp_path / "out", "lie in one another"),
        (tmp_path / "out" / "journal", "lie in one another"),
        (tmp_path, "lie in one another"),
    ):
        answer = run(capsys, monkeypatch, "trellis", model, tmp_path / "out", *options, "--journal", place)
        assert (answer.code, f"--journal {place}: " in answer.err, message in answer.err) == (2, True, True), answer.err
        assert all_files(tmp_path) == before


def test_what_another_job_kept_stays(work, tmp_path, capsys, monkeypatch):
    options = ("-k", "2", "--modules", "*.0.mlp.down_proj", "--check", "none", "--journal", tmp_path / "journal")
    (tmp_path / "journal").mkdir()
    other = tmp_path / "journal" / f"{'a' * 64}.safetensors"
    other.write_bytes(b"of another job")
    assert run(capsys, monkeypatch, "trellis", work / "source", tmp_path / "out", *options).code == 0
    assert list((tmp_path / "journal").iterdir()) == [other]


def test_what_cannot_be_reused_is_refused_while_planning_by_the_options_name(work, tmp_path, capsys, monkeypatch):
    for folder, code, message in (
        (work / "source", 4, f"--reuse {work / 'source'}: has no tqtool/manifest.json"),
        (tmp_path / "gone", 2, f"--reuse {tmp_path / 'gone'}: no such folder"),
    ):
        answer = run(
            *(capsys, monkeypatch, "trellis", work / "source", tmp_path / "out", "-k", "2"),
            *("--reuse", folder, "--dry-run"),
        )
        assert (answer.code, message in answer.err, "verify" in answer.err) == (code, True, False), answer.err
