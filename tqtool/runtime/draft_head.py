"""A draft head for multi-token prediction (``qwen3_5_mtp``) made of mlx-lm's own layers. Imports mlx."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache
from mlx_lm.models.qwen3_5 import DecoderLayer, TextModelArgs


@dataclass(frozen=True, slots=True)
class Drafted:
    """What one pass gives: what the trunk's head reads, and the state that the next draft reads; ``[B, T, hidden]``."""

    normed: mx.array
    state: mx.array


class DraftHead(nn.Module):  # type: ignore[misc]
    """Row i reads the embedding of token i + 1 and the trunk's hidden state of token i, and predicts token i + 2."""

    def __init__(self, text_config: dict[str, Any], depth: int, *, is_post_norm: bool) -> None:
        super().__init__()
        stated = TextModelArgs.from_dict(text_config)
        args = replace(stated, num_hidden_layers=depth, full_attention_interval=1)
        hidden, eps = args.hidden_size, args.rms_norm_eps
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.pre_fc_norm_embedding = nn.RMSNorm(hidden, eps=eps)
        self.pre_fc_norm_hidden = nn.RMSNorm(hidden, eps=eps)
        self.layers = [DecoderLayer(args=args, layer_idx=0) for _ in range(depth)]
        self.norm = nn.RMSNorm(hidden, eps=eps)
        self._is_post_norm = is_post_norm

    def __call__(self, embedded: mx.array, state: mx.array, cache: list[KVCache] | None = None) -> Drafted:
        """One pass over ``[B, T, hidden]`` of each; drafts behind drafts take ``state`` from here, at the same tap."""
        both = [self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(state)]
        x = self.fc(mx.concatenate(both, axis=-1))
        caches = cache or [None] * len(self.layers)
        mask = create_attention_mask(x, caches[0])
        for layer, own in zip(self.layers, caches, strict=True):
            x = layer(x, mask=mask, cache=own)
        normed = self.norm(x)
        return Drafted(normed=normed, state=normed if self._is_post_norm else x)

    def make_cache(self) -> list[KVCache]:
        """One for each layer; they grow with the text."""
        return [KVCache() for _ in self.layers]


class KeptInput(nn.Module):  # type: ignore[misc]
    """A norm that keeps what it was called with."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.kept: list[mx.array] = []

    def __call__(self, x: mx.array) -> mx.array:
        """The norm of ``x``."""
        self.kept.append(x)
        result: mx.array = self.norm(x)
        return result
