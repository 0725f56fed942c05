"""What the supported GGUF architectures are called and shaped, and what has to be undone per tensor.

A GGUF file is claimed whole: ``map_tensors`` names the Hugging Face tensor, its shape and the edit for every tensor
the architecture must have, and lists whatever is missing or left over.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from tqtool.errors import SourceError
from tqtool.source.gguf.config import ModelShape
from tqtool.source.gguf.reader import GgufFile, GgufTensor


class Edit(StrEnum):
    """What llama.cpp's converter did to a tensor and has to be undone."""

    NONE = "none"
    UNPERMUTE_Q = "unpermute q heads"
    UNPERMUTE_K = "unpermute k heads"
    MINUS_ONE = "subtract 1"


@dataclass(frozen=True, slots=True, kw_only=True)
class MappedTensor:
    """One tensor of the folder to be written and where it comes from."""

    name: str
    shape: tuple[int, ...]
    source: GgufTensor
    edit: Edit
    n_heads: int  # of the permutation; 0 without one


# Tensors that hold nothing a Hugging Face checkpoint stores: rope tables, read into config.json instead.
TABLES: Final = frozenset({"rope_freqs.weight"})
_TOP: Final = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LINEARS: Final = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LLAMA_NORMS: Final = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_HEAD_NORMS: Final = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GEMMA_NORMS: Final = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_ATTENTION: Final = ("attn_q", "attn_k", "attn_v", "attn_output")
_MLP: Final = ("ffn_gate", "ffn_up", "ffn_down")


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One GGUF architecture.

    ``biases`` are always present; ``optional_biases`` are groups of which a file has all or none.
    llama.cpp rotates neighbouring pairs in some architectures, Hugging Face halves: there q and k rows are permuted.
    """

    architecture: str
    norms: Mapping[str, str]
    biases: tuple[str, ...] = ()
    optional_biases: tuple[tuple[str, ...], ...] = ()
    permuted: bool = False
    norms_plus_one: bool = False


FAMILIES: Final = {
    family.architecture: family
    for family in (
        Family(architecture="llama", norms=_LLAMA_NORMS, optional_biases=(_ATTENTION, _MLP), permuted=True),
        Family(architecture="qwen2", norms=_LLAMA_NORMS, biases=("attn_q", "attn_k", "attn_v")),
        Family(architecture="qwen3", norms={**_LLAMA_NORMS, **_HEAD_NORMS}),
        Family(architecture="gemma3", norms={**_GEMMA_NORMS, **_HEAD_NORMS}, norms_plus_one=True),
    )
}


def family_of(file: GgufFile) -> Family:
    """The family of ``file``, or a SourceError that names its architecture and the known ones."""
    family = FAMILIES.get(file.architecture)
    if family is None:
        raise SourceError(
            f"{file.path}: architecture {file.architecture!r} cannot be imported; known: {', '.join(FAMILIES)}",
            hint="use the original safetensors checkpoint of the model instead",
        )
    return family


def has_bias(file: GgufFile, group: tuple[str, ...]) -> bool:
    """Whether the linears of ``group`` carry biases, judged by the first layer."""
    return f"blk.0.{group[0]}.bias" in file.tensors


def map_tensors(file: GgufFile, family: Family, shape: ModelShape) -> tuple[MappedTensor, ...]:
    """Every tensor of the folder in the order it will be written: by layer, as checkpoints usually are.

    Raises:
        SourceError: tensors are missing, left over, or of another shape than the metadata says.
    """
    wanted = _wanted(file, family, shape)
    missing = [name for name in wanted if name not in file.tensors]
    unknown = [name for name in file.tensors if name not in wanted and name not in TABLES]
    if missing or unknown:
        raise SourceError(
            f"{file.path}: the tensors are not those of a {family.architecture} model"
            + (f"; missing: {_listing(missing)}" if missing else "")
            + (f"; unknown: {_listing(unknown)}" if unknown else ""),
            hint="a variant of the architecture that is not supported; use its safetensors checkpoint",
        )
    mapped = []
    for name, (target, expected) in wanted.items():
        tensor = file.tensors[name]
        if tensor.shape != expected:
            raise SourceError(
                f"{file.path}: tensor {name!r}: expected {list(expected)} from the metadata, found {list(tensor.shape)}"
            )
        edit, n_heads = _edit(family, shape, name)
        mapped.append(MappedTensor(name=target, shape=expected, source=tensor, edit=edit, n_heads=n_heads))
    return tuple(mapped)


def _wanted(file: GgufFile, family: Family, shape: ModelShape) -> dict[str, tuple[str, tuple[int, ...]]]:
    """GGUF name -> (Hugging Face name, shape)."""
    hidden = shape.hidden
    wanted: dict[str, tuple[str, tuple[int, ...]]] = {}
    wanted["token_embd.weight"] = (_TOP["token_embd.weight"], (shape.vocab, hidden))
    sizes = {
        "attn_q": (shape.heads * shape.head_dim, hidden),
        "attn_k": (shape.kv_heads * shape.head_dim, hidden),
        "attn_v": (shape.kv_heads * shape.head_dim, hidden),
        "attn_output": (hidden, shape.heads * shape.head_dim),
        "ffn_gate": (shape.intermediate, hidden),
        "ffn_up": (shape.intermediate, hidden),
        "ffn_down": (hidden, shape.intermediate),
    }
    biased = [*family.biases, *(part for group in family.optional_biases if has_bias(file, group) for part in group)]
    for layer in range(shape.layers):
        source, target = f"blk.{layer}.", f"model.layers.{layer}."
        for part, name in _LINEARS.items():
            wanted[f"{source}{part}.weight"] = (f"{target}{name}.weight", sizes[part])
            if part in biased:
                wanted[f"{source}{part}.bias"] = (f"{target}{name}.bias", sizes[part][:1])
        for part, name in family.norms.items():
            width = shape.head_dim if part in _HEAD_NORMS else hidden
            wanted[f"{source}{part}.weight"] = (f"{target}{name}.weight", (width,))
    wanted["output_norm.weight"] = (_TOP["output_norm.weight"], (hidden,))
    if "output.weight" in file.tensors:
        wanted["output.weight"] = (_TOP["output.weight"], (shape.vocab, hidden))
    return wanted


def _edit(family: Family, shape: ModelShape, name: str) -> tuple[Edit, int]:
    if family.permuted and ".attn_q." in name:
        return Edit.UNPERMUTE_Q, shape.heads
    if family.permuted and ".attn_k." in name:
        return Edit.UNPERMUTE_K, shape.kv_heads
    if family.norms_plus_one and name.endswith("norm.weight"):
        return Edit.MINUS_ONE, 0
    return Edit.NONE, 0


def _listing(names: list[str], limit: int = 6) -> str:
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
