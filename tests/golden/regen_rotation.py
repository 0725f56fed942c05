"""Write rotation.json: sign streams and folded bytes that must never change. By hand only: a change breaks every seed.

The signs come from ``tests/oracles/hadamard.py`` (one Python integer at a time), the folded bytes from the numpy
reference on an integer ramp, so neither is an echo of the compiled code they judge.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np

from tests.oracles.hadamard import splitmix32_signs
from tqtool.mathx.hadamard import hadamard_factor, reference_transform, require_size

TARGET = Path(__file__).with_name("rotation.json")
STREAMS = ((42, 0, 64), (42, 1, 64), (0, 0, 64), (4294967295, 31, 64), (42, 0, 17408))
FOLDS = ((12, 3), (64, 3), (576, 5), (896, 2), (5120, 1))


def ramp(rows: int, n: int) -> np.ndarray:
    """float32 ``[rows, n]`` of both signs and many magnitudes, from integer arithmetic."""
    index = np.arange(rows * n, dtype=np.int64)
    mantissa = (index * 2654435761 % 16381 - 8190).astype(np.float32)
    return (mantissa * np.float32(2.0) ** (-(index % 19)).astype(np.float32)).reshape(rows, n)


def main() -> None:
    """Compute and write both tables."""
    signs = []
    for seed, lane, n in STREAMS:
        text = "".join("+" if sign > 0 else "-" for sign in splitmix32_signs(seed, n, lane))
        digest = hashlib.sha256(text.encode()).hexdigest()
        signs.append({"seed": seed, "lane": lane, "n": n, "sha256": digest, "first": text[:64]})
    folds = []
    for n, rows in FOLDS:
        scale = np.array(splitmix32_signs(42, n, 0), dtype=np.float32)
        folded = reference_transform(ramp(rows, n), hadamard_factor(require_size(n, what="n")[0]), scale)
        folds.append({"n": n, "rows": rows, "sha256": hashlib.sha256(folded.tobytes()).hexdigest()})
    provenance = (
        "tests/golden/regen_rotation.py; splitmix32 oracle in pure Python, fold by the numpy reference, seed 42 lane 0"
    )
    data = {"provenance": provenance, "signs": signs, "folds": folds}
    TARGET.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
