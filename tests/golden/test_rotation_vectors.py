"""Signs and folded bytes against the stored ones: a seed means the same weights on every machine, today and later."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from tests.golden.regen_rotation import ramp
from tests.oracles.hadamard import splitmix32_signs
from tqtool.mathx.signs import sign_vector
from tqtool.native import hadamard_transform

GOLDEN = json.loads(Path(__file__).with_name("rotation.json").read_text())


@pytest.mark.parametrize("case", GOLDEN["signs"], ids=lambda case: "seed{seed} lane{lane} n{n}".format(**case))
def test_sign_streams(case: dict) -> None:
    signs = sign_vector(case["seed"], case["n"], lane=case["lane"])
    text = "".join("+" if sign > 0 else "-" for sign in signs)
    assert text[:64] == case["first"]
    assert hashlib.sha256(text.encode()).hexdigest() == case["sha256"]


@pytest.mark.parametrize("case", GOLDEN["folds"], ids=lambda case: "n{n}".format(**case))
@pytest.mark.parametrize("axis", [0, 1])
def test_folded_bytes(case: dict, axis: int) -> None:
    n = case["n"]
    x = ramp(case["rows"], n) if axis else np.ascontiguousarray(ramp(case["rows"], n).T)
    scale = np.array(splitmix32_signs(42, n, 0), dtype=np.float32)
    folded = hadamard_transform(x, axis=axis, scale=scale)
    rows = folded if axis else np.ascontiguousarray(folded.T)
    assert hashlib.sha256(rows.tobytes()).hexdigest() == case["sha256"]
