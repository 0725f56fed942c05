"""A text in the words of the tiny tokenizer, and calibrations made from it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.support.tiny_models import Tiny
from tqtool.calibration.calibrate import CalibrationRequest, calibrate, plan_calibration


def write_words(path: Path, count: int) -> Path:
    """``count`` words drawn from the vocabulary of ``tiny_models``, one a line."""
    words = np.random.default_rng(0).integers(3, Tiny().vocab, count)
    path.write_text("\n".join(f"w{word}" for word in words))
    return path


def calibrate_rows(work: Path, name: str, *, rotation_seed: int | None, rows: int = 12, context: int = 100) -> Path:
    """Calibrate ``work/source`` on ``work/text.txt`` into ``work/name``."""
    request = CalibrationRequest(
        source=str(work / "source"),
        out=work / name,
        text=work / "text.txt",
        rows=rows,
        context=context,
        rotation_seed=rotation_seed,
    )
    calibrate(plan_calibration(request))
    return work / name
