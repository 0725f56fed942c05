"""Write ``docs/recipes.md`` from the schema: every field with its type, default and meaning.

python docs/generate_recipes.py [--check]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from tqtool.recipes.schema import (
    AllocationPart,
    CalibrationPart,
    ConvertPart,
    EvaluationPart,
    Recipe,
    Rotation,
    TrellisPart,
)

PATH = Path(__file__).parent / "recipes.md"
SECTIONS: dict[str, type[BaseModel]] = {
    "": Recipe,
    "rotation": Rotation,
    "calibration": CalibrationPart,
    "allocation": AllocationPart,
    "quantize, verb: convert": ConvertPart,
    "quantize, verb: trellis": TrellisPart,
    "evaluation": EvaluationPart,
}
HEAD = """# Recipe fields

Generated from `tqtool/recipes/schema.py` by `make docs`. A recipe is YAML; unknown fields are errors, with their line.
Paths are relative to the current directory.
"""


def render() -> str:
    """The page."""
    parts = [HEAD]
    for name, model in SECTIONS.items():
        title = f"## `{name}`" if name else "## Top level"
        doc = "" if model is Recipe else " ".join((model.__doc__ or "").split())
        parts += [title, "", *([doc, ""] if doc else []), "| field | type | default | |", "|---|---|---|---|"]
        for field, info in model.model_fields.items():
            required = info.is_required()
            value = info.get_default(call_default_factory=True) if not required else PydanticUndefined
            default = "required" if required else f"`{value!r}`" if value is not None else "none"
            text = info.description or ("section" if field in SECTIONS or field == "quantize" else "")
            parts.append(f"| `{field}` | {type_name(info.annotation)} | {default} | {text} |")
        parts.append("")
    return "\n".join(parts)


def type_name(annotation: object) -> str:
    """A type as a person writes it."""
    if isinstance(annotation, type) and not get_args(annotation):
        return "section" if issubclass(annotation, BaseModel) else annotation.__name__
    arguments = [argument for argument in get_args(annotation) if argument is not type(None)]
    if all(isinstance(argument, str) for argument in arguments):
        return " / ".join(arguments)
    if getattr(annotation, "__origin__", None) in (list, dict):
        return f"{annotation.__origin__.__name__} of {' to '.join(type_name(argument) for argument in arguments)}"  # type: ignore[attr-defined]
    return " / ".join(
        dict.fromkeys(type_name(argument) for argument in arguments if not isinstance(argument, FieldInfo))
    )


def main() -> None:
    """Write the page, or with ``--check`` say whether it is fresh."""
    text = render()
    if "--check" in sys.argv:
        if not PATH.exists() or PATH.read_text() != text:
            sys.exit(f"{PATH} is stale: make docs")
        return
    PATH.write_text(text)


if __name__ == "__main__":
    main()
