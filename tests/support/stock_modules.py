"""Single modules of mlx-lm's models, made from one small configuration."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import mlx.nn as nn

HEADS, KV_HEADS, HEAD = 4, 2, 16


def stock_module(path: str, *, hidden: int, width: int = 48) -> nn.Module:
    """An MLP or attention of ``mlx_lm.models`` by the path of its class."""
    place, _, name = path.rpartition(".")
    module = importlib.import_module(place)
    made = getattr(module, name)
    wanted = list(inspect.signature(made.__init__).parameters)[1:]
    if wanted == ["dim", "hidden_dim"]:
        return made(hidden, width)
    args = module.ModelArgs.from_dict(_config(hidden, width))
    return made(args) if wanted == ["args"] else made(args, layer_idx=0)


def _config(hidden: int, width: int) -> dict[str, Any]:
    """What the models of all families ask for."""
    return {
        "model_type": "any",
        "hidden_size": hidden,
        "num_hidden_layers": 1,
        "intermediate_size": width,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "rms_norm_eps": 1e-5,
        "vocab_size": 64,
        "max_position_embeddings": 64,
        "rope_theta": 1e4,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        # granite
        "attention_multiplier": 0.25,
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "logits_scaling": 1.0,
        # qwen3_moe, mixtral
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": width,
        "norm_topk_prob": True,
        "num_local_experts": 2,
        # gemma3_text
        "query_pre_attn_scalar": 16,
        "sliding_window": 8,
        "sliding_window_pattern": 2,
        "rope_local_base_freq": 1e4,
    }
