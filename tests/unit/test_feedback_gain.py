"""``benchmarks/feedback_gain.py``: what counts as won, lost, and as a guard that acted."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, get_args

import pytest

from tqtool.solve.feedback import Attempt, Verdict, describe

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    sys.path.insert(0, BENCHMARKS)
    yield importlib.import_module("feedback_gain")
    sys.path.remove(BENCHMARKS)


def record(loss: float, plain: float, *notes: str, layer: int = 0, against: str = "plain") -> Any:
    module = f"model.layers.{layer}.mlp.up_proj"
    stats = {"proxy_loss": loss, f"proxy_loss_{against}": plain}
    return SimpleNamespace(name=f"{module}.weight", module=module, stats=stats, notes=list(notes))


@pytest.fixture
def judge(script, monkeypatch, capsys):
    """Exit code and output for one artifact of these tensors."""

    def call(*records: Any) -> tuple[int, str]:
        monkeypatch.setattr(script, "read_manifest", lambda folder: SimpleNamespace(tensors=records))
        code = script.main(["artifact"])
        return code, capsys.readouterr().out

    return call


def test_what_was_won_is_told_by_projection(judge):
    dense = SimpleNamespace(name="model.norm.weight", module=None, stats={}, notes=["kept"])
    code, out = judge(dense, record(1, 4), record(1, 2, layer=1, against="rtn"), record(3, 4, layer=2))
    assert code == 0
    assert "3 calibrated tensors, loss against none: median 0.500, 0.250 to 0.750" in out
    assert "  up_proj: median 0.500" in out
    assert "  not below: 0\n  guards: 0\n" in out


def test_a_loss_that_feedback_did_not_lower_fails(judge):
    code, out = judge(record(1, 2), record(2, 2, layer=1))
    assert (code, "not below: 1 model.layers.1.mlp.up_proj.weight" in out) == (1, True)


def test_a_plain_loss_of_zero_is_named_and_not_divided_by(judge):
    code, out = judge(record(1, 2), record(0, 0, layer=1))
    assert (code, "the plain loss is 0: 1 model.layers.1.mlp.up_proj.weight" in out) == (0, True)
    code, out = judge(record(1, 2), record(1e-3, 0, layer=1))
    assert (code, "not below: 1 model.layers.1" in out) == (1, True)


def test_rows_of_zeros_are_no_guard(judge):
    code, out = judge(record(1, 2, "3 rows of zeros"))
    assert (code, "guards: 0" in out) == (0, True)


@pytest.mark.parametrize("verdict", [verdict for verdict in get_args(Verdict) if verdict != "accepted"])
def test_every_attempt_that_was_not_taken_is_a_guard(judge, verdict):
    growth = float("nan") if verdict == "indefinite" else 12.5
    attempts = [
        Attempt(damping=1e-06, verdict=verdict, growth=growth, loss=1.0),
        Attempt(damping=0.03, verdict="accepted", growth=1.0, loss=1.0),
    ]
    code, out = judge(record(1, 2, "3 rows of zeros", *describe(attempts, "the trellis without feedback")))
    assert (code, "guards: 1\n    model.layers.0.mlp.up_proj.weight: damping 1e-06" in out) == (1, True)


@pytest.mark.parametrize("fallback", ["round-to-nearest", "the trellis without feedback"])
def test_the_plain_coder_in_its_place_is_a_guard(judge, fallback):
    code, out = judge(record(1, 2, *describe([], fallback)))
    assert (code, f": fell back to {fallback}" in out) == (1, True)


def test_nothing_to_judge_is_no_success(judge, script, capsys):
    assert judge()[0] == 1
    with pytest.raises(SystemExit) as stopped:
        script.main([])
    assert stopped.value.code == 2
    assert "ARTIFACT" in capsys.readouterr().err
