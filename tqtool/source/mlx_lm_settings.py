"""Settings that mlx-lm's models require, fix or read in another way than the authors' code, by model type.

Found by reading the models of mlx-lm 0.32.2 beside those of transformers 5.24; nothing of either is imported.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from tqtool.source.config import text_config

# Required by mlx-lm, and by transformers taken to be these values where config.json leaves them out.
_STATED: Final[Mapping[str, Mapping[str, Any]]] = {
    "granite": {
        "embedding_multiplier": 1.0,
        "attention_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "logits_scaling": 1.0,
        "attention_bias": False,
        "mlp_bias": False,
    },
    "qwen3": {"head_dim": 128},
    "qwen3_moe": {
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
        "norm_topk_prob": False,
        "num_experts_per_tok": 8,
    },
    "mixtral": {"num_experts_per_tok": 2},
}
# mlx-lm divides hidden_size by the heads here, whatever head_dim says.
_NO_HEAD_DIM: Final = frozenset({"granite", "mixtral", "phi3", "qwen2"})
_NO_ATTENTION_BIAS: Final = frozenset({"qwen3", "qwen3_moe"})
_NO_ROPE_SCALING: Final = frozenset({"mixtral", "qwen3_moe"})
_ROUTERS_AT_EIGHT: Final = frozenset({"qwen3_moe", "qwen3_5_moe"})
_PHI3_ROPE: Final = ("longrope", "su")
_PARTIAL_ROTARY: Final = frozenset({"phi3", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"})
# ``mlx_lm.convert`` packs these at 8 bits whatever was asked for: their weights are small, nvfp4's scales would vanish.
_EIGHT_BITS: Final = {"granite": ("*.o_proj", "*.down_proj", "lm_head")}


# Saved by transformers for the text model alone; mlx-lm, and mlx-vlm without a tower, read it inside the whole model's.
_TEXT_ALONE: Final = {"qwen3_5_text": "qwen3_5", "qwen3_5_moe_text": "qwen3_5_moe"}


def stated_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """What ``config`` leaves to defaults that mlx-lm does not have, or says in words that it does not know."""
    if config.get("model_type") in _TEXT_ALONE:
        return {"model_type": _TEXT_ALONE[str(config["model_type"])], "text_config": dict(config)}
    kind, scaling = str(config.get("model_type")), config.get("rope_scaling")
    stated = {key: value for key, value in _STATED.get(kind, {}).items() if config.get(key) is None}
    if kind == "qwen3_moe" and config.get("num_experts") is None and "num_local_experts" in config:
        stated["num_experts"] = config["num_local_experts"]  # as transformers 5 calls it
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    if kind == "qwen3_moe" and config.get("head_dim") is None and hidden and heads:
        stated["head_dim"] = hidden // heads  # no number of its own in transformers, unlike qwen3
    if kind == "phi3" and scaling and "type" not in scaling and "rope_type" in scaling:
        stated["rope_scaling"] = {**scaling, "type": scaling["rope_type"]}  # transformers 5 calls it so
    return stated


def is_router_at_eight_bits(config: Mapping[str, Any]) -> bool:
    """Whether ``mlx_lm.convert`` packs the routers of this family affine at 8 bits in groups of 64 in any case."""
    return config.get("model_type") in _ROUTERS_AT_EIGHT


def eight_bit_modules(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Globs of the modules that ``mlx_lm.convert`` packs at 8 bits in groups of 64 in any case."""
    return _EIGHT_BITS.get(str(config.get("model_type")), ())


def setting_refusal(config: Mapping[str, Any]) -> str | None:
    """Why mlx-lm cannot load, or would compute throughout with other settings than, a model of ``config``."""
    kind, heads, hidden = (config.get(key) for key in ("model_type", "num_attention_heads", "hidden_size"))
    head_dim = config.get("head_dim")
    if kind in _NO_ATTENTION_BIAS and config.get("attention_bias"):
        return f"attention_bias is true; mlx-lm's {kind} has no attention biases"
    if kind in _NO_HEAD_DIM and head_dim and heads and hidden and head_dim != hidden // heads:
        return f"head_dim is {head_dim}; mlx-lm's {kind} has only hidden_size / num_attention_heads, {hidden // heads}"
    part = text_config(config)
    refusal = _pattern_refusal(part) or _rotary_size_refusal(part) or _multiplier_refusal(part)
    if refusal is None and kind == "phi3":
        return _phi3_rope_refusal(config.get("rope_scaling"))
    return refusal


def _pattern_refusal(part: Mapping[str, Any]) -> str | None:
    """Gemma 3 in mlx-lm takes the mask of full attention from the cache of layer ``sliding_window_pattern`` - 1."""
    if part.get("model_type") != "gemma3_text":
        return None
    layers, pattern = part.get("num_hidden_layers"), part.get("sliding_window_pattern", 6)
    if isinstance(layers, int) and isinstance(pattern, int) and layers < pattern:
        return f"num_hidden_layers is {layers}; mlx-lm's gemma3_text needs at least sliding_window_pattern, {pattern}"
    return None


def _rotary_size_refusal(part: Mapping[str, Any]) -> str | None:
    """mlx-lm rotates ``int(head_dim · partial_rotary_factor)`` dimensions, in pairs."""
    if part.get("model_type") not in _PARTIAL_ROTARY:
        return None
    rope = part.get("rope_parameters") or {}
    factor = part.get("partial_rotary_factor", rope.get("partial_rotary_factor"))
    heads, hidden = part.get("num_attention_heads"), part.get("hidden_size")
    size = part.get("head_dim") or (
        hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads else 0
    )
    if isinstance(factor, float) and isinstance(size, int) and int(size * factor) % 2:
        return f"partial_rotary_factor is {factor}: {int(size * factor)} of {size} dimensions, which do not pair up"
    return None


def _multiplier_refusal(part: Mapping[str, Any]) -> str | None:
    for key, default in _STATED.get(str(part.get("model_type")), {}).items():
        value = part.get(key, default)
        if (
            isinstance(default, float)
            and value is not None
            and (isinstance(value, bool) or not isinstance(value, int | float))
        ):
            return f"{key} is {value!r}: expected a number"
    return None


def _phi3_rope_refusal(scaling: Any) -> str | None:
    if not scaling:
        return None
    kind = scaling.get("type")
    if kind not in _PHI3_ROPE:
        found = kind or scaling.get("rope_type")
        return f"rope_scaling is {found!r}; mlx-lm's phi3 knows longrope and su, ignores or refuses all others"
    missing = [key for key in ("short_factor", "long_factor") if not scaling.get(key)]
    return f"rope_scaling {kind!r} lacks {' and '.join(missing)}" if missing else None


def rotary_warnings(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Lines for rotary settings that mlx-lm ignores, or reads in its own way."""
    part = text_config(config)
    scaling = part.get("rope_scaling")
    if part.get("model_type") in _NO_ROPE_SCALING and scaling:
        return (
            f"rope_scaling is set; mlx-lm's {part['model_type']} ignores it: positions come out different, "
            "before and after quantization alike",
        )
    if part.get("model_type") != "phi3" or not scaling or scaling.get("type") not in _PHI3_ROPE:
        return ()
    warnings = []
    trained = int(part.get("original_max_position_embeddings") or 4096)
    if scaling.get("short_factor") != scaling.get("long_factor"):
        warnings.append(
            f"longrope: mlx-lm's phi3 uses long_factor at every length, the authors' code only beyond {trained} "
            "tokens: shorter texts come out different, before and after quantization alike"
        )
    stretch = int(part.get("max_position_embeddings") or 131072) / trained
    own = math.sqrt(1 + math.log(stretch) / math.log(trained)) if stretch > 1 else 1.0
    factor = scaling.get("factor")
    told = scaling.get("attention_factor")
    if told is None and factor is not None:
        told = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
    if told is not None and not math.isclose(told, own, rel_tol=1e-6):
        warnings.append(f"longrope: config.json asks for attention scale {told:.6g}, mlx-lm's phi3 takes {own:.6g}")
    return tuple(warnings)
