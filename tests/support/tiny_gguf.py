"""GGUF files of tiny random models, made with the gguf package's own tables and llama.cpp's row order.

The names come from the package, the permutation is written here row by row: nothing is shared with the importer.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

SAMPLE = (
    "The quick brown fox jumps over the lazy dog. Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.\n"
    "def add(a, b):\n\treturn a + b  # 1234567890\n\nIt's 12:34 — naïve café, 日本語のテキスト, Привет мир! 🙂🙃 "
    " end\r\n"
)
CHAT_TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "gemma3": gguf.MODEL_ARCH.GEMMA3,
}
MODEL_TYPES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3_text"}


@dataclass(frozen=True, kw_only=True)
class TinyGguf:
    """One case: a family, its settings in Hugging Face's words, and how the file stores its matrices."""

    family: str = "llama"
    settings: dict[str, Any] = field(default_factory=dict)
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32
    seed: int = 0

    def config(self) -> Any:
        base: dict[str, Any] = {
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "vocab_size": 320,
            "max_position_embeddings": 512,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
        }
        if self.family == "gemma3":
            base |= {"sliding_window": 8, "num_hidden_layers": 6, "query_pre_attn_scalar": 64, "rms_norm_eps": 1e-6}
        return CONFIG_MAPPING[MODEL_TYPES[self.family]](**(base | self.settings))

    def model(self) -> PreTrainedModel:
        """Random weights that bf16 holds exactly, with norms that are not one."""
        torch.manual_seed(self.seed)
        model = AutoModelForCausalLM.from_config(self.config(), dtype=torch.float32)
        with torch.no_grad():
            for name, value in model.named_parameters():
                spread = 0.2 if "norm" in name or name.endswith("bias") else value.shape[-1] ** -0.5
                center = 1.0 if "norm" in name and self.family != "gemma3" else 0.0
                value.copy_((center + spread * torch.randn_like(value)).bfloat16().float())
        return model.eval()


def llama_cpp_rows(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """llama.cpp's order: within a head, row i of the first half, then row i of the second half, i ascending."""
    size = weight.shape[0] // heads
    order = [h * size + half * (size // 2) + i for h in range(heads) for i in range(size // 2) for half in (0, 1)]
    return weight[order]


def write_gguf(
    path: Path,
    case: TinyGguf,
    model: PreTrainedModel,
    tokenizer: dict[str, Any] | None = None,
    extra: dict[str, Any] | None = None,
) -> dict[str, NDArray[np.float32]]:
    """Write ``model``; returns what the file holds, by Hugging Face name, in Hugging Face row order."""
    config, family = model.config, case.family
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[ARCHITECTURES[family]])
    add_sizes(writer, config)
    if family == "gemma3":
        writer.add_sliding_window(config.sliding_window)
    for key, value in (extra or {}).items():
        add_value(writer, key, value)
    for key, value in (tokenizer or byte_level_fields(config.vocab_size)).items():
        add_value(writer, f"tokenizer.{key}", value)
    names = gguf.get_tensor_name_map(ARCHITECTURES[family], config.num_hidden_layers)
    held = {}
    for name, parameter in model.named_parameters():
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert target is not None, name
        values = parameter.detach().numpy()
        if family == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            values = llama_cpp_rows(values, heads)
        if family == "gemma3" and "norm" in name:
            values = values + np.float32(1)
        kind = case.kind if values.ndim == 2 else gguf.GGMLQuantizationType.F32
        raw = encoded(values, kind, np.random.default_rng(case.seed))
        writer.add_tensor(target, raw, raw_dtype=kind)
        held[name] = gguf.dequantize(raw, kind).reshape(values.shape)
    table = rope_table(config)
    if table is not None:
        writer.add_tensor("rope_freqs.weight", table)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    return {name: _back(name, values, model, family) for name, values in held.items()}


def _back(name: str, values: NDArray[np.float32], model: PreTrainedModel, family: str) -> NDArray[np.float32]:
    if family == "llama" and ("q_proj" in name or "k_proj" in name):
        heads = model.config.num_attention_heads if "q_proj" in name else model.config.num_key_value_heads
        where = llama_cpp_rows(np.arange(values.shape[0], dtype=np.float32), heads).astype(int)
        back = np.empty_like(values)
        back[where] = values
        return back
    return values - np.float32(1) if family == "gemma3" and "norm" in name else values


def encoded(values: NDArray[np.float32], kind: gguf.GGMLQuantizationType, rng: np.random.Generator) -> NDArray[Any]:
    """``values`` in a type the package can write; random blocks of small scale in one it can only read."""
    try:
        return gguf.quantize(np.ascontiguousarray(values), kind)
    except NotImplementedError:
        block, size = gguf.GGML_QUANT_SIZES[kind]
        raw = rng.integers(0, 256, (*values.shape[:-1], values.shape[-1] // block, size), dtype=np.uint8)
        scale_at = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}[kind.name]
        for offset in scale_at:
            raw[..., offset : offset + 2] = (1e-4 * rng.random((*raw.shape[:-1], 1))).astype("<f2").view(np.uint8)
        return raw.reshape(*values.shape[:-1], -1)


def add_sizes(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    parameters = config.rope_parameters
    full = parameters.get("full_attention", parameters)
    writer.add_rope_freq_base(full["rope_theta"])
    if full["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(full["rope_type"]))
        writer.add_rope_scaling_factor(full["factor"])
    if full["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(full["original_max_position_embeddings"])


def rope_table(config: Any) -> NDArray[np.float32] | None:
    """What llama.cpp stores for Llama 3's scaling: plain over scaled frequencies, both from transformers."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if config.rope_parameters.get("rope_type") != "llama3":
        return None
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    size = config.head_dim
    plain = config.rope_parameters["rope_theta"] ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    return (plain / scaled.double()).float().numpy()


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case list():
            writer.add_array(key, value)
        case _:
            raise AssertionError(key)


def byte_level_fields(size: int, *, pre: str = "smollm", merges: bool = False) -> dict[str, Any]:
    """A byte-level vocabulary of ``size`` entries: three control tokens, all bytes, fillers (or trained merges)."""
    tokenizer = train_byte_level(size, pre) if merges else None
    if tokenizer is None:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        texts = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *alphabet]
        texts += [f"<filler{index}>" for index in range(size - len(texts))]
        merge_list = ["Ġ t"]
        texts[-1] = "Ġt"
    else:
        state = json.loads(tokenizer.to_str())
        vocabulary = state["model"]["vocab"]
        texts = sorted(vocabulary, key=vocabulary.__getitem__)
        merge_list = [" ".join(pair) for pair in state["model"]["merges"]]
    return {
        "ggml.model": "gpt2",
        "ggml.pre": pre,
        "ggml.tokens": texts,
        "ggml.token_type": [3, 3, 3] + [1] * (len(texts) - 3),
        "ggml.merges": merge_list,
        "ggml.bos_token_id": 1,
        "ggml.eos_token_id": 2,
        "ggml.unknown_token_id": 0,
        "ggml.padding_token_id": 2,
        "ggml.add_bos_token": False,
        "chat_template": CHAT_TEMPLATE,
    }


def train_byte_level(size: int, pre: str) -> Tokenizer:
    """A real byte-level BPE over SAMPLE, set up as the published tokenizers with that pre-tokenizer are."""
    words = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        + ("{1,3}" if pre == "llama-bpe" else "")
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    steps: dict[str, list[Any]] = {
        "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
        "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
        "qwen2": [
            pre_tokenizers.Split(Regex(words), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ],
    }
    tokenizer = Tokenizer(models.BPE(ignore_merges=pre == "llama-bpe"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps["qwen2" if pre == "llama-bpe" else pre])
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([SAMPLE] * 3, trainer)
    return tokenizer
