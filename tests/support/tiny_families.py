"""One small random model per family and variant, of the true architecture, as transformers saves it.

Unlike a fresh initialization these have what rotations are for and what hides mistakes: heavy tails, outlier channels
in the residual stream and inside an MLP, norm gains far from one and of both signs, biases. Every value is exact in
bfloat16, so that one model serves all three precisions.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from tests.support import tiny_hybrid
from tests.support.tiny_bpe import write_bpe

VOCAB = 320
OUTLIERS = (17, 101)  # residual channels
INNER_OUTLIER = 40  # hidden channel of every MLP
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# The texts are longer than 16 tokens: mlx-lm takes the long factors always, the authors' code beyond that length.
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0 + 0.02 * i for i in range(18)],
    "long_factor": [1.0 + 0.2 * i for i in range(18)],
}
MULTIPLIERS = {
    "embedding_multiplier": 6.0,
    "attention_multiplier": 0.03125,
    "residual_multiplier": 0.22,
    "logits_scaling": 4.0,
}


@dataclass(frozen=True, kw_only=True)
class TinyFamily:
    """A family, its settings in Hugging Face's words over ``BASE``, and what is special in a phrase."""

    model_type: str
    what: str
    settings: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    is_nested: bool = False  # a text model inside a larger one: ``tiny_hybrid``

    def config(self) -> Any:
        """transformers' config object."""
        return CONFIG_MAPPING[self.model_type](**{**BASE, **self.settings})


# 192 = 12·16 and 48 = 12·4: the factor of both Hadamard matrices is Paley's, which is not symmetric.
BASE: dict[str, Any] = {
    "hidden_size": 192,
    "intermediate_size": 320,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
CASES: dict[str, TinyFamily] = {
    "llama": TinyFamily(model_type="llama", what="tied", settings={"tie_word_embeddings": True}),
    "llama biases": TinyFamily(
        model_type="llama", what="untied, every bias", settings={"attention_bias": True, "mlp_bias": True}
    ),
    "llama 3": TinyFamily(
        model_type="llama",
        what="explicit head_dim, scaled positions",
        settings={"head_dim": 64, "rope_parameters": LLAMA3},
    ),
    "mistral": TinyFamily(model_type="mistral", what="explicit head_dim", settings={"head_dim": 32}),
    "qwen2": TinyFamily(model_type="qwen2", what="q, k, v biases, tied", settings={"tie_word_embeddings": True}),
    "qwen3": TinyFamily(model_type="qwen3", what="q and k norms", settings={"head_dim": 64}),
    "smollm3": TinyFamily(
        model_type="smollm3",
        what="a layer without positions, tied",
        settings={"num_hidden_layers": 4, "tie_word_embeddings": True},
    ),
    "granite": TinyFamily(
        model_type="granite",
        what="four multipliers, every bias, tied",
        settings={**MULTIPLIERS, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "phi3": TinyFamily(model_type="phi3", what="fused qkv and gate_up"),
    "phi3 longrope": TinyFamily(
        model_type="phi3",
        what="fused, partly rotated heads, LongRoPE, tied",
        settings={
            "rope_parameters": LONGROPE,
            "original_max_position_embeddings": 16,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_moe": TinyFamily(
        model_type="qwen3_moe",
        what="six experts, two a token, a dense layer, q and k norms",
        settings={
            "head_dim": 64,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 128,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "mixtral": TinyFamily(
        model_type="mixtral",
        what="four experts, two a token",
        settings={"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 192},
    ),
    "qwen3_5": TinyFamily(
        model_type="qwen3_5", what="DeltaNet between gated attention, norms around zero, a vision tower", is_nested=True
    ),
    "qwen3_5_moe": TinyFamily(
        model_type="qwen3_5_moe", what="the same, six experts and one that every token reads", is_nested=True
    ),
    "gemma3_text": TinyFamily(
        model_type="gemma3_text",
        what="norms after the blocks, tied",
        settings={
            "hidden_size": 256,  # of which mlx-lm takes the root in bfloat16
            "head_dim": 64,
            "num_hidden_layers": 6,  # the sixth attends to everything
            "tie_word_embeddings": True,
            "sliding_window": 16,
            "query_pre_attn_scalar": 64,
        },
    ),
}


def random_state(case: TinyFamily) -> dict[str, NDArray[np.float64]]:
    """Values of every parameter by name, exact in bfloat16."""
    rng = np.random.default_rng(case.seed)
    with torch.device("meta"):
        shapes = {
            name: tuple(p.shape) for name, p in AutoModelForCausalLM.from_config(case.config()).named_parameters()
        }
    return {
        name: _values(rng, name, shape, case).astype(ml_dtypes.bfloat16).astype(np.float64)
        for name, shape in shapes.items()
    }


EXPERTS = {
    "qwen3_moe": ("mlp", ("gate_proj", "up_proj", "down_proj")),
    "mixtral": ("block_sparse_moe", ("w1", "w3", "w2")),
}
"""Block in a checkpoint, and gate, up and down of an expert there; in transformers all is ``mlp.experts``, stacked."""


ONE_BY_ONE = {"attn_implementation": "sdpa", "experts_implementation": "eager"}
"""transformers' experts one after another: its grouped products know no float64."""


def unstacked(folder: Path, out: Path) -> Path:
    """A copy of an artifact with a tensor an expert, as transformers reads it; any other artifact itself."""
    config = json.loads((folder / "config.json").read_text())
    if config["model_type"] not in EXPERTS:
        return folder
    block, names = EXPERTS[config["model_type"]]
    shutil.copytree(folder, out, ignore=shutil.ignore_patterns("*.safetensors*", "tqtool"))
    tensors: dict[str, NDArray[Any]] = {}
    for name, array in load_file(folder / "model.safetensors").items():
        stem, is_stack, rest = name.partition(f".{block}.switch_mlp.")
        if not is_stack:
            tensors[name] = array
            continue
        own = dict(zip(("gate_proj", "up_proj", "down_proj"), names, strict=True))[rest.removesuffix(".weight")]
        tensors |= {f"{stem}.{block}.experts.{expert}.{own}.weight": m for expert, m in enumerate(array)}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


def _values(rng: np.random.Generator, name: str, shape: tuple[int, ...], case: TinyFamily) -> NDArray[np.float64]:
    if "norm" in name:
        gain = rng.uniform(0.2, 1.2, shape) * rng.choice([-1.0, 1.0], shape)
        return gain - (1.0 if case.model_type.startswith("gemma") else 0.0)
    if name.endswith("bias"):
        return 0.2 * rng.standard_t(3, shape)
    weight = rng.standard_t(3, shape) / np.sqrt(3 * shape[-1])  # three is the variance
    if "embed_tokens" in name:
        weight[:, OUTLIERS] *= 6.0
    if name.endswith(("o_proj.weight", "down_proj.weight", "experts.down_proj")):
        weight[..., OUTLIERS, :] *= 4.0
    if name.endswith("down_proj.weight"):
        weight[:, INNER_OUTLIER] *= 6.0
    return weight


def build(case: TinyFamily, *, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """transformers' model with the values of ``random_state``."""
    if case.is_nested:
        return tiny_hybrid.build(experts=case.model_type.endswith("moe")).to(dtype)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(case.config(), dtype=dtype, **ONE_BY_ONE)
    state = random_state(case)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(state[name]))
    transformers.utils.logging.disable_progress_bar()
    return model.eval()


def write_family(folder: Path, case: TinyFamily, *, dtype: torch.dtype = torch.float32) -> Path:
    """The model's folder as transformers writes it, with a tokenizer."""
    build(case, dtype=dtype).save_pretrained(folder)
    if case.model_type == "qwen3_5_moe":  # as published, which is what mlx-lm reads
        tiny_hybrid.change(folder, tiny_hybrid.fused(tiny_hybrid.tensors_of(folder)))
    write_bpe(folder)  # transformers rebuilds the tokenizers of some types, as BPE whatever the file says
    assert json.loads((folder / "config.json").read_text())["model_type"] == case.model_type
    return folder
