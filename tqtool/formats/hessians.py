"""Calibration folder, format v1: second moments of the inputs of every linear layer, one safetensors file per layer.

    calibration.json          what was run, on what, and a row per module; canonical JSON, written last
    layer-00012.safetensors   for every distinct input of that layer, under the first module that reads it:
        {input}.hessian       F32 [in·(in+1)/2], the upper triangle of Σ x·xᵀ / rows by rows, sinks left out
        {input}.sinks         F32 [m, in], the rows that are sinks, as they are
    tail.safetensors          the same for the head's input

Sinks are kept apart and whole because length and weight are the solver's choice (``pipeline.calibrated``).
Prose: docs/formats/hessians.md.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from tqtool.errors import ArtifactError, SourceError, UserError
from tqtool.formats.dtypes import DType
from tqtool.formats.safetensors import read_header

INFO_NAME = "calibration.json"
TAIL_FILE = "tail.safetensors"
FORMAT_VERSION = 1

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=0)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class InputRecord(_Model):
    """One distinct input: the modules that read it, and what was summed.

    ``wider`` is the key of an input that this one is a part of: what all tokens of the layer bring to its experts, of
    which one expert reads some. An expert that read nothing has no rows and no sinks, and nothing is stored for it.
    """

    key: str
    file: str
    modules: Annotated[list[str], Field(min_length=1)]
    width: Annotated[int, Field(ge=1)]
    rows: Count
    sinks: Count
    dropped: Count
    wider: str | None = None

    @model_serializer(mode="wrap")
    def _without_none(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """``wider`` stands in the file for experts only."""
        body: dict[str, Any] = dump(self)
        if self.wider is None:
            del body["wider"]
        return body


class RoutingRecord(_Model):
    """How many tokens each expert of one block read, sinks among them; ``router`` is the module that sent them."""

    block: str
    router: str | None
    tokens: Annotated[list[Count], Field(min_length=1)]


class TextRecord(_Model):
    """What was read; ``first_byte`` is where the part that was used begins."""

    name: str
    kind: Literal["text", "jsonl", "chat"]
    sha256: Sha256
    first_byte: Count
    sequences: Count
    tokens: Count


class DroppedSequence(_Model):
    """A sequence that counts in no sum from ``layer`` on: its hidden state was not finite behind it."""

    sequence: Count
    layer: Count


class CalibrationInfo(_Model):
    """The whole of ``calibration.json``."""

    format_version: Literal[1] = 1
    model_type: str
    source_fingerprint: Sha256
    transform: str
    rotation_seed: int | None
    tokenizer_sha256: Sha256
    text: TextRecord
    context: Annotated[int, Field(ge=2)]
    sink_ratio: float
    dropped: list[DroppedSequence]
    inputs: list[InputRecord]
    routing: list[RoutingRecord] = []
    files: dict[str, Sha256]
    tools: dict[str, str]

    @model_serializer(mode="wrap")
    def _without_empty_routing(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """``routing`` stands in the file for models with experts only."""
        body: dict[str, Any] = dump(self)
        if not self.routing:
            del body["routing"]
        return body

    @model_validator(mode="after")
    def _experts_fit(self) -> Self:
        """What an expert read is a part of what its layer's tokens bring, and is counted twice alike."""
        by_key = {record.key: record for record in self.inputs}
        for record in self.inputs:
            whole = None if record.wider is None else by_key.get(record.wider)
            if record.wider is not None and (whole is None or whole.wider is not None or whole.width != record.width):
                raise ValueError(f"input {record.key}: wider {record.wider!r} is no input that it can be a part of")
        for routing in self.routing:
            stem = f"{routing.block.removesuffix('switch_mlp')}experts."
            own = [r for r in self.inputs if r.wider is not None and r.key.startswith(stem)]
            counts = [record.rows + record.sinks + record.dropped for record in own]
            if routing.router is not None and counts != routing.tokens:
                raise ValueError(f"routing of {routing.block}: {routing.tokens} tokens, its inputs hold {counts}")
        return self

    def input_of(self, module: str) -> InputRecord | None:
        """The record of what ``module`` reads, or None."""
        return self._by_module.get(module)

    @cached_property
    def _by_module(self) -> dict[str, InputRecord]:
        return {module: record for record in self.inputs for module in record.modules}

    def content_sha256(self) -> str:
        """Names the content: equal for equal files and settings."""
        return hashlib.sha256(encode(self)).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class InputMoments:
    """What is stored for one input: mean second moment ``[in, in]`` of ``rows`` rows, and the sinks ``[m, in]``."""

    matrix: NDArray[np.float32]
    sinks: NDArray[np.float32]
    rows: int


def encode(info: CalibrationInfo) -> bytes:
    """Canonical bytes of ``calibration.json``."""
    text = json.dumps(info.model_dump(mode="json"), indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False)
    return (text + "\n").encode()


def pack_triangle(matrix: NDArray[np.floating]) -> NDArray[np.float32]:
    """Upper triangle of ``[n, n]`` by rows, float32 ``[n·(n+1)/2]``."""
    n = matrix.shape[0]
    packed = np.empty(n * (n + 1) // 2, np.float32)
    start = 0
    for row in range(n):
        packed[start : start + n - row] = matrix[row, row:]
        start += n - row
    return packed


def unpack_triangle(packed: NDArray[np.float32], width: int) -> NDArray[np.float32]:
    """The symmetric ``[width, width]`` matrix of :func:`pack_triangle`."""
    matrix = np.empty((width, width), np.float32)
    start = 0
    for row in range(width):
        stop = start + width - row
        matrix[row, row:] = matrix[row:, row] = packed[start:stop]
        start = stop
    return matrix


def layer_tensors(record: InputRecord) -> tuple[tuple[str, DType, tuple[int, ...]], ...]:
    """Name, type and shape of what is stored for one input; nothing for an expert that read nothing."""
    if not record.rows + record.sinks:
        return ()
    triangle = record.width * (record.width + 1) // 2
    return (
        (f"{record.key}.hessian", DType.F32, (triangle,)),
        (f"{record.key}.sinks", DType.F32, (record.sinks, record.width)),
    )


@dataclass(frozen=True, slots=True)
class Calibration:
    """An open calibration folder; matrices are read one at a time."""

    folder: Path
    info: CalibrationInfo

    def moments(self, module: str) -> InputMoments | None:
        """What ``module`` read during calibration; None if it was not calibrated, or is an expert that read nothing.

        Raises:
            ArtifactError: the file is missing, damaged or not finite.
        """
        record = self.info.input_of(module)
        if record is None or not record.rows + record.sinks:
            return None
        path = self.folder / record.file
        try:
            header = read_header(path)
        except SourceError as error:
            raise ArtifactError(error.message, hint="run tqtool calibrate again") from error
        arrays = []
        for name, dtype, shape in layer_tensors(record):
            found = header.tensors.get(name)
            if found is None or (found.dtype, found.shape) != (dtype, shape):
                what = f"{found.dtype.value} {list(found.shape)}" if found else "nothing"
                raise ArtifactError(f"{path}: tensor {name}: expected {dtype.value} {list(shape)}, found {what}")
            with path.open("rb") as file:
                file.seek(found.begin)
                array = np.frombuffer(file.read(found.size_bytes), "<f4").reshape(shape)
            if not np.isfinite(array).all():
                raise ArtifactError(f"{path}: tensor {name} is not finite", hint="run tqtool calibrate again")
            arrays.append(array)
        return InputMoments(matrix=unpack_triangle(arrays[0], record.width), sinks=arrays[1], rows=record.rows)


def open_calibration(folder: Path) -> Calibration:
    """Open a finished calibration folder and check ``calibration.json`` and the hash of every file.

    Raises:
        UserError: there is no such folder, or the calibration is not finished.
        ArtifactError: it is damaged.
    """
    path = folder / INFO_NAME
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        hint = "tqtool calibrate SRC OUT --text FILE makes one; --resume finishes one that was interrupted"
        raise UserError(f"{folder}: no {INFO_NAME}: not a finished calibration", hint=hint) from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    info = parse(data, str(path))
    lost = next((record.file for record in info.inputs if record.file not in info.files), None)
    if lost is not None:
        raise ArtifactError(f"{path}: {lost} is used and not listed under files", hint="calibrate again")
    for name, expected in info.files.items():
        if hash_file(folder / name) != expected:
            raise ArtifactError(f"{folder / name}: its SHA-256 is not the one in {INFO_NAME}", hint="calibrate again")
    return Calibration(folder, info)


def parse(data: bytes, where: str) -> CalibrationInfo:
    """Read ``calibration.json``; ArtifactError unless it is exactly what ``encode`` writes."""
    try:
        body: Any = json.loads(data)
        info = CalibrationInfo.model_validate(body)
        is_canonical = encode(info) == data
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in problem["loc"])
        raise ArtifactError(f"{where}: {place}: {problem['msg']}") from error
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{where}: not the JSON of a calibration ({error})") from error
    if not is_canonical:
        raise ArtifactError(f"{where}: was edited or damaged", hint="run tqtool calibrate again")
    return info


def hash_file(path: Path) -> str:
    """SHA-256 of a file's bytes; ArtifactError if it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read ({error.strerror})", hint="run tqtool calibrate again") from error
