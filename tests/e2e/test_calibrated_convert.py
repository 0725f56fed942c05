"""``convert --method gptq``: Hessians find their modules, sinks weigh what was asked, the wrong folder is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from tests.support.calibrations import calibrate_rows, write_words
from tests.support.command import Answer, run
from tests.support.tensors import raw_tensors
from tests.support.tiny_models import Tiny, write_tiny, write_weights
from tqtool.artifact.verify import verify_artifact
from tqtool.formats.dtypes import DType
from tqtool.formats.hessians import InputMoments, open_calibration
from tqtool.pipeline.calibrated import LONGEST_SINK, capped, combine
from tqtool.solve.gptq import GptqOptions, gptq_quantize

TINY = Tiny(layers=2, tied=False)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source and its calibrations: ``plain`` and ``rotated``."""
    folder = tmp_path_factory.mktemp("gptq")
    write_tiny(folder / "source", TINY)
    write_words(folder / "text.txt", 1500)
    calibrate_rows(folder, "plain", rotation_seed=None)
    calibrate_rows(folder, "rotated", rotation_seed=42)
    return folder


@pytest.fixture
def convert(capsys, monkeypatch, work):
    def call(out: Path, *arguments: object) -> Answer:
        return run(capsys, monkeypatch, "convert", work / "source", out, *arguments, "--check", "none")

    return call


def records(out: Path) -> dict[str, dict]:
    manifest = json.loads((out / "tqtool" / "manifest.json").read_text())
    return {record["module"]: record for record in manifest["tensors"] if record["module"]}


def test_gptq_is_written_and_beats_rounding_on_every_module(work, convert, tmp_path):
    answer = convert(tmp_path / "out", "--bits", "3", "--method", "gptq", "--hessians", work / "plain")
    assert answer.code == 0, answer.err
    rows = records(tmp_path / "out")
    assert rows["model.embed_tokens"]["quantizer"] == "affine3 g64"
    assert rows["model.embed_tokens"]["notes"] == ["rounded to nearest: nothing to calibrate it on"]
    assert "note: 1 module rounded to nearest: nothing to calibrate it on" in answer.err
    assert rows["lm_head"]["quantizer"] == "gptq affine6 g64"
    solved = {module: row for module, row in rows.items() if row["quantizer"].startswith("gptq")}
    assert len(solved) == 2 * 7 + 1
    for row in solved.values():
        assert row["stats"]["proxy_loss"] < row["stats"]["proxy_loss_rtn"]
        assert {"error_rows", "error_rows_rtn", "error_sinks", "error_sinks_rtn"} <= set(row["stats"])
        assert row["stats"]["damping"] >= (0.3 if row["role"] == "down" else 0.03)
    report = verify_artifact(tmp_path / "out")
    assert report.is_good, [check for check in report.checks if check.status == "fail"]
    request = json.loads((tmp_path / "out" / "tqtool" / "manifest.json").read_text())["request"]
    assert request["method"] == "gptq"
    assert request["calibration"]["sha256"] == open_calibration(work / "plain").info.content_sha256()


def test_the_bytes_are_those_of_the_solver_under_that_modules_hessian(work, convert, tmp_path):
    weight_of_sinks = ("--sink-weight", "8")
    arguments = ("--bits", "4", "--method", "gptq", "--hessians", work / "plain", *weight_of_sinks)
    assert convert(tmp_path / "out", *arguments).code == 0
    stored = raw_tensors(tmp_path / "out")
    moments = open_calibration(work / "plain").moments("model.layers.1.mlp.down_proj")
    longest = LONGEST_SINK * np.sqrt(np.trace(moments.matrix.astype(float)))
    sinks = [sink * min(1, longest / np.linalg.norm(sink)) for sink in moments.sinks.astype(float)]
    rows = moments.rows * moments.matrix.astype(float) + 8 * sum(np.outer(sink, sink) for sink in sinks)
    moments = capped(moments)
    hessian = combine(moments, sink_weight=8)
    # A shortened sink is float32: half a unit in its last place, twice in a product, relative to the diagonal.
    size = np.sqrt(np.outer(np.diag(rows), np.diag(rows))) / (moments.rows + len(sinks))
    assert (np.abs(hessian.matrix - rows / (moments.rows + len(sinks))) <= 2.0**-22 * size).all()
    weight = TINY.tensors()["model.layers.1.mlp.down_proj.weight"].astype(np.float32)
    dampings = (0.3, 1.0, 3.0, 10.0)
    options = GptqOptions(bits=4, group_size=64, dtype=DType.BF16, grid="search", dampings=dampings)
    expected = gptq_quantize("w", weight, hessian, options)
    assert stored["model.layers.1.mlp.down_proj.weight"][2] == expected.words.tobytes()
    assert stored["model.layers.1.mlp.down_proj.scales"][2] == expected.scales.astype(ml_dtypes.bfloat16).tobytes()
    other = gptq_quantize("w", weight, combine(moments, sink_weight=0), options)
    assert other.words.tobytes() != expected.words.tobytes()


def test_heavier_sinks_lose_less(work, convert, tmp_path):
    errors = {}
    for weight in (0, 1, 100):
        out = tmp_path / str(weight)
        arguments = ("--bits", "2", "--method", "gptq", "--hessians", work / "plain", "--sink-weight", weight)
        assert convert(out, *arguments).code == 0
        errors[weight] = [row["stats"]["error_sinks"] for row in records(out).values() if "error_sinks" in row["stats"]]
    assert np.mean(errors[100]) < np.mean(errors[1]) < np.mean(errors[0])


def test_a_rotated_calibration_serves_a_rotated_job(work, convert, tmp_path):
    arguments = ("--bits", "3", "--rotate-weights", "--method", "gptq")
    assert convert(tmp_path / "out", *arguments, "--hessians", work / "rotated").code == 0
    rows = records(tmp_path / "out")
    assert all(
        r["stats"]["proxy_loss"] < r["stats"]["proxy_loss_rtn"] for r in rows.values() if "damping" in r["stats"]
    )
    for options, folder, found in (
        ((*arguments,), "plain", "calibrated for identity, the job is rotation.llama with seed 42"),
        ((*arguments, "--rotation-seed", "7"), "rotated", "with seed 42, the job is rotation.llama with seed 7"),
        (("--bits", "3", "--method", "gptq"), "rotated", "the job is identity"),
    ):
        answer = convert(tmp_path / "bad", *options, "--hessians", work / folder)
        assert (answer.code, found in answer.err) == (2, True), answer.err
    assert not (tmp_path / "bad").exists()


def test_what_does_not_belong_together_is_refused(work, convert, tmp_path, capsys, monkeypatch):
    hessians = ("--hessians", work / "plain")
    for arguments, found in (
        (("--bits", "4", "--method", "gptq"), "--method gptq and --hessians DIR belong together"),
        (("--bits", "4", *hessians), "belong together"),
        (("--method", "gptq", *hessians), "packs nothing"),
        (("--mode", "mxfp4", "--method", "gptq", *hessians), "GPTQ is for affine modules"),
        (("--bits", "4", "--method", "awq", *hessians), "--method 'awq' is unknown"),
        (("--bits", "4", "--sink-weight", "2"), "--sink-weight without"),
        (("--bits", "4", "--method", "gptq", *hessians, "--sink-weight", "-1"), "expected a number"),
        (("--bits", "4", "--method", "gptq", *hessians, "--sink-weight", "1e7"), "expected at most 1e+06"),
        (("--bits", "4", "--method", "gptq", "--hessians", tmp_path), "not a finished calibration"),
    ):
        answer = convert(tmp_path / "out", *arguments)
        assert (answer.code, found in answer.err) == (2, True), answer.err
    other = tmp_path / "other"
    shutil.copytree(work / "source", other)
    tensors = TINY.tensors()
    tensors["model.norm.weight"][0] += 1
    write_weights(other, tensors)
    answer = run(capsys, monkeypatch, "convert", other, tmp_path / "out", "--bits", "4", "--method", "gptq", *hessians)
    assert (answer.code, "calibrated on other weights" in answer.err) == (2, True)


def test_ldlq_is_written_in_every_form_and_beats_the_search_alone(work, tmp_path, capsys, monkeypatch):
    forms = {"packed": (), "fake": ("--fake-quant",)}
    for name, form in forms.items():
        arguments = ("--modules", "all", "-k", "2", "--ldlq", work / "rotated", *form, "--check", "none")
        answer = run(capsys, monkeypatch, "trellis", work / "source", tmp_path / name, *arguments)
        assert answer.code == 0, answer.err
        assert "encode: 100%" in answer.err
    rows = records(tmp_path / "packed")
    coded = {module: row for module, row in rows.items() if "ldlq" in row["quantizer"]}
    assert len(coded) == 2 * 7
    assert rows["model.layers.0.mlp.up_proj"]["quantizer"] == "ldlq trellis k2 mul1 tile"
    assert rows["lm_head"]["quantizer"] == "gptq affine6 g64"
    for row in coded.values():
        assert row["stats"]["proxy_loss"] < row["stats"]["proxy_loss_plain"]
        assert {"error_rows", "error_sinks"} <= set(row["stats"])
        assert row["stats"]["damping"] >= (0.3 if row["role"] == "down" else 0.03)
    report = verify_artifact(tmp_path / "packed")
    assert report.is_good, [check for check in report.checks if check.status == "fail"]
    fake = records(tmp_path / "fake")
    assert fake["model.layers.0.mlp.up_proj"]["stats"] == rows["model.layers.0.mlp.up_proj"]["stats"]
    wrong = ("--no-rotate-weights", "--ldlq", work / "rotated")
    answer = run(capsys, monkeypatch, "trellis", work / "source", tmp_path / "bad", *wrong)
    assert (answer.code, "the job is identity" in answer.err) == (2, True)


def test_moments_without_sinks_are_just_the_sum():
    matrix = np.eye(3, dtype=np.float32) * 5
    moments = InputMoments(matrix=matrix, sinks=np.empty((0, 3), np.float32), rows=7)
    assert np.array_equal(combine(moments, sink_weight=9).matrix, matrix)
