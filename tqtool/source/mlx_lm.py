"""Where stock mlx-lm computes something else than config.json says, or nothing at all.

It is what runs the artifacts and the teacher, and it ignores settings that it does not have. Found by reading the
models of mlx-lm 0.32.2; nothing of it is imported.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tqtool.errors import SourceError
from tqtool.source.config import text_config
from tqtool.source.mlx_lm_settings import rotary_warnings, setting_refusal

# mlx-lm loads these types with another type's module; its own table cannot be read without importing mlx.
_MLX_LM_ALIASES: Final = {
    "mistral": "llama",
    "llava": "mistral3",
    "phi-msft": "phixtral",
    "falcon_mamba": "mamba",
    "kimi_k2": "deepseek_v3",
    "qwen2_5_vl": "qwen2_vl",
    "minimax_m2": "minimax",
    "iquestcoder": "llama",
    "xverse": "llama",
}
# These have SwiGLU built in, whatever hidden_act says.
_HYBRIDS: Final = frozenset({"qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"})
_SWIGLU: Final = _HYBRIDS | {"granite", "llama", "mistral", "mixtral", "phi3", "qwen2", "qwen3", "qwen3_moe", "smollm3"}
# These attend to everything: mistral and smollm3 run as llama, which slides only where layer_types says so.
_NO_SLIDING: Final = frozenset({"mistral", "mixtral", "phi3", "qwen2", "qwen3", "qwen3_moe", "smollm3"})
_ALWAYS_SLIDE: Final = frozenset({"mistral", "mixtral", "phi3"})  # in the authors' code: wherever there is a window


def keeps_every_token(kind: str) -> bool:
    """Whether mlx-lm's caches of this type grow in every layer, whatever the config says of windows."""
    return kind == "gemma2" or kind in _NO_SLIDING - {"smollm3"}


def refuse_unservable(folder: Path, config: Mapping[str, Any]) -> None:
    """Raise SourceError for what mlx-lm cannot serve, however it is written.

    That is a model whose layers are code in its own folder, and settings that its module does not have.
    """
    if config.get("model_file") is not None:
        raise SourceError(
            f"{folder}: config.json has model_file {config['model_file']!r}: the model brings its own code",
            hint="tqtool runs no code from model folders; remove model_file if mlx-lm has the architecture itself",
        )
    refusal = setting_refusal(config)
    if refusal is not None:
        raise SourceError(f"{folder}: config.json: {refusal}", hint="nothing can run this model in mlx-lm yet")


def architecture_warnings(config: Mapping[str, Any]) -> tuple[str, ...]:
    """One warning if the installed mlx-lm has no model of this type."""
    names = {str(config["model_type"]), str(text_config(config).get("model_type", ""))}
    known = _mlx_lm_models()
    if known is None or any(_MLX_LM_ALIASES.get(name, name) in known for name in names):
        return ()
    return (f"model_type {config['model_type']!r} is not an architecture the installed mlx-lm knows",)


def _mlx_lm_models() -> frozenset[str] | None:
    spec = importlib.util.find_spec("mlx_lm")
    if spec is None or not spec.submodule_search_locations:
        return None
    root = Path(next(iter(spec.submodule_search_locations))) / "models"
    return frozenset(path.stem for path in root.glob("*.py")) | frozenset(
        path.parent.name for path in root.glob("*/__init__.py")
    )


def behaviour_warnings(config: Mapping[str, Any]) -> tuple[str, ...]:
    """A line for each setting that mlx-lm ignores, so that it computes another function than the authors' code."""
    part = text_config(config)
    kind = str(part.get("model_type", config["model_type"]))
    warnings = []
    activation = part.get("hidden_act", "silu")
    if kind in _SWIGLU and activation not in ("silu", "swish", None):
        warnings.append(f"hidden_act is {activation!r}; mlx-lm's {kind} always uses silu, its output will be wrong")
    window = part.get("sliding_window")
    slides = part.get("use_sliding_window", kind in _ALWAYS_SLIDE)
    if kind == "smollm3" and part.get("layer_types"):
        slides = False  # mlx-lm reads which layers do
    if kind in _NO_SLIDING and window and slides:
        warnings.append(f"sliding_window is {window}; mlx-lm's {kind} attends to all, longer texts come out different")
    return (*warnings, *rotary_warnings(config))
