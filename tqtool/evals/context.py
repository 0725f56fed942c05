"""How many positions a model was made for."""

from __future__ import annotations

import logging
from typing import Any

log = logging.getLogger(__name__)

KEYS = ("max_position_embeddings", "n_positions", "max_seq_len")


def context_limit(config: dict[str, Any]) -> int | None:
    """Positions that ``config`` names, at its top or in ``text_config``; None if it names none."""
    inner = config.get("text_config")
    for part in (config, inner if isinstance(inner, dict) else {}):
        for key in KEYS:
            value = part.get(key)
            if type(value) is int and value > 0:
                return value
    return None


def context_warnings(config: dict[str, Any], context: int) -> tuple[str, ...]:
    """For a report, and logged at once: windows longer than the model was made for still give numbers."""
    limit = context_limit(config)
    if limit is None or context <= limit:
        return ()
    text = f"windows of {context} tokens, the model was made for {limit}: later positions may score badly"
    log.warning("warning: %s", text)
    return (text,)
