"""What a model asks of its caches: found by running it for one token without computing anything, MLX being lazy."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, make_prompt_cache

from tqtool.errors import UserError
from tqtool.kv.attention import PackedWindow, install, stock_attention


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """One cache of a model.

    Attributes:
        kind: Name of the class that mlx-lm gives it.
        heads: KV heads; 0 if the cache is no KVCache or no layer writes to it.
        k_dim: Elements of a key.
        v_dim: Elements of a value.
        float_bytes: Of one element, in the dtype that the layer computes.
    """

    kind: str
    heads: int = 0
    k_dim: int = 0
    v_dim: int = 0
    float_bytes: int = 0

    @property
    def grows(self) -> bool:
        """Whether it is a full cache that a layer writes to: one that a scheme can replace."""
        return self.heads > 0


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """All caches of a model, in order.

    Attributes:
        layers: One for each cache.
        takes_windows: Its layers only hand keys and values on to attention.
        checked: Names of the schemes that it was run with.
    """

    layers: tuple[LayerFacts, ...]
    takes_windows: bool
    checked: set[str] = field(default_factory=set)


class _Probe(KVCache):  # type: ignore[misc]
    """A full cache that notes what is written to it."""

    def __init__(self, *, as_windows: bool) -> None:
        super().__init__()
        self.facts: LayerFacts | None = None
        self._as_windows = as_windows

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        self.facts = LayerFacts("KVCache", keys.shape[1], keys.shape[-1], values.shape[-1], keys.dtype.size)
        fetched = super().update_and_fetch(keys, values)
        if not self._as_windows:
            return fetched
        return tuple(PackedWindow(self, array.shape, array.dtype) for array in fetched)

    def attend(
        self, window: PackedWindow, queries: mx.array, scale: float, mask: mx.array | str | None, sinks: mx.array | None
    ) -> mx.array:
        keys, values = self.keys_and_values()
        return stock_attention(queries, keys, values, scale, mask, sinks)


_known: dict[int, ModelFacts] = {}


def facts_of(model: nn.Module) -> ModelFacts:
    """What ``model`` asks of its caches; found once for each model.

    Raises:
        UserError: the model does not run on one token.
    """
    if id(model) not in _known:
        _known[id(model)] = _trace(model)
        weakref.finalize(model, _known.pop, id(model), None)
    return _known[id(model)]


def try_caches(model: nn.Module, caches: list[Any], what: str) -> None:
    """Run ``model`` for one token on ``caches``, computing nothing; they are used up.

    Raises:
        UserError: its attention in mlx-lm does not take them: ``what`` they are is in the message.
    """
    try:
        model(mx.array([[0]]), cache=caches)
    except Exception as error:
        raise UserError(
            f"{what}: this model's attention in mlx-lm takes no such caches ({_short(error)})",
            hint="leave --kv-quant out",
        ) from error


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _trace(model: nn.Module) -> ModelFacts:
    install(model)
    for as_windows in (True, False):
        caches = [
            _Probe(as_windows=as_windows) if type(cache) is KVCache else cache for cache in make_prompt_cache(model)
        ]
        try:
            model(mx.array([[0]]), cache=caches)
        except Exception as error:
            if as_windows:
                continue
            raise UserError(f"the model does not run on one token in mlx-lm ({_short(error)})") from error
        break
    found = (cache.facts if isinstance(cache, _Probe) else None for cache in caches)
    layers = tuple(
        LayerFacts("KVCache" if isinstance(cache, _Probe) else type(cache).__name__) if facts is None else facts
        for cache, facts in zip(caches, found, strict=True)
    )
    return ModelFacts(layers, takes_windows=as_windows)
