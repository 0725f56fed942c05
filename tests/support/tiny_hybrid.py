"""A small random qwen3_5 with its vision tower, as transformers saves it, in each spelling that is found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from tests.oracles import draft_head
from tests.support.tiny_bpe import write_bpe

VOCAB = 320
TEXT: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCAB,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "full_attention_interval": 2,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention", "linear_attention"],
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
    },
}
EXPERTS: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 96,
}
VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 4,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "out_hidden_size": 128,
    "num_position_embeddings": 16,
}


def build(*, tied: bool = False, experts: bool = False) -> PreTrainedModel:
    """transformers' model: heavy tails, an outlier channel, gains far from their neutral zero."""
    text = {**TEXT, **(EXPERTS if experts else {}), "tie_word_embeddings": tied}
    kind = CONFIG_MAPPING["qwen3_5_moe" if experts else "qwen3_5"]
    config = kind(text_config=text, vision_config=VISION, tie_word_embeddings=tied)
    model: PreTrainedModel = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    rng = np.random.default_rng(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(_values(rng, name, tuple(parameter.shape))))
    transformers.utils.logging.disable_progress_bar()
    return model.eval()


def _values(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> NDArray[np.float64]:
    if "norm" in name and "visual" not in name:
        return rng.uniform(0.3, 1.5, shape) - (0.0 if "linear_attn" in name else 1.0)
    if name.endswith("A_log"):
        return rng.uniform(-2, 1, shape)
    if len(shape) < 2:
        return 0.3 * rng.standard_normal(shape)
    weight = rng.standard_t(3, shape) / np.sqrt(3 * shape[-1])
    if "embed_tokens" in name:
        weight[:, 17] *= 6.0
    return weight


def write_text_alone(folder: Path) -> PreTrainedModel:
    """The text model alone, as transformers saves it under ``qwen3_5_text``, with a tokenizer; the model."""
    whole = build()
    config = whole.config.text_config
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    renamed = {name.replace("model.language_model.", "model."): value for name, value in whole.state_dict().items()}
    model.load_state_dict({name: value for name, value in renamed.items() if ".visual." not in name})
    model.save_pretrained(folder)
    write_bpe(folder)
    assert json.loads((folder / "config.json").read_text())["model_type"] == "qwen3_5_text"
    return model.eval()


def write_hybrid(folder: Path, *, tied: bool = False, experts: bool = False) -> Path:
    """The model's folder as transformers writes it, with a tokenizer."""
    build(tied=tied, experts=experts).save_pretrained(folder)
    write_bpe(folder)
    assert json.loads((folder / "config.json").read_text())["model_type"] == ("qwen3_5_moe" if experts else "qwen3_5")
    return folder


def write_with_companion(folder: Path, *, experts: bool = False, inside: bool = True) -> Path:
    """The same with a companion: as tensors ``mtp.*`` among the others, or mlx-vlm's way in ``folder/mtp``."""
    write_hybrid(folder, experts=experts)
    head = {name: array.astype(np.float32) for name, array in companion_of(folder).items()}
    if inside:
        return change(folder, tensors_of(folder) | head)
    (folder / "mtp").mkdir()
    save_file(
        {name: np.ascontiguousarray(array) for name, array in draft_head.plain(head).items()},
        folder / "mtp" / "model.safetensors",
        metadata={"format": "mlx"},
    )
    text = json.loads((folder / "config.json").read_text())["text_config"]
    config = {"model_type": "qwen3_5_mtp", "text_config": text, "block_size": 3, "tie_word_embeddings": False}
    (folder / "mtp" / "config.json").write_text(json.dumps(config))
    return folder


def companion_of(folder: Path) -> dict[str, NDArray[np.float64]]:
    """The random draft head that ``write_with_companion`` gives the model of ``folder``, as Hugging Face stores it."""
    return draft_head.random_head(flat_config(folder), seed=5)


def flat_config(folder: Path) -> dict[str, Any]:
    """Settings of the text model as the oracles take them."""
    config = json.loads((folder / "config.json").read_text())
    text = config["text_config"]
    turned = text["rope_parameters"]["partial_rotary_factor"]
    return {**text, "model_type": config["model_type"], "partial_rotary_factor": turned}


def fused(tensors: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """A tensor an expert → gate and up of all in one, as the published models have it."""
    found = {name: array for name, array in tensors.items() if ".experts." not in name}
    for stem in sorted({name.partition(".experts.")[0] for name in tensors if ".experts." in name}):
        gate, up, down = (
            np.stack([tensors[f"{stem}.experts.{e}.{name}_proj.weight"] for e in range(EXPERTS["num_experts"])])
            for name in ("gate", "up", "down")
        )
        found[f"{stem}.experts.gate_up_proj"] = np.concatenate([gate, up], axis=1)
        found[f"{stem}.experts.down_proj"] = down
    return found


def change(folder: Path, tensors: dict[str, NDArray[Any]] | None = None, **settings: Any) -> Path:
    """Replace the tensors of ``folder``, or settings of its text model."""
    if tensors is not None:
        save_file({name: np.ascontiguousarray(t) for name, t in tensors.items()}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] |= settings
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def tensors_of(folder: Path) -> dict[str, NDArray[Any]]:
    """All tensors of a folder of one shard."""
    return dict(load_file(folder / "model.safetensors"))
