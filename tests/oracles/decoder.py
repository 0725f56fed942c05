"""A decoder-only transformer in float64 numpy, written out plainly: the judge of every fold.

Covers llama, mistral, qwen2 (q/k/v bias), qwen3 (q/k norm), gemma3_text (norms after the blocks too, gains 1 + w,
GELU, scaled embedding; no sliding window), smollm3 (layers without positions), granite (four multipliers), phi3 (fused
projections), qwen3_moe and mixtral (``experts``), qwen3_5 (``delta_net``), grouped-query attention, explicit head_dim,
tied and untied heads.
Weights are ``[out, in]`` under Hugging Face names. Imports nothing of tqtool.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.oracles import delta_net, experts
from tests.oracles.rotary import rotate

Weights = dict[str, NDArray[np.float64]]

MULTIPLIERS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
HAVE_MLP_BIAS = ("llama", "smollm3", "granite")


def forward(weights: Weights, config: dict[str, Any], tokens: NDArray[np.int_]) -> NDArray[np.float64]:
    """Logits ``[T, vocab]`` of one sequence."""
    weights = delta_net.plain(weights, config)
    x = rms_norm(residual(weights, config, tokens), weights["model.norm.weight"], config)
    logits: NDArray[np.float64] = x @ head(weights, config).T
    return logits / config.get("logits_scaling", 1.0)


def residual(weights: Weights, config: dict[str, Any], tokens: NDArray[np.int_]) -> NDArray[np.float64]:
    """What the final norm reads, ``[T, hidden]``; ``weights`` by their plain names."""
    x = weights["model.embed_tokens.weight"][tokens]
    if config["model_type"] == "gemma3_text":
        x = x * np.sqrt(config["hidden_size"])
    x = x * config.get("embedding_multiplier", 1.0)
    for layer in range(config["num_hidden_layers"]):
        x = block(weights, config, layer, x)
    return x


def head(weights: Weights, config: dict[str, Any]) -> NDArray[np.float64]:
    return weights["model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"]


def block(weights: Weights, config: dict[str, Any], layer: int, x: NDArray[np.float64]) -> NDArray[np.float64]:
    """One decoder layer on ``[T, hidden]``."""
    stem, step = f"model.layers.{layer}", config.get("residual_multiplier", 1.0)
    is_gemma = config["model_type"] == "gemma3_text"
    normed = rms_norm(x, weights[f"{stem}.input_layernorm.weight"], config)
    if delta_net.is_linear(config, layer):
        written = delta_net.mix(weights, config, f"{stem}.linear_attn", normed)
    else:
        written = attention(weights, config, f"{stem}.self_attn", normed, is_turned=is_turned(config, layer))
    if is_gemma:
        written = rms_norm(written, weights[f"{stem}.post_attention_layernorm.weight"], config)
    x = x + step * written
    before = "pre_feedforward" if is_gemma else "post_attention"
    normed = rms_norm(x, weights[f"{stem}.{before}_layernorm.weight"], config)
    if experts.is_sparse(config, layer):
        written = experts.block(weights, config, layer, normed)
    else:
        if f"{stem}.mlp.gate_up_proj.weight" in weights:
            gate, up = np.split(linear(weights, f"{stem}.mlp.gate_up_proj", normed), 2, axis=-1)
        else:
            gate = linear(weights, f"{stem}.mlp.gate_proj", normed)
            up = linear(weights, f"{stem}.mlp.up_proj", normed)
        written = linear(weights, f"{stem}.mlp.down_proj", (gelu(gate) if is_gemma else silu(gate)) * up)
    if is_gemma:
        written = rms_norm(written, weights[f"{stem}.post_feedforward_layernorm.weight"], config)
    return x + step * written


def is_turned(config: dict[str, Any], layer: int) -> bool:
    """Whether a layer's queries and keys know their position."""
    if config["model_type"] != "smollm3":
        return True
    listed = config.get("no_rope_layers")
    return bool(listed[layer]) if listed else (layer + 1) % config.get("no_rope_layer_interval", 4) != 0


def attention(
    weights: Weights, config: dict[str, Any], stem: str, x: NDArray[np.float64], *, is_turned: bool
) -> NDArray[np.float64]:
    n_heads, n_kv = config["num_attention_heads"], config["num_key_value_heads"]
    if f"{stem}.qkv_proj.weight" in weights:
        fused = linear(weights, f"{stem}.qkv_proj", x)
        width = fused.shape[-1] // (n_heads + 2 * n_kv)
        parts = np.split(fused, [n_heads * width, (n_heads + n_kv) * width], axis=-1)
    else:
        parts = [linear(weights, f"{stem}.{p}_proj", x) for p in ("q", "k", "v")]
    q, k, v = (split(part, n) for part, n in zip(parts, (n_heads, n_kv, n_kv), strict=True))
    gate = None
    if config["model_type"] in delta_net.KINDS:  # beside each head's query the gates of its output
        q, gate = np.split(q, 2, axis=-1)
    if f"{stem}.q_norm.weight" in weights:
        q = rms_norm(q, weights[f"{stem}.q_norm.weight"], config)
        k = rms_norm(k, weights[f"{stem}.k_norm.weight"], config)
    if is_turned:
        q, k = rotate(q, config), rotate(k, config)
    scale = config.get("attention_multiplier", q.shape[-1] ** -0.5)
    heads = []
    for head in range(n_heads):
        kv = head // (n_heads // n_kv)
        score = q[head] @ k[kv].T * scale
        score[np.triu_indices(len(x), 1)] = -np.inf
        weight = np.exp(score - score.max(axis=-1, keepdims=True))
        heads.append(weight / weight.sum(axis=-1, keepdims=True) @ v[kv])
    if gate is not None:
        heads = [head / (1 + np.exp(-own)) for head, own in zip(heads, gate, strict=True)]
    return linear(weights, f"{stem}.o_proj", np.concatenate(heads, axis=-1))


def split(x: NDArray[np.float64], n_heads: int) -> NDArray[np.float64]:
    """[T, n_heads · d] to [n_heads, T, d]."""
    return x.reshape(len(x), n_heads, -1).transpose(1, 0, 2)


def linear(weights: Weights, module: str, x: NDArray[np.float64]) -> NDArray[np.float64]:
    y = x @ weights[f"{module}.weight"].T
    return y + weights[f"{module}.bias"] if f"{module}.bias" in weights else y


def rms_norm(x: NDArray[np.float64], gain: NDArray[np.float64], config: dict[str, Any]) -> NDArray[np.float64]:
    offset = 1.0 if config["model_type"] == "gemma3_text" else 0.0
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + config["rms_norm_eps"]) * (offset + gain)


def silu(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return x / (1 + np.exp(-x))


def gelu(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """The tanh form."""
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def random_config(model_type: str, *, tied: bool = True, **changes: Any) -> dict[str, Any]:
    """A small config: hidden 36 is all factor, no power of two; the Hadamard matrix of head_dim 12 is not symmetric."""
    config = {
        "model_type": model_type,
        "hidden_size": 36,
        "intermediate_size": 44,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "vocab_size": 50,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": tied,
    }
    if model_type == "granite":
        config |= dict(zip(MULTIPLIERS, (3.0, 0.11, 0.4, 5.0), strict=True))
    if model_type in delta_net.KINDS:
        config |= delta_net.SIZES | {"partial_rotary_factor": 0.5}
    return config | (experts.config_of(model_type) if model_type in experts.BLOCKS else {}) | changes


def random_weights(config: dict[str, Any], *, seed: int) -> Weights:
    """Heavy-tailed weights (Student's t, 3 degrees of freedom), norm gains and biases far from their neutral values."""
    rng = np.random.default_rng(seed)
    hidden, inter, d = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, key_value = config["num_attention_heads"] * d, config["num_key_value_heads"] * d
    family = config["model_type"]
    attention_bias = bool(config.get("attention_bias", False)) and family not in (
        "qwen2",
        "phi3",
        "mixtral",
        *delta_net.KINDS,
    )
    qkv_bias = family == "qwen2" or attention_bias
    mlp_bias = bool(config.get("mlp_bias", False)) and family in HAVE_MLP_BIAS

    def heavy(*shape: int) -> NDArray[np.float64]:
        return rng.standard_t(3, shape) / np.sqrt(shape[-1])

    def gain(n: int) -> NDArray[np.float64]:
        return rng.uniform(0.2, 3.0, n) * rng.choice([-1.0, 1.0], n)

    weights = {"model.embed_tokens.weight": rng.standard_t(3, (config["vocab_size"], hidden))}
    for layer in range(config["num_hidden_layers"]):
        stem = f"model.layers.{layer}"
        weights[f"{stem}.input_layernorm.weight"] = gain(hidden)
        weights[f"{stem}.post_attention_layernorm.weight"] = gain(hidden)
        if family == "gemma3_text":
            weights[f"{stem}.pre_feedforward_layernorm.weight"] = gain(hidden)
            weights[f"{stem}.post_feedforward_layernorm.weight"] = gain(hidden)
        is_delta = delta_net.is_linear(config, layer)
        if is_delta:
            weights |= delta_net.random_layer(config, f"{stem}.linear_attn", rng)
        elif family in ("qwen3", "qwen3_moe", "gemma3_text", *delta_net.KINDS):
            weights[f"{stem}.self_attn.q_norm.weight"] = gain(d)
            weights[f"{stem}.self_attn.k_norm.weight"] = gain(d)
        is_sparse = experts.is_sparse(config, layer)
        if is_sparse:
            weights |= experts.random_experts(config, layer, rng)
        apart = (
            ("self_attn.q_proj", 2 * query if family in delta_net.KINDS else query, hidden, qkv_bias),
            ("self_attn.k_proj", key_value, hidden, qkv_bias),
            ("self_attn.v_proj", key_value, hidden, qkv_bias),
            ("self_attn.o_proj", hidden, query, attention_bias),
            ("mlp.gate_proj", inter, hidden, mlp_bias),
            ("mlp.up_proj", inter, hidden, mlp_bias),
            ("mlp.down_proj", hidden, inter, mlp_bias),
        )
        fused = (
            ("self_attn.qkv_proj", query + 2 * key_value, hidden, False),
            ("self_attn.o_proj", hidden, query, False),
            ("mlp.gate_up_proj", 2 * inter, hidden, False),
            ("mlp.down_proj", hidden, inter, False),
        )
        present = apart[4 if is_delta else 0 : 4 if is_sparse else None]
        if family == "phi3":
            present = fused
        for module, n_out, n_in, bias in present:
            weights[f"{stem}.{module}.weight"] = heavy(n_out, n_in)
            if bias:
                weights[f"{stem}.{module}.bias"] = heavy(n_out) * np.sqrt(n_out)
    weights["model.norm.weight"] = gain(hidden)
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = heavy(config["vocab_size"], hidden)
    return weights
