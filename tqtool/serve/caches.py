"""Which KV cache requests get, and what a token of it costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tqtool.kv.scheme import KVOptions
from tqtool.runtime.load import LoadedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheChoice:
    """A KV cache for every request.

    Attributes:
        make: An empty one.
        name: ``full``, or the scheme.
        bytes_per_token: Of the growing caches of all layers together.
        prefixes_are_exact: Whether a cache of a prefix is what a shorter prompt would have made. Not where tokens are
            packed from some length on: a longer prompt's are then packed, a shorter one's are not.
    """

    make: Callable[[], list[Any]]
    name: str
    bytes_per_token: int
    prefixes_are_exact: bool


def choose_caches(loaded: LoadedModel, kv: KVOptions) -> CacheChoice:
    """The cache for ``loaded``; UserError where the scheme does not go with the model."""
    from tqtool.kv.cache import cache_bytes_per_token, make_caches

    model = loaded.model
    make_caches(model, kv.scheme, start=kv.start)  # refused now, not at the first request
    return CacheChoice(
        make=lambda: make_caches(model, kv.scheme, start=kv.start),
        name=kv.name or "full",
        bytes_per_token=cache_bytes_per_token(model, kv.scheme),
        prefixes_are_exact=kv.start == 0,
    )
