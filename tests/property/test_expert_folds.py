"""Experts fold like any reader and writer; both spellings of a checkpoint, and planted faults."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from tests.oracles import experts
from tests.oracles.decoder import Weights, random_config, random_weights
from tests.property.test_folds import EXACT, fold, logit_error, shapes
from tqtool.errors import SourceError
from tqtool.transform.channels import choose_channels, mlps, with_channels
from tqtool.transform.folds import RotateInput, RotateOutput, ScaleInput
from tqtool.transform.plan import OutputTensor, Role, TransformPlan, plan_identity, plan_rotation

KINDS = ["qwen3_moe", "mixtral"]


def stacked(weights: Weights, plan: TransformPlan) -> Weights:
    """The same checkpoint in mlx-lm's spelling: a tensor for all experts of a layer."""
    taken = {part.source for output in plan.outputs for part in output.parts}
    rest = {name: array for name, array in weights.items() if name not in taken}
    stacks = [output for output in plan.outputs if output.parts]
    return rest | {stack.name: np.stack([weights[part.source] for part in stack.parts]) for stack in stacks}


@pytest.mark.parametrize("kind", KINDS)
def test_both_spellings_give_the_same_parts_under_the_same_names(kind: str) -> None:
    config = random_config(kind)
    weights = random_weights(config, seed=1)
    plan = plan_rotation(shapes(weights), config)
    other = stacked(weights, plan)
    again = plan_rotation(shapes(other), config)
    assert [piece.name for piece in plan.pieces()] == [piece.name for piece in again.pieces()]
    assert [output.name for output in plan.outputs] == [output.name for output in again.outputs]
    one, two = fold(weights, plan), fold(other, again)
    assert all(np.array_equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("kind", KINDS)
def test_the_identity_takes_every_expert_as_it_is(kind: str) -> None:
    config = random_config(kind, tied=False)
    weights = random_weights(config, seed=3)
    folded = fold(weights, plan_identity(shapes(weights), config))
    assert folded.keys() == weights.keys()
    assert all(np.array_equal(folded[name], weights[name]) for name in weights)


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_survives_json(kind: str) -> None:
    config = random_config(kind)
    plan = plan_rotation(shapes(random_weights(config, seed=1)), config)
    assert TransformPlan.from_json(plan.to_json()) == plan


def _expert(role: Role, kind: type, only: int) -> Callable[[OutputTensor], OutputTensor]:
    """Take one fold from one expert."""

    def change(output: OutputTensor) -> OutputTensor:
        if output.role is not role or not output.parts:
            return output
        part = output.parts[only]
        bare = dataclasses.replace(part, ops=tuple(op for op in part.ops if not isinstance(op, kind)))
        return dataclasses.replace(output, parts=(*output.parts[:only], bare, *output.parts[only + 1 :]))

    return change


def _router(kind: type) -> Callable[[OutputTensor], OutputTensor]:
    def change(output: OutputTensor) -> OutputTensor:
        if output.role is not Role.ROUTER:
            return output
        return dataclasses.replace(output, ops=tuple(op for op in output.ops if not isinstance(op, kind)))

    return change


FAULTS = {
    "gain not folded into the router": _router(ScaleInput),
    "router not rotated": _router(RotateInput),
    "gain not folded into one expert": _expert(Role.UP, ScaleInput, 2),
    "one expert reads the old basis": _expert(Role.GATE, RotateInput, 2),
    "one expert writes the old basis": _expert(Role.DOWN, RotateOutput, 2),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_planted_fault_shows_in_the_logits(kind: str, fault: str) -> None:
    config = random_config(kind)
    weights = random_weights(config, seed=4)
    plan = plan_rotation(shapes(weights), config)
    broken = dataclasses.replace(plan, outputs=tuple(FAULTS[fault](output) for output in plan.outputs))
    assert broken != plan
    assert logit_error(config, weights, plan) < EXACT
    assert logit_error(config, weights, broken) > 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_channels_of_one_expert_are_reordered_for_it_alone(kind: str) -> None:
    config = random_config(kind)
    weights = random_weights(config, seed=6)
    plan = plan_rotation(shapes(weights), config)
    found = mlps(plan)
    layers = [layer for layer in range(config["num_hidden_layers"]) if experts.is_sparse(config, layer)]
    dense = config["num_hidden_layers"] - len(layers)
    assert len(found) == dense + len(layers) * experts.count_of(config)
    rng = np.random.default_rng(0)
    mixed = {
        path: choose_channels(rng.uniform(0.5, 2, down.shape[1]), rng.uniform(0, 1, down.shape[1]))
        for path, down in list(found.items())[1::2]
    }
    reordered = with_channels(plan, mixed)
    assert reordered != plan
    # Scales are float32 and multiply one side and divide the other: 2^-24 twice for each of three layers.
    assert logit_error(config, weights, reordered) < 1e-5


def test_absurd_numbers_of_experts_are_refused_before_they_are_listed() -> None:
    config = random_config("mixtral")
    weights = random_weights(config, seed=1)
    for spelling in (weights, stacked(weights, plan_identity(shapes(weights), config))):
        with pytest.raises(SourceError, match="num_local_experts 1000000000: the checkpoint has at most"):
            plan_identity(shapes(spelling), config | {"num_local_experts": 10**9})


def test_a_missing_expert_is_named() -> None:
    config = random_config("qwen3_moe")
    weights = random_weights(config, seed=1)
    del weights["model.layers.2.mlp.experts.3.up_proj.weight"]
    with pytest.raises(SourceError, match=r"missing tensors: model\.layers\.2\.mlp\.experts\.3\.up_proj\.weight"):
        plan_identity(shapes(weights), config)


@pytest.mark.parametrize("field", [{"decoder_sparse_step": 0}, {"mlp_only_layers": 3}, {"num_experts": 0}])
def test_impossible_settings_are_refused(field: dict[str, object]) -> None:
    config = random_config("qwen3_moe")
    weights = random_weights(config, seed=1)
    with pytest.raises(SourceError, match=f"config.json: {next(iter(field))}"):
        plan_identity(shapes(weights), config | field)
