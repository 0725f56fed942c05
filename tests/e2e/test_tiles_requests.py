"""What ``trellis`` in tiles refuses, and what its printed plan says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.calibrations import calibrate_rows, write_words
from tests.support.command import Answer, run
from tests.support.tiny_models import Tiny, uneven, write_tiny, write_weights

TINY = Tiny(intermediate=192, tied=False, dtype="float32")


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source of uneven channels and a calibration."""
    folder = tmp_path_factory.mktemp("requests")
    write_tiny(folder / "source", TINY)
    write_weights(folder / "source", uneven(TINY))
    write_words(folder / "text.txt", 1500)
    calibrate_rows(folder, "rotated", rotation_seed=42)
    return folder


@pytest.fixture
def trellis(capsys, monkeypatch, work):
    def call(out: Path, *arguments: object) -> Answer:
        return run(capsys, monkeypatch, "trellis", work / "source", out, *arguments)

    return call


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--fold-channels",), "--fold-channels needs --ldlq"),
        (("--fold-channels", "--layout", "tile"), "--fold-channels needs --ldlq"),
        (("--fold-channels", "--modules", "*.q_proj", "--ldlq"), "no down_proj is coded under a Hessian"),
        (("--layout", "tile", "--down-axis", "in"), "--down-axis with tiles does nothing"),
        (("--down-axis", "out", "--ldlq"), "--down-axis with tiles does nothing"),
        (("--layout", "square"), "--layout 'square': expected tile or axis"),
    ],
)
def test_what_would_do_nothing_is_refused(work, trellis, tmp_path, arguments, message):
    arguments = (*arguments, work / "rotated") if arguments[-1] == "--ldlq" else arguments
    answer = trellis(tmp_path / "out", *arguments)
    assert (answer.code, message in answer.err) == (2, True), answer.err
    assert list(tmp_path.iterdir()) == []


def test_an_axis_for_the_axis_layout(work, trellis, tmp_path):
    for axis, label in (("in", "axis1"), ("out", "axis0")):
        options = ("--layout", "axis", "--down-axis", axis, "--ldlq", work / "rotated", "--dry-run", "--json")
        answer = trellis(tmp_path / "out", *options)
        labels = {row["module"]: row["quantizer"] for row in json.loads(answer.out)["rows"] if row["module"]}
        assert labels["model.layers.1.mlp.down_proj"] == f"ldlq trellis k3 mul1 {label}"


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        (("--ldlq", "rotated", "--fold-channels"), "channels[n]"),
        (("--ldlq", "rotated"), "outliers[n]"),
        (("--layout", "tile"), "outliers[n]"),
    ],
)
def test_the_plan_names_channels_once_for_all_layers(work, trellis, tmp_path, options, shown):
    """Every layer's order and scales have a hash of their own; a row for each would be a page of them."""
    options = [work / option if option == "rotated" else option for option in options]
    plan = trellis(tmp_path / "out", *options, "--dry-run", "--json")
    folds = {fold for row in json.loads(plan.out)["rows"] for fold in row["folds"] if shown.split("[")[0] in fold}
    assert len(folds) > 2  # the layers do differ
    answer = trellis(tmp_path / "out", *options, "--dry-run")
    assert answer.code == 0, answer.err
    for part in ("gate_proj", "up_proj", "down_proj"):
        assert sum(f"model.layers.*.mlp.{part}" in line for line in answer.out.splitlines()) == 1, answer.out
    assert shown in answer.out
