"""Whether hubs can read a model card: asked of huggingface_hub's own parser, which needs no network."""

from __future__ import annotations

from typing import Any

from tqtool.artifact.card import CARD_NAME
from tqtool.errors import UserError

_HINT = "`tqtool card` writes it again"


def check_card(data: bytes) -> dict[str, Any]:
    """The front matter of a card as huggingface_hub reads it.

    Raises:
        UserError: it does not read it, there is none, or a field is of the wrong kind.
    """
    from huggingface_hub import ModelCard

    try:
        card: Any = ModelCard(data.decode())
        found: dict[str, Any] = card.data.to_dict()
    except Exception as error:
        raise UserError(
            f"{CARD_NAME}: huggingface_hub does not read its front matter ({type(error).__name__}: {error})", hint=_HINT
        ) from error
    if not found:
        raise UserError(f"{CARD_NAME}: it has no front matter", hint=_HINT)
    return found
