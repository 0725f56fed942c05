"""Small random mixture-of-experts checkpoints, in both spellings that are found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.support.tiny_models import DTYPES, Tiny

BLOCKS = {"qwen3_moe": "mlp", "mixtral": "block_sparse_moe"}
NAMES = {"qwen3_moe": ("gate_proj", "up_proj", "down_proj"), "mixtral": ("w1", "w3", "w2")}
STACKS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, kw_only=True)
class TinyExperts(Tiny):
    """A small qwen3_moe (its last layer dense) or mixtral.

    ``is_stacked`` spells the experts of a layer as one tensor, as mlx-lm saves them.
    """

    model_type: str = "qwen3_moe"
    hidden: int = 128
    intermediate: int = 192
    layers: int = 3
    tied: bool = False
    experts: int = 6
    top_k: int = 2
    expert_width: int = 64
    is_stacked: bool = False

    def width(self) -> int:
        return self.expert_width if self.model_type == "qwen3_moe" else self.intermediate

    def is_sparse(self, layer: int) -> bool:
        return self.model_type == "mixtral" or layer != self.layers - 1

    def config(self) -> dict[str, Any]:
        kinds = {"qwen3_moe": "Qwen3MoeForCausalLM", "mixtral": "MixtralForCausalLM"}
        config = super().config() | {"architectures": [kinds[self.model_type]], "num_experts_per_tok": self.top_k}
        if self.model_type == "mixtral":
            return config | {"num_local_experts": self.experts}
        return config | {
            "num_experts": self.experts,
            "moe_intermediate_size": self.expert_width,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [self.layers - 1],
        }

    def tensors(self) -> dict[str, NDArray[Any]]:
        rng, dtype = np.random.default_rng(self.seed + 1000), DTYPES[self.dtype]

        def weight(*shape: int) -> NDArray[Any]:
            return (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(dtype)

        tensors = super().tensors()
        hidden, width = self.hidden, self.width()
        for layer in range(self.layers):
            stem = f"model.layers.{layer}"
            if self.model_type == "qwen3_moe":
                for norm in ("q_norm", "k_norm"):
                    gains = 1 + 0.1 * rng.standard_normal(self.head_dim)
                    tensors[f"{stem}.self_attn.{norm}.weight"] = gains.astype(dtype)
            if not self.is_sparse(layer):
                continue
            for name in STACKS:
                del tensors[f"{stem}.mlp.{name}.weight"]
            block = f"{stem}.{BLOCKS[self.model_type]}"
            # Wide logits: some experts see many tokens, some few, as after training.
            tensors[f"{block}.gate.weight"] = weight(self.experts, hidden) * dtype(4)
            for name, stack in zip(NAMES[self.model_type], STACKS, strict=True):
                shape = (hidden, width) if stack == "down_proj" else (width, hidden)
                parts = [weight(*shape) for _ in range(self.experts)]
                if self.is_stacked:
                    tensors[f"{block}.switch_mlp.{stack}.weight"] = np.stack(parts)
                else:
                    tensors |= {f"{block}.experts.{e}.{name}.weight": part for e, part in enumerate(parts)}
        return tensors
