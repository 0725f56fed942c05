"""KV caches in mlx-lm's protocol whose tokens are packed, and the list of them that a model gets.

    caches = make_caches(model, parse_scheme("turbo:k8v3"))
    for response in stream_generate(model, tokenizer, prompt, prompt_cache=caches): ...

Importing this module makes the classes known to ``mlx_lm.models.cache.load_prompt_cache``.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import Counter
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import cache as stock
from mlx_lm.models.cache import KVCache, QuantizedKVCache, make_prompt_cache

from tqtool.errors import UserError
from tqtool.kv import array_codec
from tqtool.kv.attend import attend, decode_rotated, encode
from tqtool.kv.attention import PackedWindow
from tqtool.kv.scheme import KVOptions, KVScheme, affine_group, full_bytes_per_token, parse_scheme
from tqtool.kv.trace import ModelFacts, facts_of, try_caches

log = logging.getLogger(__name__)

STEP = 256
"""Tokens that room is made for at a time."""


class _StartingCache(stock._BaseCache, ABC):  # type: ignore[misc]
    """A cache that keeps float tokens until there are ``start`` of them, and packs all of them then."""

    def __init__(self, scheme: KVScheme, start: int) -> None:
        self.scheme, self.start = scheme, start
        self._floats: KVCache | None = KVCache() if start > 0 else None

    def _keeps_floats(self) -> bool:
        """Whether the next tokens are to be kept as floats; when first they are not, what is there is packed."""
        if self._floats is None:
            return False
        if self._floats.offset < self.start:
            return True
        keys, values = self._floats.keys_and_values()
        self._floats = None
        self._append(keys, values)
        return False

    @abstractmethod
    def _append(self, keys: mx.array, values: mx.array) -> None:
        """Pack new tokens and keep them."""

    def is_trimmable(self) -> bool:
        """Yes: every token is packed alone."""
        return True

    def make_mask(self, *args: Any, **kwargs: Any) -> Any:
        """The mask of new queries, as a full cache makes it."""
        return stock.create_attention_mask(*args, offset=self.offset, **kwargs)

    def size(self) -> int:
        """Tokens held."""
        tokens: int = self.offset
        return tokens


class TurboKVCache(_StartingCache):
    """Records of one layer (docs/formats/kv.md), ``[1, KV heads, capacity, words]`` uint32.

    A token's bytes never depend on other tokens, so what is generated does not depend on how a prompt was cut. There is
    no ``merge``: mlx-lm's batches refuse it.

    Args:
        scheme: A turbo scheme.
        start: Keep float tokens until there are so many; then all of them are packed.
        as_windows: Return ``PackedWindow`` in place of arrays: only where attention takes them.
    """

    def __init__(self, scheme: KVScheme, *, start: int = 0, as_windows: bool = False) -> None:
        super().__init__(scheme, start)
        self.as_windows = as_windows
        self.records: mx.array | None = None
        self.head_dim = 0
        self._tokens = 0

    @property
    def offset(self) -> int:
        """Tokens held."""
        tokens: int = self._tokens if self._floats is None else self._floats.offset
        return tokens

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        """Append ``[1, heads, L, d]`` each; all keys and values, decoded to their dtype, or as windows.

        Raises:
            UserError: a batch, a head dimension without sign vector, keys and values of different sizes.
        """
        self._check(keys.shape, values.shape)
        if self._keeps_floats():
            assert self._floats is not None
            return self._floats.update_and_fetch(keys, values)
        self._append(keys, values)
        if self.as_windows:
            shape = (1, keys.shape[1], self._tokens, self.head_dim)
            window = PackedWindow(self, shape, keys.dtype)
            return window, window
        decoded, rotated = decode_rotated(self._records(), self._tokens, self.head_dim, self.scheme, mx.float32)
        return decoded.astype(keys.dtype), array_codec.unrotate(rotated).astype(values.dtype)

    def attend(
        self, window: PackedWindow, queries: mx.array, scale: float, mask: mx.array | str | None, sinks: mx.array | None
    ) -> mx.array:
        """Attention of ``queries [1, heads, L, d]`` over a window of this cache: the same shape and dtype."""
        return attend(self._records(), window.shape[2], self.scheme, queries, scale, mask, sinks)

    def trim(self, n: int) -> int:
        """Forget the last ``n`` tokens; returns how many there were."""
        if self._floats is not None:
            trimmed: int = self._floats.trim(n)
            return trimmed
        n = min(self._tokens, n)
        self._tokens -= n
        return n

    def empty(self) -> bool:
        """Whether nothing was ever written."""
        return self.records is None if self._floats is None else bool(self._floats.empty())

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        if self._floats is not None:
            floats: int = self._floats.nbytes
            return floats
        return 0 if self.records is None else self.records.nbytes

    @property
    def state(self) -> Any:
        """Arrays and numbers that say everything: what mlx-lm saves."""
        floats = (None, None, 0) if self._floats is None else self._floats.state
        is_packed = int(self._floats is None)
        return (self.records, self._tokens, self.head_dim, self.scheme.name, self.start, is_packed, *floats)

    @state.setter
    def state(self, v: Any) -> None:
        self.records, self._tokens, self.head_dim, name, self.start, is_packed, *floats = v
        scheme = parse_scheme(name)
        assert scheme is not None, "a turbo scheme has a name"
        self.scheme, self.as_windows = scheme, False
        self._floats = None if is_packed else KVCache.from_state(tuple(floats))

    def _records(self) -> mx.array:
        assert self.records is not None, "something was appended"
        return self.records

    def _check(self, keys: tuple[int, ...], values: tuple[int, ...]) -> None:
        if keys[0] != 1:
            raise UserError(
                f"KV scheme {self.scheme.name}: a batch of {keys[0]}: caches of this kind hold one sequence",
                hint="run one request at a time, or leave --kv-quant out",
            )
        reason = _refusal(self.scheme, keys[-1], values[-1])
        if reason is not None:
            raise UserError(f"KV scheme {self.scheme.name}: {reason}", hint="leave --kv-quant out, or try affine8")

    def _append(self, keys: mx.array, values: mx.array) -> None:
        new = encode(keys, values, self.scheme)
        first, count = self._tokens, new.shape[2]
        self.head_dim = keys.shape[-1]
        if self.records is None or first + count > self.records.shape[2]:
            room = mx.zeros((1, new.shape[1], -(-count // STEP) * STEP, new.shape[-1]), mx.uint32)
            kept = [] if self.records is None else [self.records[:, :, :first]]
            self.records = mx.concatenate([*kept, room], axis=2)
        self.records[:, :, first : first + count] = new
        self._tokens += count


class AffineKVCache(_StartingCache):
    """mlx-lm's QuantizedKVCache that begins with float tokens.

    Its ``bits``, by which mlx-lm's attention knows a quantized cache, exist from when tokens are packed.
    """

    def __init__(self, scheme: KVScheme, group_size: int, *, start: int) -> None:
        super().__init__(scheme, start)
        self._packed = QuantizedKVCache(group_size=group_size, bits=scheme.k_bits)

    def __getattr__(self, name: str) -> Any:
        if name in ("bits", "group_size") and self._floats is None:
            return getattr(self._packed, name)
        raise AttributeError(name)

    @property
    def offset(self) -> int:
        """Tokens held."""
        tokens: int = self._active.offset
        return tokens

    @property
    def _active(self) -> Any:
        return self._packed if self._floats is None else self._floats

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        """As mlx-lm's caches."""
        self._keeps_floats()
        return self._active.update_and_fetch(keys, values)

    def trim(self, n: int) -> int:
        """Forget the last ``n`` tokens; returns how many there were."""
        trimmed: int = self._active.trim(n)
        return trimmed

    def empty(self) -> bool:
        """Whether nothing was ever written."""
        return bool(self._active.empty())

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return 0 if self.empty() else int(self._active.nbytes)

    @property
    def state(self) -> Any:
        """Arrays and numbers that say everything: what mlx-lm saves."""
        return (int(self._floats is None), self.scheme.name, self.start, self._packed.group_size, self._active.state)

    @state.setter
    def state(self, v: Any) -> None:
        is_packed, name, self.start, group_size, active = v
        scheme = parse_scheme(name)
        assert scheme is not None, "an affine scheme has a name"
        self.scheme, self._floats = scheme, None if is_packed else KVCache.from_state(active)
        self._packed = QuantizedKVCache(group_size=group_size, bits=scheme.k_bits)
        if is_packed:
            self._packed.state = active

    def _append(self, keys: mx.array, values: mx.array) -> None:
        self._packed.update_and_fetch(keys, values)


for _class in (TurboKVCache, AffineKVCache):
    setattr(stock, _class.__name__, _class)  # load_prompt_cache looks names up there


def make_caches(model: nn.Module, scheme: KVScheme | None, *, start: int = 0) -> list[Any]:
    """Fresh caches for one sequence of ``model``, one for each that mlx-lm makes.

    Caches that are no growing KVCache (rotating windows, recurrent states) stay as mlx-lm makes them; that is said once
    for each model.

    Args:
        model: mlx-lm's.
        scheme: None for the full cache.
        start: Keep float tokens until there are so many; then all of them are packed (mlx-lm's quantized_kv_start).

    Raises:
        UserError: the model's head dimension, or the way it uses its cache, does not go with the scheme; no layer has a
            growing cache; ``start`` is negative, or given without a scheme.
    """
    KVOptions(scheme=scheme, start=start)
    if scheme is None:
        return list(make_prompt_cache(model))
    facts = facts_of(model)
    _require(model, facts, scheme)
    return _build(model, facts, scheme, start)


def cache_bytes_per_token(model: nn.Module, scheme: KVScheme | None) -> int:
    """Bytes that one more token takes in the growing caches of ``model``; errors as ``make_caches``.

    Room is made for 256 tokens at a time; caches that do not grow are not counted.
    """
    facts = facts_of(model)
    if scheme is not None:
        _require(model, facts, scheme)
    return sum(
        layer.heads
        * (
            full_bytes_per_token(layer.k_dim, layer.v_dim, float_bytes=layer.float_bytes)
            if scheme is None
            else scheme.bytes_per_token(layer.k_dim, float_bytes=layer.float_bytes)
        )
        for layer in facts.layers
        if layer.grows
    )


def use_windows(model: nn.Module, caches: list[Any]) -> None:
    """Let ``caches`` that were loaded, or set from a state, attend over packed tokens where ``model`` can."""
    takes_windows = facts_of(model).takes_windows
    for cache in caches:
        if isinstance(cache, TurboKVCache):
            cache.as_windows = takes_windows


def _refusal(scheme: KVScheme, k_dim: int, v_dim: int) -> str | None:
    if k_dim != v_dim:
        return (
            f"keys of {k_dim} and values of {v_dim} elements: expected the same (latent attention keeps none of both)"
        )
    return scheme.refusal(k_dim)


def _require(model: nn.Module, facts: ModelFacts, scheme: KVScheme) -> None:
    """UserError unless the model can have such caches; each scheme is looked at once."""
    if scheme.name in facts.checked:
        return
    _check_model(facts, scheme)
    if scheme.kind == "affine":  # mlx-lm's own attention over them has conditions of its own
        try_caches(model, _build(model, facts, scheme, 0), f"KV scheme {scheme.name}")
    facts.checked.add(scheme.name)


def _check_model(facts: ModelFacts, scheme: KVScheme) -> None:
    growing = [layer for layer in facts.layers if layer.grows]
    if not growing:
        kinds = ", ".join(sorted({layer.kind for layer in facts.layers}))
        raise UserError(f"KV scheme {scheme.name}: no layer of this model has a growing KV cache, found {kinds}")
    for index, layer in enumerate(facts.layers):
        reason = _refusal(scheme, layer.k_dim, layer.v_dim) if layer.grows else None
        if reason is not None:
            has_affine = scheme.kind == "turbo" and layer.k_dim == layer.v_dim and affine_group(layer.k_dim)
            hint = f"{'affine8 and affine4 go with it; or ' if has_affine else ''}leave --kv-quant out"
            raise UserError(f"KV scheme {scheme.name}, layer {index}: {reason}", hint=hint)
    others = Counter(layer.kind for layer in facts.layers if not layer.grows)
    if others and not facts.checked:
        listed = ", ".join(f"{count} {kind}" for kind, count in others.items())
        log.warning(
            "KV scheme %s: %d layers are packed, others stay as they are: %s", scheme.name, len(growing), listed
        )


def _build(model: nn.Module, facts: ModelFacts, scheme: KVScheme, start: int) -> list[Any]:
    caches = list(make_prompt_cache(model))
    for index, layer in enumerate(facts.layers):
        if layer.grows:
            caches[index] = _new_cache(facts, scheme, layer.k_dim, start)
    return caches


def _new_cache(facts: ModelFacts, scheme: KVScheme, head_dim: int, start: int) -> Any:
    if scheme.kind == "turbo":
        return TurboKVCache(scheme, start=start, as_windows=facts.takes_windows)
    group = affine_group(head_dim)
    assert group is not None, "checked"
    if start:
        return AffineKVCache(scheme, group, start=start)
    return QuantizedKVCache(group_size=group, bits=scheme.k_bits)
