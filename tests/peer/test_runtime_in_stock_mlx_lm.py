"""Packed artifacts in stock mlx-lm: they load with trust where there is no tqtool, and fail loudly without."""

from __future__ import annotations

import os
import subprocess
import sys

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest

from tests.support.candidates import write_trellis
from tests.support.packed_artifact import write_packed
from tests.support.stock import PACKED_TOKENS, stock_packed
from tests.support.tiny_experts import TinyExperts
from tests.support.tiny_models import Tiny, write_tiny
from tqtool.runtime.load import load

TRELLIS = "TrellisLinear"


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """By name: both axes and tiles in each, all four rates mixed in the first two; what a job writes; experts."""
    folder = tmp_path_factory.mktemp("stock")
    made = {
        "tied": write_packed(folder / "tied", Tiny(intermediate=200), k=(1, 2, 3, 4)),
        "untied": write_packed(
            folder / "untied", Tiny(model_type="qwen2", intermediate=200, tied=False), k=(4, 3, 2, 1, 3)
        ),
        "rotated": write_trellis(write_tiny(folder / "source"), folder / "rotated", k=3, k_map={"*.0.*": 2}),
    }
    source = write_tiny(folder / "sparse", TinyExperts())
    return made | {"experts": write_trellis(source, folder / "experts", k=3, k_map={"*.up_proj": 4})}


def test_stock_mlx_lm_refuses_without_trust(packed):
    with pytest.raises(ValueError, match=r"custom module \('tqtool_model.py'\)"):
        mlx_lm.load(str(packed["tied"]))


@pytest.mark.slow
def test_its_command_refuses_without_the_flag(packed):
    command = [sys.executable, "-m", "mlx_lm", "generate", "--model", str(packed["tied"]), "--prompt", "w5"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode != 0
    assert "custom module ('tqtool_model.py')" in done.stderr
    assert "trust_remote_code" in done.stderr


@pytest.mark.slow
def test_its_command_with_the_flag_where_there_is_no_tqtool(packed):
    answers = stock_packed(list(packed.values()))
    for name, folder in packed.items():
        answer, expected = answers[folder], np.array(load(folder).model(mx.array([PACKED_TOKENS]))[0])
        # The same weights in float32; sums of at most 256 products in another order.
        found = np.array(answer["logits"])
        np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max(), err_msg=name)
        assert "Generation: 6 tokens" in answer["said"], name
        assert answer["kinds"] == (["TrellisExperts", TRELLIS] if name == "experts" else [TRELLIS])
