"""The header reader against hand-made files: one fault each, one message each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.raw_safetensors import entry, raw_file
from tqtool.errors import SourceError
from tqtool.formats.dtypes import DType, dtype_of
from tqtool.formats.safetensors import MAX_HEADER_BYTES, build_header, read_header


def test_reads_offsets_as_absolute_file_positions(tmp_path: Path) -> None:
    # Given in another order than their bytes lie in the file.
    path = raw_file(
        tmp_path / "a.safetensors",
        {"__metadata__": {"format": "pt"}, "b": entry("BF16", [2], 8, 12), "a": entry("F32", [2, 1], 0, 8)},
        bytes(range(12)),
    )
    header = read_header(path)
    start = header.file_bytes - 12
    assert [(t.name, t.dtype, t.shape, t.begin - start, t.end - start) for t in header.tensors.values()] == [
        ("a", DType.F32, (2, 1), 0, 8),
        ("b", DType.BF16, (2,), 8, 12),
    ]
    assert header.metadata == {"format": "pt"}
    assert path.read_bytes()[header.tensors["b"].begin : header.tensors["b"].end] == bytes(range(8, 12))


def test_scalars_and_empty_tensors_take_their_place(tmp_path: Path) -> None:
    header = {"s": entry("F64", [], 0, 8), "e": entry("F32", [0, 5], 8, 8), "t": entry("U8", [3], 8, 11)}
    read = read_header(raw_file(tmp_path / "a.safetensors", header, bytes(11)))
    assert {name: (info.shape, info.size_bytes) for name, info in read.tensors.items()} == {
        "s": ((), 8),
        "e": ((0, 5), 0),
        "t": ((3,), 3),
    }


FAULTS: dict[str, tuple[Any, bytes, str]] = {
    "overlap": (
        {"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 3, 7)},
        bytes(7),
        r"'b' begins at byte .*inside 'a'",
    ),
    "same bytes twice": ({"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 0, 4)}, bytes(4), "inside 'a'"),
    "hole": (
        {"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 6, 10)},
        bytes(10),
        "2 bytes between 'a' and tensor 'b'",
    ),
    "hole at the start": ({"a": entry("U8", [4], 4, 8)}, bytes(8), "4 bytes between 'the header' and tensor 'a'"),
    "backwards": ({"a": entry("U8", [4], 4, 0)}, bytes(4), r"begin <= end, found \[4, 0\]"),
    "too small for its shape": ({"a": entry("F32", [2, 2], 0, 12)}, bytes(12), "needs 16 bytes, data_offsets give 12"),
    "shape beyond 64 bits": ({"a": entry("F32", [1 << 62, 1 << 62], 0, 16)}, bytes(16), "needs over 2.80 bytes"),
    "truncated": ({"a": entry("U8", [100], 0, 100)}, bytes(60), r"truncated; \d+ bytes expected, \d+ found .*'a'"),
    "bytes after the end": ({"a": entry("U8", [4], 0, 4)}, bytes(9), "5 bytes after the last tensor 'a'"),
    "unknown dtype": ({"a": entry("F7", [4], 0, 4)}, bytes(4), "unknown dtype 'F7'; known: BF16"),
    "dtype not text": ({"a": entry(7, [4], 0, 4)}, bytes(4), "unknown dtype 7"),  # type: ignore[arg-type]
    "negative dimension": ({"a": entry("U8", [-4], 0, 4)}, bytes(4), r"shape must be a list of sizes, found \[-4\]"),
    "true as a dimension": ({"a": entry("U8", [True], 0, 1)}, bytes(1), "shape must be a list of sizes"),
    "fractional offset": ({"a": entry("U8", [4], 0, 4.0)}, bytes(4), "data_offsets must be"),  # type: ignore[arg-type]
    "three offsets": (
        {"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1, 2]}},
        bytes(1),
        "data_offsets must be",
    ),
    "no shape": ({"a": {"dtype": "U8", "data_offsets": [0, 1]}}, bytes(1), "must have dtype, shape and data_offsets"),
    "entry not an object": ({"a": 3}, b"", "must have dtype, shape and data_offsets"),
    "metadata not text": ({"__metadata__": {"format": 1}}, b"", "__metadata__ must map strings to strings"),
    "a list": ([1, 2], b"", "must be a JSON object, found list"),
    "not JSON": (b"{'a': 1}", b"", "not JSON"),
    "not UTF-8": (b'{"\xff": 1}', b"", "not JSON"),
    "named twice": (b'{"a": 1, "a": 2}', b"", "names 'a' twice"),
    "deep nesting": (b"[" * 100_000, b"", "not JSON"),
    "lone surrogate": (b'{"\\ud800": {"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"x", "not valid Unicode"),
    "huge integer": (b'{"a": {"dtype":"U8","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,1]}}', b"x", "not JSON"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_has_its_message(tmp_path: Path, fault: str) -> None:
    header, data, message = FAULTS[fault]
    path = raw_file(tmp_path / "bad.safetensors", header, data)
    with pytest.raises(SourceError, match=message) as caught:
        read_header(path)
    assert str(path) in caught.value.message
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("length", "message"),
    [
        (10_000_000_000, f"claims 10,000,000,000 bytes, the format allows {MAX_HEADER_BYTES:,}"),
        (2**64 - 1, "the format allows"),
        (MAX_HEADER_BYTES, "the file has only 2 after the length field"),
        (3, "the file has only 2 after the length field"),
    ],
)
def test_absurd_header_length(tmp_path: Path, length: int, message: str) -> None:
    with pytest.raises(SourceError, match=message):
        read_header(raw_file(tmp_path / "bad.safetensors", b"{}", b"", length=length))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer"),
        (b"GGUF\x03\0\0\0" + bytes(40), "a GGUF file"),
        (b"PK\x03\x04" + bytes(40), "zip archive"),
        (b"\x80\x02}q\0" + bytes(40), "pickle"),
        (b"<!DOCTYPE html><html></html>", "web page"),
        (b"", "found only 0 bytes"),
        (b"\x02\0\0\0\0\0\0\0{", "found only 9 bytes"),
    ],
)
def test_other_formats_are_recognized(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(SourceError, match=message) as caught:
        read_header(path)
    assert caught.value.hint


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no such file"):
        read_header(tmp_path / "none.safetensors")
    with pytest.raises(SourceError, match="cannot be read"):
        read_header(tmp_path)


def test_build_keeps_order_and_pads_to_eight() -> None:
    tensors = [("z", DType.F16, (3,)), ("a", DType.U32, (2, 2)), ("empty", DType.BF16, (0, 4))]
    blob, offsets = build_header(tensors, {"format": "mlx"})
    assert len(blob) % 8 == 0
    assert int.from_bytes(blob[:8], "little") == len(blob) - 8
    n = len(blob)
    assert offsets == {"z": (n, n + 6), "a": (n + 6, n + 22), "empty": (n + 22, n + 22)}
    assert build_header(tensors, {"format": "mlx"})[0] == blob


def test_build_is_independent_of_metadata_order() -> None:
    one = build_header([("a", DType.U8, (1,))], {"x": "1", "y": "2"})
    assert one == build_header([("a", DType.U8, (1,))], {"y": "2", "x": "1"})


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([("a", DType.U8, (1,)), ("a", DType.U8, (1,))], "given twice"),
        ([("__metadata__", DType.U8, (1,))], "reserved"),
        ([("a", DType.U8, (-1,))], "negative"),
    ],
)
def test_build_refuses(tensors: list[tuple[str, DType, tuple[int, ...]]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_header(tensors, {})


def test_every_dtype_knows_its_numpy_type() -> None:
    for dtype in DType:
        assert dtype_of(np.empty(0, dtype=dtype.numpy)) is dtype
        assert dtype.itemsize == dtype.numpy.itemsize
    assert [d.value for d in DType if d.is_float] == ["BF16", "F16", "F32", "F64"]
    with pytest.raises(TypeError, match="complex64"):
        dtype_of(np.empty(0, dtype=np.complex64))
    with pytest.raises(TypeError, match="cannot be stored"):
        dtype_of(np.empty(0, dtype=">f4"))
