"""mlx-lm's own module trees judge the plans: the same parameter names, the same quantizable modules, strict loading."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

from tests.oracles.decoder import forward, random_config, random_weights
from tests.property.test_folds import BIASED, case_id
from tqtool.runtime.blas import ensure_blas
from tqtool.transform.apply import apply_folds
from tqtool.transform.plan import TransformPlan, plan_identity, plan_rotation

ALIASES = {"mistral": "llama"}
FACTORS = [1.0, 1.5, 2.0]
LONGROPE = {
    "partial_rotary_factor": 0.5,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 3, "long_factor": FACTORS},
    "original_max_position_embeddings": 16,
}
LLAMA3 = {
    "type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def build(config: dict[str, Any]) -> Any:
    ensure_blas()
    kind = config["model_type"]
    architecture = importlib.import_module(f"mlx_lm.models.{ALIASES.get(kind, kind)}")
    return architecture.Model(architecture.ModelArgs.from_dict(config))


def checkpoint(model_type: str, *, tied: bool, **changes: Any) -> tuple[dict[str, tuple[int, ...]], dict[str, Any]]:
    config = random_config("qwen3" if model_type == "gemma3_text" else model_type, tied=tied, **changes)
    config["rope_theta"] = 10000.0
    config["max_position_embeddings"] = 512
    if model_type == "granite":
        config = {"attention_bias": False, "mlp_bias": False} | config
    if model_type in ("qwen2", "granite", "phi3", "mixtral"):  # mlx-lm's have no explicit head_dim
        config |= {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 12}
    shapes = {name: array.shape for name, array in random_weights(config, seed=0).items()}
    if model_type == "gemma3_text":
        config["model_type"] = model_type
        for layer in range(3):
            for name in ("pre_feedforward_layernorm", "post_feedforward_layernorm"):
                shapes[f"model.layers.{layer}.{name}.weight"] = (36,)
    return shapes, config


def check(plan: TransformPlan, config: dict[str, Any], *, tied: bool) -> None:
    import mlx.core as mx
    import mlx.nn as nn
    from mlx.utils import tree_flatten
    from mlx_lm.models.switch_layers import SwitchLinear

    model = build(plan.updated_config(config))
    weights = {output.name: mx.zeros(output.shape) for output in plan.outputs}
    loaded = model.sanitize(weights) if hasattr(model, "sanitize") else weights  # as mlx_lm.load does
    model.load_weights(list(loaded.items()), strict=True)
    assert sorted(weights) == sorted(name for name, _ in tree_flatten(model.parameters()))
    quantizable = {
        name for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Embedding | SwitchLinear)
    }
    assert {output.module for output in plan.outputs if output.module} == quantizable
    assert any(name.endswith("lm_head") for name in quantizable) is not tied


PLANNED: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", BIASED),
    ("mistral", {}),
    ("qwen2", {}),
    ("qwen3", {}),
    ("smollm3", {}),
    ("granite", {}),
    ("granite", BIASED),
    ("phi3", {}),
    ("qwen3_moe", {}),
    ("mixtral", {}),
    ("qwen3_5", {}),
    ("qwen3_5_moe", {}),
]


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(("model_type", "changes"), PLANNED, ids=case_id)
def test_plans_name_what_mlx_lm_has(model_type: str, changes: dict[str, Any], tied: bool) -> None:
    shapes, config = checkpoint(model_type, tied=tied, **changes)
    check(plan_identity(shapes, config), config, tied=tied)
    check(plan_rotation(shapes, config), config, tied=False)


def test_gemma3_identity() -> None:
    shapes, config = checkpoint("gemma3_text", tied=True)
    check(plan_identity(shapes, config), config, tied=True)


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("llama", {"attention_bias": True}),
        ("llama", {"rope_scaling": LLAMA3}),
        ("mistral", {}),
        ("qwen2", {}),
        ("qwen3", {}),
        ("qwen3_moe", {}),
        ("mixtral", {}),
        ("qwen3_5", {}),
        ("qwen3_5_moe", {}),
        ("smollm3", {"no_rope_layers": [1, 0, 1]}),
        ("granite", {"attention_bias": True, "mlp_bias": True}),
        ("phi3", {}),
        ("phi3", LONGROPE),
    ],
    ids=case_id,
)
def test_the_dense_oracle_is_mlx_lm_s_model(model_type: str, changes: dict[str, Any]) -> None:
    """The decoder that judges the folds computes what stock mlx-lm computes, before and after a fold."""
    ensure_blas()
    import mlx.core as mx

    _, config = checkpoint(model_type, tied=True, **changes)
    weights = random_weights(config, seed=11)
    shapes = {name: array.shape for name, array in weights.items()}
    plan = plan_rotation(shapes, config)

    def stored(plan: TransformPlan) -> dict[str, Any]:
        made = {o.name: [apply_folds(piece, weights.__getitem__) for piece in o.pieces] for o in plan.outputs}
        return {o.name: np.stack(made[o.name]) if o.parts else made[o.name][0] for o in plan.outputs}

    # mlx-lm stacks experts by itself, but not those of a hybrid.
    source = stored(plan_identity(shapes, config)) if model_type == "qwen3_5_moe" else weights
    folded = stored(plan)
    tokens = np.arange(20) * 7 % 50
    expected = forward(weights, config, tokens)
    for arrays, settings in ((source, config), (folded, plan.updated_config(config))):
        model = build(settings)
        loaded = {name: mx.array(array.astype(np.float32)) for name, array in arrays.items()}
        loaded = model.sanitize(loaded) if hasattr(model, "sanitize") else loaded
        model.load_weights(list(loaded.items()), strict=True)
        found = np.array(model(mx.array(tokens)[None])[0])
        # float32 with three layers of heavy-tailed weights: about 2^-24 · 1000 of the largest logit.
        assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()
