"""Mixture-of-experts blocks in float64 numpy, one token and one expert at a time, under Hugging Face names.

qwen3_moe: softmax over all experts, the top k, renormalized if ``norm_topk_prob``. mixtral: softmax over the logits of
the top k. Imports nothing of tqtool.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Weights = dict[str, NDArray[np.float64]]
BLOCKS = {"qwen3_moe": "mlp", "qwen3_5_moe": "mlp", "mixtral": "block_sparse_moe"}
PLAIN = ("gate_proj", "up_proj", "down_proj")
NAMES = {"qwen3_moe": PLAIN, "qwen3_5_moe": PLAIN, "mixtral": ("w1", "w3", "w2")}


def config_of(model_type: str) -> dict[str, Any]:
    """What config.json says of the experts: five of them, two for each token."""
    if model_type == "mixtral":
        return {"num_local_experts": 5, "num_experts_per_tok": 2}
    own = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 28, "norm_topk_prob": True}
    if model_type == "qwen3_5_moe":
        return own | {"shared_expert_intermediate_size": 20}
    return {
        **own,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [1],
    }


def width_of(config: dict[str, Any]) -> int:
    return int(config.get("moe_intermediate_size", config["intermediate_size"]))


def count_of(config: dict[str, Any]) -> int:
    return int(config.get("num_experts", config.get("num_local_experts", 0)))


def is_sparse(config: dict[str, Any], layer: int) -> bool:
    if config["model_type"] not in BLOCKS:
        return False
    return layer not in config.get("mlp_only_layers", []) and (layer + 1) % config.get("decoder_sparse_step", 1) == 0


def routes(
    weights: Weights, config: dict[str, Any], layer: int, x: NDArray[np.float64]
) -> list[list[tuple[int, float]]]:
    """For each row of ``x [T, hidden]`` the experts it goes to and their shares."""
    router = weights[f"model.layers.{layer}.{BLOCKS[config['model_type']]}.gate.weight"]
    found = []
    for logits in x @ router.T:
        top = np.argsort(-logits)[: config["num_experts_per_tok"]]
        share = np.exp(logits - logits.max())
        whole = (
            share[top].sum() if config["model_type"] == "mixtral" or config.get("norm_topk_prob", True) else share.sum()
        )
        found.append([(int(expert), float(share[expert] / whole)) for expert in top])
    return found


def read(module: str, row: NDArray[np.float64]) -> None:
    """Called with every row that a module of the block reads; tests put a recorder here."""


def block(weights: Weights, config: dict[str, Any], layer: int, x: NDArray[np.float64]) -> NDArray[np.float64]:
    """What the experts of ``layer`` make of ``x [T, hidden]``."""
    kind = config["model_type"]
    stem = f"model.layers.{layer}.{BLOCKS[kind]}.experts"
    out = np.zeros_like(x)
    for token, row in enumerate(routes(weights, config, layer, x)):
        for expert, share in row:
            modules = [f"{stem}.{expert}.{name}" for name in NAMES[kind]]
            gate, up, down = (weights[f"{module}.weight"] for module in modules)
            inner = gate @ x[token]
            inner = inner / (1 + np.exp(-inner)) * (up @ x[token])
            for module, row in zip(modules, (x[token], x[token], inner), strict=True):
                read(module, row)
            out[token] += share * (down @ inner)
    return out + shared(weights, stem.removesuffix(".experts"), x) if kind == "qwen3_5_moe" else out


def shared(weights: Weights, stem: str, x: NDArray[np.float64]) -> NDArray[np.float64]:
    """The expert that every token reads, by a share of its own."""
    gate, up, down = (weights[f"{stem}.shared_expert.{name}.weight"] for name in PLAIN)
    inner = x @ gate.T
    share = 1 / (1 + np.exp(-(x @ weights[f"{stem}.shared_expert_gate.weight"].T)))
    return share * ((inner / (1 + np.exp(-inner)) * (x @ up.T)) @ down.T)


def random_experts(config: dict[str, Any], layer: int, rng: np.random.Generator) -> Weights:
    """Router and heavy-tailed experts of one layer."""
    kind, hidden, width = config["model_type"], config["hidden_size"], width_of(config)
    stem = f"model.layers.{layer}.{BLOCKS[kind]}"
    weights = {f"{stem}.gate.weight": rng.standard_t(3, (count_of(config), hidden))}
    if kind == "qwen3_5_moe":
        common = config["shared_expert_intermediate_size"]
        weights[f"{stem}.shared_expert_gate.weight"] = rng.standard_t(3, (1, hidden)) / np.sqrt(hidden)
        for name, (n_out, n_in) in zip(PLAIN, ((common, hidden), (common, hidden), (hidden, common)), strict=True):
            weights[f"{stem}.shared_expert.{name}.weight"] = rng.standard_t(3, (n_out, n_in)) / np.sqrt(n_in)
    for expert in range(count_of(config)):
        for name, (n_out, n_in) in zip(NAMES[kind], ((width, hidden), (width, hidden), (hidden, width)), strict=True):
            weights[f"{stem}.experts.{expert}.{name}.weight"] = rng.standard_t(3, (n_out, n_in)) / np.sqrt(n_in)
    return weights
