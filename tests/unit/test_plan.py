"""Plans: every tensor claimed, the recipe's folds in their order, and errors that list what is wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.oracles.decoder import random_config, random_weights
from tqtool.errors import SourceError, UserError
from tqtool.transform.families import FAMILIES
from tqtool.transform.plan import (
    Fill,
    OnRows,
    OutputTensor,
    Role,
    RotateHeads,
    RotateInput,
    RotateOutput,
    Rotation,
    ScaleInput,
    TransformPlan,
    plan_identity,
    plan_rotation,
)
from tqtool.transform.rotation import DEVIATIONS

Shapes = dict[str, tuple[int, ...]]
R1 = Rotation(n=36, signs_lane=0, seed=42)
R2 = Rotation(n=12)


def checkpoint(model_type: str, **changes: Any) -> tuple[Shapes, dict[str, Any]]:
    config = random_config(model_type, **changes)
    return {name: array.shape for name, array in random_weights(config, seed=0).items()}, config


def gemma3(**changes: Any) -> tuple[Shapes, dict[str, Any]]:
    shapes, config = checkpoint("qwen3")
    config["model_type"] = "gemma3_text"
    for layer in range(3):
        for name in ("pre_feedforward_layernorm", "post_feedforward_layernorm"):
            shapes[f"model.layers.{layer}.{name}.weight"] = (36,)
    return shapes, config | changes


# -------------------------------------------------------------------------------------------------------- recipe
def test_the_recipe_of_one_layer() -> None:
    shapes, config = checkpoint("llama", attention_bias=True, mlp_bias=True)
    plan = plan_rotation(shapes, config)
    ops = {output.name.removeprefix("model.layers.1."): output.ops for output in plan.outputs}
    stem = "model.layers.1."
    into_attention = (ScaleInput(gain=stem + "input_layernorm.weight"), RotateInput(rotation=R1))
    into_mlp = (ScaleInput(gain=stem + "post_attention_layernorm.weight"), RotateInput(rotation=R1))
    assert ops["self_attn.q_proj.weight"] == into_attention
    assert ops["self_attn.k_proj.weight"] == into_attention
    assert ops["self_attn.v_proj.weight"] == (*into_attention, RotateHeads(rotation=R2, axis="output"))
    assert ops["self_attn.o_proj.weight"] == (RotateOutput(rotation=R1), RotateHeads(rotation=R2, axis="input"))
    assert ops["mlp.gate_proj.weight"] == ops["mlp.up_proj.weight"] == into_mlp
    assert ops["mlp.down_proj.weight"] == (RotateOutput(rotation=R1),)
    assert ops["self_attn.v_proj.bias"] == (RotateHeads(rotation=R2, axis="output"),)
    assert ops["self_attn.o_proj.bias"] == ops["mlp.down_proj.bias"] == (RotateOutput(rotation=R1),)
    for untouched in ("self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj", "mlp.up_proj"):
        assert ops[f"{untouched}.bias"] == ()
    assert ops["input_layernorm.weight"] == ops["post_attention_layernorm.weight"] == (Fill(value=1.0),)
    assert ops["model.norm.weight"] == (Fill(value=1.0),)
    assert ops["model.embed_tokens.weight"] == (RotateInput(rotation=R1),)
    assert ops["lm_head.weight"] == (ScaleInput(gain="model.norm.weight"), RotateInput(rotation=R1))


def test_the_recipe_of_a_fused_layer() -> None:
    shapes, config = checkpoint("phi3")
    found = {output.name.removeprefix("model.layers.1."): output for output in plan_rotation(shapes, config).outputs}
    stem = "model.layers.1."
    into_attention = (ScaleInput(gain=stem + "input_layernorm.weight"), RotateInput(rotation=R1))
    into_mlp = (ScaleInput(gain=stem + "post_attention_layernorm.weight"), RotateInput(rotation=R1))
    qkv, gate_up = found["self_attn.qkv_proj.weight"], found["mlp.gate_up_proj.weight"]
    values = OnRows(start=72, stop=96, fold=RotateHeads(rotation=R2, axis="output"))  # 48 of q, 24 of k, 24 of v
    assert (qkv.shape, qkv.role, qkv.module) == ((96, 36), Role.QKV, stem + "self_attn.qkv_proj")
    assert qkv.ops == (*into_attention, values)
    assert (gate_up.shape, gate_up.role, gate_up.ops) == ((88, 36), Role.GATE_UP, into_mlp)
    assert found["self_attn.o_proj.weight"].ops == (
        RotateOutput(rotation=R1),
        RotateHeads(rotation=R2, axis="input"),
    )
    assert str(values) == "rows 72…95: heads Rᵀ[H12 plain] ·"


def test_query_and_key_norms_are_untouched() -> None:
    shapes, config = checkpoint("qwen3")
    plan = plan_rotation(shapes, config)
    assert [output.ops for output in plan.outputs if output.name.endswith(("q_norm.weight", "k_norm.weight"))] == [
        ()
    ] * 6


def test_signed_r2_takes_lane_layer_plus_one() -> None:
    shapes, config = checkpoint("llama")
    plan = plan_rotation(shapes, config, seed=7, signed_r2=True)
    lanes = [
        op.rotation.signs_lane
        for output in plan.outputs
        for op in output.ops
        if isinstance(op, RotateHeads) and output.role is Role.V
    ]
    assert lanes == [1, 2, 3]


def test_provenance() -> None:
    shapes, config = checkpoint("mistral")
    plan = plan_rotation(shapes, config, seed=7)
    assert (plan.id, plan.seed, plan.deviations) == ("rotation.mistral", 7, DEVIATIONS)
    keys = [deviation.split(":")[0] for deviation in DEVIATIONS]
    assert keys == ["no-mean-centring", "no-r3", "no-r4", "r2-per-head", "gain-kept-neutral", "fold-float32"]


# ---------------------------------------------------------------------------------------------------------- head
def test_untying_a_tied_head() -> None:
    shapes, config = checkpoint("llama", tied=True)
    plan = plan_rotation(shapes, config)
    head = plan.output("lm_head.weight")
    assert (head.source, head.module, head.role) == ("model.embed_tokens.weight", "lm_head", Role.HEAD)
    assert plan.config_updates == {"tie_word_embeddings": False}
    assert [output.name for output in plan.outputs if output.source not in shapes] == []


def test_untying_reaches_the_text_config() -> None:
    shapes, config = checkpoint("llama", tied=True)
    config["text_config"] = {"tie_word_embeddings": True, "other": 1}
    updated = plan_rotation(shapes, config).updated_config(config)
    assert updated["tie_word_embeddings"] is False
    assert updated["text_config"] == {"tie_word_embeddings": False, "other": 1}
    assert config["text_config"] == {"tie_word_embeddings": True, "other": 1}


@pytest.mark.parametrize("tied", [True, False])
def test_a_config_that_does_not_say_is_made_explicit(tied: bool) -> None:
    shapes, config = checkpoint("llama", tied=tied)
    del config["tie_word_embeddings"]
    assert plan_identity(shapes, config).config_updates == {"tie_word_embeddings": tied}
    assert plan_rotation(shapes, config).config_updates == {"tie_word_embeddings": False}


def test_a_head_beside_a_tied_flag_is_dropped_with_its_reason() -> None:
    shapes, config = checkpoint("qwen2", tied=True)
    shapes["lm_head.weight"] = (50, 36)
    plan = plan_rotation(shapes, config)
    assert [(drop.name, "tie_word_embeddings" in drop.reason) for drop in plan.dropped] == [("lm_head.weight", True)]
    assert plan.output("lm_head.weight").source == "model.embed_tokens.weight"


# -------------------------------------------------------------------------------------------------------- claims
@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3", "smollm3", "granite", "phi3"])
@pytest.mark.parametrize("tied", [True, False])
def test_every_source_tensor_is_claimed_once(model_type: str, tied: bool) -> None:
    shapes, config = checkpoint(model_type, tied=tied)
    identity = plan_identity(shapes, config)
    assert sorted(output.name for output in identity.outputs) == sorted(shapes)
    assert all(output.source == output.name and output.shape == shapes[output.name] for output in identity.outputs)
    rotated = plan_rotation(shapes, config)
    assert sorted({output.source for output in rotated.outputs}) == sorted(shapes)


def test_roles_and_modules() -> None:
    shapes, config = checkpoint("qwen2", tied=False)
    found = {output.name: (output.role.value, output.module) for output in plan_identity(shapes, config).outputs}
    stem = "model.layers.0."
    assert found["model.embed_tokens.weight"] == ("embedding", "model.embed_tokens")
    assert found["lm_head.weight"] == ("head", "lm_head")
    assert found["model.norm.weight"] == ("norm", None)
    assert found[stem + "self_attn.q_proj.weight"] == ("q", stem + "self_attn.q_proj")
    assert found[stem + "self_attn.q_proj.bias"] == ("bias", None)
    assert found[stem + "mlp.down_proj.weight"] == ("down", stem + "mlp.down_proj")
    assert {role for role, _ in found.values()} == {
        "embedding", "head", "q", "k", "v", "o", "gate", "up", "down", "norm", "bias",
    }  # fmt: skip


def test_rotary_tables_are_dropped_with_their_reason() -> None:
    shapes, config = checkpoint("llama")
    names = ["model.rotary_emb.inv_freq", "model.layers.2.self_attn.rotary_emb.inv_freq"]
    shapes |= dict.fromkeys(names, (6,))
    for plan in (plan_identity(shapes, config), plan_rotation(shapes, config)):
        assert [drop.name for drop in plan.dropped] == names
        assert all("rotary" in drop.reason for drop in plan.dropped)


def test_leftovers_and_missing_tensors_are_listed() -> None:
    shapes, config = checkpoint("llama")
    del shapes["model.layers.1.mlp.up_proj.weight"]
    shapes["model.layers.1.mlp.extra.weight"] = (3, 3)
    shapes["model.layers.1.self_attn.q_proj.bias"] = (48,)
    for plan in (plan_identity, plan_rotation):
        with pytest.raises(SourceError) as error:
            plan(shapes, config)
        assert "missing tensors: model.layers.1.mlp.up_proj.weight;" in error.value.message
        assert (
            "no rule claims: model.layers.1.mlp.extra.weight, model.layers.1.self_attn.q_proj.bias"
            in error.value.message
        )


def test_a_long_list_is_cut() -> None:
    shapes, config = checkpoint("llama")
    shapes |= {f"extra.{index}": (1,) for index in range(20)}
    with pytest.raises(SourceError, match=r"extra\.7 and 12 more"):
        plan_identity(shapes, config)


def test_a_wrong_shape_names_the_tensor() -> None:
    shapes, config = checkpoint("qwen2")
    shapes["model.layers.2.self_attn.v_proj.bias"] = (25,)
    with pytest.raises(SourceError, match=r"layers\.2\.self_attn\.v_proj\.bias: expected \[24\], found \[25\]"):
        plan_rotation(shapes, config)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": None}, "hidden_size: expected a positive integer, found None"),
        ({"num_hidden_layers": "3"}, "num_hidden_layers: expected a positive integer, found '3'"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is no multiple of num_key_value_heads 3"),
        ({"head_dim": None, "num_attention_heads": 5, "num_key_value_heads": 5}, "hidden_size 36 is no multiple"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings: expected true or false"),
        ({"model_type": None}, "model_type: expected a string"),
    ],
)
def test_a_bad_config_is_refused(changes: dict[str, Any], words: str) -> None:
    shapes, config = checkpoint("llama")
    with pytest.raises(SourceError, match=words):
        plan_identity(shapes, config | changes)


def test_head_dim_defaults() -> None:
    shapes, config = checkpoint("llama", num_attention_heads=3, num_key_value_heads=3, head_dim=12)
    del config["head_dim"]
    assert plan_identity(shapes, config)
    shapes, config = checkpoint("qwen3", head_dim=128)
    del config["head_dim"]
    assert plan_identity(shapes, config)


# ------------------------------------------------------------------------------------------------------- refusals
def test_gemma3_converts_and_does_not_rotate() -> None:
    shapes, config = gemma3()
    plan = plan_identity(shapes, config)
    assert len(plan.outputs) == len(shapes)
    assert plan.output("model.layers.0.mlp.gate_proj.weight").role is Role.GATE
    with pytest.raises(UserError, match=r"'gemma3_text' cannot be rotated.*post-norms"):
        plan_rotation(shapes, config)


@pytest.mark.parametrize("model_type", ["gemma2", "gemma3", "olmo2", "olmo3", "exaone4", "glm4"])
def test_post_norm_architectures_are_refused_with_the_reason(model_type: str) -> None:
    with pytest.raises(
        UserError, match=f"(?s){model_type}.* cannot be rotated.*post-norms.*not known without rotation either"
    ):
        plan_rotation({}, {"model_type": model_type})


@pytest.mark.parametrize("model_type", ["cohere", "cohere2", "phi", "stablelm", "starcoder2", "gpt_neox", "gpt2"])
def test_layer_norm_architectures_are_refused_with_the_reason(model_type: str) -> None:
    with pytest.raises(
        UserError, match=f"(?s){model_type}.* cannot be rotated.*LayerNorms.*not known without rotation either"
    ):
        plan_rotation({}, {"model_type": model_type})
    with pytest.raises(UserError, match=f"model_type '{model_type}' is not known"):
        plan_identity({}, {"model_type": model_type})


def test_an_unknown_architecture_names_the_known_ones() -> None:
    with pytest.raises(UserError, match=f"'mamba'.*known: {', '.join(sorted(FAMILIES))}"):
        plan_identity({}, {"model_type": "mamba"})
    rotated = [name for name, family in FAMILIES.items() if family.rotation_refusal is None]
    assert "gemma3_text" not in rotated
    with pytest.raises(UserError, match=f"'mamba'; known: {', '.join(rotated)}\n"):
        plan_rotation({}, {"model_type": "mamba"})


def test_transforms_by_name() -> None:
    shapes, config = checkpoint("qwen2")
    assert plan_rotation(shapes, config, transform="rotation.qwen2") == plan_rotation(shapes, config)
    with pytest.raises(UserError, match=r"'rotation\.llama' does not fit model_type 'qwen2'"):
        plan_rotation(shapes, config, transform="rotation.llama")
    with pytest.raises(UserError, match=r"unknown transform 'quarot'; known: rotation\.auto, rotation\.llama"):
        plan_rotation(shapes, config, transform="quarot")


def test_an_impossible_size_is_refused_before_any_work() -> None:
    shapes, config = checkpoint("llama", hidden_size=92)
    with pytest.raises(UserError, match="hidden_size 92: no Hadamard matrix"):
        plan_rotation(shapes, config)
    shapes, config = checkpoint("llama", head_dim=6)
    with pytest.raises(UserError, match="head_dim 6: no Hadamard matrix"):
        plan_rotation(shapes, config)
    with pytest.raises(UserError, match="seed -1"):
        plan_rotation(*checkpoint("llama"), seed=-1)


# --------------------------------------------------------------------------------------- print, serialize, diff
def test_json_round_trip() -> None:
    shapes, config = checkpoint("llama", attention_bias=True)
    shapes["model.rotary_emb.inv_freq"] = (6,)
    fused = plan_rotation(*checkpoint("phi3"), signed_r2=True)
    for plan in (plan_rotation(shapes, config, signed_r2=True), plan_identity(shapes, config), fused):
        text = json.dumps(plan.to_json())
        assert TransformPlan.from_json(json.loads(text)) == plan


@pytest.mark.parametrize(
    "damage", [{"outputs": None}, {"outputs": [{"name": "x"}]}, {"seed": 1, "id": 2, "outputs": [3]}]
)
def test_json_that_is_not_a_plan(damage: dict[str, Any]) -> None:
    data = plan_identity(*checkpoint("llama")).to_json()
    with pytest.raises(UserError, match="not a transform plan"):
        TransformPlan.from_json(data | damage)
    data["outputs"][0]["ops"] = [{"op": "rotate_heads", "rotation": {"n": 4}, "axis": "sideways"}]
    with pytest.raises(UserError, match="rotate_heads"):
        TransformPlan.from_json(data)
    data["outputs"][0]["ops"] = [{"op": "on_rows", "start": 0, "stop": 4, "fold": {"op": "fill", "value": 1.0}}]
    with pytest.raises(UserError, match="on_rows holds fill"):
        TransformPlan.from_json(data)


def test_a_plan_prints() -> None:
    shapes, config = checkpoint("llama")
    shapes["model.rotary_emb.inv_freq"] = (6,)
    rows = {row.name: row for row in plan_rotation(shapes, config).describe()}
    assert rows["model.layers.0.self_attn.v_proj.weight"].folds == (
        "· diag(model.layers.0.input_layernorm.weight)  · R[H36 lane 0]  heads Rᵀ[H12 plain] ·"
    )
    assert (rows["lm_head.weight"].source, rows["lm_head.weight"].shape) == ("model.embed_tokens.weight", "[50, 36]")
    assert rows["model.rotary_emb.inv_freq"].role == "dropped"


def test_plans_diff() -> None:
    shapes, config = checkpoint("llama")
    plan = plan_rotation(shapes, config)
    assert plan.diff(plan_rotation(shapes, config)) == ()
    signed = plan.diff(plan_rotation(shapes, config, signed_r2=True))
    assert len(signed) == 2 * 6  # v and o of three layers, old and new line
    assert all("v_proj" in line or "o_proj" in line for line in signed)
    assert "id: 'rotation.llama' -> 'identity'" in plan.diff(plan_identity(shapes, config))


def test_half_a_sign_stream_is_no_rotation() -> None:
    with pytest.raises(ValueError, match="need both or neither"):
        Rotation(n=4, signs_lane=1)


def test_an_unknown_output_is_a_key_error() -> None:
    plan = TransformPlan(id="identity", outputs=(OutputTensor(name="a", source="a", shape=(1,)),))
    assert plan.output("a").source == "a"
    with pytest.raises(KeyError):
        plan.output("b")
