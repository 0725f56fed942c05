"""The draft head of qwen3_5 (multi-token prediction) in float64 numpy.

Row i reads the embedding of token i + 1 and the trunk's hidden state of token i, end to end and the embedding first,
each normalized; ``fc`` makes one vector of them; layers of full attention and a norm follow. Wiring from mlx-vlm's
``qwen3_5_mtp``. Imports nothing of tqtool.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.oracles import decoder
from tests.oracles.decoder import Weights

NORMS = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")


def plain(head: Weights) -> Weights:
    """``head`` by the names it has alone; gains under ``mtp.`` are stored less one, as Hugging Face does."""
    return {
        name.removeprefix("mtp."): array + 1.0 if name.startswith("mtp.") and array.ndim == 1 else array
        for name, array in head.items()
    }


def forward(
    head: Weights,
    config: dict[str, Any],
    embedded: NDArray[np.float64],
    hidden: NDArray[np.float64],
    *,
    state_gain: NDArray[np.float64] | None = None,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """What the trunk's head reads and what the final norm did, of embeddings and hidden states; each ``[T, hidden]``.

    ``state_gain`` multiplies the hidden state behind its norm.
    """
    full = {**config, "full_attention_interval": 1}
    state = decoder.rms_norm(hidden, head["pre_fc_norm_hidden.weight"], config)
    if state_gain is not None:
        state = state * state_gain
    both = [decoder.rms_norm(embedded, head["pre_fc_norm_embedding.weight"], config), state]
    x = np.concatenate(both, axis=-1) @ head["fc.weight"].T
    named = {f"model.{name}": array for name, array in head.items()}
    for layer in range(1 + max(int(name.split(".")[1]) for name in head if name.startswith("layers."))):
        x = decoder.block(named, full, layer, x)
    return decoder.rms_norm(x, head["norm.weight"], config), x


def random_head(config: dict[str, Any], *, seed: int, depth: int = 1) -> Weights:
    """A companion as Hugging Face stores it: heavy tails, gains far from their neutral value."""
    rng = np.random.default_rng(seed)
    hidden = config["hidden_size"]
    layers = {**config, "num_hidden_layers": depth, "full_attention_interval": 1}
    found = {
        name.replace("model.", "mtp.", 1): array
        for name, array in decoder.random_weights(layers, seed=seed).items()
        if ".layers." in name
    }
    found["mtp.fc.weight"] = rng.standard_t(3, (hidden, 2 * hidden)) / np.sqrt(2 * hidden)
    found |= {f"mtp.{norm}.weight": rng.uniform(0.2, 3.0, hidden) * rng.choice([-1.0, 1.0], hidden) for norm in NORMS}
    return found
