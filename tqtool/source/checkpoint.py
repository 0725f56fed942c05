"""A source checkpoint: opened and validated whole, read one tensor at a time.

``open_checkpoint`` reads headers, index and config only. ``TensorRef.read`` is the one place that
materializes weights; it reads into a fresh array (never a mapping), so peak memory is the caller's arrays
and nothing else.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from tqtool.errors import SourceError
from tqtool.formats.dtypes import DType
from tqtool.formats.safetensors import Header, read_header
from tqtool.source.checks import refuse_quantized, tokenizer_warnings
from tqtool.source.config import read_config, rope_updates
from tqtool.source.hub import is_hub_id, resolve_snapshot
from tqtool.source.layout import INDEX_NAME, WEIGHTS_GLOB, WeightFiles, find_weights
from tqtool.source.mlx_lm import architecture_warnings, behaviour_warnings
from tqtool.source.mlx_lm_settings import stated_defaults

# One pread never returns more than 0x7ffff000 bytes on Linux; smaller pieces cost nothing.
_READ_BYTES: Final = 1 << 26
# Everything a loader, a tokenizer, a processor or a licence needs, copied verbatim into an artifact.
COMPANION_GLOBS: Final = (
    "*.json",
    "*.jinja",
    "*.model",
    "*.tiktoken",
    "*.txt",
    "*.py",
    "LICENSE*",
    "LICENCE*",
    "NOTICE*",
    "USE_POLICY*",
)
ROPE_WARNING: Final = (
    "config.json has its rotary settings under rope_parameters only; they are repeated where mlx-lm reads them"
)
_NOT_COMPANIONS: Final = frozenset({"config.json", INDEX_NAME})


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a checkpoint came from; ``revision`` is the resolved commit of a hub snapshot, else None."""

    kind: Literal["folder", "hub"]
    location: str
    revision: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRef:
    """One tensor on disk; ``begin`` and ``end`` are absolute byte offsets in ``path``."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    path: Path
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes on disk, and of the array ``read`` returns."""
        return self.end - self.begin

    def read(self) -> NDArray[Any]:
        """The whole tensor in its stored type, as a fresh, writable, contiguous array.

        Raises:
            SourceError: the file cannot be read or became shorter since it was opened.
        """
        return self._read_bytes(self.begin, self.end).view(self.dtype.numpy).reshape(self.shape)

    def read_rows(self, start: int, stop: int) -> NDArray[Any]:
        """Rows ``start`` to ``stop`` of the first axis, as ``read()[start:stop]``, reading only those.

        Raises:
            IndexError: the range is not within the first axis.
            SourceError: as ``read``.
        """
        if not self.shape or not 0 <= start <= stop <= self.shape[0]:
            raise IndexError(f"{self.name}: rows {start}:{stop} of shape {list(self.shape)}")
        row_bytes = self.nbytes // self.shape[0] if self.shape[0] else 0
        raw = self._read_bytes(self.begin + start * row_bytes, self.begin + stop * row_bytes)
        return raw.view(self.dtype.numpy).reshape(stop - start, *self.shape[1:])

    def read_flat_rows(self, start: int, stop: int) -> NDArray[Any]:
        """As ``read_rows``, with the leading axes flattened: ``[stop - start, shape[-1]]``."""
        flat = replace(self, shape=(math.prod(self.shape[:-1]), *self.shape[-1:]))
        return flat.read_rows(start, stop)

    def _read_bytes(self, begin: int, end: int) -> NDArray[np.uint8]:
        buffer = np.empty(end - begin, dtype=np.uint8)
        view = memoryview(buffer.data)
        try:
            descriptor = os.open(self.path, os.O_RDONLY)
            try:
                done = 0
                while done < len(view):
                    got = os.preadv(descriptor, [view[done : done + _READ_BYTES]], begin + done)
                    if not got:
                        raise SourceError(
                            f"{self.path}: ends inside tensor {self.name!r} (byte {begin + done:,} of {end:,})",
                            hint="the file changed while it was being read; run again on a complete copy",
                        )
                    done += got
            finally:
                os.close(descriptor)
        except OSError as error:
            raise SourceError(
                f"{self.path}: tensor {self.name!r} cannot be read ({error.strerror or error})"
            ) from error
        return buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A validated model folder. ``tensors`` is in file order; ``files`` are the non-weight companions.

    ``config`` is config.json with what ``rope_updates`` and ``stated_defaults`` add. ``warnings`` are facts a verb may
    turn into a refusal (an architecture mlx-lm does not know, no tokenizer).
    """

    path: Path
    config: dict[str, Any]
    tensors: Mapping[str, TensorRef]
    origin: Origin
    files: tuple[Path, ...]
    warnings: tuple[str, ...] = ()

    @property
    def model_type(self) -> str:
        """``model_type`` of config.json."""
        return str(self.config["model_type"])

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(ref.nbytes for ref in self.tensors.values())

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Tensor name to shape."""
        return {name: ref.shape for name, ref in self.tensors.items()}

    def content_hash(self) -> str:
        """SHA-256 over the config and every tensor's name, type, shape, file and offsets; no weight is read.

        Two checkpoints that differ only in values hash alike: it identifies a layout, not the numbers.
        """
        layout = [
            [ref.name, ref.dtype.value, list(ref.shape), ref.path.name, ref.begin, ref.end]
            for ref in sorted(self.tensors.values(), key=lambda ref: ref.name)
        ]
        text = json.dumps({"config": self.config, "tensors": layout}, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


def open_checkpoint(path_or_id: str, *, revision: str | None = None, allow_quantized: bool = False) -> Checkpoint:
    """Open a local model folder or a hub id and validate everything that can be without reading weights.

    Args:
        path_or_id: a folder, or ``organization/name`` on the hub.
        revision: branch, tag or commit of a hub id.
        allow_quantized: for reporting only; every verb that writes leaves it False.

    Raises:
        SourceError: the folder, the index, a header or the config is wrong, or the weights are quantized.
    """
    folder, origin = _locate(path_or_id, revision)
    weights = find_weights(folder)
    stored = read_config(folder)
    updates = rope_updates(stored)
    stated = stated_defaults({**stored, **updates})
    config = {**stored, **updates, **stated}
    tensors = _collect(folder, weights, [read_header(path) for path in weights.shards])
    files = _companions(folder)
    if not allow_quantized:
        refuse_quantized(folder, config, {name: ref.dtype for name, ref in tensors.items()})
    return Checkpoint(
        path=folder,
        config=config,
        tensors=tensors,
        origin=origin,
        files=files,
        warnings=(
            *architecture_warnings(config),
            *behaviour_warnings(config),
            *tokenizer_warnings(folder, files),
            *((ROPE_WARNING,) if updates else ()),
            *((f"config.json: {', '.join(stated)} stated as mlx-lm needs it",) if stated else ()),
        ),
    )


def _locate(path_or_id: str, revision: str | None) -> tuple[Path, Origin]:
    path = Path(path_or_id).expanduser()
    if path.is_dir():
        if revision is not None:
            raise SourceError(
                f"{path}: --revision {revision} is for hub ids, and this is a local folder",
                hint="leave --revision away, or give the hub id",
            )
        return path, Origin(kind="folder", location=str(path.resolve()))
    if path.is_file():
        raise _file_given(path)
    if not is_hub_id(path_or_id):
        raise SourceError(
            f"{path_or_id}: no such folder, and not a hub id (organization/name)",
            hint="check the spelling of the path",
        )
    folder, commit = resolve_snapshot(path_or_id, revision=revision)
    return folder, Origin(kind="hub", location=path_or_id, revision=commit)


def _file_given(path: Path) -> SourceError:
    with path.open("rb") as file:
        is_gguf = file.read(4) == b"GGUF"
    if is_gguf or path.suffix.lower() == ".gguf":
        return SourceError(
            f"{path}: a GGUF file, expected a model folder",
            hint=f"tqtool import-gguf {path} OUT, then use OUT",
        )
    return SourceError(f"{path}: a file, expected a model folder", hint=f"give the folder: {path.parent}")


def _collect(folder: Path, weights: WeightFiles, headers: list[Header]) -> dict[str, TensorRef]:
    """All tensors in file order; the index, if any, must say exactly the same."""
    tensors: dict[str, TensorRef] = {}
    for header in headers:
        for info in header.tensors.values():
            before = tensors.get(info.name)
            if before is not None:
                raise SourceError(
                    f"{folder}: tensor {info.name!r} is in both {before.path.name} and {header.path.name}",
                    hint="two sets of weights are mixed; keep one",
                )
            tensors[info.name] = TensorRef(
                name=info.name,
                dtype=info.dtype,
                shape=info.shape,
                path=header.path,
                begin=info.begin,
                end=info.end,
            )
    if weights.index is not None:
        _check_index(folder, weights.index, tensors)
    if not tensors:
        raise SourceError(f"{folder}: the weight files ({WEIGHTS_GLOB}) hold no tensor")
    return tensors


def _check_index(folder: Path, index: dict[str, str], tensors: Mapping[str, TensorRef]) -> None:
    hint = "index and shards are not from the same download; fetch the folder again"
    for name, file in index.items():
        ref = tensors.get(name)
        if ref is None:
            raise SourceError(
                f"{folder}: {INDEX_NAME} places tensor {name!r} in {file}, which does not hold it", hint=hint
            )
        if ref.path.name != file:
            raise SourceError(
                f"{folder}: {INDEX_NAME} places tensor {name!r} in {file}, found in {ref.path.name}",
                hint=hint,
            )
    for name, ref in tensors.items():
        if name not in index:
            raise SourceError(
                f"{folder}: {ref.path.name} holds tensor {name!r}, which {INDEX_NAME} does not list",
                hint=hint,
            )


def _companions(folder: Path) -> tuple[Path, ...]:
    found = {path for glob in COMPANION_GLOBS for path in folder.glob(glob) if path.is_file()}
    return tuple(sorted(path for path in found if path.name not in _NOT_COMPANIONS and not path.name.startswith(".")))
