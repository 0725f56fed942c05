"""Teacher dump, format v1: what a model said at every position of a text, in one safetensors file.

W windows of C tokens give W·(C-1) predictions; position i predicts token i+1. K is the vocabulary or less.

    tokens            U32 [W, C]
    log_sum_exp       F64 [W, C-1]      over the whole vocabulary
    tail_log_sum_exp  F64 [W, C-1]      over the ids that are not in top_ids; -inf if there are none
    target_logits     F32 [W, C-1]      logit of the token that follows
    top_ids           U32 [W, C-1, K]   by falling logit, equal logits by rising id
    top_logits        F32 [W, C-1, K]

The metadata has ``format``, ``format_version`` and ``info``, the JSON of ``TeacherInfo``. The tail is stored, not
derived: 1 - Σp loses every digit of a small tail. See docs/formats/teacher.md.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tqtool.errors import ArtifactError, SourceError
from tqtool.formats.dtypes import DType
from tqtool.formats.safetensors import Header, read_header

FORMAT = "tqtool-teacher"
FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherInfo:
    """Provenance and sizes of a dump.

    Attributes:
        model: What was loaded, as the user named it.
        model_hash: SHA-256 over the headers of its weight files and its config.
        dtype: Type of the arithmetic.
        text: Name of the text file.
        text_sha256: Hash of the whole text file.
        tokenizer_hash: Hash of vocabulary and behaviour, independent of how the files are formatted.
        bos: Token put before each window because the tokenizer begins every text with it; None without one.
        vocab_size: Width of the logits.
        windows: W.
        context: C.
        top: K.
        versions: Versions of the software that made it.
    """

    model: str
    model_hash: str
    dtype: str
    text: str
    text_sha256: str
    tokenizer_hash: str
    bos: int | None
    vocab_size: int
    windows: int
    context: int
    top: int
    versions: dict[str, str]

    def metadata(self) -> dict[str, str]:
        """The safetensors metadata."""
        info = json.dumps(asdict(self), sort_keys=True, ensure_ascii=False)
        return {"format": FORMAT, "format_version": str(FORMAT_VERSION), "info": info}

    def tensors(self) -> tuple[tuple[str, DType, tuple[int, ...]], ...]:
        """Name, type and shape of each tensor, in file order (the 8-byte type first, so that it is aligned)."""
        each = (self.windows, self.context - 1)
        return (
            ("log_sum_exp", DType.F64, each),
            ("tail_log_sum_exp", DType.F64, each),
            ("tokens", DType.U32, (self.windows, self.context)),
            ("target_logits", DType.F32, each),
            ("top_ids", DType.U32, (*each, self.top)),
            ("top_logits", DType.F32, (*each, self.top)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherWindow:
    """One window of a dump; P = C - 1 predictions. Field names are tensor names."""

    tokens: NDArray[np.uint32]
    log_sum_exp: NDArray[np.float64]
    tail_log_sum_exp: NDArray[np.float64]
    target_logits: NDArray[np.float32]
    top_ids: NDArray[np.uint32]
    top_logits: NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherDump:
    """An open dump: header checked, windows read one at a time."""

    header: Header
    info: TeacherInfo

    def tokens(self, index: int) -> NDArray[np.uint32]:
        """Tokens of window ``index``, without reading the rest of it."""
        return self._read("tokens", index)

    def window(self, index: int) -> TeacherWindow:
        """Window ``index`` in fresh arrays."""
        return TeacherWindow(**{name: self._read(name, index) for name, _, _ in self.info.tensors()})

    def _read(self, name: str, index: int) -> NDArray[Any]:
        tensor = self.header.tensors[name]
        size = tensor.size_bytes // self.info.windows
        with self.header.path.open("rb") as file:
            file.seek(tensor.begin + index * size)
            data = file.read(size)
        return np.frombuffer(data, tensor.dtype.numpy).reshape(tensor.shape[1:])


def open_dump(path: Path) -> TeacherDump:
    """Open a dump and check header, version, names, types and shapes.

    Raises:
        ArtifactError: it is not a dump, or of another version, or damaged.
    """
    try:
        header = read_header(path)
    except SourceError as error:
        raise ArtifactError(error.message, hint="make it with `tqtool teacher`") from error
    if header.metadata.get("format") != FORMAT:
        raise ArtifactError(f"{path}: not a teacher dump", hint="make one with `tqtool teacher MODEL OUT --text FILE`")
    version = header.metadata.get("format_version")
    if version != str(FORMAT_VERSION):
        raise ArtifactError(
            f"{path}: teacher dump format_version: expected {FORMAT_VERSION}, found {version}",
            hint="make the dump again with this version of tqtool",
        )
    info = _parse_info(path, header.metadata.get("info", ""))
    expected = {name: (dtype, shape) for name, dtype, shape in info.tensors()}
    found = {name: (tensor.dtype, tensor.shape) for name, tensor in header.tensors.items()}
    if found != expected:
        wrong = next(name for name in sorted({*expected, *found}) if expected.get(name) != found.get(name))
        raise ArtifactError(f"{path}: tensor {wrong}: expected {expected.get(wrong)}, found {found.get(wrong)}")
    return TeacherDump(header=header, info=info)


def _parse_info(path: Path, text: str) -> TeacherInfo:
    try:
        value: Any = json.loads(text)
    except ValueError as error:
        raise ArtifactError(f"{path}: metadata 'info' is not JSON ({error})") from error
    names = {field.name for field in fields(TeacherInfo)}
    if not isinstance(value, dict) or set(value) != names:
        raise ArtifactError(f"{path}: metadata 'info': expected the keys {sorted(names)}")
    return TeacherInfo(**value)
