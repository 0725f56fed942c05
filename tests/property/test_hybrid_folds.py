"""qwen3_5: exact in float64 in every spelling, and a fault in any corridor shows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.oracles.decoder import Weights, random_config, random_weights
from tests.property.test_folds import EXACT, fold, logit_error, shapes
from tqtool.errors import UserError
from tqtool.transform.folds import Fill, Reshape, RotateHeads, RotateInput, RotateOutput, Rotation, ScaleInput, Shift
from tqtool.transform.plan import OutputTensor, TransformPlan, plan_identity, plan_rotation

CONFIG = random_config("qwen3_5", tied=False)


def spelled(weights: Weights, spelling: str) -> Weights:
    """``weights`` of the text model alone, as a larger model's part or as mlx-lm stores it."""
    if spelling == "nested":
        return {name.replace("model.", "model.language_model."): array for name, array in weights.items()}
    if spelling == "mlx":
        return fold(weights, plan_identity(shapes(weights), CONFIG))
    return weights


@pytest.mark.parametrize("spelling", ["text", "nested", "mlx"])
def test_every_spelling_is_exact(spelling: str) -> None:
    weights = spelled(random_weights(CONFIG, seed=1), spelling)
    plan = plan_rotation(shapes(weights), CONFIG)
    assert logit_error(CONFIG, weights, plan) < EXACT
    assert all(output.name.startswith("language_model.") for output in plan.outputs)
    assert not any(isinstance(op, RotateHeads) for output in plan.outputs for op in output.ops)
    assert any(line.startswith("no-r2:") for line in plan.deviations)


def test_the_identity_stores_as_mlx_lm_does_and_can_be_read_again() -> None:
    weights = random_weights(CONFIG, seed=2)
    once = fold(weights, plan_identity(shapes(weights), CONFIG))
    plan = plan_identity(shapes(once), CONFIG)
    assert all(not output.ops for output in plan.outputs)
    assert once["language_model.model.layers.0.linear_attn.conv1d.weight"].shape == (56 - 8 + 8, 4, 1)
    gain = "model.layers.1.self_attn.q_norm.weight"
    assert np.array_equal(once[f"language_model.{gain}"], 1 + weights[gain])


def test_a_plan_survives_json() -> None:
    plan = plan_rotation(shapes(random_weights(CONFIG, seed=1)), CONFIG)
    assert TransformPlan.from_json(plan.to_json()) == plan


Change = Callable[[OutputTensor], OutputTensor]


def _without(kind: type, ends: str) -> Change:
    def change(output: OutputTensor) -> OutputTensor:
        if not output.name.endswith(ends):
            return output
        return dataclasses.replace(output, ops=tuple(op for op in output.ops if not isinstance(op, kind)))

    return change


def _swapped(old: type, new: Any, ends: str) -> Change:
    def change(output: OutputTensor) -> OutputTensor:
        if not output.name.endswith(ends):
            return output
        return dataclasses.replace(output, ops=tuple(new(op) if isinstance(op, old) else op for op in output.ops))

    return change


FAULTS: dict[str, Change] = {
    "gain as it is stored, not 1 + w": _swapped(
        ScaleInput, lambda op: dataclasses.replace(op, offset=0.0), "in_proj_z.weight"
    ),
    "rates read the old basis": _without(RotateInput, "in_proj_a.weight"),
    "rates without the gain": _without(ScaleInput, "in_proj_b.weight"),
    "q, k, v of linear attention read the old basis": _without(RotateInput, "in_proj_qkv.weight"),
    "linear attention writes the old basis": _without(RotateOutput, "out_proj.weight"),
    "inner gain not shifted": _without(Shift, "q_norm.weight"),
    "folded gain zero, as neutral in the other layout": _swapped(
        Fill, lambda op: Fill(value=0.0), "input_layernorm.weight"
    ),
    "values rotated in spite of the gate": lambda output: (
        dataclasses.replace(output, ops=(*output.ops, RotateHeads(rotation=Rotation(n=12), axis="output")))
        if output.name.endswith("v_proj.weight")
        else dataclasses.replace(output, ops=(*output.ops, RotateHeads(rotation=Rotation(n=12), axis="input")))
        if output.name.endswith("self_attn.o_proj.weight")
        else output
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_shows_in_the_logits(fault: str) -> None:
    weights = random_weights(CONFIG, seed=4)
    plan = plan_rotation(shapes(weights), CONFIG)
    broken = dataclasses.replace(plan, outputs=tuple(FAULTS[fault](output) for output in plan.outputs))
    assert broken != plan
    assert logit_error(CONFIG, weights, broken) > 1e-3


def test_convolutions_keep_their_values() -> None:
    weights = random_weights(CONFIG, seed=5)
    plan = plan_rotation(shapes(weights), CONFIG)
    name = "model.layers.0.linear_attn.conv1d.weight"
    output = plan.output(f"language_model.{name}")
    assert output.ops == (Reshape(shape=weights[name].shape),)
    assert np.array_equal(fold(weights, plan)[output.name].reshape(-1), weights[name].reshape(-1))


def test_a_head_size_without_hadamard_matrix_is_no_hindrance() -> None:
    """No head is rotated here; a hidden size without one still is refused."""
    config = CONFIG | {"head_dim": 236}
    weights = random_weights(config, seed=6)
    assert logit_error(config, weights, plan_rotation(shapes(weights), config)) < EXACT
    wide = CONFIG | {"hidden_size": 22}
    with pytest.raises(UserError, match="hidden_size"):
        plan_rotation(shapes(random_weights(wide, seed=6)), wide)
