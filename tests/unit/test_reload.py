"""The plan held against what a loader built; the child process itself is tested end to end."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from tqtool.artifact import reload as reload_module
from tqtool.artifact.reload import LoadedModule, ReloadReport, compare_modules, reload_stock
from tqtool.errors import ArtifactError, BackendError

Q4 = {"group_size": 64, "bits": 4, "mode": "affine"}
DENSE = LoadedModule(kind="Linear", bits=None, group_size=None, mode=None)
PACKED = LoadedModule(kind="QuantizedLinear", bits=4, group_size=64, mode="affine")


def report(**modules: LoadedModule) -> ReloadReport:
    return ReloadReport(modules=modules, n_logits=0, mlx_lm_version="0")


def test_agreement() -> None:
    entries: dict[str, Any] = {"a": Q4, "b": False, "c": None}
    assert compare_modules(report(a=PACKED, b=DENSE), entries) == ()
    assert compare_modules(report(a=PACKED, b=DENSE, c=DENSE), entries) == ()


@pytest.mark.parametrize(
    ("module", "entry", "message"),
    [
        (PACKED, {**Q4, "bits": 8}, "a: planned affine 8 bits g64, loaded as QuantizedLinear affine 4 bits g64"),
        (PACKED, {**Q4, "group_size": 32}, "a: planned affine 4 bits g32, loaded as"),
        (PACKED, {**Q4, "mode": "mxfp4"}, "a: planned mxfp4 4 bits g64, loaded as"),
        (PACKED, False, "a: planned dense, loaded as QuantizedLinear"),
        (DENSE, Q4, "a: planned affine 4 bits g64, loaded as Linear"),
    ],
)
def test_differences(module: LoadedModule, entry: Any, message: str) -> None:
    problems = compare_modules(report(a=module), {"a": entry})
    assert len(problems) == 1
    assert problems[0].startswith(message)


def test_missing_and_extra_modules() -> None:
    assert compare_modules(report(), {"a": False}) == ("a: planned, but mlx-lm built no such module",)
    assert compare_modules(report(a=DENSE), {}) == ("a: Linear is not in the plan",)


def answer_with(monkeypatch: pytest.MonkeyPatch, code: int, stdout: str = "", stderr: str = "") -> None:
    done = subprocess.CompletedProcess([], code, stdout, stderr)
    monkeypatch.setattr(reload_module.subprocess, "run", lambda *a, **k: done)


def test_failures_of_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    answer_with(monkeypatch, 1, stderr="Traceback\n  File\nValueError: Received 3 parameters not in model\n")
    with pytest.raises(ArtifactError, match="stock mlx-lm does not load x: ValueError: Received 3 parameters"):
        reload_stock(Path("x"), depth="load")
    answer_with(monkeypatch, -9)
    with pytest.raises(BackendError, match="killed by signal 9"):
        reload_stock(Path("x"), depth="forward")
    answer_with(monkeypatch, 70, stderr="No module named mlx_lm")
    with pytest.raises(BackendError, match="mlx-lm cannot be imported: No module named"):
        reload_stock(Path("x"), depth="forward")
    answer_with(monkeypatch, 0, stdout='{"finite": false, "modules": {}, "n_logits": 3, "mlx_lm_version": "0"}')
    with pytest.raises(ArtifactError, match="not finite"):
        reload_stock(Path("x"), depth="forward")
