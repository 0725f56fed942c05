"""A fast BLAS for MLX's CPU build on Linux.

The Linux CPU wheel of MLX links netlib's reference BLAS: 6 GFLOP/s where OpenBLAS reaches 190 on the same
two cores (``benchmarks/bench_blas.py``). A library loaded into the global symbol scope *before*
``libmlx.so`` takes precedence over that dependency, so ``ensure_blas`` loads the shim built from
``kernels/cpu/blas_shim.cpp`` and points it at the OpenBLAS inside the scipy wheel, or the system's. Only
float32, float64 and complex64 products profit: bf16 and f16 do not go through BLAS.

Call it before the first ``import mlx.core`` of the process, as every verb does: that import resolves all symbols.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

SHIM_NAME = "libtqblas.so"
ENTRIES = ("sgemm", "dgemm", "cgemm")
"""The CBLAS functions that libmlx imports."""

SYSTEM_OPENBLAS = "libopenblas.so.0"

IDLE_THREADS = ("OPENBLAS_THREAD_TIMEOUT", "4")
"""OpenBLAS threads spin 2^26 cycles after each product by default, on cores that MLX and our kernels want: with other
work on the machine a prompt of 35 tokens took 0.7 s instead of 4.3 s once they sleep at once (2^4)."""

log = logging.getLogger(__name__)


class BlasStatus(StrEnum):
    """What stands behind MLX's matrix products in this process."""

    NOT_NEEDED = "not-needed"
    FAST = "fast"
    SLOW = "slow"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlasReport:
    """Outcome of ``ensure_blas``: ``library`` is what serves the products, ``reason`` why it is so."""

    status: BlasStatus
    library: str
    reason: str

    @property
    def is_fast(self) -> bool:
        """False only where float32 products run through the reference BLAS."""
        return self.status is not BlasStatus.SLOW


def ensure_blas() -> BlasReport:
    """Make a real BLAS serve MLX's CPU matrix products; idempotent; logs one line.

    Never touches a Mac (Accelerate) or an MLX with a GPU backend. Where no fast library can be put in
    place, including when MLX was imported first, the report says ``SLOW`` and a warning is logged:
    results stay right, but take tens of times as long. If MLX is imported, one small product proves the way.
    """
    report = _ensure()
    level = logging.INFO if report.is_fast else logging.WARNING
    log.log(level, "BLAS for MLX: %s (%s; %s)", report.status, report.library, report.reason)
    return report


def _ensure() -> BlasReport:
    if sys.platform != "linux":
        return _not_needed("platform library", f"{sys.platform} brings its own")
    gpu_wheel = _gpu_wheel()
    if gpu_wheel:
        return _not_needed(gpu_wheel, "MLX has a GPU backend")
    if _is_openblas_preloaded():
        return _fast("preloaded OpenBLAS", "in the global scope already")
    library, reason = _bound_library(), "already loaded"
    if library is None:
        shim = _shim()
        if shim is None:
            return _slow(f"{SHIM_NAME} was not built; reinstall tqtool with a C++ compiler")
        library = next((path for path, prefix in _candidates() if _bind(shim, path, prefix)), None)
        reason = "bound through the shim"
    if library is None:
        return _slow(f"no OpenBLAS in the scipy wheel, no {SYSTEM_OPENBLAS}")
    if "mlx.core" in sys.modules and not _products_arrive():
        return _slow("mlx.core was imported first; call tqtool.runtime.blas.ensure_blas() before it")
    return _fast(library, reason)


def _not_needed(library: str, reason: str) -> BlasReport:
    return BlasReport(status=BlasStatus.NOT_NEEDED, library=library, reason=reason)


def _fast(library: str, reason: str) -> BlasReport:
    return BlasReport(status=BlasStatus.FAST, library=library, reason=reason)


def _slow(reason: str) -> BlasReport:
    return BlasReport(status=BlasStatus.SLOW, library="reference BLAS", reason=reason)


def _gpu_wheel() -> str | None:
    """Name of the installed MLX GPU backend wheel (``mlx-cuda-13`` and the like)."""
    names = (str(found.metadata["Name"]) for found in importlib.metadata.distributions())
    return next((name for name in names if name.startswith("mlx-cuda")), None)


def _is_openblas_preloaded() -> bool:
    """True if someone put an OpenBLAS into the global symbol scope, with LD_PRELOAD for example."""
    scope = ctypes.CDLL(None)
    return hasattr(scope, "openblas_get_config") and hasattr(scope, "cblas_sgemm")


def _bound_library() -> str | None:
    """What the shim forwards to, if it is in the global scope already."""
    scope = ctypes.CDLL(None)
    if not hasattr(scope, "tq_blas_source"):
        return None
    scope.tq_blas_source.restype = ctypes.c_char_p
    return bytes(scope.tq_blas_source()).decode() or None


def _products_arrive() -> bool:
    """Whether a float32 product of MLX reaches the shim."""
    import mlx.core as mx

    served = ctypes.CDLL(None).tq_blas_calls
    served.restype = ctypes.c_uint
    before = served()
    with mx.stream(mx.cpu):
        ones = mx.ones((8, 8))
        mx.eval(ones @ ones)
    return bool(served() != before)


def _shim() -> Path | None:
    """Where the build put the shim: beside the extension, apart from the sources if installed editable."""
    native = importlib.util.find_spec("tqtool._native")
    if native is None or native.origin is None:
        return None
    path = Path(native.origin).parent / SHIM_NAME
    return path if path.is_file() else None


def _candidates() -> Iterator[tuple[str, str]]:
    """Libraries to try, best first, each with the prefix of its CBLAS names."""
    scipy = importlib.util.find_spec("scipy")
    if scipy is not None and scipy.origin is not None:
        bundled = Path(scipy.origin).parent.parent / "scipy.libs"
        for path in sorted(bundled.glob("libscipy_openblas-*.so")):  # openblas64_ has other integers
            yield str(path), "scipy_cblas_"
    yield SYSTEM_OPENBLAS, "cblas_"


def _bind(shim_path: Path, library: str, prefix: str) -> bool:
    """Load the shim globally, pointed at ``library``; False if that or one of its functions is missing."""
    os.environ.setdefault(*IDLE_THREADS)  # read by the library when it is loaded; the user's own setting wins
    try:
        blas = ctypes.CDLL(library)
        addresses = [ctypes.cast(getattr(blas, prefix + entry), ctypes.c_void_p) for entry in ENTRIES]
    except (OSError, AttributeError) as error:
        log.debug("%s: %s", library, error)
        return False
    shim = ctypes.CDLL(str(shim_path), mode=ctypes.RTLD_GLOBAL)
    shim.tq_blas_bind.restype = None
    shim.tq_blas_bind(*addresses, library.encode())
    return True
