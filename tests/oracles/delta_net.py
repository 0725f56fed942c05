"""Gated DeltaNet and gated attention of qwen3_5 in float64 numpy, one token after another.

A checkpoint comes as Hugging Face stores it (gains around zero, convolutions ``[channels, 1, k]``) or as mlx-lm does;
``plain`` makes both one. Imports nothing of tqtool.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Weights = dict[str, NDArray[np.float64]]
KINDS = ("qwen3_5", "qwen3_5_moe")
SIZES = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}
_CENTRED = tuple(
    f"{norm}.weight" for norm in ("input_layernorm", "post_attention_layernorm", "model.norm", "q_norm", "k_norm")
)


def plain(weights: Weights, config: dict[str, Any]) -> Weights:
    """``weights`` under the names of the text model alone, gains as they are, convolutions ``[channels, k]``."""
    if config["model_type"] not in KINDS:
        return weights
    is_centred = any("conv1d" in name and array.shape[-1] != 1 for name, array in weights.items())
    found = {}
    for name, array in weights.items():
        if "vision_tower" in name or "visual" in name:
            continue
        short = name.replace("model.language_model.", "model.").removeprefix("language_model.")
        if "conv1d" in short:
            array = array.reshape(array.shape[0], -1)
        elif is_centred and short.endswith(_CENTRED):
            array = array + 1.0
        found[short] = array
    return found


def is_linear(config: dict[str, Any], layer: int) -> bool:
    return config["model_type"] in KINDS and (layer + 1) % config["full_attention_interval"] != 0


def mix(weights: Weights, config: dict[str, Any], stem: str, x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Linear attention: a state of ``[key, value]`` a head, decayed, corrected towards the new value, read out."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    dk, dv, width = config["linear_key_head_dim"], config["linear_value_head_dim"], config["linear_conv_kernel_dim"]
    mixed = x @ weights[f"{stem}.in_proj_qkv.weight"].T
    padded = np.concatenate([np.zeros((width - 1, mixed.shape[1])), mixed])
    kernel = weights[f"{stem}.conv1d.weight"]
    mixed = silu(sum(padded[tap : tap + len(x)] * kernel[:, tap] for tap in range(width)))
    q, k, v = np.split(mixed, [keys * dk, 2 * keys * dk], axis=1)
    q, k = (unit(part.reshape(len(x), keys, dk)).repeat(values // keys, axis=1) for part in (q, k))
    v = v.reshape(len(x), values, dv)
    beta = 1 / (1 + np.exp(-(x @ weights[f"{stem}.in_proj_b.weight"].T)))
    rate = np.logaddexp(0, x @ weights[f"{stem}.in_proj_a.weight"].T + weights[f"{stem}.dt_bias"])
    decay = np.exp(-np.exp(weights[f"{stem}.A_log"]) * rate)
    state = np.zeros((values, dk, dv))
    out = np.empty((len(x), values, dv))
    for token in range(len(x)):
        state = state * decay[token, :, None, None]
        error = v[token] - np.einsum("hkv,hk->hv", state, k[token])
        state = state + np.einsum("hk,hv->hkv", k[token], beta[token, :, None] * error)
        out[token] = np.einsum("hkv,hk->hv", state, q[token]) / np.sqrt(dk)
    gate = (x @ weights[f"{stem}.in_proj_z.weight"].T).reshape(out.shape)
    out = out / np.sqrt(np.mean(out**2, axis=-1, keepdims=True) + config["rms_norm_eps"])
    return (out * weights[f"{stem}.norm.weight"] * silu(gate)).reshape(len(x), -1) @ weights[
        f"{stem}.out_proj.weight"
    ].T


def silu(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return x / (1 + np.exp(-x))


def unit(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return x / np.sqrt((x**2).sum(axis=-1, keepdims=True) + 1e-6)


def random_layer(config: dict[str, Any], stem: str, rng: np.random.Generator) -> Weights:
    """Heavy-tailed projections; decays from slow to fast."""
    hidden, values = config["hidden_size"], config["linear_num_value_heads"]
    key = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    value = values * config["linear_value_head_dim"]
    shapes = {
        "in_proj_qkv": (2 * key + value, hidden),
        "in_proj_z": (value, hidden),
        "in_proj_b": (values, hidden),
        "in_proj_a": (values, hidden),
        "out_proj": (hidden, value),
    }
    weights = {f"{stem}.{name}.weight": rng.standard_t(3, shape) / np.sqrt(shape[1]) for name, shape in shapes.items()}
    weights[f"{stem}.conv1d.weight"] = rng.standard_normal((2 * key + value, 1, config["linear_conv_kernel_dim"]))
    weights[f"{stem}.dt_bias"] = rng.standard_normal(values)
    weights[f"{stem}.A_log"] = rng.uniform(-2, 1, values)
    weights[f"{stem}.norm.weight"] = rng.uniform(0.2, 3.0, config["linear_value_head_dim"])
    return weights
