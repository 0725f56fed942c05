"""A sequence whose hidden state overflows goes no further; the others are summed as if it were not there."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.support.tiny_models import Tiny, write_tiny
from tqtool.calibration.calibrate import CalibrationRequest, calibrate, plan_calibration
from tqtool.calibration.forward import StreamedModel
from tqtool.errors import NumericalError
from tqtool.formats.hessians import open_calibration

BAD = 2
LINES = [" ".join(f"w{3 + (7 * line + word) % 300}" for word in range(10 if line == BAD else 20)) for line in range(4)]
SHORT, ALL, NONE = 15, 1000, 0
"""Lengths below which ``overflow`` strikes: the bad line alone, every line, no line."""


def request(tmp_path, name, lines, **options):
    text = tmp_path / f"{name}.jsonl"
    text.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return CalibrationRequest(
        source=str(tmp_path / "source"), out=tmp_path / name, text=text, rows=len(lines), context=24, **options
    )


@pytest.fixture
def overflow(tmp_path, monkeypatch):
    """Layer 1 turns sequences of fewer tokens than a limit into infinities: they are told by their length."""
    write_tiny(tmp_path / "source", Tiny(layers=3, dtype="float32"))
    run, limit = StreamedModel.run, [NONE]

    def ran(self, index, hidden, note):
        leaving = run(self, index, hidden, note)
        if index == 1 and len(hidden) < limit[0]:
            leaving = leaving.copy()
            leaving[0, 0] = np.inf
        return leaving

    monkeypatch.setattr(StreamedModel, "run", ran)

    def below(tokens):
        limit[0] = tokens

    return below


def test_it_is_left_out_from_the_layer_on_and_counted(tmp_path, overflow):
    overflow(SHORT)
    info = calibrate(plan_calibration(request(tmp_path, "with", LINES)))
    assert [(each.sequence, each.layer) for each in info.dropped] == [(BAD, 1)]
    overflow(NONE)
    others = LINES[:BAD] + LINES[BAD + 1 :]
    whole = calibrate(plan_calibration(request(tmp_path, "without", others)))
    assert whole.dropped == []
    for file in info.files:
        found, wanted = load_file(tmp_path / "with" / file), load_file(tmp_path / "without" / file)
        same = all(np.array_equal(found[name], wanted[name]) for name in wanted)
        assert same == (file != "layer-00000.safetensors"), file  # only layer 0 has seen the sequence
    assert open_calibration(tmp_path / "with").info == info


def test_a_resumed_run_remembers_it(tmp_path, overflow):
    overflow(SHORT)
    calibrate(plan_calibration(request(tmp_path, "whole", LINES)))
    done = []

    def stop(layers):
        done.append(layers)
        if sum(done) == 2:
            raise KeyboardInterrupt

    text = tmp_path / "whole.jsonl"
    parts = CalibrationRequest(
        source=str(tmp_path / "source"), out=tmp_path / "parts", text=text, rows=len(LINES), context=24
    )
    with pytest.raises(KeyboardInterrupt):
        calibrate(plan_calibration(parts), stop)
    resumed = CalibrationRequest(
        source=parts.source, out=parts.out, text=text, rows=len(LINES), context=24, resume=True
    )
    calibrate(plan_calibration(resumed))
    for path in (tmp_path / "whole").iterdir():
        assert (tmp_path / "parts" / path.name).read_bytes() == path.read_bytes(), path.name


def test_where_nothing_is_left_the_weights_are_blamed(tmp_path, overflow):
    overflow(ALL)
    with pytest.raises(NumericalError, match="layer 1: no sequence's hidden state is finite"):
        calibrate(plan_calibration(request(tmp_path, "out", LINES)))
