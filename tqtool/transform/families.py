"""Which tensors each architecture has, what each one is, and which of them write or read the residual stream.

A family is data. ``read_layout`` turns it, the config and the names found into a complete, checked list of
parameters: all that the family must have is there, with its shape; all that was found is claimed, or dropped with
a reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from tqtool.errors import SourceError
from tqtool.transform.ops import DroppedTensor, OutputTensor, Role

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
FINAL_NORM = "model.norm.weight"

POST_NORM_REFUSAL = (
    "it normalizes what attention and MLP write before adding it to the residual stream (post-norms); "
    "that gain acts per channel on a writer's output, so a residual rotation cannot pass through it"
)
LAYER_NORM_REFUSAL = (
    "its norms are LayerNorms, which subtract the mean over channels; a rotation keeps lengths and not means, and the "
    "weights that write the residual stream are not centred, which would make RMSNorms of them"
)

# Precomputed position tables of old exports: a function of config.json, which every loader recomputes.
_ROTARY_TABLE = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
_MAX_LISTED = 8


class Slot(StrEnum):
    """A parameter's place in the block: finer than its role, because the folds differ."""

    EMBEDDING = "embedding"
    HEAD = "head"
    FINAL_NORM = "final_norm"
    ATTENTION_NORM = "attention_norm"  # read by q, k, v
    MLP_NORM = "mlp_norm"  # read by gate, up
    INNER_NORM = "inner_norm"  # in head space, or a post-norm: never folded
    QKV = "qkv"  # rows of q, then k, then v
    Q = "q"
    K = "k"
    V = "v"
    O = "o"  # noqa: E741 - the projection's usual name
    GATE_UP = "gate_up"  # rows of gate, then of up
    GATE = "gate"
    UP = "up"
    DOWN = "down"

    @property
    def role(self) -> Role:
        """Role of the slot's weight."""
        return Role.NORM if self.value.endswith("norm") else Role(self.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One architecture, as far as names and folds go.

    Attributes:
        model_type: ``model_type`` in config.json.
        qkv_bias: Whether q, k, v have a bias; ``"config"`` reads ``attention_bias``, which then covers o_proj too.
        is_fused: q, k and v are one projection, and so are gate and up.
        mlp_bias: Whether ``mlp_bias`` in config.json is honoured.
        qk_norm: q_norm and k_norm, gains of ``[head_dim]``.
        sandwich_norms: Gemma 3's four norms per layer.
        gain_offset: 1 where norms multiply by 1 + w, else 0.
        head_dim: head_dim if config.json does not say; None means hidden_size / num_attention_heads.
        rotation_refusal: Why a residual rotation cannot be folded, or None.
    """

    model_type: str
    qkv_bias: Literal["config", "always", "never"] = "config"
    is_fused: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sandwich_norms: bool = False
    gain_offset: float = 0.0
    head_dim: int | None = None
    rotation_refusal: str | None = None


FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        Family(model_type="llama", mlp_bias=True),
        Family(model_type="mistral"),
        Family(model_type="smollm3", mlp_bias=True),  # llama; which layers rotate their heads is no fold's business
        Family(model_type="granite", mlp_bias=True),  # llama; its four multipliers are scalars: R passes through
        Family(model_type="phi3", qkv_bias="never", is_fused=True),
        Family(model_type="qwen2", qkv_bias="always"),
        Family(model_type="qwen3", qk_norm=True, head_dim=128),
        Family(
            model_type="gemma3_text",
            qk_norm=True,
            sandwich_norms=True,
            gain_offset=1.0,
            head_dim=256,
            rotation_refusal=POST_NORM_REFUSAL,
        ),
    )
}

# Cannot be rotated, and their tensors are not planned yet either: the refusal still names the reason.
REFUSED_ROTATION: dict[str, str] = {
    **dict.fromkeys(("gemma2", "gemma3", "gemma3n", "gemma4", "gemma4_text"), POST_NORM_REFUSAL),
    **dict.fromkeys(("olmo2", "olmo3", "exaone4", "glm4"), POST_NORM_REFUSAL),
    # cohere and phi run attention and MLP side by side, which alone would not matter.
    **dict.fromkeys(("cohere", "cohere2", "phi", "starcoder2", "stablelm", "gpt_neox", "gpt2"), LAYER_NORM_REFUSAL),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """Sizes from config.json."""

    hidden: int
    intermediate: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    n_layers: int
    vocab: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One source tensor and its place."""

    name: str
    shape: tuple[int, ...]
    slot: Slot
    layer: int | None = None
    is_bias: bool = False

    def output(self) -> OutputTensor:
        """The tensor passed through unchanged."""
        is_matrix = not self.is_bias and self.slot.role is not Role.NORM
        return OutputTensor(
            name=self.name,
            source=self.name,
            shape=self.shape,
            module=self.name.removesuffix(".weight") if is_matrix else None,
            role=Role.BIAS if self.is_bias else self.slot.role,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A checkpoint's parameters in writing order, all claimed.

    Attributes:
        is_tied: The head is the embedding (there is no head parameter).
        config_updates: What config.json must say explicitly for every loader to agree.
    """

    family: Family
    geometry: Geometry
    parameters: tuple[Parameter, ...]
    dropped: tuple[DroppedTensor, ...]
    is_tied: bool
    config_updates: dict[str, Any] = field(default_factory=dict)


def read_layout(family: Family, shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any]) -> Layout:
    """Claim every source tensor.

    Raises:
        SourceError: config.json lacks a size, or a tensor is missing, left over or of an unexpected shape.
    """
    geometry = read_geometry(family, config)
    if geometry.n_layers > len(shapes):  # before listing their tensors: the number may be absurd
        raise SourceError(
            f"config.json: num_hidden_layers {geometry.n_layers}: the checkpoint holds {len(shapes)} tensors, "
            "fewer than one a layer",
            hint="config.json and the weights belong to different models",
        )
    is_tied = _is_tied(shapes, config)
    parameters = tuple(_parameters(family, geometry, config, is_tied=is_tied))
    dropped = tuple(_dropped(shapes, is_tied=is_tied))
    _require_complete(family, shapes, parameters, dropped)
    # A missing flag is read as true by some loaders and as false by others; the artifact always says.
    updates = {} if "tie_word_embeddings" in config else {"tie_word_embeddings": is_tied}
    return Layout(
        family=family,
        geometry=geometry,
        parameters=parameters,
        dropped=dropped,
        is_tied=is_tied,
        config_updates=updates,
    )


def identity_outputs(layout: Layout) -> tuple[OutputTensor, ...]:
    """Every parameter, unchanged, in writing order."""
    return tuple(parameter.output() for parameter in layout.parameters)


def read_geometry(family: Family, config: Mapping[str, Any]) -> Geometry:
    """Sizes from config.json. Raises SourceError for a missing, non-positive or inconsistent one."""
    hidden = _size(config, "hidden_size")
    n_heads = _size(config, "num_attention_heads")
    n_kv_heads = _size(config, "num_key_value_heads", default=n_heads)
    if n_heads % n_kv_heads:
        raise SourceError(
            f"config.json: num_attention_heads {n_heads} is no multiple of num_key_value_heads {n_kv_heads}"
        )
    head_dim = _size(config, "head_dim", default=family.head_dim or hidden // n_heads)
    if config.get("head_dim") is None and family.head_dim is None and hidden % n_heads:
        raise SourceError(
            f"config.json: no head_dim, and hidden_size {hidden} is no multiple of num_attention_heads {n_heads}"
        )
    return Geometry(
        hidden=hidden,
        intermediate=_size(config, "intermediate_size"),
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        n_layers=_size(config, "num_hidden_layers"),
        vocab=_size(config, "vocab_size"),
    )


def _size(config: Mapping[str, Any], key: str, *, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise SourceError(f"config.json: {key}: expected a positive integer, found {config.get(key)!r}")
    return value


def _is_tied(shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any]) -> bool:
    flag = config.get("tie_word_embeddings")
    if flag is None:
        return HEAD not in shapes
    if not isinstance(flag, bool):
        raise SourceError(f"config.json: tie_word_embeddings: expected true or false, found {flag!r}")
    return flag


def _parameters(family: Family, geometry: Geometry, config: Mapping[str, Any], *, is_tied: bool) -> Iterator[Parameter]:
    table_shape = (geometry.vocab, geometry.hidden)
    yield Parameter(name=EMBEDDING, shape=table_shape, slot=Slot.EMBEDDING)
    for layer in range(geometry.n_layers):
        yield from _layer_norms(family, geometry, layer)
        yield from _layer_linears(family, geometry, config, layer)
    yield Parameter(name=FINAL_NORM, shape=(geometry.hidden,), slot=Slot.FINAL_NORM)
    if not is_tied:
        yield Parameter(name=HEAD, shape=table_shape, slot=Slot.HEAD)


def _layer_norms(family: Family, geometry: Geometry, layer: int) -> Iterator[Parameter]:
    hidden, head = (geometry.hidden,), (geometry.head_dim,)
    norms: list[tuple[str, tuple[int, ...], Slot]] = [("input_layernorm", hidden, Slot.ATTENTION_NORM)]
    if family.sandwich_norms:
        norms += [
            ("post_attention_layernorm", hidden, Slot.INNER_NORM),
            ("pre_feedforward_layernorm", hidden, Slot.MLP_NORM),
            ("post_feedforward_layernorm", hidden, Slot.INNER_NORM),
        ]
    else:
        norms += [("post_attention_layernorm", hidden, Slot.MLP_NORM)]
    if family.qk_norm:
        norms += [("self_attn.q_norm", head, Slot.INNER_NORM), ("self_attn.k_norm", head, Slot.INNER_NORM)]
    for name, shape, slot in norms:
        yield Parameter(name=f"model.layers.{layer}.{name}.weight", shape=shape, slot=slot, layer=layer)


def _layer_linears(family: Family, geometry: Geometry, config: Mapping[str, Any], layer: int) -> Iterator[Parameter]:
    query = geometry.n_heads * geometry.head_dim
    key_value = geometry.n_kv_heads * geometry.head_dim
    attention_bias = family.qkv_bias == "config" and config.get("attention_bias", False)
    qkv_bias = family.qkv_bias == "always" or attention_bias
    mlp_bias = family.mlp_bias and config.get("mlp_bias", False)
    hidden, inner = geometry.hidden, geometry.intermediate
    into_attention: tuple[tuple[Slot, str, int, int, bool], ...] = (
        (Slot.Q, "self_attn.q_proj", query, hidden, qkv_bias),
        (Slot.K, "self_attn.k_proj", key_value, hidden, qkv_bias),
        (Slot.V, "self_attn.v_proj", key_value, hidden, qkv_bias),
    )
    into_mlp: tuple[tuple[Slot, str, int, int, bool], ...] = (
        (Slot.GATE, "mlp.gate_proj", inner, hidden, mlp_bias),
        (Slot.UP, "mlp.up_proj", inner, hidden, mlp_bias),
    )
    if family.is_fused:
        into_attention = ((Slot.QKV, "self_attn.qkv_proj", query + 2 * key_value, hidden, qkv_bias),)
        into_mlp = ((Slot.GATE_UP, "mlp.gate_up_proj", 2 * inner, hidden, mlp_bias),)
    linears = (
        *into_attention,
        (Slot.O, "self_attn.o_proj", hidden, query, attention_bias),
        *into_mlp,
        (Slot.DOWN, "mlp.down_proj", hidden, inner, mlp_bias),
    )
    for slot, module, n_out, n_in, has_bias in linears:
        stem = f"model.layers.{layer}.{module}"
        yield Parameter(name=f"{stem}.weight", shape=(n_out, n_in), slot=slot, layer=layer)
        if has_bias:
            yield Parameter(name=f"{stem}.bias", shape=(n_out,), slot=slot, layer=layer, is_bias=True)


def _dropped(shapes: Mapping[str, tuple[int, ...]], *, is_tied: bool) -> Iterator[DroppedTensor]:
    for name in shapes:
        if _ROTARY_TABLE.fullmatch(name):
            yield DroppedTensor(name=name, reason="rotary table, recomputed from config.json")
        elif name == HEAD and is_tied:
            yield DroppedTensor(name=name, reason="tie_word_embeddings is true: loaders use the embedding")


def _require_complete(
    family: Family,
    shapes: Mapping[str, tuple[int, ...]],
    parameters: tuple[Parameter, ...],
    dropped: tuple[DroppedTensor, ...],
) -> None:
    claimed = {parameter.name for parameter in parameters} | {drop.name for drop in dropped}
    missing = [parameter.name for parameter in parameters if parameter.name not in shapes]
    leftover = [name for name in shapes if name not in claimed]
    wrong = [
        f"{parameter.name}: expected {list(parameter.shape)}, found {list(shapes[parameter.name])}"
        for parameter in parameters
        if parameter.name in shapes and tuple(shapes[parameter.name]) != parameter.shape
    ]
    problems = [
        f"{label}: {_listed(entries)}"
        for label, entries in (
            ("missing tensors", missing),
            ("tensors no rule claims", leftover),
            ("shapes that disagree with config.json", wrong),
        )
        if entries
    ]
    if problems:
        raise SourceError(
            f"the checkpoint does not look like model_type {family.model_type!r}; " + "; ".join(problems),
            hint="check model_type and the sizes in config.json, and that every shard is there",
        )


def _listed(entries: list[str]) -> str:
    shown = ", ".join(entries[:_MAX_LISTED])
    return shown if len(entries) <= _MAX_LISTED else f"{shown} and {len(entries) - _MAX_LISTED} more"
