"""``config.json`` of an artifact: the source's config plus what mlx-lm needs to rebuild every module.

``quantization`` holds a default triple and one explicit entry per quantizable module, keyed by mlx-lm module
path: ``{group_size, bits, mode}`` or ``false``. ``quantization_config`` is the same object (Hugging Face model
tree). Nothing of ours goes inside it: mlx-lm hands unknown keys to ``to_quantized`` and fails.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from tqtool.formats.dtypes import DType
from tqtool.solve.quantizer import ConfigEntry

_DTYPE_NAMES = {DType.BF16: "bfloat16", DType.F16: "float16", DType.F32: "float32"}
_DROPPED = ("_name_or_path", "quantization", "quantization_config")


def build_config(
    base: Mapping[str, Any],
    *,
    entries: Mapping[str, ConfigEntry],
    default: dict[str, Any] | None = None,
    dtype: DType | None = None,
    extra: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The artifact's config.

    Args:
        base: Source config with the transform's updates merged in.
        entries: Module path → ``Quantizer.config_entry()``.
        default: Top-level triple; without it the entry used by most modules.
        dtype: Dtype of the dense tensors, if it was set for the whole model.
        extra: Further top-level keys (``trellis``, ``model_file``).
    """
    config = {key: value for key, value in base.items() if key not in _DROPPED}
    if dtype is not None:
        _set_dtype(config, _DTYPE_NAMES[dtype])
    quantization = quantization_section(entries, default)
    if quantization is not None:
        config["quantization"] = config["quantization_config"] = quantization
    config.update(extra or {})
    return dict(sorted(config.items()))


def quantization_section(
    entries: Mapping[str, ConfigEntry], default: dict[str, Any] | None = None
) -> dict[str, Any] | None:
    """The ``quantization`` object, or None when no module has an entry of its own (a dense model)."""
    used = Counter(json.dumps(entry, sort_keys=True) for entry in entries.values() if entry)
    if not used:
        return None
    top = default or json.loads(max(used, key=lambda text: (used[text], text)))
    listed = {path: entry for path, entry in sorted(entries.items()) if entry is not None}
    return {**top, **listed}


def encode_config(config: Mapping[str, Any]) -> bytes:
    """JSON as mlx-lm writes it (indent 4); non-finite floats are tagged as transformers does."""
    return json.dumps(_tagged(config), indent=4, ensure_ascii=False, allow_nan=False).encode()


def _set_dtype(config: dict[str, Any], name: str) -> None:
    keys = [key for key in ("torch_dtype", "dtype") if key in config] or ["torch_dtype"]
    config.update(dict.fromkeys(keys, name))
    text = config.get("text_config")
    if isinstance(text, dict):
        config["text_config"] = {**text, **{key: name for key in ("torch_dtype", "dtype") if key in text}}


def _tagged(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {"__float__": "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")}
    if isinstance(value, Mapping):
        return {key: _tagged(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_tagged(item) for item in value]
    return value
