"""What a checkpoint is and what each verb would do with it, from headers, index and config; weights only if asked.

Never refuses what it can describe: quantized models, artifacts of tqtool and GGUF files are reported as such, and a
verb that would refuse is a row with the reason.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from tqtool.errors import NumericalError, TqError
from tqtool.formats.manifest import MANIFEST_NAME
from tqtool.formats.trellis import specs_from_config
from tqtool.pipeline.kv_outlook import KVRow, kv_rows
from tqtool.pipeline.outlook import (
    Outlook,
    PaddingRow,
    VerbRow,
    damaged_outlook,
    gguf_outlook,
    outlook,
    quantized_outlook,
)
from tqtool.source.checkpoint import Checkpoint, open_checkpoint
from tqtool.source.checks import check_finite, quantization_evidence
from tqtool.source.config import text_config
from tqtool.source.gguf.families import TABLES
from tqtool.source.gguf.reader import MAGIC, GgufFile, read_gguf
from tqtool.source.mlx_lm import keeps_every_token
from tqtool.transform.layout import EMBEDDING, HEAD

_LAYER: Final = re.compile(r"\.\d+\.")
# Written by MLX for every packed module; its sibling `.weight` holds 32-bit words of codes.
_SCALES: Final = ".scales"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorGroup:
    """Tensors that differ only in their layer number."""

    pattern: str
    count: int
    shape: tuple[int, ...]
    dtype: str
    size_bytes: int
    role: str
    convert: str
    rotate: str
    trellis: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeRow:
    """Tensors of one stored type."""

    dtype: str
    tensors: int
    elements: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The model's dimensions as its config states them, None where it does not; ``kv``: bytes of its KV caches."""

    layers: int | None
    hidden: int | None
    intermediate: int | None
    heads: int | None
    kv_heads: int | None
    head_dim: int | None
    vocabulary: int | None
    context: int | None
    kv_cache_bytes_per_token: int | None
    kv: tuple[KVRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """The whole report.

    ``kind`` is ``float`` (a source every verb takes), ``quantized``, ``artifact`` (written by tqtool) or ``gguf``;
    ``parameters`` counts weights before packing and is None where the packing is not understood. ``values`` says what
    reading every weight found; None if that was not asked for.
    """

    path: str
    origin: str
    revision: str | None
    kind: str
    evidence: str | None
    architecture: str
    model_type: str
    parameters: int | None
    tensors: int
    size_bytes: int
    files: int
    head: str
    sizes: Sizes
    tokenizer: str
    values: str | None
    types: tuple[TypeRow, ...]
    groups: tuple[TensorGroup, ...]
    verbs: tuple[VerbRow, ...]
    padding: tuple[PaddingRow, ...]
    warnings: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """JSON-ready form, complete."""
        return asdict(self)


def inspect_model(
    path_or_id: str, *, revision: str | None = None, read_values: Callable[[float, str], None] | None = None
) -> Inspection:
    """Describe a model folder, a hub id or a GGUF file.

    Args:
        path_or_id: What to look at.
        revision: Branch, tag or commit of a hub id.
        read_values: Given, every weight is read too and must be finite; called with bytes and tensor name as they pass.

    Raises:
        SourceError: it is damaged or incomplete, so that nothing about it can be trusted.
    """
    if _is_gguf(Path(path_or_id)):
        return _inspect_gguf(read_gguf(Path(path_or_id)))
    checkpoint = open_checkpoint(path_or_id, revision=revision, allow_quantized=True)
    evidence = quantization_evidence(
        checkpoint.path, checkpoint.config, {name: ref.dtype for name, ref in checkpoint.tensors.items()}
    )
    values, is_finite = (None, True) if read_values is None else _read_values(checkpoint, read_values)
    if not is_finite:
        view = damaged_outlook(f"{values}")
    else:
        view = outlook(checkpoint) if evidence is None else quantized_outlook(evidence)
    is_artifact = (checkpoint.path / MANIFEST_NAME).is_file()
    return Inspection(
        path=str(checkpoint.path),
        origin=checkpoint.origin.location,
        revision=checkpoint.origin.revision,
        kind="artifact" if is_artifact else "quantized" if evidence else "float",
        evidence=evidence,
        architecture=", ".join(checkpoint.config.get("architectures") or []) or "not stated",
        model_type=checkpoint.model_type,
        parameters=_parameters(checkpoint, quantized=evidence is not None),
        tensors=len(checkpoint.tensors),
        size_bytes=checkpoint.nbytes,
        files=len({ref.path for ref in checkpoint.tensors.values()}),
        head=_head(checkpoint),
        sizes=_sizes(checkpoint.config),
        tokenizer=_tokenizer(checkpoint.path),
        values=values,
        types=_types((r.dtype.value, math.prod(r.shape), r.nbytes) for r in checkpoint.tensors.values()),
        groups=_groups(checkpoint, view),
        verbs=view.verbs,
        padding=view.padding,
        warnings=checkpoint.warnings,
    )


def _read_values(checkpoint: Checkpoint, progress: Callable[[float, str], None]) -> tuple[str, bool]:
    try:
        check_finite(checkpoint, progress)
    except NumericalError as error:
        return error.message, False
    return "every weight is finite", True


def _is_gguf(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC or path.suffix.lower() == ".gguf"


def _inspect_gguf(file: GgufFile) -> Inspection:
    view = gguf_outlook(file)
    elements = {name: tensor.n_elements for name, tensor in file.tensors.items() if name not in TABLES}
    groups: dict[tuple[str, tuple[int, ...], str], list[int]] = {}
    for tensor in file.tensors.values():
        key = (_LAYER.sub(".*.", tensor.name), tensor.shape, tensor.kind.name)
        groups.setdefault(key, []).append(tensor.nbytes)
    config = view.config
    return Inspection(
        path=str(file.path),
        origin=str(file.path),
        revision=None,
        kind="gguf",
        evidence=f"a GGUF file, version {file.version}",
        architecture=file.architecture or "not stated",
        model_type=str(config.get("model_type", "not importable")),
        parameters=sum(elements.values()),
        tensors=len(file.tensors),
        size_bytes=sum(tensor.nbytes for tensor in file.tensors.values()),
        files=1,
        head="its own tensor" if "output.weight" in file.tensors else "tied to the embedding",
        sizes=_sizes(config),
        tokenizer=_gguf_tokenizer(file),
        values=None,
        types=_types((t.kind.name, t.n_elements, t.nbytes) for t in file.tensors.values()),
        groups=tuple(
            TensorGroup(
                pattern=pattern,
                count=len(sizes),
                shape=shape,
                dtype=kind,
                size_bytes=sum(sizes),
                role="",
                convert="",
                rotate="",
                trellis="",
            )
            for (pattern, shape, kind), sizes in groups.items()
        ),
        verbs=view.verbs,
        padding=(),
        warnings=(),
    )


def _groups(checkpoint: Checkpoint, view: Outlook) -> tuple[TensorGroup, ...]:
    groups: dict[tuple[object, ...], TensorGroup] = {}
    for ref in checkpoint.tensors.values():
        facts = view.tensors.get(ref.name)
        role, convert, rotate, trellis = (
            ("", "", "", "")
            if facts is None
            else (
                facts.role,
                facts.convert,
                _LAYER.sub(".*.", facts.rotate),
                facts.trellis,
            )
        )
        pattern = _LAYER.sub(".*.", ref.name)
        key = (pattern, ref.shape, ref.dtype, role, convert, rotate, trellis)
        known = groups.get(key)
        groups[key] = TensorGroup(
            pattern=pattern,
            count=1 + (known.count if known else 0),
            shape=ref.shape,
            dtype=ref.dtype.value,
            size_bytes=ref.nbytes + (known.size_bytes if known else 0),
            role=role,
            convert=convert,
            rotate=rotate,
            trellis=trellis,
        )
    return tuple(groups.values())


def _types(rows: Iterable[tuple[str, int, int]]) -> tuple[TypeRow, ...]:
    count: Counter[str] = Counter()
    elements: Counter[str] = Counter()
    size: Counter[str] = Counter()
    for dtype, n_elements, n_bytes in rows:
        count[dtype] += 1
        elements[dtype] += n_elements
        size[dtype] += n_bytes
    return tuple(
        TypeRow(dtype=dtype, tensors=count[dtype], elements=elements[dtype], size_bytes=total)
        for dtype, total in size.most_common()
    )


def _parameters(checkpoint: Checkpoint, *, quantized: bool) -> int | None:
    """Weights before packing: MLX words and trellis modules are counted by what they decode to."""
    if not quantized:
        return sum(math.prod(ref.shape) for ref in checkpoint.tensors.values())
    try:
        trellis = specs_from_config(checkpoint.config)
    except TqError:
        return None
    total = 0
    for name, ref in checkpoint.tensors.items():
        module = name.rpartition(".")[0]
        if module in trellis:
            total += math.prod(trellis[module].weight_shape) if name.endswith(".weight") else 0
        elif ref.dtype.is_float and f"{module}{_SCALES}" not in checkpoint.tensors:
            total += math.prod(ref.shape)
        elif name.endswith(".weight") and f"{module}{_SCALES}" in checkpoint.tensors:
            bits = _mlx_bits(checkpoint.config, module)
            if bits is None:
                return None
            total += math.prod(ref.shape) * 8 * ref.dtype.itemsize // bits
        elif name.endswith(".bias"):
            total += math.prod(ref.shape)
        elif not name.endswith((_SCALES, ".biases")):
            return None
    return total


def _mlx_bits(config: Mapping[str, Any], module: str) -> int | None:
    section = config.get("quantization")
    if not isinstance(section, dict):
        return None
    entry = section.get(module, section)
    bits = entry.get("bits") if isinstance(entry, dict) else None
    return bits if isinstance(bits, int) and bits > 0 else None


def _head(checkpoint: Checkpoint) -> str:
    declared = text_config(checkpoint.config).get("tie_word_embeddings", checkpoint.config.get("tie_word_embeddings"))
    has_head = any(name == HEAD or name.endswith(f".{HEAD}") for name in checkpoint.tensors)
    has_embedding = any(name == EMBEDDING or name.endswith("embed_tokens.weight") for name in checkpoint.tensors)
    if not has_head and not has_embedding:
        return "not found under the usual names"
    if has_head and declared:
        return "tied to the embedding by config.json; the stored lm_head is redundant"
    if has_head:
        return "its own tensor"
    if declared is False:
        return "missing: config.json says untied, no lm_head is stored"
    return "tied to the embedding"


def _sizes(config: Mapping[str, Any]) -> Sizes:
    part = text_config(config)

    def integer(*names: str) -> int | None:
        values = (part.get(name, config.get(name)) for name in names)
        return next((value for value in values if isinstance(value, int) and not isinstance(value, bool)), None)

    layers, hidden, heads = integer("num_hidden_layers"), integer("hidden_size"), integer("num_attention_heads")
    kv_heads = integer("num_key_value_heads", "num_attention_heads")
    head_dim = integer("head_dim") or (hidden // heads if hidden and heads else None)
    interval = integer("full_attention_interval")  # the other layers keep a state whose size does not grow
    caching = layers // interval if layers and interval else layers
    kinds = part.get("layer_types")
    if isinstance(kinds, list) and "full_attention" in kinds and not keeps_every_token(str(part.get("model_type"))):
        caching = kinds.count("full_attention")  # windows and states do not grow
    is_latent = integer("kv_lora_rank") is not None  # what mlx-lm keeps then differs from family to family
    rows = () if is_latent else kv_rows(head_dim, kv_heads, caching)
    return Sizes(
        layers=layers,
        hidden=hidden,
        intermediate=integer("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocabulary=integer("vocab_size"),
        context=integer("max_position_embeddings"),
        kv_cache_bytes_per_token=rows[0].bytes_per_token if rows else None,
        kv=rows,
    )


def _tokenizer(folder: Path) -> str:
    """One phrase: which files, how many entries, whether there is a chat template."""
    template = (folder / "chat_template.jinja").exists() or (folder / "chat_template.json").exists()
    try:
        settings = json.loads((folder / "tokenizer_config.json").read_bytes())
        template = template or bool(settings.get("chat_template"))
    except (OSError, ValueError, AttributeError):
        pass
    chat = "chat template" if template else "no chat template"
    try:
        stored = json.loads((folder / "tokenizer.json").read_bytes())
        vocabulary = stored["model"]["vocab"]
        added = [entry["content"] for entry in stored.get("added_tokens", [])]
    except FileNotFoundError:
        others = [name for name in ("tokenizer.model", "vocab.json", "vocab.txt") if (folder / name).exists()]
        return f"{', '.join(others)}, {chat}" if others else "missing"
    except (OSError, ValueError, KeyError, TypeError):
        return "tokenizer.json cannot be read"
    known = set(vocabulary) if isinstance(vocabulary, dict) else {entry[0] for entry in vocabulary}
    return f"tokenizer.json, {len(known | set(added)):,} entries, {chat}"


def _gguf_tokenizer(file: GgufFile) -> str:
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list):
        return "missing"
    kind, pre = file.metadata.get("tokenizer.ggml.model"), file.metadata.get("tokenizer.ggml.pre", "none")
    chat = "chat template" if "tokenizer.chat_template" in file.metadata else "no chat template"
    return f"{kind} (pre-tokenizer {pre}), {len(tokens):,} entries, {chat}"
