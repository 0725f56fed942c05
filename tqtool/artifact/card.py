"""``README.md`` of an artifact: the front matter hubs read, and the facts of how it was made.

A licence is copied only if the source's own card states it; it is never guessed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

CARD_NAME = "README.md"
_COPIED_KEYS = ("license", "license_name", "license_link", "language")
_SCALAR = re.compile(r"^([a-z_]+):[ \t]*(\S.*?)[ \t]*$")


@dataclass(frozen=True, slots=True, kw_only=True)
class CardFacts:
    """What the card says.

    Attributes:
        title: Heading.
        base_model: Hub id of the source, or None for a local folder.
        source_card: README.md of the source, if it has one.
        facts: Rows of the table, label → text.
        is_quantized: Sets ``base_model_relation``.
        is_stock: True when stock mlx-lm loads the artifact.
        tags: Added to ``mlx`` and ``tqtool``.
        notes: Listed under the table.
    """

    title: str
    base_model: str | None
    source_card: Path | None
    facts: Mapping[str, str]
    is_quantized: bool
    is_stock: bool = True
    tags: Sequence[str] = field(default_factory=tuple)
    notes: Sequence[str] = field(default_factory=tuple)


def render_card(facts: CardFacts) -> bytes:
    """The card's bytes."""
    front = {"library_name": "mlx", "pipeline_tag": "text-generation", **stated_fields(facts.source_card)}
    lines = ["---", *(f"{key}: {value}" for key, value in front.items())]
    if facts.base_model is not None:
        lines.append(f"base_model: {json.dumps(facts.base_model)}")
        if facts.is_quantized:
            lines.append("base_model_relation: quantized")
    lines += ["tags:", *(f"- {tag}" for tag in ("mlx", "tqtool", *facts.tags)), "---", "", f"# {facts.title}", ""]
    lines += ["| | |", "|---|---|", *(f"| {label} | {text} |" for label, text in facts.facts.items()), ""]
    if facts.notes:
        lines += ["Notes:", "", *(f"* {note}" for note in facts.notes), ""]
    if facts.is_stock:
        lines += ["```sh", "pip install mlx-lm", "mlx_lm.generate --model THIS_FOLDER --prompt Hello", "```", ""]
    lines.append("`tqtool/manifest.json` lists every tensor and hash; `tqtool verify` checks them.")
    return ("\n".join(lines) + "\n").encode()


def stated_fields(card: Path | None) -> dict[str, str]:
    """Licence and language lines of a source card's front matter, verbatim; empty if there are none."""
    if card is None or not card.is_file():
        return {}
    lines = card.read_text(encoding="utf-8", errors="replace").splitlines()
    if not lines or lines[0].strip() != "---":
        return {}
    found: dict[str, str] = {}
    for line in lines[1:]:
        if line.strip() == "---":
            return found
        match = _SCALAR.match(line)
        if match and match[1] in _COPIED_KEYS:
            found[match[1]] = match[2]
    return {}
