"""Claim every tensor of a checkpoint, of a language model alone or of one inside a larger model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tqtool.source.config import text_config
from tqtool.transform.families import Family, Slot
from tqtool.transform.folds import Shift
from tqtool.transform.layout import Layout, Parameter, is_zero_centred, read_text
from tqtool.transform.nested import PREFIX, nested_names, renamed_stack
from tqtool.transform.outputs import DroppedTensor, OutputTensor
from tqtool.transform.tower import outdated_keys, read_tower

NORMS_AROUND_ZERO = (
    *(Slot.ATTENTION_NORM, Slot.MLP_NORM, Slot.FINAL_NORM, Slot.INNER_NORM),
    *(Slot.EMBEDDING_NORM, Slot.HIDDEN_NORM),  # of a companion
)
"""Norms whose gains a hybrid stores less one."""
COMPANION_REASON = "multi-token-prediction companion: a model of its own, which mlx-lm does not run"


def read_layout(family: Family, shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any]) -> Layout:
    """Claim every source tensor.

    Raises:
        SourceError: config.json lacks a size, or a tensor is missing, left over or of an unexpected shape.
    """
    return _read_nested(family, shapes, config) if family.is_hybrid else read_text(family, shapes, config)


def identity_outputs(layout: Layout) -> tuple[OutputTensor, ...]:
    """Every parameter, unchanged, in writing order."""
    return tuple(parameter.output() for parameter in layout.parameters)


def _read_nested(family: Family, shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any]) -> Layout:
    """``read_layout`` of a text model inside a larger one: read by the names it would have alone, then renamed.

    What is written is mlx-lm's way to store it, whatever the source has: its loader tells the two apart by the shape of
    a convolution and would add one to every gain if only some tensors were in its way.
    """
    text = text_config(config)
    names = nested_names(shapes)
    plain = read_text(family, {place: shapes[name] for place, name in names.text.items()}, text)
    is_shifted = is_zero_centred(shapes)

    def renamed(parameter: Parameter) -> Parameter:
        if parameter.stack is not None:
            stack = renamed_stack(parameter.stack, lambda name: PREFIX + name, names.text)
            return replace(parameter, name=PREFIX + parameter.name, stack=stack)
        shift = is_shifted and parameter.slot in NORMS_AROUND_ZERO
        stored = (Shift(value=1.0),) if shift else parameter.stored
        return replace(parameter, name=PREFIX + parameter.name, source=names.text[parameter.name], stored=stored)

    parameters = [renamed(parameter) for parameter in plain.parameters]
    parameters += read_tower(names.tower, shapes, config, plain.geometry.hidden)
    dropped = [replace(drop, name=names.text[drop.name]) for drop in plain.dropped]
    dropped += [DroppedTensor(name=name, reason=COMPANION_REASON) for name in names.companion]
    return replace(
        plain,
        parameters=tuple(parameters),
        dropped=tuple(dropped),
        gain_offset=1.0 if is_shifted else 0.0,
        neutral_gain=1.0,
        prefix=PREFIX,
        config_updates={**_nested_updates(config, is_tied=plain.is_tied), **outdated_keys(names.tower, config)},
    )


def _nested_updates(config: Mapping[str, Any], *, is_tied: bool) -> dict[str, Any]:
    """What both places of config.json must say: loaders read one or the other."""
    flag = {"tie_word_embeddings": is_tied}
    return {**flag, "text_config": flag} if isinstance(config.get("text_config"), Mapping) else flag
