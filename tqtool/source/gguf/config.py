"""GGUF metadata to config.json: sizes, rope (scaled or not), and what each architecture's config calls them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tqtool.errors import SourceError
from tqtool.source.gguf.reader import GgufFile

ROPE_FREQS: Final = "rope_freqs.weight"
# Llama 3.1's published rope scaling; GGUF stores only the resulting factors.
LLAMA3_LOW_FREQ: Final = 1.0
LLAMA3_HIGH_FREQ: Final = 4.0
LLAMA3_ORIGINAL_CONTEXT: Final = 8192
GEMMA3_LOCAL_ROPE_BASE: Final = 10000.0
GEMMA3_PATTERN: Final = 6  # every sixth layer attends to everything
GEMMA3_27B_LAYERS: Final = 62  # the one size whose query scale is hidden / heads instead of the head size


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes that fix every tensor's shape."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int


def read_shape(file: GgufFile) -> ModelShape:
    """The sizes of ``file`` from its metadata and the width of its vocabulary matrix.

    Raises:
        SourceError: a key is missing, differs per layer, or the rotary part of a head is not the whole head.
    """
    hidden, heads = _size(file, "embedding_length"), _size(file, "attention.head_count")
    head_dim = _size(file, "attention.key_length", hidden // heads)
    for key, expected in (("attention.value_length", head_dim), ("rope.dimension_count", head_dim)):
        found = _size(file, key, expected)
        if found != expected:
            raise SourceError(f"{file.path}: {_key(file, key)} is {found}, only the head size {expected} is supported")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise SourceError(f"{file.path}: tensor 'token_embd.weight' [vocabulary, hidden] is missing")
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) > embedding.shape[0]:
        raise SourceError(f"{file.path}: {len(tokens):,} tokens, but the embedding has {embedding.shape[0]:,} rows")
    layers = _size(file, "block_count")
    if layers > len(file.tensors):
        raise SourceError(
            f"{file.path}: {_key(file, 'block_count')} is {layers:,}, but only {len(file.tensors)} tensors"
        )
    return ModelShape(
        layers=layers,
        hidden=hidden,
        intermediate=_size(file, "feed_forward_length"),
        heads=heads,
        kv_heads=_size(file, "attention.head_count_kv", heads),
        head_dim=head_dim,
        vocab=embedding.shape[0],
    )


def build_config(file: GgufFile, shape: ModelShape, *, torch_dtype: str, biases: tuple[bool, bool]) -> dict[str, Any]:
    """config.json of the folder.

    Args:
        file: the GGUF file; its architecture is one of ``families.FAMILIES``.
        shape: its sizes.
        torch_dtype: ``bfloat16``, ``float16`` or ``float32``.
        biases: whether attention and MLP linears carry biases (llama only).
    """
    config: dict[str, Any] = {
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "intermediate_size": shape.intermediate,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "max_position_embeddings": _size(file, "context_length"),
        "rms_norm_eps": _decimal(_number(file, "attention.layer_norm_rms_epsilon")),
        "rope_theta": _decimal(_number(file, "rope.freq_base", 10000.0)),
        "rope_scaling": rope_scaling(file, shape),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "torch_dtype": torch_dtype,
        "use_cache": True,
    }
    for key, name in (("bos", "bos_token_id"), ("eos", "eos_token_id"), ("padding", "pad_token_id")):
        token = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token is not None:
            config[name] = token
    config.update(_SPECIFIC[file.architecture](file, shape, biases))
    return dict(sorted(config.items()))


def _llama(file: GgufFile, shape: ModelShape, biases: tuple[bool, bool]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": biases[0],
        "mlp_bias": biases[1],
    }


def _qwen2(file: GgufFile, shape: ModelShape, biases: tuple[bool, bool]) -> dict[str, Any]:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": shape.layers,
    }


def _qwen3(file: GgufFile, shape: ModelShape, biases: tuple[bool, bool]) -> dict[str, Any]:
    return {
        **_qwen2(file, shape, biases),
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
    }


def _gemma3(file: GgufFile, shape: ModelShape, biases: tuple[bool, bool]) -> dict[str, Any]:
    pattern = _size(file, "attention.sliding_window_pattern", GEMMA3_PATTERN)
    query_scalar = shape.hidden // shape.heads if shape.layers == GEMMA3_27B_LAYERS else shape.head_dim
    softcap = file.metadata.get(_key(file, "final_logit_softcapping"))
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None if softcap is None else _decimal(softcap),
        "query_pre_attn_scalar": query_scalar,
        "rope_local_base_freq": _decimal(_number(file, "rope.freq_base_swa", GEMMA3_LOCAL_ROPE_BASE)),
        "sliding_window": _size(file, "attention.sliding_window"),
        "sliding_window_pattern": pattern,
        "layer_types": [
            "full_attention" if (layer + 1) % pattern == 0 else "sliding_attention" for layer in range(shape.layers)
        ],
    }


_SPECIFIC: Final[dict[str, Callable[[GgufFile, ModelShape, tuple[bool, bool]], dict[str, Any]]]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma3": _gemma3,
}


def rope_scaling(file: GgufFile, shape: ModelShape) -> dict[str, Any] | None:
    """The ``rope_scaling`` entry of config.json, from the metadata or from the table of Llama 3.

    Raises:
        SourceError: a kind of scaling that has no known equivalent, or a table no Llama 3 setting explains.
    """
    kind = file.metadata.get(_key(file, "rope.scaling.type"), "none")
    has_table = ROPE_FREQS in file.tensors
    factor = file.metadata.get(_key(file, "rope.scaling.factor"))
    extras = sorted(
        key
        for key in file.metadata
        if key.startswith(_key(file, "rope.scaling."))
        and key.rsplit(".", 1)[1] not in {"type", "factor", "original_context_length", "finetuned"}
    )
    if kind not in ("none", "linear", "yarn") or extras or (has_table and kind != "none"):
        found = ", ".join([f"rope.scaling.type {kind!r}", *extras, *([ROPE_FREQS] if has_table else [])])
        raise SourceError(
            f"{file.path}: rope scaling {found} cannot be expressed; known: linear, yarn, and the table of Llama 3"
        )
    if kind == "none":
        return _llama3_scaling(file, shape) if has_table else None
    if not isinstance(factor, float | int) or factor <= 0:
        raise SourceError(f"{file.path}: rope.scaling.factor must be a positive number, found {factor!r}")
    entry: dict[str, Any] = {"rope_type": kind, "type": kind, "factor": _decimal(factor)}
    if kind == "yarn":
        entry["original_max_position_embeddings"] = _size(file, "rope.scaling.original_context_length")
    return entry


def _llama3_scaling(file: GgufFile, shape: ModelShape) -> dict[str, Any] | None:
    """Find the factor and original context that give the stored table; the two published frequencies are fixed."""
    table = np.concatenate([values.reshape(-1) for _, _, values in file.tensors[ROPE_FREQS].chunks()])
    if np.all(table == 1.0):
        return None
    base = _number(file, "rope.freq_base", 10000.0)
    factor = _decimal(float(table.max()))
    original = _size(file, "rope.scaling.original_context_length", LLAMA3_ORIGINAL_CONTEXT)
    expected = llama3_factors(base, shape.head_dim, factor=factor, original_context=original)
    # The table was computed in float32; 1e-5 is some 80 of its roundings.
    if table.shape != expected.shape or not np.allclose(table, expected, rtol=1e-5, atol=0.0):
        raise SourceError(
            f"{file.path}: {ROPE_FREQS} is not the table of Llama 3 scaling with factor {factor} and original context "
            f"{original}",
            hint="use the safetensors checkpoint, whose config.json states the scaling",
        )
    return {
        "rope_type": "llama3",
        "type": "llama3",
        "factor": factor,
        "low_freq_factor": LLAMA3_LOW_FREQ,
        "high_freq_factor": LLAMA3_HIGH_FREQ,
        "original_max_position_embeddings": original,
    }


def llama3_factors(base: float, head_dim: int, *, factor: float, original_context: int) -> NDArray[np.float64]:
    """Divisor of each rotary frequency under Llama 3 scaling: [head_dim / 2], 1 for fast ones, ``factor`` for slow.

    Source: the rope scaling published with Llama 3.1 (low and high frequency factors 1 and 4).
    """
    wavelength = 2 * math.pi * base ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    smooth = (original_context / wavelength - LLAMA3_LOW_FREQ) / (LLAMA3_HIGH_FREQ - LLAMA3_LOW_FREQ)
    between = 1.0 / ((1.0 - smooth) / factor + smooth)
    slow = wavelength > original_context / LLAMA3_LOW_FREQ
    fast = wavelength < original_context / LLAMA3_HIGH_FREQ
    result: NDArray[np.float64] = np.where(fast, 1.0, np.where(slow, factor, between))
    return result


def _key(file: GgufFile, name: str) -> str:
    return f"{file.architecture}.{name}"


def _size(file: GgufFile, name: str, default: int | None = None) -> int:
    """A positive integer of the architecture's metadata."""
    value = file.metadata.get(_key(file, name), default)
    if value is None:
        raise SourceError(f"{file.path}: metadata {_key(file, name)!r} is missing")
    if isinstance(value, list):
        if len(set(value)) != 1:
            raise SourceError(f"{file.path}: {_key(file, name)} differs from layer to layer, which is not supported")
        value = value[0]
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise SourceError(f"{file.path}: {_key(file, name)} must be a positive integer, found {value!r}")
    return value


def _number(file: GgufFile, name: str, default: float | None = None) -> float:
    value = file.metadata.get(_key(file, name), default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise SourceError(f"{file.path}: metadata {_key(file, name)!r} must be a number, found {value!r}")
    return float(value)


def _decimal(value: float) -> float:
    """The shortest decimal that rounds to the same float32: 9.999999747378752e-06 is written 1e-05 upstream."""
    return float(str(np.float32(value)))
