"""Names of a language model that lies inside a larger one: its tensors, and what belongs to the rest.

Checkpoints spell the same tensor in three ways: ``model.language_model.layers.0…`` (Hugging Face, with a vision tower),
``model.layers.0…`` (Hugging Face, text alone), ``language_model.model.layers.0…`` (mlx-lm, mlx-vlm). Inside, all go by
the second; artifacts have the third.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from tqtool.errors import SourceError
from tqtool.transform.outputs import OutputTensor

PREFIX = "language_model."
TOWER = "vision_tower."
_TOWERS = ("model.visual.", "model.language_model.visual.", TOWER)
COMPANION = "mtp."
"""Begins the names of a multi-token-prediction companion's tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NestedNames:
    """Every source tensor in its place.

    Attributes:
        text: Name as the text model alone would have it → name in the source.
        tower: Name of a vision tensor in the artifact → name in the source.
        companion: Source names of a multi-token-prediction companion.
    """

    text: Mapping[str, str] = field(default_factory=dict)
    tower: Mapping[str, str] = field(default_factory=dict)
    companion: tuple[str, ...] = ()


def nested_names(shapes: Mapping[str, tuple[int, ...]]) -> NestedNames:
    """Sort the tensors of a checkpoint. Raises SourceError where two are one and the same tensor."""
    text: dict[str, str] = {}
    tower: dict[str, str] = {}
    companion = []
    for name in shapes:
        stem = next((prefix for prefix in _TOWERS if name.startswith(prefix)), None)
        if stem is not None:
            _put(tower, TOWER + name.removeprefix(stem), name)
        elif name.startswith(COMPANION) or f".{COMPANION}" in name:
            companion.append(name)
        elif name.startswith("model.language_model."):
            _put(text, "model." + name.removeprefix("model.language_model."), name)
        else:
            _put(text, name.removeprefix(PREFIX), name)
    return NestedNames(text=text, tower=tower, companion=tuple(companion))


def renamed_stack(stack: OutputTensor, rename: Callable[[str], str], sources: Mapping[str, str]) -> OutputTensor:
    """A stack of experts under other names; ``sources``: name inside the text model → name in the source."""
    parts = tuple(
        replace(part, name=rename(part.name), module=rename(str(part.module)), source=sources[part.source])
        for part in stack.parts
    )
    return replace(stack, name=rename(stack.name), module=rename(str(stack.module)), parts=parts)


def _put(names: dict[str, str], place: str, name: str) -> None:
    if place in names:
        raise SourceError(f"{names[place]} and {name}: one tensor in two spellings", hint="keep one of them")
    names[place] = name
