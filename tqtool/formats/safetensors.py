"""The safetensors container: header read (fully validated) and header build. No policy, no streaming.

    byte 0        8            8+n                                  file size
    ├─ n: u64 LE ─┼─ JSON, n B ─┼─ tensor bytes, contiguous, no holes ─┤

The JSON maps each name to ``{"dtype", "shape", "data_offsets": [begin, end]}``, offsets counted from the
first tensor byte, and may hold ``"__metadata__"`` (string to string). ``TensorInfo`` keeps absolute file
offsets instead.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tqtool.errors import SourceError
from tqtool.formats.dtypes import DType

MAX_HEADER_BYTES: Final = 100_000_000  # the limit of the reference implementation
LENGTH_BYTES: Final = 8
ALIGNMENT: Final = 8
METADATA_KEY: Final = "__metadata__"

# First bytes of files people mistake for safetensors, and what to do about them.
_FOREIGN: Final = (
    (
        b"version https://git-lfs",
        "a Git LFS pointer, not the weights",
        "run `git lfs pull` in the model folder",
    ),
    (b"GGUF", "a GGUF file", "use `tqtool import-gguf FILE OUT` first"),
    (b"PK\x03\x04", "a zip archive (a PyTorch checkpoint?)", "convert the checkpoint to safetensors"),
    (b"\x80\x02", "a Python pickle", "convert the checkpoint to safetensors; pickles are not read"),
    (b"<", "a web page", "download the file again; a login or an error page was saved in its place"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """One tensor of one file; ``begin`` and ``end`` are absolute byte offsets in that file."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def size_bytes(self) -> int:
        """Bytes the tensor takes in the file."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """A validated header: ``tensors`` in the order of their bytes, which fill the file without holes."""

    path: Path
    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    file_bytes: int


def read_header(path: Path) -> Header:
    """Read and validate the header of one safetensors file; no tensor byte is read.

    Raises:
        SourceError: the file is missing, truncated, of another format, or its header is inconsistent
            (length, JSON, names, dtypes, sizes, overlap, holes, bytes after the last tensor).
    """
    raw, file_bytes = _header_bytes(path)
    entries = _parse_json(path, raw)
    metadata = _metadata(path, entries.pop(METADATA_KEY, None))
    data_start = LENGTH_BYTES + len(raw)
    infos = [_tensor_info(path, name, entry, data_start) for name, entry in entries.items()]
    infos.sort(key=lambda info: (info.begin, info.end))
    _check_layout(path, infos, data_start, file_bytes)
    return Header(path=path, tensors={info.name: info for info in infos}, metadata=metadata, file_bytes=file_bytes)


def build_header(
    tensors: Sequence[tuple[str, DType, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """Lay out a file that holds ``tensors`` in the order given.

    Returns:
        The first bytes of the file (length and JSON, padded with spaces to a multiple of 8) and the absolute
        ``(begin, end)`` of each tensor. Equal input gives equal bytes; metadata keys are sorted.

    Raises:
        ValueError: a name is duplicated or reserved, or a dimension is negative.
    """
    entries: dict[str, object] = {METADATA_KEY: dict(sorted(metadata.items()))} if metadata else {}
    relative: dict[str, tuple[int, int]] = {}
    offset = 0
    for name, dtype, shape in tensors:
        if name in relative or name == METADATA_KEY:
            raise ValueError(f"tensor name {name!r} is {'reserved' if name == METADATA_KEY else 'given twice'}")
        if any(dim < 0 for dim in shape):
            raise ValueError(f"{name}: negative dimension in shape {list(shape)}")
        end = offset + math.prod(shape) * dtype.itemsize
        relative[name] = (offset, end)
        entries[name] = {"dtype": dtype.value, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    start = LENGTH_BYTES + len(text)
    absolute = {name: (start + begin, start + end) for name, (begin, end) in relative.items()}
    return len(text).to_bytes(LENGTH_BYTES, "little") + text, absolute


def _header_bytes(path: Path) -> tuple[bytes, int]:
    """The JSON bytes of the header and the size of the file."""
    try:
        with path.open("rb") as file:
            file_bytes = file.seek(0, 2)
            file.seek(0)
            head = file.read(32)
            length = int.from_bytes(head[:LENGTH_BYTES], "little")
            if file_bytes < LENGTH_BYTES + 2 or length > min(MAX_HEADER_BYTES, file_bytes - LENGTH_BYTES):
                raise _bad_length(path, head, length, file_bytes)
            file.seek(LENGTH_BYTES)
            return file.read(length), file_bytes
    except FileNotFoundError:
        raise SourceError(f"{path}: no such file") from None
    except OSError as error:
        raise SourceError(f"{path}: cannot be read ({error.strerror or error})") from error


def _bad_length(path: Path, head: bytes, length: int, file_bytes: int) -> SourceError:
    """Why the first bytes cannot be a header length; only then is another format looked for: `<` is also 60."""
    for magic, what, hint in _FOREIGN:
        if head.startswith(magic):
            return SourceError(f"{path}: expected a safetensors file, found {what}", hint=hint)
    if file_bytes < LENGTH_BYTES + 2:
        return SourceError(
            f"{path}: expected a safetensors file, found only {file_bytes} bytes", hint="download the file again"
        )
    if length > MAX_HEADER_BYTES:
        return SourceError(
            f"{path}: the header claims {length:,} bytes, the format allows {MAX_HEADER_BYTES:,}",
            hint="the file is damaged or not a safetensors file; download it again",
        )
    return SourceError(
        f"{path}: the header claims {length:,} bytes, the file has only "
        f"{file_bytes - LENGTH_BYTES:,} after the length field",
        hint="the file is truncated; download it again",
    )


def _parse_json(path: Path, raw: bytes) -> dict[str, Any]:
    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        if len(found) != len(items):
            names = [name for name, _ in items]
            twice = next(name for name in names if names.count(name) > 1)
            raise SourceError(f"{path}: the header names {twice!r} twice", hint="the file must be written again")
        return found

    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=pairs)
    except (
        ValueError,
        RecursionError,
    ) as error:  # JSONDecodeError, UnicodeDecodeError, absurd integers, deep nesting
        raise SourceError(
            f"{path}: the header is not JSON ({error})", hint="the file is damaged; download it again"
        ) from error
    if not isinstance(value, dict):
        raise SourceError(f"{path}: the header must be a JSON object, found {type(value).__name__}")
    return value


def _metadata(path: Path, value: Any) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
        raise SourceError(f"{path}: {METADATA_KEY} must map strings to strings")
    return value


def _tensor_info(path: Path, name: str, entry: Any, data_start: int) -> TensorInfo:
    """One header entry, checked by itself."""
    where = f"{path}: tensor {name!r}"
    try:
        name.encode()
    except UnicodeEncodeError:
        raise SourceError(f"{where}: the name is not valid Unicode") from None
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise SourceError(f"{where}: the header entry must have dtype, shape and data_offsets")
    dtype = _dtype(where, entry["dtype"])
    if not _are_sizes(entry["shape"]):
        raise SourceError(f"{where}: shape must be a list of sizes, found {_short(entry['shape'])}")
    offsets = entry["data_offsets"]
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise SourceError(f"{where}: data_offsets must be [begin, end] with begin <= end, found {_short(offsets)}")
    shape = tuple(entry["shape"])
    expected = math.prod(shape) * dtype.itemsize
    found = offsets[1] - offsets[0]
    if found != expected:
        raise SourceError(
            f"{where}: {dtype} {_short(list(shape))} needs {_count(expected)} bytes, data_offsets give {_count(found)}"
        )
    return TensorInfo(name=name, dtype=dtype, shape=shape, begin=data_start + offsets[0], end=data_start + offsets[1])


def _dtype(where: str, value: Any) -> DType:
    try:
        return DType(value)
    except ValueError:
        known = ", ".join(dtype.value for dtype in DType)
        raise SourceError(f"{where}: unknown dtype {_short(value)}; known: {known}") from None


def _check_layout(path: Path, infos: Iterable[TensorInfo], data_start: int, file_bytes: int) -> None:
    """The tensors must tile the data section exactly: no overlap, no hole, nothing after the last one."""
    position, before = data_start, "the header"
    for info in infos:
        if info.begin < position:
            raise SourceError(
                f"{path}: tensor {info.name!r} begins at byte {_count(info.begin)}, inside {before!r}, "
                f"which ends at {_count(position)}",
                hint="the header is damaged; download the file again",
            )
        if info.begin > position:
            raise SourceError(
                f"{path}: {_count(info.begin - position)} bytes between {before!r} and tensor "
                f"{info.name!r} belong to no tensor",
                hint="the header is damaged; download the file again",
            )
        position, before = info.end, info.name
    if position > file_bytes:
        raise SourceError(
            f"{path}: truncated; {_count(position)} bytes expected, {file_bytes:,} found "
            f"(tensor {before!r} runs past the end)",
            hint="download the file again",
        )
    if position < file_bytes:
        raise SourceError(
            f"{path}: {file_bytes - position:,} bytes after the last tensor {before!r} belong to no tensor",
            hint="the file was not written whole or was appended to; download it again",
        )


def _are_sizes(value: Any) -> bool:
    """A list of non-negative integers; bool is an int to Python but not here."""
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _short(value: Any) -> str:
    """``value`` as text that fits in a message, whatever a damaged header holds."""
    try:
        text = repr(value)
    except ValueError:  # integers beyond Python's digit limit
        return f"<{type(value).__name__}>"
    return text if len(text) <= 80 else text[:77] + "..."


def _count(value: int) -> str:
    return f"{value:,}" if value < 1 << 80 else "over 2^80"
