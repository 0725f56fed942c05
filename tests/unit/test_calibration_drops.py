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

LINES = [" ".join(f"w{3 + (7 * line + word) % 300}" for word in range(20)) for line in range(4)]
BAD = 2


def request(tmp_path, name, lines, **options):
    text = tmp_path / f"{name}.jsonl"
    text.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return CalibrationRequest(
        source=str(tmp_path / "source"), out=tmp_path / name, text=text, rows=len(lines), context=24, **options
    )


@pytest.fixture
def overflow(tmp_path, monkeypatch):
    """Layer 1 turns the sequences that hold the marked lines' first tokens into infinities."""
    write_tiny(tmp_path / "source", Tiny(layers=3, dtype="float32"))
    run, begin, marked, bad = StreamedModel.run, StreamedModel.begin, set[int](), set[int]()

    def began(self, tokens):
        hidden = begin(self, tokens)
        if int(tokens[0]) in bad:
            marked.add(len(seen))
        seen.append(hidden)
        return hidden

    seen: list[np.ndarray] = []
    firsts: dict[bytes, int] = {}

    def ran(self, index, hidden, note):
        if index == 0:
            for number, each in enumerate(seen):
                firsts.setdefault(each.tobytes(), number)
            place[0] = firsts[hidden.tobytes()]
            of_layer.append(place[0])
        leaving = run(self, index, hidden, note)
        if index == 0:
            behind[leaving.tobytes()] = place[0]
        if index == 1 and behind[hidden.tobytes()] in marked:
            leaving = leaving.copy()
            leaving[0, 0] = np.inf
        return leaving

    place, of_layer, behind = [0], list[int](), dict[bytes, int]()
    monkeypatch.setattr(StreamedModel, "run", ran)
    monkeypatch.setattr(StreamedModel, "begin", began)

    def of(*lines):
        seen.clear(), marked.clear(), firsts.clear(), bad.clear()
        bad.update(int(line.split()[0][1:]) for line in lines)

    return of


def test_it_is_left_out_from_the_layer_on_and_counted(tmp_path, overflow):
    overflow(LINES[BAD])
    info = calibrate(plan_calibration(request(tmp_path, "with", LINES)))
    assert [(each.sequence, each.layer) for each in info.dropped] == [(BAD, 1)]
    overflow()
    others = LINES[:BAD] + LINES[BAD + 1 :]
    whole = calibrate(plan_calibration(request(tmp_path, "without", others)))
    assert whole.dropped == []
    for file in info.files:
        found, wanted = load_file(tmp_path / "with" / file), load_file(tmp_path / "without" / file)
        same = all(
            np.array_equal(found[name], wanted[name]) for name in wanted if found[name].shape == wanted[name].shape
        )
        assert same == (file != "layer-00000.safetensors"), file  # only layer 0 has seen the sequence
    assert open_calibration(tmp_path / "with").info == info


def test_a_resumed_run_remembers_it(tmp_path, overflow):
    overflow(LINES[BAD])
    calibrate(plan_calibration(request(tmp_path, "whole", LINES)))
    overflow(LINES[BAD])
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
    overflow(*LINES)
    with pytest.raises(NumericalError, match="layer 1: no sequence's hidden state is finite"):
        calibrate(plan_calibration(request(tmp_path, "out", LINES)))
