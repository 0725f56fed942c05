"""Small random checkpoints, written by the reference safetensors library, never by tqtool."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
CHAT_TEMPLATE = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}</s>{% endfor %}<|assistant|>"


@dataclass(frozen=True, kw_only=True)
class Tiny:
    """Sizes of a small llama-like model."""

    model_type: str = "llama"
    hidden: int = 128
    intermediate: int = 256
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    layers: int = 2
    vocab: int = 320
    tied: bool = True
    dtype: str = "bfloat16"
    shards: int = 1
    seed: int = 0

    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["Qwen2ForCausalLM" if self.model_type == "qwen2" else "LlamaForCausalLM"],
            "model_type": self.model_type,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "num_hidden_layers": self.layers,
            "vocab_size": self.vocab,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "max_position_embeddings": 512,
            "tie_word_embeddings": self.tied,
            "torch_dtype": self.dtype,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }

    def tensors(self) -> dict[str, NDArray[Any]]:
        rng = np.random.default_rng(self.seed)
        dtype = DTYPES[self.dtype]

        def weight(out: int, width: int) -> NDArray[Any]:
            return (rng.standard_normal((out, width)) / np.sqrt(width)).astype(dtype)

        def gain(width: int) -> NDArray[Any]:
            return (1 + 0.1 * rng.standard_normal(width)).astype(dtype)

        query, key_value = self.heads * self.head_dim, self.kv_heads * self.head_dim
        tensors = {"model.embed_tokens.weight": weight(self.vocab, self.hidden)}
        for layer in range(self.layers):
            stem = f"model.layers.{layer}"
            linears = {
                "self_attn.q_proj": (query, self.hidden),
                "self_attn.k_proj": (key_value, self.hidden),
                "self_attn.v_proj": (key_value, self.hidden),
                "self_attn.o_proj": (self.hidden, query),
                "mlp.gate_proj": (self.intermediate, self.hidden),
                "mlp.up_proj": (self.intermediate, self.hidden),
                "mlp.down_proj": (self.hidden, self.intermediate),
            }
            for name, (out, width) in linears.items():
                tensors[f"{stem}.{name}.weight"] = weight(out, width)
                if self.model_type == "qwen2" and name.endswith(("q_proj", "k_proj", "v_proj")):
                    tensors[f"{stem}.{name}.bias"] = gain(out) - dtype(1)
            for norm in ("input_layernorm", "post_attention_layernorm"):
                tensors[f"{stem}.{norm}.weight"] = gain(self.hidden)
        tensors["model.norm.weight"] = gain(self.hidden)
        if not self.tied:
            tensors["lm_head.weight"] = weight(self.vocab, self.hidden)
        return tensors


def uneven(tiny: Tiny) -> dict[str, NDArray[Any]]:
    """Weights whose hidden channels differ by far, as those of trained models do."""
    tensors, rng = tiny.tensors(), np.random.default_rng(5)
    for layer in range(tiny.layers):
        stem = f"model.layers.{layer}.mlp"
        for name, axis in (("up_proj", 0), ("down_proj", 1)):
            spread = np.exp(rng.normal(0, 1, tiny.intermediate)).astype(np.float32)
            weight = tensors[f"{stem}.{name}.weight"]
            weight *= np.expand_dims(spread, 1 - axis)
    return tensors


def write_tiny(folder: Path, tiny: Tiny | None = None, *, tokenizer: bool = True) -> Path:
    """Write the checkpoint of ``tiny`` to ``folder`` with config, weights, tokenizer, generation config, licence."""
    tiny = tiny or Tiny()
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(tiny.config(), indent=2))
    write_weights(folder, tiny.tensors(), tiny.shards)
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2}))
    (folder / "LICENSE").write_text("a licence text\n")
    if tokenizer:
        write_tokenizer(folder, tiny.vocab)
    return folder


def write_weights(folder: Path, tensors: dict[str, NDArray[Any]], shards: int = 1) -> None:
    """One ``model.safetensors``, or numbered shards with an index."""
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = list(tensors)
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[shard::shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def write_tokenizer(folder: Path, vocab: int) -> None:
    """A word-level tokenizer with ``vocab`` entries, ``</s>`` = 2, and a chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{index}": index for index in range(3, vocab)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
