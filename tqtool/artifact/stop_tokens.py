"""Stop tokens: three files may name them and stock loaders believe only one, so an artifact says the same in all.

mlx-lm takes ``generation_config.json`` over ``config.json``; a stop token missing there never ends a reply. The
artifact's two configs get the union of config, generation config and tokenizer, and the change is noted.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqtool.source.config import text_config

_HEAD_CHARS = 1 << 22
"""``added_tokens`` comes before the vocabulary; parsing a whole tokenizer.json can take 300 MB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopTokens:
    """Ids each file names, and what the artifact should say."""

    config: tuple[int, ...]
    generation: tuple[int, ...]
    tokenizer: tuple[int, ...]

    @property
    def union(self) -> tuple[int, ...]:
        """All ids: those of the generation config first, in its order, then the rest."""
        return tuple(dict.fromkeys((*self.generation, *self.config, *self.tokenizer)))

    @property
    def note(self) -> str | None:
        """What disagreed, or None."""
        named = {
            label: ids
            for label, ids in (
                ("config.json", self.config),
                ("generation_config.json", self.generation),
                ("tokenizer", self.tokenizer),
            )
            if ids
        }
        if all(set(ids) == set(self.union) for ids in named.values()):
            return None
        found = ", ".join(f"{label} {list(ids)}" for label, ids in named.items())
        return f"stop tokens differ ({found}); the artifact's configs say {list(self.union)}"


def read_stop_tokens(config: Mapping[str, Any], files: Iterable[Path]) -> StopTokens:
    """Collect the stop tokens named by ``config`` and by the companion ``files`` of a checkpoint."""
    by_name = {path.name: path for path in files}
    generation = _json_object(by_name.get("generation_config.json"))
    own = _ids(config.get("eos_token_id")) or _ids(text_config(config).get("eos_token_id"))
    return StopTokens(
        config=own,
        generation=_ids(generation.get("eos_token_id")),
        tokenizer=_tokenizer_ids(by_name.get("tokenizer_config.json"), by_name.get("tokenizer.json")),
    )


def generation_config_bytes(files: Iterable[Path], stop: StopTokens) -> bytes | None:
    """``generation_config.json`` with the union written in, or None when the file needs no change."""
    path = next((path for path in files if path.name == "generation_config.json"), None)
    generation = _json_object(path)
    if not generation or set(stop.union) == set(stop.generation):
        return None
    return (json.dumps({**generation, "eos_token_id": list(stop.union)}, indent=2) + "\n").encode()


def _tokenizer_ids(config_path: Path | None, tokenizer_path: Path | None) -> tuple[int, ...]:
    config = _json_object(config_path)
    eos = config.get("eos_token")
    text = eos.get("content") if isinstance(eos, Mapping) else eos
    if not isinstance(text, str):
        return ()
    decoder = config.get("added_tokens_decoder")
    if isinstance(decoder, Mapping):
        for token_id, token in decoder.items():
            if isinstance(token, Mapping) and token.get("content") == text and str(token_id).isdigit():
                return (int(token_id),)
    return tuple(
        token["id"] for token in _added_tokens(tokenizer_path) if token.get("content") == text and "id" in token
    )


def _added_tokens(path: Path | None) -> list[dict[str, Any]]:
    if path is None:
        return []
    with path.open(encoding="utf-8", errors="replace") as file:
        head = file.read(_HEAD_CHARS)
    start = head.find('"added_tokens"')
    begin = head.find("[", start) if start >= 0 else -1
    if begin < 0:
        return []
    try:
        tokens, _ = json.JSONDecoder().raw_decode(head, begin)
    except ValueError:
        return []
    return [token for token in tokens if isinstance(token, dict)]


def _ids(value: Any) -> tuple[int, ...]:
    values = value if isinstance(value, list) else [value]
    return tuple(item for item in values if isinstance(item, int) and not isinstance(item, bool))


def _json_object(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        value = json.loads(path.read_bytes())
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
