"""Which KV cache requests get, and what a token of it costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tqtool.runtime.load import LoadedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheChoice:
    """A KV cache for every request.

    Attributes:
        make: An empty one.
        name: ``dense``, or the scheme.
        prefixes_are_exact: Whether a cache of a prefix is what a shorter prompt would have made. Not where layers are
            quantized from some position on: what was read before, full precision, depends on the prompt's length.
    """

    make: Callable[[], list[Any]]
    name: str
    prefixes_are_exact: bool


def choose_caches(loaded: LoadedModel) -> CacheChoice:
    """The cache for ``loaded``."""
    from mlx_lm.models.cache import make_prompt_cache

    model = loaded.model
    return CacheChoice(make=lambda: list(make_prompt_cache(model)), name="dense", prefixes_are_exact=True)
