"""Against ``mlx_lm.convert``: the same tensors byte for byte, the same index, the same loaded model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.conversions import convert
from tests.support.stock import stock_convert, stock_generate
from tests.support.tensors import raw_tensors
from tests.support.tiny_models import Tiny, write_tiny
from tqtool.formats.dtypes import DType
from tqtool.pipeline.rules import packed_setting

SOURCES = {
    "tied": Tiny(),
    "untied": Tiny(tied=False, seed=3),
    "biased": Tiny(model_type="qwen2", seed=4),
    "indivisible": Tiny(intermediate=288, seed=5),
    "float32": Tiny(dtype="float32", seed=6),
}
PACKED: list[tuple[str, int | None, int | None, str]] = [
    ("tied", 4, 64, "affine"),
    ("tied", 3, 32, "affine"),
    ("tied", 1, 128, "affine"),
    ("untied", 6, 64, "affine"),
    ("untied", 5, 128, "affine"),
    ("biased", 2, 32, "affine"),
    ("biased", 8, 64, "affine"),
    ("indivisible", 4, 64, "affine"),
    ("float32", 4, 64, "affine"),
    ("tied", None, None, "mxfp4"),
    ("tied", None, None, "nvfp4"),
    ("tied", None, None, "mxfp8"),
]
DENSE = [("tied", None), ("biased", "float16"), ("float32", "bfloat16")]
DTYPES = {"float16": DType.F16, "bfloat16": DType.BF16, None: None}


def packed_name(source: str, bits: int | None, group: int | None, mode: str) -> str:
    return f"{source}-{mode}-{bits}-{group}"


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sources and everything stock made of them, in one process."""
    root = tmp_path_factory.mktemp("stock")
    jobs: list[tuple[Path, Path, dict[str, Any]]] = []
    for name, tiny in SOURCES.items():
        write_tiny(root / "source" / name, tiny)
    (root / "out").mkdir()
    for source, bits, group, mode in PACKED:
        options = {"quantize": True, "q_bits": bits, "q_group_size": group, "q_mode": mode}
        jobs.append((root / "source" / source, root / "out" / packed_name(source, bits, group, mode), options))
    for source, dtype in DENSE:
        jobs.append((root / "source" / source, root / "out" / f"{source}-{dtype}", {"dtype": dtype}))
    stock_convert(jobs)
    return root


def index_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "model.safetensors.index.json").read_bytes())


def assert_equal(ours: Path, stock: Path) -> None:
    left, right = raw_tensors(ours), raw_tensors(stock)
    assert left.keys() == right.keys()
    for name in left:
        assert left[name][:2] == right[name][:2], name
        assert left[name][2] == right[name][2], name
    assert index_of(ours) == index_of(stock)


@pytest.mark.parametrize(("source", "bits", "group", "mode"), PACKED)
def test_packed_bytes(
    theirs: Path, tmp_path: Path, source: str, bits: int | None, group: int | None, mode: str
) -> None:
    packing = packed_setting(bits=bits, group_size=group, mode=mode)
    convert(theirs / "source" / source, tmp_path / "out", packing=packing)
    stock = theirs / "out" / packed_name(source, bits, group, mode)
    assert_equal(tmp_path / "out", stock)
    ours = json.loads((tmp_path / "out" / "config.json").read_bytes())["quantization"]
    top = json.loads((stock / "config.json").read_bytes())["quantization"]
    assert {key: ours[key] for key in top} == top


@pytest.mark.parametrize(("source", "dtype"), DENSE)
def test_dense_bytes(theirs: Path, tmp_path: Path, source: str, dtype: str | None) -> None:
    convert(theirs / "source" / source, tmp_path / "out", packing=None, dtype=DTYPES[dtype])
    assert_equal(tmp_path / "out", theirs / "out" / f"{source}-{dtype}")


def test_a_rule_can_say_what_the_default_says(theirs: Path, tmp_path: Path) -> None:
    convert(theirs / "source" / "tied", tmp_path / "out", packing=None, rules=("*=bits:4,group:64",))
    assert_equal(tmp_path / "out", theirs / "out" / packed_name("tied", 4, 64, "affine"))


def test_stock_generates_the_same_from_both(theirs: Path, tmp_path: Path) -> None:
    source = theirs / "source" / "tied"
    stock = theirs / "out" / packed_name("tied", 4, 64, "affine")
    convert(source, tmp_path / "ours")
    convert(source, tmp_path / "mixed", rules=("*q_proj=bits:8,group:32", "*v_proj=float", "*up_proj=mode:mxfp8"))
    answers = stock_generate([stock, tmp_path / "ours", tmp_path / "mixed"], [1, 5, 9, 40])
    expected = answers[stock]
    assert answers[tmp_path / "ours"] == expected
    mixed = answers[tmp_path / "mixed"]
    assert mixed["finite"]
    assert mixed["eos"] == [2]
    assert mixed["template"]
    assert mixed["last_logits"] != expected["last_logits"]


def test_stock_runs_the_rotated_model_as_the_source(tmp_path: Path) -> None:
    """float32 throughout, so that only the fold's own rounding is left."""
    source = write_tiny(tmp_path / "source", Tiny(dtype="float32", model_type="qwen2"))
    convert(source, tmp_path / "rotated", packing=None, rotation_seed=42)
    convert(source, tmp_path / "rotated4", rotation_seed=42)
    answers = stock_generate([source, tmp_path / "rotated", tmp_path / "rotated4"], [1, 5, 9, 40, 77])
    before = np.array(answers[source]["last_logits"])
    after = np.array(answers[tmp_path / "rotated"]["last_logits"])
    # float32 eps times the root of the longest sum (256 terms), twice over two layers, with slack for the fold itself.
    tolerance = 64 * np.finfo(np.float32).eps * np.sqrt(256) * np.abs(before).max()
    assert np.abs(before - after).max() <= tolerance
    assert answers[source]["tokens"] == answers[tmp_path / "rotated"]["tokens"]
    assert answers[tmp_path / "rotated4"]["finite"]
