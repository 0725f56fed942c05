"""The GGUF directory reader: the `gguf` package as peer, hand-made damage, and blocks decoded by the book."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tqtool.errors import SourceError
from tqtool.source.gguf.reader import read_gguf


def small_file(path: Path, *, rows: int = 6) -> dict[str, NDArray[np.float32]]:
    """A file with every kind of metadata and two tensors, written by the gguf package."""
    rng = np.random.default_rng(3)
    arrays = {
        "a.weight": rng.standard_normal((rows, 64)).astype(np.float32),
        "b.weight": rng.standard_normal(32).astype(np.float32),
    }
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_string("general.name", "täst")
    writer.add_uint8("x.u8", 200)
    writer.add_int8("x.i8", -3)
    writer.add_uint16("x.u16", 60000)
    writer.add_int16("x.i16", -300)
    writer.add_uint32("x.u32", 4_000_000_000)
    writer.add_int32("x.i32", -5)
    writer.add_uint64("x.u64", 2**63)
    writer.add_int64("x.i64", -(2**62))
    writer.add_float32("x.f32", 0.1)
    writer.add_float64("x.f64", 0.1)
    writer.add_bool("x.yes", True)
    writer.add_array("x.strings", ["a", "", "é🙂"])
    writer.add_array("x.ints", [1, -2, 3])
    writer.add_array("x.floats", [0.5, -0.25])
    writer.add_array("x.bools", [True, False])
    for name, array in arrays.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return arrays


def whole(tensor: Any) -> NDArray[np.float32]:
    """All chunks of a tensor put together."""
    parts = [values for _, _, values in tensor.chunks()]
    result: NDArray[np.float32] = np.concatenate(parts).reshape(tensor.shape)
    return result


def test_agrees_with_the_gguf_package(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    arrays = small_file(path)
    ours, theirs = read_gguf(path), gguf.GGUFReader(path)
    fields = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert dict(ours.metadata) == fields
    assert ours.version == 3
    assert [(t.name, t.data_offset, t.n_bytes, t.tensor_type) for t in theirs.tensors] == [
        (t.name, t.begin, t.nbytes, t.kind) for t in ours.tensors.values()
    ]
    for name, array in arrays.items():
        assert ours.tensors[name].shape == array.shape
        assert np.array_equal(whole(ours.tensors[name]), array)


def test_chunks_cover_a_long_tensor_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tqtool.source.gguf.reader._CHUNK_ELEMENTS", 3 * 64)
    array = small_file(tmp_path / "m.gguf", rows=10)["a.weight"]
    chunks = list(read_gguf(tmp_path / "m.gguf").tensors["a.weight"].chunks())
    assert [(start, stop) for start, stop, _ in chunks] == [(0, 3), (3, 6), (6, 9), (9, 10)]
    assert all(np.array_equal(values, array[start:stop]) for start, stop, values in chunks)


def test_truncation_anywhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    small_file(path)
    content = path.read_bytes()
    end = max(t.begin + t.nbytes for t in read_gguf(path).tensors.values())
    for cut in [*range(0, 2000, 7), *range(2000, end, 97), end - 1]:
        path.write_bytes(content[:cut])
        with pytest.raises(SourceError) as caught:
            read_gguf(path)
        assert str(path) in caught.value.message


@given(edits=st.lists(st.tuples(st.integers(0, 1100), st.integers(0, 255)), min_size=1, max_size=5))
@settings(max_examples=300, deadline=None)
def test_damage_anywhere_is_refused_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, edits: list[tuple[int, int]]
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    small_file(path)
    content = bytearray(path.read_bytes())
    for position, value in edits:
        content[position] = value
    path.write_bytes(content)
    try:
        file = read_gguf(path)
        for tensor in file.tensors.values():
            whole(tensor)
    except SourceError:
        pass


def header(version: int = 3, tensors: int = 0, values: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, values)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def number(key: str, value: int) -> bytes:
    return text(key) + struct.pack("<II", 4, value)


def tensor(name: str, dims: list[int], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


FAULTS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", r"expected a GGUF file \(first bytes b'GGUF'\), found b''"),
    "another format": (b"PK\x03\x04" + bytes(40), "found b'PK"),
    "version 1": (header(1), "GGUF version 1; versions 2 and 3 are read"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "10^15 tensors": (header(tensors=10**15), "claims 1,000,000,000,000,000 tensors, which cannot fit"),
    "10^15 values": (header(values=10**15), "claims 1,000,000,000,000,000 metadata entries"),
    "endless string": (
        header(values=1) + struct.pack("<Q", 2**60) + bytes(20),
        "metadata key 1 of 1 at byte 32 needs 1,152,921,504,606,846,976 bytes",
    ),
    "key not UTF-8": (header(values=1) + struct.pack("<Q", 2) + b"\xff\xfe" + bytes(12), "not valid UTF-8"),
    "key twice": (header(values=2) + number("k", 1) + number("k", 2), "'k' is given twice"),
    "unknown value type": (header(values=1) + text("k") + struct.pack("<II", 77, 0), "'k' has unknown value type 77"),
    "nested array": (
        header(values=1) + text("k") + struct.pack("<IIQ", 9, 9, 1) + bytes(20),
        "'k' is an array of arrays",
    ),
    "array longer than the file": (
        header(values=1) + text("k") + struct.pack("<IIQ", 9, 4, 10**12),
        "claims 1,000,000,000,000 items of 'k'",
    ),
    "split file": (header(values=1) + text("split.count") + struct.pack("<IH", 2, 3), "part 1 of a GGUF split in 3"),
    "alignment 0": (header(values=1) + number("general.alignment", 0), "positive multiple of 8, found 0"),
    "five dimensions": (header(tensors=1) + tensor("t", [1] * 5, 0, 0) + bytes(64), "'t' has 5 dimensions"),
    "no dimension": (header(tensors=1) + tensor("t", [], 0, 0) + bytes(64), "'t' has 0 dimensions"),
    "no elements": (header(tensors=1) + tensor("t", [4, 0], 0, 0) + bytes(64), r"'t' has the shape \[0, 4\]"),
    "unknown type": (header(tensors=1) + tensor("t", [32], 999, 0) + bytes(64), "'t' has type number 999"),
    "integer type": (header(tensors=1) + tensor("t", [32], int(Kind.I32), 0) + bytes(256), "'t' is I32, which cannot"),
    "ragged blocks": (
        header(tensors=1) + tensor("t", [33], int(Kind.Q8_0), 0) + bytes(256),
        "rows of 33 are not whole Q8_0 blocks of 32",
    ),
    "tensor past the end": (
        header(tensors=1) + tensor("t", [1 << 40], 0, 0) + bytes(64),
        r"truncated; tensor 't' ends at byte 4,398,\d+,\d+,\d+, the file has",
    ),
    "tensor twice": (
        header(tensors=2) + tensor("t", [4], 0, 0) + tensor("t", [4], 0, 32) + bytes(200),
        "'t' is listed twice",
    ),
    "overlap": (
        header(tensors=2) + tensor("t", [16], 0, 0) + tensor("u", [16], 0, 32) + bytes(200),
        "tensors 't' and 'u' overlap",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_has_its_message(tmp_path: Path, fault: str) -> None:
    content, message = FAULTS[fault]
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(SourceError, match=message):
        read_gguf(path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no such file"):
        read_gguf(tmp_path / "m.gguf")


# Blocks by ggml's published layouts, one value at a time.


def f16(raw: bytes) -> float:
    return float(np.frombuffer(raw, "<f2")[0])


def q4_0(block: bytes) -> list[float]:
    d, q = f16(block[:2]), block[2:18]
    return [d * ((byte & 15) - 8) for byte in q] + [d * ((byte >> 4) - 8) for byte in q]


def q4_1(block: bytes) -> list[float]:
    d, m, q = f16(block[:2]), f16(block[2:4]), block[4:20]
    return [d * (byte & 15) + m for byte in q] + [d * (byte >> 4) + m for byte in q]


def q5_0(block: bytes) -> list[float]:
    d, high, q = f16(block[:2]), int.from_bytes(block[2:6], "little"), block[6:22]
    low = [byte & 15 for byte in q] + [byte >> 4 for byte in q]
    return [d * ((value | (high >> i & 1) << 4) - 16) for i, value in enumerate(low)]


def q5_1(block: bytes) -> list[float]:
    d, m, high, q = f16(block[:2]), f16(block[2:4]), int.from_bytes(block[4:8], "little"), block[8:24]
    low = [byte & 15 for byte in q] + [byte >> 4 for byte in q]
    return [d * (value | (high >> i & 1) << 4) + m for i, value in enumerate(low)]


def q8_0(block: bytes) -> list[float]:
    return [f16(block[:2]) * value for value in np.frombuffer(block[2:34], np.int8).tolist()]


def bf16(block: bytes) -> list[float]:
    return [float(np.frombuffer(b"\0\0" + block, "<f4")[0])]


def scale_min(scales: bytes, j: int) -> tuple[int, int]:
    """6-bit scale and minimum of sub-block j in the 12 bytes of a Q4_K or Q5_K block."""
    if j < 4:
        return scales[j] & 63, scales[j + 4] & 63
    return (
        (scales[j + 4] & 15) | (scales[j - 4] >> 6) << 4,
        (scales[j + 4] >> 4) | (scales[j] >> 6) << 4,
    )


def q4_k(block: bytes) -> list[float]:
    d, dmin, scales, q = f16(block[:2]), f16(block[2:4]), block[4:16], block[16:144]
    values = []
    for j in range(8):
        scale, minimum = scale_min(scales, j)
        for i in range(32):
            byte = q[32 * (j // 2) + i]
            values.append(d * scale * (byte >> 4 * (j % 2) & 15) - dmin * minimum)
    return values


def q5_k(block: bytes) -> list[float]:
    d, dmin, scales, high, q = f16(block[:2]), f16(block[2:4]), block[4:16], block[16:48], block[48:176]
    values = []
    for j in range(8):
        scale, minimum = scale_min(scales, j)
        for i in range(32):
            low = q[32 * (j // 2) + i] >> 4 * (j % 2) & 15
            values.append(d * scale * (low | (high[i] >> j & 1) << 4) - dmin * minimum)
    return values


def q6_k(block: bytes) -> list[float]:
    low, high, scales, d = block[:128], block[128:192], np.frombuffer(block[192:208], np.int8), f16(block[208:210])
    values = []
    for n in range(256):
        half, rest = divmod(n, 128)
        quarter, lane = divmod(rest, 32)
        nibble = low[64 * half + 32 * (quarter % 2) + lane] >> 4 * (quarter // 2) & 15
        top = high[32 * half + lane] >> 2 * quarter & 3
        values.append(d * int(scales[n // 16]) * ((nibble | top << 4) - 32))
    return values


DECODERS: dict[Kind, tuple[Callable[[bytes], list[float]], tuple[int, ...]]] = {
    # type: decoder, byte offsets of its float16 fields
    Kind.Q4_0: (q4_0, (0,)),
    Kind.Q4_1: (q4_1, (0, 2)),
    Kind.Q5_0: (q5_0, (0,)),
    Kind.Q5_1: (q5_1, (0, 2)),
    Kind.Q8_0: (q8_0, (0,)),
    Kind.Q4_K: (q4_k, (0, 2)),
    Kind.Q5_K: (q5_k, (0, 2)),
    Kind.Q6_K: (q6_k, (208,)),
    Kind.BF16: (bf16, ()),
    Kind.F16: (lambda raw: [f16(raw)], ()),
    Kind.F32: (lambda raw: [float(np.frombuffer(raw, "<f4")[0])], ()),
    Kind.F64: (lambda raw: [float(np.frombuffer(raw, "<f8")[0])], ()),
}


@pytest.mark.parametrize("kind", DECODERS, ids=lambda kind: kind.name)
def test_blocks_decode_by_the_book(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind) -> None:
    decode, halves = DECODERS[kind]
    block, size = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(int(kind))
    rows, per_row = 5, max(2, 4 // block)
    if halves:
        raw = rng.integers(0, 256, (rows, per_row, size), dtype=np.uint8)
        for offset in halves:
            raw[:, :, offset : offset + 2] = rng.standard_normal((rows, per_row, 1)).astype("<f2").view(np.uint8)
    else:
        values = rng.standard_normal((rows, per_row)).astype(np.float32)
        if kind is Kind.BF16:
            raw = values.view(np.uint16)[..., 1::2].copy().view(np.uint8)
        else:
            raw = values.astype({Kind.F16: "<f2", Kind.F32: "<f4", Kind.F64: "<f8"}[kind]).view(np.uint8)
    raw = raw.reshape(rows, per_row * size)
    path = tmp_path / "m.gguf"
    entry = tensor("t", [per_row * block, rows], int(kind), 0)
    content = header(tensors=1) + entry
    path.write_bytes(content + bytes(-len(content) % 32) + raw.tobytes())
    expected = [
        [value for i in range(per_row) for value in decode(row[i * size : (i + 1) * size].tobytes())] for row in raw
    ]
    monkeypatch.setattr("tqtool.source.gguf.reader._CHUNK_ELEMENTS", 2 * per_row * block)
    found = whole(read_gguf(path).tensors["t"])
    # Both compute d·q (+ m) from the same integers; the terms may cancel, so three float32 roundings of the largest.
    assert found.shape == (rows, per_row * block)
    np.testing.assert_allclose(found, np.array(expected), rtol=0, atol=3 * 2.0**-24 * np.abs(expected).max() * 2)
