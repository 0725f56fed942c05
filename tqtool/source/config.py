"""config.json: read and check, and the few facts of it that more than one verb asks for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tqtool.errors import SourceError

CONFIG_NAME: Final = "config.json"
# A quantized checkpoint says so under one of these keys (MLX, Hugging Face, llm-compressor).
QUANTIZATION_KEYS: Final = ("quantization", "quantization_config", "compression_config")

_FIELD_TYPES: Final[tuple[tuple[str, tuple[type, ...], tuple[str, ...]], ...]] = (
    (
        "a whole number",
        (int,),
        (
            *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
            *("head_dim", "vocab_size", "max_position_embeddings"),
            *("num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size"),
        ),
    ),
    ("a number", (int, float), ("rms_norm_eps", "rope_theta")),
    (
        "true or false",
        (bool,),
        ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window", "norm_topk_prob"),
    ),
    ("an object", (dict,), ("rope_scaling", "rope_parameters")),
    ("a string", (str,), ("hidden_act", "torch_dtype", "dtype")),
)


def read_config(folder: Path) -> dict[str, Any]:
    """The parsed config.json of ``folder``.

    Raises:
        SourceError: the file is missing, is not a JSON object, or has no ``model_type``.
    """
    path = folder / CONFIG_NAME
    try:
        value: Any = json.loads(path.read_bytes().decode("utf-8"))
    except FileNotFoundError:
        raise SourceError(
            f"{folder}: {CONFIG_NAME} is missing",
            hint="the path must be a Hugging Face model folder or a hub id",
        ) from None
    except OSError as error:
        raise SourceError(f"{path}: cannot be read ({error.strerror or error})") from error
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{path}: not JSON ({error})", hint="download the file again") from error
    if not isinstance(value, dict):
        raise SourceError(f"{path}: expected a JSON object, found {type(value).__name__}")
    if not isinstance(value.get("model_type"), str) or not value["model_type"]:
        raise SourceError(
            f"{path}: field 'model_type' must be a non-empty string, found {value.get('model_type')!r}",
            hint="the model's own config.json is needed, not an adapter's or a pipeline's",
        )
    for part, prefix in ((value, ""), (value.get("text_config"), "text_config.")):
        if isinstance(part, dict):
            _check_types(path, part, prefix)
    return value


def _check_types(path: Path, part: Mapping[str, Any], prefix: str) -> None:
    """Refuse a well-known field of the wrong type: loaders find it late, some only while they compute."""
    for expected, kinds, names in _FIELD_TYPES:
        for name in names:
            found = part.get(name)
            is_wrong = found is not None and (type(found) not in kinds)  # not isinstance: True is an int to Python
            if is_wrong:
                raise SourceError(
                    f"{path}: field '{prefix}{name}': expected {expected}, found {found!r}",
                    hint="correct config.json, or download it again",
                )


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of ``config``: its ``text_config`` if it has one, else ``config`` itself."""
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else config


def declared_quantization(config: Mapping[str, Any]) -> str | None:
    """``"key (method)"`` if the config says the weights are already quantized, else None."""
    for part in (config, text_config(config)):
        for key in QUANTIZATION_KEYS:
            entry = part.get(key)
            if entry:
                method = entry.get("quant_method") or entry.get("mode") if isinstance(entry, dict) else None
                return f"{key} ({method})" if method else key
    if config.get("trellis"):
        return "trellis"
    return None


def rope_updates(config: Mapping[str, Any]) -> dict[str, Any]:
    """What must be added to ``config`` so that every loader rotates alike; empty for most checkpoints.

    transformers 5 saves the rotary settings under ``rope_parameters`` only. mlx-lm's llama and qwen2 read
    ``rope_theta`` and ``rope_scaling``, ignore the new key, and silently compute with base 10000.

    Raises:
        SourceError: both places state a value and they differ.
    """
    part = text_config(config)
    found = _flat_rope(part.get("rope_parameters"))
    for key, value in found.items():
        if part.get(key) is not None and not _same_rope(part[key], value):
            raise SourceError(
                f"{CONFIG_NAME}: {key} is {part[key]!r}, but rope_parameters says {value!r}; loaders would disagree",
                hint="keep the one the model was trained with",
            )
    added = {key: value for key, value in found.items() if part.get(key) is None}
    if not added or part is config:
        return added
    return {"text_config": {**part, **added}}


def _same_rope(first: Any, second: Any) -> bool:
    """Equal, where ``type`` and ``rope_type`` are two spellings of one field."""
    if isinstance(first, dict) and isinstance(second, dict):
        one, two = ({key: value for key, value in entry.items() if key != "type"} for entry in (first, second))
        return bool({"rope_type": first.get("type"), **one} == two)
    return bool(first == second)


def _flat_rope(parameters: Any) -> dict[str, Any]:
    """``rope_parameters`` in the words of transformers 4; layered ones are those of sliding-window models."""
    if not isinstance(parameters, dict):
        return {}
    layered = isinstance(parameters.get("full_attention"), dict)
    full = parameters["full_attention"] if layered else parameters
    flat: dict[str, Any] = {}
    if full.get("rope_theta") is not None:
        flat["rope_theta"] = full["rope_theta"]
    if full.get("rope_type", "default") != "default":
        scaling = {key: value for key, value in full.items() if key not in ("rope_theta", "partial_rotary_factor")}
        flat["rope_scaling"] = {**scaling, "type": full["rope_type"]}
    if full.get("partial_rotary_factor") is not None:
        flat["partial_rotary_factor"] = full["partial_rotary_factor"]
    local = parameters.get("sliding_attention") if layered else None
    if isinstance(local, dict) and local.get("rope_theta") is not None:
        flat["rope_local_base_freq"] = local["rope_theta"]
    return flat
