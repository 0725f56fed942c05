"""``benchmarks/bench_quality.py`` on a tiny random model: stock methods, a recipe, arms that cannot run; twice."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tiny_models import Tiny, write_tiny

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_peers_recipes_and_given_arms_in_one_run_and_its_reuse(tmp_path):
    source = write_tiny(tmp_path / "source", Tiny(intermediate=128, layers=1))
    text = tmp_path / "text.txt"
    lines = (" ".join(f"w{3 + (7 * word * word + line) % 317}" for word in range(40)) for line in range(20))
    text.write_text("\n".join(lines))
    command = [sys.executable, str(ROOT / "benchmarks" / "bench_quality.py"), str(source), "--text", str(text)]
    command += ["--work", str(tmp_path / "work"), "--rows", "4", "--context", "32", "--windows", "2"]
    command += ["--awq-grid", "2", "--peers", "dwq-4,gptq-4,awq-4,dynamic", "--arm", f"gone={tmp_path / 'nowhere'}"]
    command += ["--arm", f"source={source}", "--recipe", str(ROOT / "recipes" / "rtn4.yaml")]
    first = subprocess.run(command, capture_output=True, text=True, check=False)
    assert first.returncode == 0, first.stderr
    report = json.loads((tmp_path / "work" / "quality.json").read_text())
    rows = {row["name"]: row for row in report["rows"]}
    assert {name: row["failed"] for name, row in rows.items() if "failed" in row} == {
        "dwq-4": "needs the arm rtn-4-head6, which is not there",
        "gone": f"{tmp_path / 'nowhere'}: no model there",
    }
    assert rows["source"]["score"]["kl"]["mean"] == 0
    assert [rows[name]["linear_bits_per_weight"] for name in ("gptq-4", "awq-4", "rtn4")] == [4.5, 4.5, 4.5]
    assert 4.5 < rows["dynamic"]["linear_bits_per_weight"] <= 5.5
    assert all(0 < rows[name]["score"]["kl"]["mean"] < 1 for name in ("gptq-4", "awq-4", "rtn4", "dynamic"))
    assert first.stdout.startswith("| arm | linear bpw |")
    assert "not run: needs the arm rtn-4-head6" in first.stdout
    config = json.loads((tmp_path / "work" / "gptq-4" / "config.json").read_text())
    assert config["quantization"]["model.embed_tokens"]["bits"] == 6

    again = subprocess.run(command, capture_output=True, text=True, check=True)
    assert again.stderr.count("artifact reused") == 4
    assert again.stderr.count("score reused") == 5
    assert again.stderr.count("teacher: dump reused") == 1
    assert again.stdout == first.stdout
