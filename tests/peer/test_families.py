"""Every family by construction: a small random model of the true architecture, folded, judged by both stacks.

transformers' own model in float64 says that the fold changes nothing; transformers and stock mlx-lm on the files that
``convert`` writes say that config and names do not either.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from tests.support.family_parity import exact_error, mean_kl, mlx_logits, transformers_logits
from tests.support.tiny_families import CASES, EXPERTS, random_state, write_family
from tqtool.errors import UserError
from tqtool.formats.dtypes import DType
from tqtool.pipeline.convert import ConvertRequest, plan_convert
from tqtool.transform.families import FAMILIES
from tqtool.transform.plan import OnRows, RotateHeads, TransformPlan, plan_rotation

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

EXACT = 1e-10
REFUSED = [name for name, case in CASES.items() if FAMILIES[case.model_type].rotation_refusal is not None]
ROTATED = [name for name in CASES if name not in REFUSED]
HEADS = [name for name in ROTATED if not CASES[name].is_nested]  # whose heads are rotated


@pytest.mark.parametrize("name", ROTATED)
def test_folded_is_exact_in_float64(name: str) -> None:
    # transformers' routers take their softmax in float32; tests/property/test_folds.py has experts exact.
    assert exact_error(CASES[name]) < (1e-6 if CASES[name].model_type in EXPERTS else EXACT)


@pytest.mark.parametrize("name", HEADS)
def test_one_missing_rotation_shows(name: str) -> None:
    def change(plan: TransformPlan) -> TransformPlan:
        outputs = tuple(
            replace(output, ops=tuple(op for op in output.ops if not isinstance(op, RotateHeads | OnRows)))
            if output.layer == 1 and ".self_attn." in output.name and not output.name.endswith("o_proj.weight")
            else output
            for output in plan.outputs
        )
        return replace(plan, outputs=outputs)

    assert exact_error(CASES[name], change=change) > 1e-3


@pytest.mark.parametrize("name", ROTATED)
def test_both_stacks_say_that_the_written_model_is_the_source(tmp_path: Path, name: str) -> None:
    source = write_family(tmp_path / "source", CASES[name])
    for out, seed in (("dense", None), ("rotated", 42)):
        request = ConvertRequest(source=str(source), out=tmp_path / out, rotation_seed=seed, dtype=DType.F32)
        plan_convert(request).run()
    expected, dense = transformers_logits(source), mlx_logits(tmp_path / "dense")
    # Both in float32; sums of at most 320 terms in up to 4 layers of 7 products, heavy-tailed: 3e-6 is usual.
    assert np.abs(dense - expected).max() < 5e-5 * np.abs(expected).max()
    assert 0 < mean_kl(expected, transformers_logits(tmp_path / "rotated")) <= 1e-5
    assert 0 < mean_kl(dense, mlx_logits(tmp_path / "rotated")) <= 1e-5


@pytest.mark.parametrize("name", ["llama", "qwen3", "granite", "phi3"])
def test_gains_after_reload_are_the_planned_ones(tmp_path: Path, name: str) -> None:
    """What a stock loader holds: 1 where a gain was folded, the source's own where it acts inside a head."""
    from mlx.utils import tree_flatten
    from mlx_lm.utils import load_model

    source = write_family(tmp_path / "source", CASES[name])
    request = ConvertRequest(source=str(source), out=tmp_path / "rotated", rotation_seed=42, dtype=DType.F32)
    plan_convert(request).run()
    model, _ = load_model(tmp_path / "rotated", strict=True)
    gains = {path: np.array(value) for path, value in tree_flatten(model.parameters()) if "norm" in path}
    inner = {path for path in gains if path.endswith(("q_norm.weight", "k_norm.weight"))}
    assert bool(inner) is (name == "qwen3")
    assert all((gain == 1).all() for path, gain in gains.items() if path not in inner)
    state = random_state(CASES[name])
    assert gains.keys() == {path for path in state if "norm" in path}
    assert all(np.array_equal(gains[path], state[path]) for path in inner)


# model_type, hidden, intermediate, heads, kv heads, vocabulary, and what else the published config says.
PUBLISHED = {
    "Llama-3.2-1B": ("llama", 2048, 8192, 32, 8, 128256, {"head_dim": 64, "tie_word_embeddings": True}),
    "Llama-3.1-70B": ("llama", 8192, 28672, 64, 8, 128256, {}),
    "Mistral-Nemo": ("mistral", 5120, 14336, 32, 8, 131072, {"head_dim": 128}),
    "Qwen2.5-7B": ("qwen2", 3584, 18944, 28, 4, 152064, {}),
    "Qwen3-32B": ("qwen3", 5120, 25600, 64, 8, 151936, {"head_dim": 128}),
    "SmolLM3-3B": ("smollm3", 2048, 11008, 16, 4, 128256, {"tie_word_embeddings": True}),
    "Granite-3.1-8B": ("granite", 4096, 12800, 32, 8, 49155, {"tie_word_embeddings": True}),
    "Phi-3-mini": ("phi3", 3072, 8192, 32, 32, 32064, {}),
    "Phi-3-medium": ("phi3", 5120, 17920, 40, 10, 32064, {}),
    "Phi-4-mini": ("phi3", 3072, 8192, 24, 8, 200064, {"partial_rotary_factor": 0.75, "tie_word_embeddings": True}),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes_can_be_rotated(name: str) -> None:
    """One layer of transformers' model without weights: every tensor claimed, every Hadamard matrix there."""
    model_type, hidden, inner, heads, kv_heads, vocabulary, changes = PUBLISHED[name]
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": heads, "vocab_size": vocabulary}
    config = CONFIG_MAPPING[model_type](
        **sizes, num_key_value_heads=kv_heads, num_hidden_layers=1, **{"tie_word_embeddings": False, **changes}
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    plan = plan_rotation(shapes, config.to_dict())
    assert {output.source for output in plan.outputs} == set(shapes)
    (value,) = (o for o in plan.outputs if o.name.endswith(("v_proj.weight", "qkv_proj.weight")))
    part = value.ops[-1]
    rows = part.stop - part.start if isinstance(part, OnRows) else value.shape[0]
    assert rows == kv_heads * (changes.get("head_dim") or hidden // heads)


@pytest.mark.parametrize("name", REFUSED)
def test_a_family_that_cannot_be_rotated_converts_as_it_is(tmp_path: Path, name: str) -> None:
    source = write_family(tmp_path / "source", CASES[name])
    with pytest.raises(UserError, match="cannot be rotated"):
        plan_convert(ConvertRequest(source=str(source), out=tmp_path / "rotated", rotation_seed=42))
    plan_convert(ConvertRequest(source=str(source), out=tmp_path / "dense", dtype=DType.F32)).run()
    expected, dense = transformers_logits(source), mlx_logits(tmp_path / "dense")
    assert np.abs(dense - expected).max() < 5e-5 * np.abs(expected).max()
