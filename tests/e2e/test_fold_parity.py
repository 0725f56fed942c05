"""A real model before and after the rotation, through stock mlx-lm: only bf16 rounding may remain."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.real_models import smollm2

ROOT = Path(__file__).parents[2]
LIMIT = 5e-4  # nats; an 8-bit affine quantization of the same model costs 3.2e-3


@pytest.mark.model
@pytest.mark.slow
def test_folded_smollm2_says_the_same(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text((ROOT / "docs" / "decisions" / "0001-structure.md").read_text())
    command = [sys.executable, "benchmarks/fold_parity.py", str(smollm2()), "--text", str(text), "--windows", "1",
               "--tokens", "256", "--work", str(tmp_path), "--json"]  # fmt: skip
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    result = json.loads(run.stdout)
    assert result["plan"] == "rotation.llama"
    assert result["positions"] == 256
    assert 1e-8 < result["mean_kl"] <= LIMIT  # exactly 0 would mean that nothing was folded
    assert all(flip["source_margin"] < 0.5 for flip in result["flips"])
