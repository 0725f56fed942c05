"""GGUF file to Hugging Face folder: plan everything from the directory, then stream one tensor at a time."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tqtool.artifact.writer import ArtifactWriter, check_target
from tqtool.formats.dtypes import DType
from tqtool.pipeline.preflight import require_disk
from tqtool.solve.quantizer import StoredTensor
from tqtool.source.gguf.config import build_config, read_shape
from tqtool.source.gguf.families import Edit, MappedTensor, family_of, has_bias, map_tensors
from tqtool.source.gguf.reader import GgufFile, read_gguf
from tqtool.source.gguf.tokenizer import TokenizerFiles, build_tokenizer_files
from tqtool.source.gguf.weights import read_mapped

Progress = Callable[[float, str], None]

IMPORT_RECORD: Final = "tqtool/import.json"
_TORCH_NAMES: Final = {DType.BF16: "bfloat16", DType.F16: "float16", DType.F32: "float32"}
_HASH_BLOCK: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportPlan:
    """Everything that will be written, known before any weight is read."""

    file: GgufFile
    out: Path
    dtype: DType
    config: dict[str, Any]
    tensors: tuple[MappedTensor, ...]
    tokenizer: TokenizerFiles

    @property
    def stored(self) -> tuple[StoredTensor, ...]:
        """The tensors of the folder in file order."""
        return tuple(StoredTensor(name=item.name, dtype=self.dtype, shape=item.shape) for item in self.tensors)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all tensors as they will be stored."""
        return sum(item.nbytes for item in self.stored)

    @property
    def n_parameters(self) -> int:
        """Number of weights."""
        return sum(item.source.n_elements for item in self.tensors)

    @property
    def source_types(self) -> dict[str, int]:
        """GGUF type to number of tensors, most frequent first."""
        return dict(Counter(item.source.kind.name for item in self.tensors).most_common())

    @property
    def edits(self) -> dict[str, int]:
        """Edit to number of tensors it is made on."""
        return dict(Counter(item.edit.value for item in self.tensors if item.edit is not Edit.NONE))

    def to_json(self) -> dict[str, Any]:
        """What ``--json`` prints."""
        return {
            "file": str(self.file.path),
            "out": str(self.out),
            "architecture": self.file.architecture,
            "model_type": self.config["model_type"],
            "dtype": self.dtype.value,
            "tensors": len(self.tensors),
            "parameters": self.n_parameters,
            "weight_bytes": self.weight_bytes,
            "tied": self.config["tie_word_embeddings"],
            "source_types": self.source_types,
            "edits": self.edits,
            "files": sorted(["config.json", IMPORT_RECORD, *self.tokenizer.files]),
            "notes": list(self.tokenizer.notes),
        }


def plan_import(path: Path, out: Path, *, dtype: DType) -> ImportPlan:
    """Read the directory of a GGUF file and decide everything; no tensor is read and nothing is written.

    Raises:
        SourceError: the file is damaged, or its architecture, tensors, rope scaling or tokenizer are not supported.
        UserError: ``out`` cannot be written to.
    """
    check_target(out)
    file = read_gguf(path)
    family = family_of(file)
    shape = read_shape(file)
    attention, mlp = (has_bias(file, group) for group in family.optional_biases or (("-",), ("-",)))
    config = build_config(file, shape, torch_dtype=_TORCH_NAMES[dtype], biases=(attention, mlp))
    tokenizer = build_tokenizer_files(file, context_length=config["max_position_embeddings"])
    return ImportPlan(
        file=file,
        out=out,
        dtype=dtype,
        config=config,
        tensors=map_tensors(file, family, shape),
        tokenizer=tokenizer,
    )


def run_import(plan: ImportPlan, progress: Progress | None = None) -> tuple[str, ...]:
    """Write the folder; it appears under its name only when whole.

    Peak memory is about the largest stored tensor plus a few MB. ``progress(weights, tensor name)``.

    Raises:
        NumericalError: a value is inf or NaN, or does not fit the requested type.
        ArtifactError: the disk is full or cannot be written.
    """
    require_disk(plan.out.absolute().parent, plan.weight_bytes)
    record = _record(plan)
    with ArtifactWriter(plan.out, plan.stored, total_parameters=plan.n_parameters) as writer:
        for item in plan.tensors:
            writer.write(item.name, read_mapped(item, plan.dtype))
            if progress is not None:
                progress(item.source.n_elements, item.name)
        writer.add_bytes("config.json", _json(plan.config))
        for name, data in plan.tokenizer.files.items():
            writer.add_bytes(name, data)
        writer.add_bytes(IMPORT_RECORD, _json(record))
        writer.commit()
    return tuple(writer.notes)


def _record(plan: ImportPlan) -> dict[str, Any]:
    """Where the folder came from; nothing in it depends on when or where the import ran."""
    general = {key: value for key, value in plan.file.metadata.items() if key.startswith("general.")}
    return {
        "format_version": 1,
        "tool": f"tqtool {importlib.metadata.version('tqtool')}",
        "source": {
            "file": plan.file.path.name,
            "size_bytes": plan.file.file_bytes,
            "sha256": _sha256(plan.file.path),
            "gguf_version": plan.file.version,
            "metadata": general,
            "tensor_types": plan.source_types,
        },
        "dtype": plan.dtype.value,
        "edits": plan.edits,
        "notes": list(plan.tokenizer.notes),
    }


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_HASH_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
