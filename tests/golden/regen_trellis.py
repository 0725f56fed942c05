"""Write docs/formats/trellis-vectors.json: seeded Gaussian matrices, coded and packed.

Run by hand; a change is a new format version.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from tqtool.formats.trellis import TrellisSpec
from tqtool.native import trellis_expand
from tqtool.solve.trellis import TrellisOptions, encode_weight

TARGET = Path(__file__).parents[2] / "docs" / "formats" / "trellis-vectors.json"
CASES = [
    {"k": 1, "code": "mul1", "axis": 1, "rows": 2, "cols": 256, "stride": 256},
    {"k": 2, "code": "1mad", "axis": 0, "rows": 3, "cols": 256, "stride": 256},
    {"k": 3, "code": "mul1", "axis": 1, "rows": 4, "cols": 192, "stride": 192},
    {"k": 3, "code": "3inst", "axis": 0, "rows": 3, "cols": 100, "stride": 100},
    {"k": 3, "code": "mul1", "axis": 1, "rows": 2, "cols": 300, "stride": 512},
    {"k": 4, "code": "mul1", "axis": 1, "rows": 2, "cols": 256, "stride": 256, "window": 16},
    {"k": 3, "code": "mul1", "axis": 1, "rows": 20, "cols": 40, "stride": 48, "tile": 16},
    {"k": 2, "code": "1mad", "axis": 1, "rows": 16, "cols": 32, "stride": 32, "tile": 16},
]


def main() -> None:
    """Code every case and write the file."""
    rng = np.random.default_rng(20261129)
    rows = []
    for case in CASES:
        spec = TrellisSpec(**case)
        spread = np.exp(rng.standard_normal((spec.rows, 1)))
        stored = (rng.standard_normal((spec.rows, spec.cols)) * spread).astype(np.float32)
        weight = stored if spec.axis == 1 else np.ascontiguousarray(stored.T)
        options = TrellisOptions(k=spec.k, window=spec.window, code=spec.code)
        matrix = encode_weight("case", weight, spec, options)
        values = trellis_expand(matrix.words, matrix.scales, spec, force="scalar")
        rows.append(
            {
                "spec": spec.to_config(),
                "words": matrix.words.reshape(-1).tolist(),
                "scales": matrix.scales.view(np.uint16).tolist(),
                "values": values.view(np.uint32).reshape(-1).tolist(),
            }
        )
    TARGET.write_text("[\n" + ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows) + "\n]\n")


if __name__ == "__main__":
    main()
