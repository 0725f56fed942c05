"""ensure_blas: who gets a BLAS, who does not, and that MLX really calls it."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from typing import Any

import pytest

from tqtool.runtime import blas
from tqtool.runtime.blas import BlasStatus, ensure_blas

linux_cpu = pytest.mark.skipif(
    sys.platform != "linux" or blas._gpu_wheel() is not None, reason="only MLX's Linux CPU wheel needs a BLAS"
)


def run(code: str) -> Any:
    result = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    return json.loads(result.stdout)


@linux_cpu
def test_mlx_products_go_through_the_bound_library():
    found = run("""
import ctypes, json
from tqtool.runtime.blas import ensure_blas
report = ensure_blas()
shim = ctypes.CDLL(None)
real = ctypes.CDLL(report.library)
calls = []
I, F, P = ctypes.c_int, ctypes.c_float, ctypes.c_void_p
types = (None, I, I, I, I, I, I, F, P, I, P, I, F, P, I)
sgemm = ctypes.CFUNCTYPE(*types)(("scipy_cblas_sgemm" if "scipy" in report.library else "cblas_sgemm", real))
@ctypes.CFUNCTYPE(*types)
def spy(*arguments):
    calls.append(arguments[3:6])
    sgemm(*arguments)
shim.tq_blas_bind(spy, None, None, b"spy")
import mlx.core as mx
import numpy as np
a, b = np.arange(6, dtype=np.float32).reshape(2, 3), np.arange(12, dtype=np.float32).reshape(3, 4)
y = np.array(mx.array(a) @ mx.array(b))
idle = __import__("os").environ["OPENBLAS_THREAD_TIMEOUT"]
print(json.dumps({"status": report.status, "calls": len(calls), "right": bool((y == a @ b).all()), "idle": idle}))
""")
    assert found == {"status": "fast", "calls": 1, "right": True, "idle": "4"}


@linux_cpu
def test_nothing_loads_the_library_before_it_is_configured():
    found = run("""
import json
import tqtool.runtime.load, tqtool.evals.kl, tqtool.evals.teacher, tqtool.runtime.generate
from pathlib import Path
print(json.dumps("scipy.libs" in Path("/proc/self/maps").read_text()))
""")
    assert found is False


@linux_cpu
def test_second_call_finds_the_first(caplog):
    first = ensure_blas()
    with caplog.at_level(logging.INFO, logger="tqtool"):  # whatever level a command has set before
        again = ensure_blas()
    assert first.is_fast
    assert again.library == first.library
    assert again.reason == "already loaded"
    assert [record.levelname for record in caplog.records if "BLAS for MLX: fast" in record.message] == ["INFO"]


@linux_cpu
def test_mlx_imported_first_is_reported_as_slow_every_time():
    found = run("""
import json, logging
import mlx.core as mx
from tqtool.runtime.blas import ensure_blas
logging.disable(logging.CRITICAL)
first, again = ensure_blas(), ensure_blas()
print(json.dumps({"status": [first.status, again.status], "reason": first.reason, "fast": first.is_fast}))
""")
    assert found["status"] == ["slow", "slow"]
    assert not found["fast"]
    assert "mlx.core was imported first" in str(found["reason"])


def test_never_on_a_mac_nor_with_a_gpu(monkeypatch):
    monkeypatch.setattr(blas, "_bound_library", lambda: pytest.fail("looked for a library"))
    monkeypatch.setattr(sys, "platform", "darwin")
    assert ensure_blas().status is BlasStatus.NOT_NEEDED
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(blas, "_gpu_wheel", lambda: "mlx-cuda-13")
    report = ensure_blas()
    assert report.status is BlasStatus.NOT_NEEDED
    assert report.library == "mlx-cuda-13"


@pytest.mark.parametrize(
    ("missing", "reason"), [("_shim", "reinstall tqtool with a C"), ("_candidates", "no OpenBLAS in the scipy wheel")]
)
def test_nothing_to_bind_is_a_warning(monkeypatch, caplog, missing, reason):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(blas, "_gpu_wheel", lambda: None)
    monkeypatch.setattr(blas, "_bound_library", lambda: None)
    monkeypatch.setattr(blas, "_is_openblas_preloaded", lambda: False)
    monkeypatch.delitem(sys.modules, "mlx.core", raising=False)
    monkeypatch.setattr(blas, missing, lambda: None if missing == "_shim" else iter(()))
    report = ensure_blas()
    assert report.status is BlasStatus.SLOW
    assert reason in report.reason
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_preloaded_openblas_is_left_alone(monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(blas, "_gpu_wheel", lambda: None)
    monkeypatch.setattr(blas, "_is_openblas_preloaded", lambda: True)
    monkeypatch.setattr(blas, "_bind", lambda *arguments: pytest.fail("bound another"))
    assert ensure_blas().library == "preloaded OpenBLAS"


def test_a_library_without_the_functions_is_not_bound(tmp_path):
    assert not blas._bind(tmp_path / "unused.so", str(tmp_path / "absent.so"), "cblas_")
    assert not blas._bind(tmp_path / "unused.so", "libm.so.6", "cblas_")
