"""``tqtool/manifest.json``: what an artifact is, where it came from, and the hash of every byte of it.

The file is canonical: sorted keys, indent 1, no timestamps, and ``digest`` = SHA-256 of the same document
without ``digest``. ``parse`` refuses anything that does not encode back to the very bytes it read, so a flipped
byte anywhere in the manifest is found too. Prose: docs/formats/manifest.md.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)

from tqtool.errors import ArtifactError
from tqtool.formats.dtypes import DType

MANIFEST_NAME = "tqtool/manifest.json"
FORMAT_VERSION = 1

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=0)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class SourceRecord(_Model):
    """The checkpoint the artifact was made from.

    ``content_sha256`` covers layout and every tensor read, ``sample_sha256`` a sample of them all
    (``tqtool.source.fingerprint``), which calibrations, dumps and measurements name their model by too.
    """

    kind: Literal["folder", "hub"]
    location: str
    revision: str | None
    content_sha256: Sha256
    sample_sha256: Sha256


class TransformRecord(_Model):
    """A weight transform that is folded into the tensors."""

    id: str
    seed: int | None
    deviations: list[str]


class StoredRecord(_Model):
    """One tensor of a shard."""

    name: str
    dtype: str
    shape: list[Count]
    file: str
    size_bytes: Count
    sha256: Sha256

    @field_validator("dtype")
    @classmethod
    def _known_dtype(cls, value: str) -> str:
        return DType(value).value


class PartRecord(_Model):
    """One matrix of a stack; ``rows`` are those it takes of its source, None for all."""

    name: str
    source: str
    rows: Annotated[list[Count], Field(min_length=2, max_length=2)] | None
    source_sha256: Sha256
    key: Sha256 | None
    folds: list[str]
    quantizer: str
    notes: list[str]
    stats: dict[str, float]


class TensorRecord(_Model):
    """One float tensor of the model and what is stored for it.

    A stack of experts has ``parts``, in order, and no source, key or statistics of its own.
    """

    name: str
    module: str | None
    role: str
    source: str | None
    source_sha256: Sha256 | None
    key: Sha256 | None
    folds: list[str]
    quantizer: str
    shape: list[Count]
    parameters: Count
    stored: Annotated[list[StoredRecord], Field(min_length=1)]
    notes: list[str]
    stats: dict[str, float]
    parts: list[PartRecord] = []

    @model_serializer(mode="wrap")
    def _without_empty_parts(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """``parts`` stands in the file for stacks only."""
        body: dict[str, Any] = dump(self)
        if not self.parts:
            del body["parts"]
        return body

    @model_validator(mode="after")
    def _has_a_source(self) -> Self:
        if bool(self.parts) != (self.source is None) or (self.source is None) != (self.source_sha256 is None):
            raise ValueError(f"tensor {self.name}: expected either a source with its hash, or parts that have them")
        return self

    def sources(self) -> dict[str, str]:
        """Hash of every source tensor it was made from, by name."""
        if self.source is not None and self.source_sha256 is not None:
            return {self.source: self.source_sha256}
        return {part.source: part.source_sha256 for part in self.parts}

    def all_notes(self) -> list[str]:
        """Its notes and those of its parts."""
        return [*self.notes, *(note for part in self.parts for note in part.notes)]


class FileRecord(_Model):
    """One file of the artifact other than the manifest."""

    size_bytes: Count
    sha256: Sha256


class Totals(_Model):
    """Sizes and rates; see ``tqtool.pipeline.plan.JobTotals``."""

    parameters: Count
    source_parameters: Count
    tensor_bytes: Count
    bits_per_weight: float
    bits_per_source_weight: float
    code_bits_per_weight: float


class Manifest(_Model):
    """The whole document."""

    format_version: Literal[1] = 1
    kind: str
    source: SourceRecord
    transforms: list[TransformRecord]
    request: dict[str, Any]
    tools: dict[str, str]
    tensors: list[TensorRecord]
    totals: Totals
    files: dict[str, FileRecord]
    notes: list[str]

    @field_validator("files")
    @classmethod
    def _inside(cls, value: dict[str, FileRecord]) -> dict[str, FileRecord]:
        for name in value:
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts or name == MANIFEST_NAME:
                raise ValueError(f"file name {name!r} is not allowed")
        return value

    @model_validator(mode="after")
    def _tensors_have_files(self) -> Self:
        for record in self.tensors:
            for stored in record.stored:
                if stored.file not in self.files:
                    raise ValueError(f"tensor {stored.name} lies in {stored.file}, which files does not list")
        return self

    def stored(self) -> dict[str, StoredRecord]:
        """Every stored tensor by name."""
        return {stored.name: stored for record in self.tensors for stored in record.stored}


def rotation_seeds(transforms: Sequence[TransformRecord]) -> tuple[int | None, ...]:
    """Seeds of the rotations among ``transforms``, oldest first: a companion has those of its trunk."""
    return tuple(record.seed for record in transforms if record.id.startswith("rotation."))


def with_files(manifest: Manifest, contents: Mapping[str, bytes]) -> Manifest:
    """``manifest`` with the files ``contents`` added, or in place of those of their names."""
    added = {
        name: FileRecord(size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
        for name, data in contents.items()
    }
    return manifest.model_copy(update={"files": dict(sorted({**manifest.files, **added}.items()))})


def encode(manifest: Manifest) -> bytes:
    """The canonical bytes of ``manifest``."""
    body = manifest.model_dump(mode="json")
    return _text({**body, "digest": _digest(body)})


def parse(data: bytes, where: str = MANIFEST_NAME) -> Manifest:
    """Read a manifest.

    Raises:
        ArtifactError: not JSON (NaN and lone surrogates are not), another format version, an unknown or missing field,
            a wrong digest, or bytes that are not the canonical form.
    """
    body = parse_object(data, where, allow_nan=False)
    version = body.get("format_version")
    if type(version) is not int or version != FORMAT_VERSION:  # True == 1 == 1.0
        raise ArtifactError(
            f"{where}: format_version {short(version)}, this tqtool reads {FORMAT_VERSION}",
            hint="use the tqtool version that wrote the artifact, or a newer one",
        )
    body.pop("digest", None)
    try:
        manifest = Manifest.model_validate(body)
        canonical = encode(manifest)
    except ValidationError as error:
        raise ArtifactError(f"{where}: {_first_problem(error)}") from error
    except (ValueError, RecursionError) as error:  # a lone surrogate, deep nesting: nothing that encode can write
        raise ArtifactError(f"{where}: holds a value that a manifest cannot hold: {error}") from error
    if canonical != data:
        raise ArtifactError(f"{where}: its digest does not match its content: it was edited or damaged")
    return manifest


def parse_object(data: bytes, where: str, *, allow_nan: bool = True) -> dict[str, Any]:
    """The JSON object in ``data``; ArtifactError if it is anything else, or nested too deep to be read.

    NaN and Infinity are no JSON, but transformers writes them into config.json and mlx-lm reads them.
    """
    try:
        value = json.loads(data, parse_constant=float if allow_nan else _no_constant)
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{where}: is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ArtifactError(f"{where}: holds {type(value).__name__}, expected an object")
    return value


def _no_constant(name: str) -> float:
    raise ValueError(f"it holds {name}")


def short(value: Any) -> str:
    """``value`` as text that fits in a message, whatever a damaged file holds."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # integers beyond Python's digit limit
        return f"<{type(value).__name__}>"
    return text if len(text) <= 80 else text[:77] + "..."


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(_text(body)).hexdigest()


def _text(body: dict[str, Any]) -> bytes:
    text = json.dumps(body, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False)
    return (text + "\n").encode()


def _first_problem(error: ValidationError) -> str:
    problems = error.errors(include_url=False)
    place = ".".join(str(part) for part in problems[0]["loc"]) or "document"
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"{place}: {problems[0]['msg']}{more}"
