"""Laws of the safetensors format, with the `safetensors` package as the other side."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from tqtool.errors import SourceError
from tqtool.formats.dtypes import DType
from tqtool.formats.safetensors import build_header, read_header
from tqtool.source.checkpoint import TensorRef

# What the other side's numpy front end can also name.
SHARED = [d for d in DType if not d.is_float8]
NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12).filter(lambda name: name != "__metadata__")
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
TENSORS = st.dictionaries(NAMES, st.tuples(st.sampled_from(SHARED), SHAPES), max_size=6)
METADATA = st.dictionaries(NAMES, st.text(st.characters(codec="utf-8"), max_size=8), max_size=3)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def _arrays(tensors: dict[str, tuple[DType, tuple[int, ...]]], seed: int) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(seed)
    arrays = {}
    for name, (dtype, shape) in tensors.items():
        count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        raw = rng.integers(0, 2 if dtype is DType.BOOL else 256, count, dtype=np.uint8)
        arrays[name] = raw.view(dtype.numpy).reshape(shape)
    return arrays


@given(tensors=TENSORS, metadata=METADATA, seed=st.integers(0, 1000))
@settings(max_examples=100, deadline=None)
def test_what_we_write_the_package_reads(
    folder: Path, tensors: dict[str, tuple[DType, tuple[int, ...]]], metadata: dict[str, str], seed: int
) -> None:
    arrays = _arrays(tensors, seed)
    blob, offsets = build_header([(name, dtype, shape) for name, (dtype, shape) in tensors.items()], metadata)
    path = folder / "ours.safetensors"
    path.write_bytes(blob + b"".join(array.tobytes() for array in arrays.values()))
    assert all(end - begin == arrays[name].nbytes for name, (begin, end) in offsets.items())
    with safe_open(path, framework="np") as file:
        assert set(file.keys()) == set(arrays)
        assert (file.metadata() or {}) == metadata
        for name, array in arrays.items():
            assert file.get_tensor(name).tobytes() == array.tobytes()
            assert file.get_tensor(name).shape == array.shape


@given(tensors=TENSORS, metadata=METADATA, seed=st.integers(0, 1000))
@settings(max_examples=100, deadline=None)
def test_what_the_package_writes_we_read(
    folder: Path, tensors: dict[str, tuple[DType, tuple[int, ...]]], metadata: dict[str, str], seed: int
) -> None:
    arrays = _arrays(tensors, seed)
    path = folder / "theirs.safetensors"
    save_file(arrays, path, metadata=metadata or None)
    header = read_header(path)
    assert header.metadata == metadata
    assert set(header.tensors) == set(arrays)
    for name, info in header.tensors.items():
        ref = TensorRef(name=name, dtype=info.dtype, shape=info.shape, path=path, begin=info.begin, end=info.end)
        assert ref.read().tobytes() == arrays[name].tobytes()
        assert (ref.shape, ref.dtype.numpy) == (arrays[name].shape, arrays[name].dtype)


VALID = {
    "__metadata__": {"format": "pt"},
    "a.weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
    "c": {"dtype": "U8", "shape": [], "data_offsets": [32, 33]},
}
VALID_TEXT = json.dumps(VALID).encode()
VALID_FILE = len(VALID_TEXT).to_bytes(8, "little") + VALID_TEXT + bytes(33)


@given(
    edits=st.lists(st.tuples(st.integers(0, len(VALID_FILE) - 1), st.integers(0, 255)), min_size=1, max_size=4),
    cut=st.one_of(st.none(), st.integers(0, len(VALID_FILE))),
)
@settings(max_examples=400, deadline=None)
def test_a_damaged_file_is_refused_or_read_as_the_package_reads_it(
    folder: Path, edits: list[tuple[int, int]], cut: int | None
) -> None:
    content = bytearray(VALID_FILE)
    for position, value in edits:
        content[position] = value
    path = folder / "damaged.safetensors"
    path.write_bytes(bytes(content[:cut]))
    try:
        header = read_header(path)
    except SourceError:
        return
    # We accepted it, so the reference implementation must agree on every tensor.
    with safe_open(path, framework="np") as file:
        assert set(file.keys()) == set(header.tensors)
        for name, info in header.tensors.items():
            assert tuple(file.get_slice(name).get_shape()) == info.shape
            assert file.get_slice(name).get_dtype() == info.dtype.value


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
ENTRY = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from([d.value for d in DType]) | JSON,
        "shape": st.lists(st.integers(-1, 2**66), max_size=3) | JSON,
        "data_offsets": st.lists(st.integers(-1, 2**66), min_size=2, max_size=2) | JSON,
    },
)


@given(header=st.dictionaries(st.text(max_size=5), ENTRY | JSON, max_size=4), data=st.binary(max_size=40))
@settings(max_examples=300, deadline=None)
def test_any_json_at_all_is_read_or_refused(folder: Path, header: dict[str, Any], data: bytes) -> None:
    text = json.dumps(header).encode()
    path = folder / "any.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    try:
        ours = set(read_header(path).tensors)
    except SourceError:
        return
    try:
        with safe_open(path, framework="np") as file:
            assert set(file.keys()) == ours
    except SafetensorError as error:  # pragma: no cover - would be a finding
        raise AssertionError(f"accepted a file the package refuses: {error}") from error
