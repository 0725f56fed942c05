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


def read_config(folder: Path) -> dict[str, Any]:
    """The parsed config.json of ``folder``.

    Raises:
        SourceError: the file is missing, is not a JSON object, or has no ``model_type``.
    """
    path = folder / CONFIG_NAME
    try:
        value: Any = json.loads(path.read_bytes())
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
    return value


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
