"""Pick a checkpoint's family and the rotation that fits it; an unknown architecture is an error, never a default."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tqtool.errors import SourceError, UserError
from tqtool.transform.families import FAMILIES, REFUSED_ROTATION, Family

AUTO = "rotation.auto"
COMPANION_TYPE = "qwen3_5_mtp"
"""``model_type`` of a companion for multi-token prediction, as mlx-vlm has it."""


def select_family(config: Mapping[str, Any]) -> Family:
    """The family of ``config["model_type"]``. Raises UserError naming the known ones."""
    model_type = _model_type(config)
    _refuse_companion(model_type)
    family = FAMILIES.get(model_type)
    if family is None:
        raise UserError(
            f"config.json: model_type {model_type!r} is not known; {_known()}",
            hint="a new family is one entry in tqtool/transform/families.py",
        )
    return family


def select_rotation(config: Mapping[str, Any], transform: str) -> Family:
    """The family whose rotation ``transform`` asks for.

    Args:
        config: Parsed config.json.
        transform: ``"rotation.auto"`` or ``"rotation.<family>"``.

    Raises:
        UserError: Unknown transform or architecture, a transform of another family, or an architecture in which
            the residual rotation does not commute.
    """
    names = [f"rotation.{name}" for name, family in FAMILIES.items() if family.rotation_refusal is None]
    model_type = _model_type(config)
    _refuse_companion(model_type)
    refusal = REFUSED_ROTATION.get(model_type)
    family = FAMILIES.get(model_type)
    if refusal is None and family is not None:
        refusal = family.rotation_refusal
    if refusal is not None:
        is_known = family is not None
        hint = "convert it without --rotate-weights" if is_known else f"not known without rotation either; {_known()}"
        raise UserError(f"model_type {model_type!r} cannot be rotated: {refusal}", hint=hint)
    if transform != AUTO and transform not in names:
        raise UserError(f"unknown transform {transform!r}; known: {AUTO}, {', '.join(names)}")
    if family is None:
        known = ", ".join(name.removeprefix("rotation.") for name in names)
        raise UserError(
            f"no rotation is known for model_type {model_type!r}; known: {known}",
            hint="a new family is one entry in tqtool/transform/families.py",
        )
    if transform not in (AUTO, f"rotation.{model_type}"):
        raise UserError(
            f"transform {transform!r} does not fit model_type {model_type!r}",
            hint=f"use {AUTO} or rotation.{model_type}",
        )
    return family


def _refuse_companion(model_type: str) -> None:
    if model_type == COMPANION_TYPE:
        raise UserError(
            f"model_type {model_type!r} is no model but the companion of one: its folds need its trunk",
            hint="tqtool convert TRUNK OUT --mtp 8 --mtp-source THIS_FOLDER",
        )


def _known() -> str:
    return f"known: {', '.join(sorted(FAMILIES))}"


def _model_type(config: Mapping[str, Any]) -> str:
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise SourceError(f"config.json: model_type: expected a string, found {model_type!r}")
    return model_type
