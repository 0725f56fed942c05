"""What the layers of each family read, layer by layer through mlx-lm, is what the dense decoder's layers read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.support.tiny_families import CASES, write_family
from tests.unit.test_calibration import oracle_inputs
from tqtool.calibration.calibrate import CalibrationRequest, calibrate, plan_calibration
from tqtool.formats.hessians import open_calibration

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

TEXT = Path(__file__).parents[2] / "LICENSE"


@pytest.mark.parametrize("name", ["llama 3", "smollm3", "granite", "phi3", "phi3 longrope"])
def test_moments_are_those_of_a_float64_decoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    source = write_family(tmp_path / "source", CASES[name])
    request = CalibrationRequest(
        source=str(source), out=tmp_path / "out", text=TEXT, rows=3, context=24, rotation_seed=42
    )
    job = plan_calibration(request)
    info = calibrate(job)
    expected = oracle_inputs(source, 42, list(job.rows.sequences), monkeypatch)
    folder = open_calibration(tmp_path / "out")
    assert {module for record in info.inputs for module in record.modules} == {*expected, "lm_head"} - {"head"}
    for module, inputs in expected.items():
        moments = folder.moments("lm_head" if module == "head" else module)
        assert moments is not None
        ordinary = np.concatenate([rows[1:] for rows in inputs])
        sinks = np.stack([rows[0] for rows in inputs])
        whole = ordinary.T @ ordinary + sinks.T @ sinks
        found = moments.matrix.astype(np.float64) * moments.rows + moments.sinks.astype(np.float64).T @ moments.sinks
        # As in test_calibration; which rows count as sinks may differ, so that both are compared together.
        scale = np.sqrt(np.outer(np.diagonal(whole), np.diagonal(whole)))
        assert (np.abs(found - whole) <= 2e-4 * scale + 1e-9).all()
