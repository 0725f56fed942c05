"""Values that are inf or NaN are counted and located; checking and reading hold little in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.support.memory import added_peak_bytes
from tests.support.raw_safetensors import entry, raw_file
from tests.support.tiny_models import Tiny, write_tiny, write_weights
from tqtool.errors import NumericalError
from tqtool.source.checkpoint import open_checkpoint
from tqtool.source.checks import check_finite, require_finite


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32, np.float64])
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_finite_check_counts_and_locates(dtype: Any, value: float) -> None:
    array = np.zeros((3, 1_000_000), dtype)  # three pieces of the check
    array[0, 5] = np.finfo(np.float16).max  # large is not infinite
    require_finite("w", array)
    array[1, 700_000] = value
    array[2, 999_999] = value
    with pytest.raises(NumericalError, match=r"w: 2 of 3,000,000 .* the first at \[1, 700000\]") as caught:
        require_finite("w", array)
    assert caught.value.exit_code == 3


def test_finite_check_of_odd_arrays() -> None:
    require_finite("i", np.arange(3))
    require_finite("e", np.zeros((0, 4), np.float32))
    require_finite("t", np.ones((4, 6), np.float32).T)
    with pytest.raises(NumericalError, match=r"s: 1 of 1 .* the first at \[\]"):
        require_finite("s", np.array(np.nan, np.float32))


@pytest.mark.parametrize("chunk", [1 << 20, 3000])
def test_whole_checkpoint_finite_check_streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr("tqtool.source.checks._FINITE_CHUNK", chunk)
    folder = write_tiny(tmp_path / "model")
    seen: list[tuple[float, str]] = []
    checkpoint = open_checkpoint(str(folder))
    check_finite(checkpoint, lambda amount, what: seen.append((amount, what)))
    assert sum(amount for amount, _ in seen) == checkpoint.nbytes
    tensors = Tiny().tensors()
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name][200, 17] = np.nan
    write_weights(folder, tensors)
    with pytest.raises(NumericalError, match=rf"model.safetensors: {name}: 1 of 32,768 .* \[200, 17\]"):
        check_finite(open_checkpoint(str(folder)))


OPEN = """
import sys
from tqtool.source.checkpoint import open_checkpoint
from tqtool.source.checks import check_finite
checkpoint = open_checkpoint(sys.argv[1])
"""
READ = """
for ref in checkpoint.tensors.values():
    ref.read()
"""


@pytest.mark.parametrize(("what", "budget"), [("check_finite(checkpoint)", 24 << 20), (READ, 72 << 20)])
def test_memory_is_bounded_by_one_tensor(tmp_path: Path, what: str, budget: int) -> None:
    """Six tensors of 64 MB: reading holds one, checking a few MB, wherever the file cache keeps the rest."""
    names = [f"t{index}" for index in range(6)]
    size = 64 << 20
    header = {name: entry("F32", [4096, 4096], i * size, (i + 1) * size) for i, name in enumerate(names)}
    path = raw_file(tmp_path / "model.safetensors", header, b"")
    with path.open("r+b") as file:  # a sparse file: it reads as zeros and takes no disk
        file.truncate(path.stat().st_size + 6 * size)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert added_peak_bytes(OPEN, what, tmp_path) <= budget
