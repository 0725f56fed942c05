"""Which tensors a checkpoint of a family has, what each one is, and which of them write or read the residual stream.

``read_text`` turns a family, the config and the names found into a complete, checked list of parameters: all that the
family must have is there, with its shape; all that was found is claimed, or dropped with a reason. ``claim`` does so
for models that lie inside a larger one too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tqtool.errors import SourceError
from tqtool.transform.delta_net import DeltaNet, is_linear
from tqtool.transform.experts import STACKS, Experts, sources
from tqtool.transform.families import Family, Slot
from tqtool.transform.folds import Op, Reshape, stored_shape
from tqtool.transform.outputs import DroppedTensor, OutputTensor, Role

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
FINAL_NORM = "model.norm.weight"

# Precomputed position tables of old exports: a function of config.json, which every loader recomputes.
_ROTARY_TABLE = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
_MAX_LISTED = 8
NO_MODULE = frozenset({Role.NORM, Role.STATE, Role.DECAY, Role.TOWER})
"""Weights that are no linear layer or embedding of the language model."""


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
    """One tensor of the model and its place.

    Attributes:
        source: Name in the source; None for ``name``.
        stored: Folds that turn the source's way to store it into the artifact's, before all others.
        stack: The stack, where it is one of experts.
    """

    name: str
    shape: tuple[int, ...]
    slot: Slot
    layer: int | None = None
    is_bias: bool = False
    source: str | None = None
    stored: tuple[Op, ...] = ()
    stack: OutputTensor | None = None

    @property
    def source_name(self) -> str:
        """Name in the source."""
        return self.source or self.name

    def sources(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape of every source tensor that it claims."""
        if self.stack is not None:
            return sources(self.stack)
        return iter(((self.source_name, stored_shape(self.stored, self.shape)),))

    def output(self) -> OutputTensor:
        """The tensor passed through unchanged."""
        if self.stack is not None:
            return self.stack
        is_matrix = not self.is_bias and self.slot.role not in NO_MODULE
        return OutputTensor(
            name=self.name,
            source=self.source_name,
            shape=self.shape,
            ops=self.stored,
            module=self.name.removesuffix(".weight") if is_matrix else None,
            role=Role.BIAS if self.is_bias and self.slot.role is not Role.TOWER else self.slot.role,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A checkpoint's parameters in writing order, all claimed.

    Attributes:
        is_tied: The head is the embedding (there is no head parameter).
        gain_offset: 1 where the source stores gains around zero, else 0.
        neutral_gain: What a folded norm's gain is in the artifact.
        prefix: Of every name in the artifact.
        config_updates: What config.json must say explicitly for every loader to agree.
    """

    family: Family
    geometry: Geometry
    parameters: tuple[Parameter, ...]
    dropped: tuple[DroppedTensor, ...]
    is_tied: bool
    gain_offset: float = 0.0
    neutral_gain: float = 1.0
    prefix: str = ""
    config_updates: dict[str, Any] = field(default_factory=dict)


def read_text(family: Family, shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any]) -> Layout:
    """Claim every tensor of a language model.

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
    parameters = tuple(_parameters(family, geometry, config, shapes, is_tied=is_tied))
    dropped = tuple(_dropped(shapes, is_tied=is_tied))
    require_complete(f"model_type {family.model_type!r}", shapes, parameters, dropped)
    # A missing flag is read as true by some loaders and as false by others; the artifact always says.
    updates = {} if "tie_word_embeddings" in config else {"tie_word_embeddings": is_tied}
    return Layout(
        family=family,
        geometry=geometry,
        parameters=parameters,
        dropped=dropped,
        is_tied=is_tied,
        gain_offset=family.gain_offset,
        neutral_gain=1.0 - family.gain_offset,
        config_updates=updates,
    )


def is_zero_centred(shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether a hybrid checkpoint is as Hugging Face has it: mlx-lm tells by convolutions of ``[channels, 1, k]``."""
    return any(name.endswith("conv1d.weight") and shape[-1] != 1 for name, shape in shapes.items())


def read_geometry(family: Family, config: Mapping[str, Any]) -> Geometry:
    """Sizes from config.json. Raises SourceError for a missing, non-positive or inconsistent one."""
    hidden = read_size(config, "hidden_size")
    n_heads = read_size(config, "num_attention_heads")
    n_kv_heads = read_size(config, "num_key_value_heads", default=n_heads)
    if n_heads % n_kv_heads:
        raise SourceError(
            f"config.json: num_attention_heads {n_heads} is no multiple of num_key_value_heads {n_kv_heads}"
        )
    head_dim = read_size(config, "head_dim", default=family.head_dim or hidden // n_heads)
    if config.get("head_dim") is None and family.head_dim is None and hidden % n_heads:
        raise SourceError(
            f"config.json: no head_dim, and hidden_size {hidden} is no multiple of num_attention_heads {n_heads}"
        )
    return Geometry(
        hidden=hidden,
        intermediate=read_size(config, "intermediate_size", default=0 if family.experts is not None else None),
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        n_layers=read_size(config, "num_hidden_layers"),
        vocab=read_size(config, "vocab_size"),
    )


def read_size(config: Mapping[str, Any], key: str, *, default: int | None = None, part: str = "") -> int:
    """A size, of config.json or of its ``part``. Raises SourceError for one that is missing or not positive."""
    value = config.get(key)
    if value is None:
        value = default
    is_default = default is not None and config.get(key) is None
    if not isinstance(value, int) or isinstance(value, bool) or (value <= 0 and not is_default):
        place = f"{part}.{key}" if part else key
        raise SourceError(f"config.json: {place}: expected a positive integer, found {config.get(key)!r}")
    return value


def _is_tied(shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any]) -> bool:
    flag = config.get("tie_word_embeddings")
    if flag is None:
        return HEAD not in shapes
    if not isinstance(flag, bool):
        raise SourceError(f"config.json: tie_word_embeddings: expected true or false, found {flag!r}")
    return flag


def _parameters(
    family: Family,
    geometry: Geometry,
    config: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    *,
    is_tied: bool,
) -> Iterator[Parameter]:
    table_shape = (geometry.vocab, geometry.hidden)
    yield Parameter(name=EMBEDDING, shape=table_shape, slot=Slot.EMBEDDING)
    for layer in range(geometry.n_layers):
        yield from layer_parameters(family, geometry, config, shapes, layer)
    yield Parameter(name=FINAL_NORM, shape=(geometry.hidden,), slot=Slot.FINAL_NORM)
    if not is_tied:
        yield Parameter(name=HEAD, shape=table_shape, slot=Slot.HEAD)


def layer_parameters(
    family: Family,
    geometry: Geometry,
    config: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    layer: int,
) -> Iterator[Parameter]:
    """All that decoder layer ``layer`` has, called ``model.layers.<layer>.…``."""
    is_delta = family.is_hybrid and is_linear(layer, config)
    yield from _layer_norms(family, geometry, layer, is_delta=is_delta)
    if is_delta:
        yield from _delta_net(geometry, config, shapes, layer)
    yield from _layer_linears(family, geometry, config, layer, is_delta=is_delta)
    if family.experts is not None and family.experts.is_sparse(layer, config):
        yield from _layer_experts(family.experts, geometry, config, shapes, layer)


def _delta_net(
    geometry: Geometry, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], layer: int
) -> Iterator[Parameter]:
    net = DeltaNet(
        key_heads=read_size(config, "linear_num_key_heads"),
        value_heads=read_size(config, "linear_num_value_heads"),
        key_dim=read_size(config, "linear_key_head_dim"),
        value_dim=read_size(config, "linear_value_head_dim"),
        kernel=read_size(config, "linear_conv_kernel_dim"),
    )
    for slot, part, shape in net.tensors(geometry.hidden):
        stored: tuple[Op, ...] = ()
        if slot is Slot.CONVOLUTION:
            channels, _, kernel = shape
            shape = (channels, kernel, 1)
            stored = (Reshape(shape=(channels, 1, kernel)),) if is_zero_centred(shapes) else ()
        yield Parameter(name=f"model.layers.{layer}.{part}", shape=shape, slot=slot, layer=layer, stored=stored)


def _layer_norms(family: Family, geometry: Geometry, layer: int, *, is_delta: bool) -> Iterator[Parameter]:
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
    if family.qk_norm and not is_delta:
        norms += [("self_attn.q_norm", head, Slot.INNER_NORM), ("self_attn.k_norm", head, Slot.INNER_NORM)]
    for name, shape, slot in norms:
        yield Parameter(name=f"model.layers.{layer}.{name}.weight", shape=shape, slot=slot, layer=layer)


def _layer_linears(
    family: Family, geometry: Geometry, config: Mapping[str, Any], layer: int, *, is_delta: bool
) -> Iterator[Parameter]:
    query = geometry.n_heads * geometry.head_dim
    key_value = geometry.n_kv_heads * geometry.head_dim
    attention_bias = family.qkv_bias == "config" and config.get("attention_bias", False)
    qkv_bias = family.qkv_bias == "always" or attention_bias
    mlp_bias = family.mlp_bias and config.get("mlp_bias", False)
    hidden, inner = geometry.hidden, geometry.intermediate
    into_attention: tuple[tuple[Slot, str, int, int, bool], ...] = (
        # A hybrid's has the gate of every output channel beside its query.
        (Slot.Q, "self_attn.q_proj", 2 * query if family.is_hybrid else query, hidden, qkv_bias),
        (Slot.K, "self_attn.k_proj", key_value, hidden, qkv_bias),
        (Slot.V, "self_attn.v_proj", key_value, hidden, qkv_bias),
    )
    mlp: tuple[tuple[Slot, str, int, int, bool], ...] = (
        (Slot.GATE, "mlp.gate_proj", inner, hidden, mlp_bias),
        (Slot.UP, "mlp.up_proj", inner, hidden, mlp_bias),
        (Slot.DOWN, "mlp.down_proj", hidden, inner, mlp_bias),
    )
    if family.is_fused:
        into_attention = ((Slot.QKV, "self_attn.qkv_proj", query + 2 * key_value, hidden, qkv_bias),)
        mlp = ((Slot.GATE_UP, "mlp.gate_up_proj", 2 * inner, hidden, mlp_bias), mlp[-1])
    if family.experts is not None and family.experts.is_sparse(layer, config):
        mlp = ()
    attention = (*into_attention, (Slot.O, "self_attn.o_proj", hidden, query, attention_bias))
    linears = mlp if is_delta else (*attention, *mlp)
    for slot, module, n_out, n_in, has_bias in linears:
        stem = f"model.layers.{layer}.{module}"
        yield Parameter(name=f"{stem}.weight", shape=(n_out, n_in), slot=slot, layer=layer)
        if has_bias:
            yield Parameter(name=f"{stem}.bias", shape=(n_out,), slot=slot, layer=layer, is_bias=True)


def _layer_experts(
    experts: Experts,
    geometry: Geometry,
    config: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    layer: int,
) -> Iterator[Parameter]:
    count_key = experts.count_key(config)
    count, width = read_size(config, count_key), read_size(config, experts.width_key)
    top = read_size(config, "num_experts_per_tok")
    if top > count:
        raise SourceError(f"config.json: num_experts_per_tok {top}: there are {count} experts ({count_key})")
    experts.require_one_spelling(layer, shapes)
    found = shapes.get(experts.stack_name(layer, Role.GATE), (len(shapes),))[0]
    if count > found:  # before listing their tensors: the number may be absurd
        raise SourceError(
            f"config.json: {count_key} {count}: the checkpoint has at most {found} experts in layer {layer}",
            hint="config.json and the weights belong to different models",
        )
    router = f"{experts.router(layer)}.weight"
    yield Parameter(name=router, shape=(count, geometry.hidden), slot=Slot.ROUTER, layer=layer)
    if experts.shared_key is not None:
        yield from _shared_expert(experts, geometry, config, layer)
    for role in STACKS:
        sides = (geometry.hidden, width) if role is Role.DOWN else (width, geometry.hidden)
        stack = experts.stack(layer, role, (count, *sides), shapes)
        yield Parameter(name=stack.name, shape=stack.shape, slot=Slot(role.value), layer=layer, stack=stack)


def _shared_expert(experts: Experts, geometry: Geometry, config: Mapping[str, Any], layer: int) -> Iterator[Parameter]:
    """The expert that every token reads, and what decides how much of it."""
    assert experts.shared_key is not None, "asked for families that have one"
    stem, hidden, width = (
        f"model.layers.{layer}.{experts.block}",
        geometry.hidden,
        read_size(config, experts.shared_key),
    )
    linears = (
        (Slot.ROUTER, "shared_expert_gate", (1, hidden)),
        (Slot.GATE, "shared_expert.gate_proj", (width, hidden)),
        (Slot.UP, "shared_expert.up_proj", (width, hidden)),
        (Slot.DOWN, "shared_expert.down_proj", (hidden, width)),
    )
    for slot, module, shape in linears:
        yield Parameter(name=f"{stem}.{module}.weight", shape=shape, slot=slot, layer=layer)


def _dropped(shapes: Mapping[str, tuple[int, ...]], *, is_tied: bool) -> Iterator[DroppedTensor]:
    for name in shapes:
        if _ROTARY_TABLE.fullmatch(name):
            yield DroppedTensor(name=name, reason="rotary table, recomputed from config.json")
        elif name == HEAD and is_tied:
            yield DroppedTensor(name=name, reason="tie_word_embeddings is true: loaders use the embedding")


def require_complete(
    what: str,
    shapes: Mapping[str, tuple[int, ...]],
    parameters: tuple[Parameter, ...],
    dropped: tuple[DroppedTensor, ...],
    spelled: Callable[[str], str] = str,
) -> None:
    """Raise SourceError unless ``parameters`` and ``dropped`` claim all of ``shapes``; ``what`` they are said to be.

    ``spelled`` gives a name as the user's files have it.
    """
    expected = dict(source for parameter in parameters for source in parameter.sources())
    claimed = expected.keys() | {drop.name for drop in dropped}
    missing = [spelled(name) for name in expected if name not in shapes]
    leftover = [spelled(name) for name in shapes if name not in claimed]
    wrong = [
        f"{spelled(name)}: expected {list(shape)}, found {list(shapes[name])}"
        for name, shape in expected.items()
        if name in shapes and tuple(shapes[name]) != shape
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
            f"the checkpoint does not look like {what}; " + "; ".join(problems),
            hint="check model_type and the sizes in config.json, and that every shard is there",
        )


def _listed(entries: list[str]) -> str:
    shown = ", ".join(entries[:_MAX_LISTED])
    return shown if len(entries) <= _MAX_LISTED else f"{shown} and {len(entries) - _MAX_LISTED} more"
