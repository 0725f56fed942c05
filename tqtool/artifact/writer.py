"""An artifact appears whole or not at all: shards laid out before work, streamed, hashed, renamed.

Everything is written to ``.NAME.partial-PID`` beside the final folder; ``commit`` makes it durable and
renames. A kill leaves only the partial folder, which the next writer of that name removes (``leftovers`` says how it
knows). Memory: nothing but the tensor handed in.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import numpy as np
from numpy.typing import NDArray

from tqtool.artifact.disk import disk_errors
from tqtool.artifact.leftovers import Hold, clear_leftovers, make_partial, replaced_path
from tqtool.errors import ArtifactError, UserError
from tqtool.formats.dtypes import dtype_of
from tqtool.formats.manifest import MANIFEST_NAME
from tqtool.formats.safetensors import build_header, read_header
from tqtool.solve.quantizer import StoredTensor

MAX_SHARD_BYTES = 5 << 30
INDEX_NAME = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """A finished file of the artifact."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One planned safetensors file: the tensors in file order."""

    name: str
    tensors: tuple[StoredTensor, ...]


def plan_shards(planned: Sequence[StoredTensor], max_shard_bytes: int = MAX_SHARD_BYTES) -> tuple[Shard, ...]:
    """Cut ``planned`` into shards as mlx-lm does: fill until the next tensor would pass the limit."""
    groups: list[list[StoredTensor]] = []
    size = 0
    for tensor in planned:
        if not groups or size + tensor.nbytes > max_shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.nbytes
    if len(groups) == 1:
        return (Shard(name="model.safetensors", tensors=tuple(groups[0])),)
    return tuple(
        Shard(name=f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors", tensors=tuple(group))
        for i, group in enumerate(groups)
    )


class ArtifactWriter:
    """Context manager around one artifact folder.

    ``write`` every planned tensor in order, ``add_bytes``/``copy_file`` the rest, then ``commit``.
    Leaving the block without ``commit`` removes everything that was written.
    """

    def __init__(
        self,
        out: Path,
        planned: Sequence[StoredTensor],
        max_shard_bytes: int = MAX_SHARD_BYTES,
        *,
        total_parameters: int | None = None,
        overwrite: bool = False,
    ) -> None:
        self.out = out.absolute()
        self.shards = plan_shards(planned, max_shard_bytes)
        self.files: dict[str, FileRecord] = {}
        self.tensor_sha256: dict[str, str] = {}
        self.notes: list[str] = []
        self._total_parameters = total_parameters
        self._overwrite = overwrite
        self._order = iter([(shard, tensor) for shard in self.shards for tensor in shard.tensors])
        self._left = len(planned)
        self._file: IO[bytes] | None = None
        self._file_hash = hashlib.sha256()
        self._committed = False
        self._partial: Path | None = None
        self._hold: Hold | None = None
        self._hasher = ThreadPoolExecutor(max_workers=1)

    @property
    def folder(self) -> Path:
        """Where files are until ``commit``."""
        assert self._partial is not None, "the folder exists inside the with block"
        return self._partial

    def __enter__(self) -> Self:
        self.notes += clear_leftovers(self.out)
        check_target(self.out, overwrite=self._overwrite)
        if glob.has_magic(str(self.out)):
            self.notes.append(
                f"stock mlx-lm takes *, ? and [ in {self.out} for a pattern: rename, or run it there with --model ."
            )
        try:
            with disk_errors(self.out):
                self._partial, self._hold = make_partial(self.out)
        except BaseException:  # a signal's exit: Python calls __exit__ only for an __enter__ that returned
            self._discard()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._hasher.shutdown()
            if self._file is not None:
                self._file.close()
        except OSError:
            # Closing flushes and fails again on a full disk: that must not replace the first error or the clean-up.
            if value is None:
                raise
        finally:
            self._discard()

    def _discard(self) -> None:
        """Let go of the folder; if it has not got its final name, remove it."""
        if self._partial is not None and not self._committed:
            shutil.rmtree(self._partial, ignore_errors=True)
        if self._hold is not None:
            self._hold.release()

    def write(self, name: str, array: NDArray[Any]) -> None:
        """Append the next planned tensor; anything but that tensor is an ArtifactError."""
        shard, tensor = next(self._order, (None, None))
        if shard is None or tensor is None:
            raise ArtifactError(f"{name}: every planned tensor is written already")
        found = (name, dtype_of(array), tuple(array.shape))
        if found != (tensor.name, tensor.dtype, tensor.shape):
            raise ArtifactError(
                f"writer expected {tensor.name} {tensor.dtype.value} {list(tensor.shape)}, "
                f"got {found[0]} {found[1].value} {list(found[2])}"
            )
        with disk_errors(self.folder / shard.name):
            if tensor is shard.tensors[0]:
                self._begin(shard)
            data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
            digest = self._hasher.submit(hashlib.sha256, data)  # beside the hash of the file
            self._put(data)
            self.tensor_sha256[name] = digest.result().hexdigest()
            if tensor is shard.tensors[-1]:
                self._end(shard)
        self._left -= 1

    def add_bytes(self, relpath: str, data: bytes) -> None:
        """Write a small file; folders in ``relpath`` are made."""
        path = self._claim(relpath)
        with disk_errors(path), path.open("wb") as file:
            file.write(data)
            _sync(file)
        self.files[relpath] = FileRecord(size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())

    def copy_file(self, relpath: str, src: Path) -> None:
        """Copy ``src`` verbatim."""
        path = self._claim(relpath)
        digest, size = hashlib.sha256(), 0
        with disk_errors(path), src.open("rb") as source, path.open("wb") as file:
            while block := source.read(1 << 20):
                digest.update(block)
                size += file.write(block)
            _sync(file)
        self.files[relpath] = FileRecord(size_bytes=size, sha256=digest.hexdigest())

    def add_index(self) -> None:
        """Write the index of the planned shards; mlx-lm's keys."""
        tensors = [(tensor, shard.name) for shard in self.shards for tensor in shard.tensors]
        metadata: dict[str, int] = {"total_size": sum(tensor.nbytes for tensor, _ in tensors)}
        if self._total_parameters is not None:
            metadata["total_parameters"] = self._total_parameters
        weight_map = dict(sorted((tensor.name, shard) for tensor, shard in tensors))
        self.add_bytes(INDEX_NAME, json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=4).encode())

    def add_sidecar(self, relpath: str, names: Sequence[str]) -> None:
        """Write tensors of the finished shards once more, to a safetensors file of their own."""
        planned = {tensor.name: (shard.name, tensor) for shard in self.shards for tensor in shard.tensors}
        files = {planned[name][0] for name in names}
        headers = {file: read_header(self.folder / file).tensors for file in files}
        entries = [(name, planned[name][1].dtype, planned[name][1].shape) for name in names]
        header, _ = build_header(entries, {"format": "mlx"})
        path = self._claim(relpath)
        digest = hashlib.sha256(header)
        with disk_errors(path), path.open("wb") as file:
            file.write(header)
            for name in names:
                place = headers[planned[name][0]][name]
                with (self.folder / planned[name][0]).open("rb") as shard:
                    shard.seek(place.begin)
                    left = place.end - place.begin
                    while block := shard.read(min(left, 1 << 20)):
                        digest.update(block)
                        left -= file.write(block)
            _sync(file)
            self.files[relpath] = FileRecord(size_bytes=file.tell(), sha256=digest.hexdigest())

    def adopt(self, folder: str, files: Mapping[str, FileRecord]) -> None:
        """Count the files of an artifact that another writer has put into ``folder`` of this one."""
        for name, record in files.items():
            if f"{folder}/{name}" in self.files or not (self.folder / folder / name).is_file():
                raise ArtifactError(f"{folder}/{name}: written twice, or not there")
            self.files[f"{folder}/{name}"] = record

    def commit(self) -> None:
        """Make it durable and give it its name; raises ArtifactError when a planned tensor is missing."""
        if self._left:
            shard, tensor = next(self._order)
            raise ArtifactError(f"{self._left} planned tensors were never written, first {tensor.name} of {shard.name}")
        if INDEX_NAME not in self.files:
            self.add_index()
        with disk_errors(self.out):
            for folder, _, _ in os.walk(self.folder):
                _sync_folder(Path(folder))
            self._rename()
            _sync_folder(self.out.parent)
        self._committed = True

    def _rename(self) -> None:
        """Give the folder its name; an existing empty folder is replaced, an artifact only when asked."""
        if not (self._overwrite and self.out.is_dir()):
            self.folder.rename(self.out)
            return
        try:
            hold = Hold.take(self.out, wait=True)  # another run that is replacing it now, or has just done so
        except OSError:
            hold = None  # no locks here
        try:
            if not self.out.exists():
                self.folder.rename(self.out)
                return
            check_target(self.out, overwrite=True)  # whoever put something else there meanwhile keeps it
            old = replaced_path(self.out)
            self.out.rename(old)
            try:
                self.folder.rename(self.out)
            except BaseException:
                with suppress(OSError):  # refused if the new one has the name already
                    old.rename(self.out)
                raise
            shutil.rmtree(old)
        finally:
            if hold is not None:
                hold.release()

    def _claim(self, relpath: str) -> Path:
        path = (self.folder / relpath).resolve()
        if relpath in self.files or not path.is_relative_to(self.folder.resolve()):
            raise ArtifactError(f"{relpath}: written twice, or outside the artifact")
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def _begin(self, shard: Shard) -> None:
        header, _ = build_header([(t.name, t.dtype, t.shape) for t in shard.tensors], {"format": "mlx"})
        self._file = self._claim(shard.name).open("wb")
        self._file_hash = hashlib.sha256()
        self._put(header)

    def _put(self, data: bytes | memoryview) -> None:
        assert self._file is not None, "a shard is open between its first and last tensor"
        self._file.write(data)
        self._file_hash.update(data)

    def _end(self, shard: Shard) -> None:
        assert self._file is not None, "a shard is open between its first and last tensor"
        _sync(self._file)
        self.files[shard.name] = FileRecord(size_bytes=self._file.tell(), sha256=self._file_hash.hexdigest())
        self._file.close()
        self._file = None


def check_target(out: Path, *, overwrite: bool = False) -> None:
    """Refuse an output that is a file, not empty (but for an artifact to overwrite), or cannot be created."""
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise UserError(f"{out}: exists and is not a folder", hint="name a folder that does not exist")
    if out.is_dir() and any(out.iterdir()) and not (overwrite and (out / MANIFEST_NAME).is_file()):
        reason = "is not empty and not an artifact of tqtool" if overwrite else "is not empty"
        other = "remove it or choose another output folder"
        is_ours = (out / MANIFEST_NAME).is_file()
        hint = (
            f"an artifact of tqtool: convert and trellis replace it with --overwrite; else {other}"
            if is_ours
            else other
        )
        raise UserError(f"{out}: {reason}", hint=hint)
    if not out.parent.is_dir():
        raise UserError(f"{out.parent}: no such folder, so {out.name} cannot be created in it")
    if not os.access(out.parent, os.W_OK | os.X_OK):
        raise UserError(f"{out.parent}: no permission to create {out.name} in it")


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def shard_of(shards: Sequence[Shard]) -> Mapping[str, str]:
    """Tensor name → file name."""
    return {tensor.name: shard.name for shard in shards for tensor in shard.tensors}
