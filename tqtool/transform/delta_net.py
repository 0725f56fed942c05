"""Layers of a hybrid model: gated DeltaNet (linear attention) between layers of gated attention, as data.

Source of names and order: transformers' and mlx-lm's qwen3_5. What reads the residual stream is ``in_proj_*``, what
writes it ``out_proj``; the convolution, the decay and the inner norm act on what was projected, in a basis of their
own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tqtool.errors import SourceError
from tqtool.transform.families import Slot

FULL_INTERVAL = 4
"""Every fourth layer has full attention where config.json does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNet:
    """Sizes of the linear-attention layers."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    def tensors(self, hidden: int) -> Iterator[tuple[Slot, str, tuple[int, ...]]]:
        """Slot, name inside the layer, and shape of each; the convolution as ``[channels, 1, kernel]``."""
        value = self.value_heads * self.value_dim
        mixed = 2 * self.key_heads * self.key_dim + value
        yield Slot.LINEAR_IN, "linear_attn.in_proj_qkv.weight", (mixed, hidden)
        yield Slot.LINEAR_IN, "linear_attn.in_proj_z.weight", (value, hidden)
        yield Slot.RATE, "linear_attn.in_proj_b.weight", (self.value_heads, hidden)
        yield Slot.RATE, "linear_attn.in_proj_a.weight", (self.value_heads, hidden)
        yield Slot.CONVOLUTION, "linear_attn.conv1d.weight", (mixed, 1, self.kernel)
        yield Slot.STATE, "linear_attn.dt_bias", (self.value_heads,)
        yield Slot.DECAY, "linear_attn.A_log", (self.value_heads,)
        yield Slot.STATE, "linear_attn.norm.weight", (self.value_dim,)
        yield Slot.LINEAR_OUT, "linear_attn.out_proj.weight", (hidden, value)


def is_linear(layer: int, config: Mapping[str, Any]) -> bool:
    """Whether ``layer`` is a DeltaNet layer, as mlx-lm decides: by ``full_attention_interval`` alone.

    Raises:
        SourceError: the interval is impossible, or ``layer_types`` says otherwise: mlx-lm would build other layers.
    """
    interval = config.get("full_attention_interval", FULL_INTERVAL)
    if not isinstance(interval, int) or isinstance(interval, bool) or interval < 1:
        raise SourceError(f"config.json: full_attention_interval: expected a positive integer, found {interval!r}")
    linear = (layer + 1) % interval != 0
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and layer < len(kinds) and (kinds[layer] == "linear_attention") is not linear:
        raise SourceError(
            f"config.json: layer_types calls layer {layer} {kinds[layer]!r}; mlx-lm goes by full_attention_interval "
            f"{interval}",
            hint="mlx-lm cannot run a model whose layers alternate otherwise",
        )
    return linear
