"""The demo on a tiny random model: every step through the real commands, twice."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

LADDER = Path(__file__).parents[2] / "benchmarks" / "ladder.py"


@pytest.mark.slow
def test_quick_ladder_and_its_reuse(tmp_path, capsys, monkeypatch):
    monkeypatch.syspath_prepend(str(LADDER.parent))
    import ladder_report

    command = [sys.executable, str(LADDER), "--quick", "--work", str(tmp_path / "demo")]
    first = subprocess.run(command, capture_output=True, text=True, check=False)
    assert first.returncode == 0, first.stderr
    report = json.loads((tmp_path / "demo" / "ladder.json").read_text())
    rows = {row["name"]: row for row in report["rows"]}
    assert list(rows) == ["source", "rtn-4-stock", "rtn-3-rotated", "trellis-k3-rotated"]
    assert rows["source"]["score"]["kl"]["mean"] == 0.0
    assert 0 < rows["trellis-k3-rotated"]["score"]["kl"]["mean"] < rows["rtn-3-rotated"]["score"]["kl"]["mean"]
    assert rows["rtn-4-stock"]["bits_per_linear_weight"] == 4.5
    assert (tmp_path / "demo" / "ladder.png").read_bytes().startswith(b"\x89PNG")
    assert "tqtool generate" in first.stderr
    for name in rows:
        assert name in first.stdout

    report["gguf"] = {"file": "m.gguf", "size_bytes": 98_362_432, "tensor_types": {"Q4_1": 210, "Q8_0": 1}}
    ladder_report.print_table(report)
    ladder_report.plot(report, tmp_path / "with_gguf.png")
    assert "decoded from m.gguf (210 Q4_1, 1 Q8_0): the same model in 98.4 MB" in capsys.readouterr().out
    assert (tmp_path / "with_gguf.png").stat().st_size > 0
    del report["gguf"]

    again = subprocess.run(command, capture_output=True, text=True, check=True)
    assert again.stderr.count("artifact reused (manifest") == 3
    assert again.stderr.count("score reused (manifest") == 4
    repeated = json.loads((tmp_path / "demo" / "ladder.json").read_text())
    assert repeated["rows"] == report["rows"]
