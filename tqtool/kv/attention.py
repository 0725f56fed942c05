"""Attention over packed keys and values, where mlx-lm's attention layers call for it.

mlx-lm's layers hand what their cache returned to ``scaled_dot_product_attention`` and do nothing else with it. So a
cache may return ``PackedWindow`` objects in place of arrays, if that function knows them: ``install`` puts one that
does into the modules of a model's layers. It does what mlx-lm's does for everything else. Whether a model's layers
really do nothing else with keys and values is tried before (``tqtool.kv.trace``).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import base

NAME = "scaled_dot_product_attention"
_stock = base.scaled_dot_product_attention


class Owner(Protocol):
    """A cache that attends itself."""

    def attend(
        self, window: PackedWindow, queries: mx.array, scale: float, mask: mx.array | str | None, sinks: mx.array | None
    ) -> mx.array:
        """Attention of ``queries [1, heads, L, d]`` over the window: the same shape and dtype."""


@dataclass(frozen=True, slots=True)
class PackedWindow:
    """Keys, or values, of the first ``shape[2]`` tokens of a cache: what a layer passes on to attention.

    Attributes:
        owner: The cache.
        shape: As the array would have it, ``[1, KV heads, tokens, d]``.
        dtype: Likewise.
    """

    owner: Owner
    shape: tuple[int, ...]
    dtype: mx.Dtype


def attention(
    queries: mx.array,
    keys: mx.array | PackedWindow,
    values: mx.array | PackedWindow,
    cache: Any,
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None = None,
) -> mx.array:
    """mlx-lm's ``scaled_dot_product_attention``, which also takes windows."""
    if isinstance(keys, PackedWindow):
        return keys.owner.attend(keys, queries, scale, mask, sinks)
    output: mx.array = _stock(queries, keys, values, cache, scale, mask, sinks)
    return output


def install(model: nn.Module) -> None:
    """Make the layers of ``model`` call ``attention``; modules that have a function of their own keep it."""
    for module in {type(layer).__module__ for layer in model.modules()}:
        namespace = vars(sys.modules[module])
        if namespace.get(NAME) is _stock:
            namespace[NAME] = attention


def stock_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None,
) -> mx.array:
    """Attention of float arrays by MLX."""
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)
