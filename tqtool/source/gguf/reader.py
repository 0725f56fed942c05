"""The GGUF container: metadata and tensor directory, every count checked against the file before it is trusted.

    magic "GGUF" · version u32 · tensor count u64 · metadata count u64
    metadata count × (key string · value type u32 · value)
    tensor count   × (name string · n_dims u32 · dims u64, innermost first · type u32 · offset u64)
    padding to `general.alignment`, then the tensor bytes; offsets count from here

The `gguf` package supplies the enumerations, block sizes and dequantization. Its own reader maps the file and makes
one array per token, and an absurd count in a damaged file keeps it busy for ever; so the directory is read here.
"""

from __future__ import annotations

import itertools
import math
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from gguf.quants import dequantize
from numpy.typing import NDArray

from tqtool.errors import SourceError

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
DEFAULT_ALIGNMENT: Final = 32
_CHUNK_ELEMENTS: Final = 1 << 19  # dequantized together: 2 MB of float32, and a few times that inside gguf
_AGAIN: Final = "the file is damaged or truncated; download it again"

_SCALARS: Final = {
    GGUFValueType.UINT8: "<B",
    GGUFValueType.INT8: "<b",
    GGUFValueType.UINT16: "<H",
    GGUFValueType.INT16: "<h",
    GGUFValueType.UINT32: "<I",
    GGUFValueType.INT32: "<i",
    GGUFValueType.FLOAT32: "<f",
    GGUFValueType.BOOL: "<?",
    GGUFValueType.UINT64: "<Q",
    GGUFValueType.INT64: "<q",
    GGUFValueType.FLOAT64: "<d",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """One tensor; ``shape`` is outermost first (as numpy and Hugging Face write it), ``begin`` absolute."""

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    path: Path
    begin: int
    nbytes: int

    @property
    def n_elements(self) -> int:
        """Number of weights."""
        return math.prod(self.shape)

    def chunks(self) -> Iterator[tuple[int, int, NDArray[np.float32]]]:
        """The tensor dequantized to float32 a few MB at a time: ``(start, stop, [stop-start, row])``.

        Rows are the last axis; all other axes are counted together, outermost first.
        """
        row = self.shape[-1] if self.shape else 1
        rows = self.n_elements // row if row else 0
        row_bytes = self.nbytes // rows if rows else 0
        step = max(1, _CHUNK_ELEMENTS // max(row, 1))
        with self.path.open("rb") as file:
            for start in range(0, rows, step):
                stop = min(rows, start + step)
                raw = os.pread(file.fileno(), (stop - start) * row_bytes, self.begin + start * row_bytes)
                if len(raw) != (stop - start) * row_bytes:
                    raise SourceError(f"{self.path}: ends inside tensor {self.name!r}", hint=_AGAIN)
                packed = np.frombuffer(raw, dtype=np.uint8).reshape(stop - start, row_bytes)
                yield start, stop, dequantize_rows(packed, self.kind).reshape(stop - start, row)


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFile:
    """A validated directory: metadata values are Python scalars, strings and lists; no tensor byte was read."""

    path: Path
    version: int
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    file_bytes: int

    @property
    def architecture(self) -> str:
        """``general.architecture``."""
        return str(self.metadata.get("general.architecture", ""))


def dequantize_rows(packed: NDArray[np.uint8], kind: GGMLQuantizationType) -> NDArray[np.float32]:
    """Rows of stored bytes to float32 values; the row length follows from the type."""
    if kind == GGMLQuantizationType.F64:
        return packed.view(np.float64).astype(np.float32)
    values: NDArray[np.float32] = dequantize(packed, kind)
    return values


def is_readable_type(kind: GGMLQuantizationType) -> bool:
    """True if a tensor of this type can be turned into floats here."""
    if kind in (GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.F64):
        return True
    if kind.name.startswith("I") and not kind.name.startswith("IQ"):
        return False
    _, size = GGML_QUANT_SIZES[kind]
    try:
        dequantize(np.zeros((1, size), dtype=np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def read_gguf(path: Path) -> GgufFile:
    """Read and validate the directory of a GGUF file.

    Raises:
        SourceError: not a GGUF file, an unsupported version or byte order, one part of a split file, a
            directory that does not fit in the file, or tensors that overlap or run past its end.
    """
    try:
        with path.open("rb", buffering=1 << 20) as file:
            cursor = _Cursor(path, file, file_bytes=os.fstat(file.fileno()).st_size)
            return _read_directory(cursor)
    except FileNotFoundError:
        raise SourceError(f"{path}: no such file") from None
    except OSError as error:
        hint = "a model folder needs no import: give it to the other verbs as it is" if path.is_dir() else None
        raise SourceError(f"{path}: cannot be read ({error.strerror or error})", hint=hint) from error


class _Cursor:
    """Sequential reads that never go past the end of the file and say what they were reading when they would."""

    def __init__(self, path: Path, file: BinaryIO, *, file_bytes: int) -> None:
        self.path = path
        self.file_bytes = file_bytes
        self.position = 0
        self._file = file

    def take(self, count: int, what: str) -> bytes:
        if count > self.file_bytes - self.position:
            raise SourceError(
                f"{self.path}: {what} at byte {self.position:,} needs {count:,} bytes, the file has "
                f"{self.file_bytes - self.position:,} left",
                hint=_AGAIN,
            )
        self.position += count
        return self._file.read(count)

    def scalar(self, layout: str, what: str) -> Any:
        return struct.unpack(layout, self.take(struct.calcsize(layout), what))[0]

    def string(self, what: str) -> str:
        raw = self.take(self.scalar("<Q", f"length of {what}"), what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise SourceError(f"{self.path}: {what} is not valid UTF-8 ({error})", hint=_AGAIN) from error

    def count(self, item_bytes: int, what: str) -> int:
        """A 64-bit count of items of at least ``item_bytes`` each; refused if they cannot fit in the rest."""
        count = int(self.scalar("<Q", f"number of {what}"))
        if count * item_bytes > self.file_bytes - self.position:
            raise SourceError(
                f"{self.path}: claims {count:,} {what}, which cannot fit in the {self.file_bytes:,} bytes of the file",
                hint=_AGAIN,
            )
        return count


def _read_directory(cursor: _Cursor) -> GgufFile:
    _check_magic(cursor)
    version = _check_version(cursor)
    n_tensors = cursor.count(24, "tensors")
    n_values = cursor.count(13, "metadata entries")
    metadata: dict[str, Any] = {}
    for index in range(n_values):
        key = cursor.string(f"metadata key {index + 1} of {n_values}")
        if key in metadata:
            raise SourceError(f"{cursor.path}: metadata key {key!r} is given twice", hint=_AGAIN)
        metadata[key] = _read_value(cursor, key)
    _refuse_split(cursor.path, metadata)
    entries = [_read_tensor_entry(cursor, index, n_tensors) for index in range(n_tensors)]
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment <= 0 or alignment % 8:
        raise SourceError(f"{cursor.path}: general.alignment must be a positive multiple of 8, found {alignment!r}")
    start = cursor.position + -cursor.position % alignment
    tensors = _place_tensors(cursor, entries, start)
    return GgufFile(path=cursor.path, version=version, metadata=metadata, tensors=tensors, file_bytes=cursor.file_bytes)


def _check_magic(cursor: _Cursor) -> None:
    magic = cursor.take(4, "the magic") if cursor.file_bytes >= 4 else b""
    if magic != MAGIC:
        raise SourceError(
            f"{cursor.path}: expected a GGUF file (first bytes {MAGIC!r}), found {magic!r}",
            hint="import-gguf reads .gguf files; other checkpoints go to convert directly",
        )


def _check_version(cursor: _Cursor) -> int:
    version = int(cursor.scalar("<I", "the version"))
    if version & 0xFFFF == 0 and version:
        raise SourceError(f"{cursor.path}: a big-endian GGUF file; only little-endian files are read")
    if version not in VERSIONS:
        raise SourceError(f"{cursor.path}: GGUF version {version}; versions {VERSIONS[0]} and {VERSIONS[1]} are read")
    return version


def _read_value(cursor: _Cursor, key: str) -> Any:
    kind = _value_type(cursor, key)
    if kind == GGUFValueType.STRING:
        return cursor.string(f"value of {key!r}")
    if kind != GGUFValueType.ARRAY:
        return cursor.scalar(_SCALARS[kind], f"value of {key!r}")
    item = _value_type(cursor, key)
    if item == GGUFValueType.ARRAY:
        raise SourceError(f"{cursor.path}: metadata {key!r} is an array of arrays, which is not supported")
    if item == GGUFValueType.STRING:
        count = cursor.count(8, f"strings of {key!r}")
        return [cursor.string(f"string {index} of {key!r}") for index in range(count)]
    layout = _SCALARS[item]
    count = cursor.count(struct.calcsize(layout), f"items of {key!r}")
    raw = cursor.take(count * struct.calcsize(layout), f"items of {key!r}")
    return np.frombuffer(raw, dtype=np.dtype(layout)).tolist()


def _value_type(cursor: _Cursor, key: str) -> GGUFValueType:
    code = int(cursor.scalar("<I", f"type of {key!r}"))
    try:
        return GGUFValueType(code)
    except ValueError:
        raise SourceError(f"{cursor.path}: metadata {key!r} has unknown value type {code}", hint=_AGAIN) from None


def _refuse_split(path: Path, metadata: Mapping[str, Any]) -> None:
    parts = metadata.get("split.count", 1)
    if parts not in (0, 1):
        raise SourceError(
            f"{path}: part {int(metadata.get('split.no', 0)) + 1} of a GGUF split in {parts} files",
            hint="join the parts first: llama-gguf-split --merge FIRST_PART OUT.gguf",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    name: str
    dims: tuple[int, ...]  # innermost first, as stored
    code: int
    offset: int


def _read_tensor_entry(cursor: _Cursor, index: int, total: int) -> _Entry:
    what = f"tensor entry {index + 1} of {total}"
    name = cursor.string(f"name in {what}")
    n_dims = int(cursor.scalar("<I", what))
    if not 1 <= n_dims <= 4:
        raise SourceError(f"{cursor.path}: tensor {name!r} has {n_dims} dimensions, expected 1 to 4", hint=_AGAIN)
    dims = struct.unpack(f"<{n_dims}Q", cursor.take(8 * n_dims, what))
    if 0 in dims:
        raise SourceError(f"{cursor.path}: tensor {name!r} has the shape {list(dims[::-1])}", hint=_AGAIN)
    code = int(cursor.scalar("<I", what))
    return _Entry(name=name, dims=dims, code=code, offset=int(cursor.scalar("<Q", what)))


def _place_tensors(cursor: _Cursor, entries: list[_Entry], start: int) -> dict[str, GgufTensor]:
    """Absolute positions, checked against the file and against each other, in directory order."""
    path = cursor.path
    tensors: dict[str, GgufTensor] = {}
    for entry in entries:
        if entry.name in tensors:
            raise SourceError(f"{path}: tensor {entry.name!r} is listed twice", hint=_AGAIN)
        kind = _tensor_type(path, entry)
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if entry.dims[0] % block:
            raise SourceError(
                f"{path}: tensor {entry.name!r}: rows of {entry.dims[0]:,} are not whole {kind.name} blocks of {block}"
            )
        nbytes = math.prod(entry.dims) // block * block_bytes
        begin = start + entry.offset
        if begin + nbytes > cursor.file_bytes:
            raise SourceError(
                f"{path}: truncated; tensor {entry.name!r} ends at byte {begin + nbytes:,}, the file has "
                f"{cursor.file_bytes:,}",
                hint="download the file again",
            )
        tensors[entry.name] = GgufTensor(
            name=entry.name, kind=kind, shape=entry.dims[::-1], path=path, begin=begin, nbytes=nbytes
        )
    in_file = sorted((tensor for tensor in tensors.values() if tensor.nbytes), key=lambda tensor: tensor.begin)
    for first, second in itertools.pairwise(in_file):
        if first.begin + first.nbytes > second.begin:
            raise SourceError(f"{path}: tensors {first.name!r} and {second.name!r} overlap", hint=_AGAIN)
    return tensors


def _tensor_type(path: Path, entry: _Entry) -> GGMLQuantizationType:
    try:
        kind = GGMLQuantizationType(entry.code)
    except ValueError:
        raise SourceError(
            f"{path}: tensor {entry.name!r} has type number {entry.code}, unknown to the installed gguf package",
            hint="upgrade the gguf package, or take another quantization of the model",
        ) from None
    if not is_readable_type(kind):
        raise SourceError(
            f"{path}: tensor {entry.name!r} is {kind.name}, which cannot be turned into floats here",
            hint="take an F16, BF16, Q8_0 or K-quant file of the model",
        )
    return kind
