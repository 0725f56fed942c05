"""Open an artifact: config, manifest, headers of its shards; tensors are read when asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from tqtool.errors import ArtifactError, SourceError, UserError
from tqtool.formats.affine import AffineSpec
from tqtool.formats.manifest import MANIFEST_NAME, Manifest, parse, parse_object, short
from tqtool.formats.safetensors import Header, read_header
from tqtool.source.checkpoint import TensorRef

SHARD_GLOB = "model*.safetensors"
_ENTRY_TYPES: dict[str, type] = {"bits": int, "group_size": int, "mode": str}


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """An opened artifact. ``tensors`` holds every tensor of every shard on disk."""

    path: Path
    config: Mapping[str, Any]
    manifest: Manifest
    shards: Mapping[str, Header]
    tensors: Mapping[str, TensorRef]

    def read(self, name: str) -> NDArray[Any]:
        """The tensor ``name``."""
        try:
            return self.tensors[name].read()
        except SourceError as error:
            raise ArtifactError(error.message, hint=error.hint) from error

    def read_rows(self, name: str, start: int, stop: int) -> NDArray[Any]:
        """Rows ``start:stop`` of the tensor ``name``."""
        try:
            return self.tensors[name].read_rows(start, stop)
        except SourceError as error:
            raise ArtifactError(error.message, hint=error.hint) from error

    def read_flat(self, name: str, start: int, stop: int) -> NDArray[Any]:
        """Elements ``start:stop`` of the tensor ``name`` in storage order, reading only those."""
        ref = self.tensors[name]
        try:
            return replace(ref, shape=(ref.nbytes // ref.dtype.itemsize,)).read_rows(start, stop)
        except SourceError as error:
            raise ArtifactError(error.message, hint=error.hint) from error


def open_artifact(path: Path) -> Artifact:
    """Open the artifact in ``path``.

    Raises:
        ArtifactError: no such folder, no manifest, a file that cannot be parsed, or a tensor in two shards.
    """
    manifest = read_manifest(path)  # first: a folder without one is no artifact, whatever else is wrong with it
    shards = read_shards(path)
    tensors: dict[str, TensorRef] = {}
    for header in shards.values():
        for name, ref in _refs(header).items():
            if name in tensors:
                raise ArtifactError(f"{name}: is in {tensors[name].path.name} and in {ref.path.name}")
            tensors[name] = ref
    return Artifact(path=path, config=read_config(path), manifest=manifest, shards=shards, tensors=tensors)


def read_manifest(path: Path) -> Manifest:
    """The manifest of the artifact in ``path``."""
    if not path.is_dir():
        raise UserError(f"{path}: no such folder")
    file = path / MANIFEST_NAME
    try:
        is_there = file.exists()
    except OSError as error:
        raise ArtifactError(f"{file}: cannot be read: {error.strerror or error}") from error
    if not is_there:
        raise ArtifactError(
            f"{path}: has no {MANIFEST_NAME}, so there is nothing to hold it against",
            hint="expected an artifact written by tqtool, copied with its tqtool/ folder",
        )
    return parse(_file_bytes(file), str(file))


def read_config(path: Path) -> dict[str, Any]:
    """``config.json`` as an object."""
    return read_object(path / "config.json")


def read_object(file: Path) -> dict[str, Any]:
    """A JSON object from ``file``."""
    return parse_object(_file_bytes(file), str(file))


def read_shards(path: Path) -> dict[str, Header]:
    """The validated header of every file a loader would pick up, by file name."""
    headers = {}
    for file in sorted(path.glob(SHARD_GLOB)):
        _require_file(file)
        try:
            headers[file.name] = read_header(file)
        except SourceError as error:
            raise ArtifactError(error.message, hint="restore the file from another copy") from error
    return headers


def affine_spec(module: str, entry: Mapping[str, Any]) -> AffineSpec:
    """The packing that a ``quantization`` entry of config.json states; ArtifactError if MLX has no such packing."""
    where = f"config.json: quantization of {module}"
    if set(entry) != set(_ENTRY_TYPES):
        raise ArtifactError(f"{where}: expected bits, group_size and mode, found {sorted(entry)}")
    for key, kind in _ENTRY_TYPES.items():
        if type(entry[key]) is not kind:  # not isinstance: True is an int to Python, 4.0 equals 4
            raise ArtifactError(f"{where}: {key}: expected {kind.__name__}, found {short(entry[key])}")
    try:
        return AffineSpec(bits=entry["bits"], group_size=entry["group_size"], mode=entry["mode"])
    except ValueError as error:
        raise ArtifactError(f"{where}: {error}") from error


def _file_bytes(file: Path) -> bytes:
    _require_file(file)
    try:
        return file.read_bytes()
    except OSError as error:
        raise ArtifactError(f"{file}: cannot be read: {error.strerror or error}") from error


def _require_file(file: Path) -> None:
    """Neither missing nor a folder nor a pipe, which would be waited for."""
    if not file.exists():
        raise ArtifactError(f"{file}: is missing")
    if not file.is_file():
        raise ArtifactError(f"{file}: expected a file, found a {'folder' if file.is_dir() else 'device or pipe'}")


def _refs(header: Header) -> dict[str, TensorRef]:
    return {
        name: TensorRef(name=name, dtype=info.dtype, shape=info.shape, path=header.path, begin=info.begin, end=info.end)
        for name, info in header.tensors.items()
    }
