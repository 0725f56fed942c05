"""Before any test module imports mlx: on a Linux CPU its products then run through a real BLAS."""

from __future__ import annotations

from tqtool.runtime.blas import ensure_blas

ensure_blas()
