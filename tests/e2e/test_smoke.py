"""``serve --smoke``: green on what is sound, red on planted faults, each by the check that is there for it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.support.command import run
from tests.support.eos_first import write_eos_first
from tests.support.http_server import serving
from tests.support.real_models import smollm2
from tests.support.scripted_model import write_scripted
from tqtool.serve.smoke.checks import FULL, Context
from tqtool.serve.smoke.client import Client
from tqtool.serve.smoke.facts import read_facts
from tqtool.serve.smoke.run import Row, SmokeReport, run_check


@pytest.fixture(scope="module")
def quantized(tmp_path_factory) -> Path:
    """The scripted model in 4 bits."""
    from typer.testing import CliRunner

    from tqtool.cli.app import build_app

    folder = tmp_path_factory.mktemp("smoke")
    source, out = write_scripted(folder / "source"), folder / "model"
    done = CliRunner().invoke(build_app(), ["convert", str(source), str(out), "--bits", "4", "--check", "none"])
    assert done.exit_code == 0, done.output
    return out


def check(folder: Path, *names: str) -> dict[str, Row]:
    """The checks ``names`` against a server of this process."""
    with serving(folder, api_key="key", body_mb=8) as server:
        clients = {"client": Client(server.url, "key", 60), "anonymous": Client(server.url, None, 60)}
        context = Context(facts=read_facts(folder, None), **clients)
        return {name: run_check("full", name, FULL[name], context) for name in names}


def outcomes(rows: dict[str, Row]) -> dict[str, str]:
    return {name: row.outcome for name, row in rows.items()}


@pytest.mark.slow
def test_green_on_a_sound_artifact(quantized, capsys, monkeypatch):
    answer = run(capsys, monkeypatch, "serve", quantized, "--smoke", "--json")
    report = json.loads(answer.out)
    assert (answer.code, report["ok"]) == (0, True), answer.out
    rows = {(row["kv"], row["check"]): row["outcome"] for row in report["checks"]}
    assert set(rows.values()) == {"ok"}
    assert {name for kv, name in rows if kv == "full"} == {*FULL, "start", "shutdown"}
    assert ("turbo", "language") in rows


def edited(model: Path, out: Path, edit) -> Path:
    """A copy of ``model`` whose tensors went through ``edit``."""
    import shutil

    shutil.copytree(model, out)
    (file,) = out.glob("model*.safetensors")
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file, metadata={"format": "mlx"})
    return out


def test_red_on_swapped_scales(quantized, tmp_path):
    def swap(tensors):
        for name in ("lm_head.scales", "lm_head.biases"):
            tensors[name] = np.ascontiguousarray(tensors[name][::-1])

    assert outcomes(check(quantized, "language")) == {"language": "ok"}
    rows = check(edited(quantized, tmp_path / "swapped", swap), "language")
    assert outcomes(rows) == {"language": "FAIL"}
    assert "does not know its language" in rows["language"].detail


def test_red_on_a_missing_end_token(quantized, tmp_path):
    broken = edited(quantized, tmp_path / "endless", lambda tensors: None)
    for name in ("config.json", "generation_config.json"):
        value = json.loads((broken / name).read_text())
        (broken / name).write_text(json.dumps(value | {"eos_token_id": 1}))
    tokenizer = json.loads((broken / "tokenizer_config.json").read_text())
    (broken / "tokenizer_config.json").write_text(json.dumps(tokenizer | {"eos_token": "<s>"}))
    rows = check(broken, "end token", "language")
    assert outcomes(rows) == {"end token": "FAIL", "language": "ok"}
    assert "missing from eos_token_id" in rows["end token"].detail


def test_red_on_a_model_that_ends_at_once(tmp_path):
    folder = write_eos_first(tmp_path / "model")
    rows = check(folder, "templated", "raw", "language")
    assert outcomes(rows) == dict.fromkeys(("templated", "raw", "language"), "FAIL")
    assert "the first token ended it" in rows["raw"].detail


def test_a_model_without_a_template_is_checked_without(tmp_path):
    folder = write_scripted(tmp_path / "model", template=None)
    rows = check(folder, "templated", "end token", "tools", "raw")
    assert outcomes(rows) == {"templated": "skipped", "end token": "skipped", "tools": "skipped", "raw": "ok"}


def test_a_failed_check_is_exit_code_4(quantized, capsys, monkeypatch):
    row = Row(kv="full", check="raw", outcome="FAIL", detail="[nothing]", seconds=0.1)
    monkeypatch.setattr(
        "tqtool.serve.smoke.run.smoke", lambda folder, *args, **named: SmokeReport(model=str(folder), rows=(row,))
    )
    answer = run(capsys, monkeypatch, "serve", quantized, "--smoke")
    assert answer.code == 4
    assert "[nothing]" in answer.out
    assert "1 checks failed: raw (full)" in answer.err


def test_a_model_that_cannot_start_is_a_failed_check(quantized, capsys, monkeypatch, tmp_path):
    def spoil(tensors):
        tensors["model.norm.weight"][:] = np.nan

    broken = edited(quantized, tmp_path / "nan", spoil)
    monkeypatch.setattr("tqtool.serve.smoke.run.read_facts", lambda folder, context: None)
    answer = run(capsys, monkeypatch, "serve", broken, "--smoke", "--json")
    report = json.loads(answer.out)
    assert answer.code == 4
    assert [row["check"] for row in report["checks"]] == ["start"]
    assert "not finite" in report["checks"][0]["detail"]


@pytest.mark.model
@pytest.mark.slow
def test_green_on_a_real_model():
    names = ("raw", "language", "end token")
    rows = check(smollm2(), *names)
    assert outcomes(rows) == dict.fromkeys(names, "ok"), rows


@pytest.mark.parametrize(("code", "outcome"), [(2, "skipped"), (5, "FAIL")])
def test_a_kv_scheme_that_does_not_go_with_the_model_is_no_fault_of_the_artifact(quantized, monkeypatch, code, outcome):
    from contextlib import contextmanager

    from tqtool.serve.smoke import run as module
    from tqtool.serve.smoke.process import NotStarted

    class Running:
        url, client = "http://127.0.0.1:1", None

    @contextmanager
    def running(arguments):
        if "--kv-quant" in arguments:
            raise NotStarted(code, "loading\nerror: KV scheme turbo: head dimension 32\nhint: leave it out")
        yield Running()

    monkeypatch.setattr(module, "running", running)
    monkeypatch.setattr(module, "FULL", {})
    monkeypatch.setattr(module, "_end", lambda kv, server: module._row(kv, "shutdown", 0.0, "ok", ""))
    report = module.smoke(quantized, [], kv_quant="turbo", context=None, say=lambda row: None)
    last = report.rows[-1]
    assert (last.kv, last.outcome, report.ok) == ("turbo", outcome, outcome == "skipped")
    assert "head dimension 32" in last.detail
