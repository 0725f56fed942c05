"""Folds change weights and not the function: an independent float64 decoder judges, and planted faults must show."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.oracles.decoder import MULTIPLIERS, Weights, forward, random_config, random_weights
from tests.support.memory import added_peak_bytes
from tqtool.errors import SourceError
from tqtool.mathx.hadamard import require_size
from tqtool.transform import apply
from tqtool.transform.apply import apply_folds
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

EXACT = 1e-10  # relative to the largest logit: three layers of float64 rounding leave about 1e-14
TOKENS = np.array([3, 1, 4, 1, 5, 9, 2, 6, 49, 0, 7])
BIASED = {"attention_bias": True, "mlp_bias": True}


def fold(weights: Weights, plan: TransformPlan) -> Weights:
    return {piece.name: apply_folds(piece, weights.__getitem__, dtype=np.float64) for piece in plan.pieces()}


def shapes(weights: Weights) -> dict[str, tuple[int, ...]]:
    return {name: array.shape for name, array in weights.items()}


def logit_error(config: dict[str, Any], weights: Weights, plan: TransformPlan) -> float:
    """Largest difference of logits, folded against source, relative to the largest logit."""
    reference = forward(weights, config, TOKENS)
    folded = forward(fold(weights, plan), plan.updated_config(config), TOKENS)
    return float(np.abs(folded - reference).max() / np.abs(reference).max())


# ---------------------------------------------------------------------------------------------------- exactness
FOLDED: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", BIASED),
    ("mistral", {}),
    ("qwen2", {}),
    ("qwen3", {}),
    ("qwen3", {"attention_bias": True}),
    ("smollm3", {"no_rope_layers": [1, 0, 1]}),
    ("smollm3", BIASED),
    ("granite", {}),
    ("granite", BIASED),
    ("phi3", {}),
    ("phi3", {"partial_rotary_factor": 0.5}),
    ("qwen3_moe", {}),
    ("mixtral", {}),
    ("qwen3_5", {}),
    ("qwen3_5_moe", {}),
]


def case_id(value: str | dict[str, Any]) -> str:
    """Of a model type, or of changes to its config."""
    return value if isinstance(value, str) else "-".join(value) or "plain"


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(("model_type", "changes"), FOLDED, ids=case_id)
def test_folded_logits_are_the_source_logits(model_type: str, changes: dict[str, Any], tied: bool) -> None:
    config = random_config(model_type, tied=tied, **changes)
    weights = random_weights(config, seed=1)
    plan = plan_rotation(shapes(weights), config, seed=42)
    assert logit_error(config, weights, plan) < EXACT
    assert plan.updated_config(config)["tie_word_embeddings"] is False


@settings(max_examples=30, deadline=None)
@given(
    model_type=st.sampled_from(sorted({model_type for model_type, _ in FOLDED})),
    tied=st.booleans(),
    hidden=st.sampled_from([12, 20, 28, 36, 44, 52, 60, 64, 68, 72, 80, 100]),
    head_dim=st.sampled_from([2, 4, 12, 16, 20, 24, 28, 36, 80, 96]),
    kv_heads=st.sampled_from([1, 2, 3]),
    group=st.sampled_from([1, 2, 3]),
    biases=st.booleans(),
    signed_r2=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_geometry_is_exact(
    model_type: str,
    tied: bool,
    hidden: int,
    head_dim: int,
    kv_heads: int,
    group: int,
    biases: bool,
    signed_r2: bool,
    seed: int,
) -> None:
    config = random_config(
        model_type,
        tied=tied,
        hidden_size=hidden,
        head_dim=head_dim,
        num_key_value_heads=kv_heads,
        num_attention_heads=kv_heads * group,
        **(BIASED if biases else {}),
    )
    weights = random_weights(config, seed=seed)
    plan = plan_rotation(shapes(weights), config, seed=seed, signed_r2=signed_r2)
    assert logit_error(config, weights, plan) < EXACT


def test_rotation_spreads_an_outlier_channel() -> None:
    config = random_config("llama", hidden_size=576)
    weights = random_weights(config, seed=2)
    weights["model.layers.0.mlp.gate_proj.weight"][:, 17] *= 100.0
    plan = plan_rotation(shapes(weights), config)
    rows = fold(weights, plan)["model.layers.0.mlp.gate_proj.weight"]
    peak = np.abs(rows).max(axis=1) / np.sqrt(np.mean(rows**2, axis=1))
    assert peak.max() < 6.0  # one channel of 576 alone would stand at sqrt(576) = 24


def test_the_identity_plan_changes_nothing() -> None:
    config = random_config("qwen2", tied=False)
    weights = random_weights(config, seed=3)
    folded = fold(weights, plan_identity(shapes(weights), config))
    assert folded.keys() == weights.keys()
    assert all(np.array_equal(folded[name], weights[name]) for name in weights)


def test_zero_centred_gains_fold_as_one_plus_w() -> None:
    rng = np.random.default_rng(12)
    arrays = {"w": rng.standard_normal((5, 36)), "g": rng.standard_normal(36)}
    output = OutputTensor(name="w", source="w", shape=(5, 36), ops=(ScaleInput(gain="g", offset=1.0),))
    assert np.array_equal(apply_folds(output, arrays.__getitem__, dtype=np.float64), arrays["w"] * (1 + arrays["g"]))


# ----------------------------------------------------------------------------------------------- planted faults
def _every(plan: TransformPlan, change: Callable[[OutputTensor], OutputTensor]) -> TransformPlan:
    return dataclasses.replace(plan, outputs=tuple(change(output) for output in plan.outputs))


def _with_ops(output: OutputTensor, ops: tuple[Any, ...]) -> OutputTensor:
    return dataclasses.replace(output, ops=ops)


def _without(kind: type, **match: Any) -> Callable[[OutputTensor], OutputTensor]:
    def change(output: OutputTensor) -> OutputTensor:
        if any(getattr(output, key) != value for key, value in match.items()):
            return output
        return _with_ops(output, tuple(op for op in output.ops if not isinstance(op, kind)))

    return change


def _rotate_before_gain(output: OutputTensor) -> OutputTensor:
    ops = sorted(output.ops, key=lambda op: isinstance(op, ScaleInput))
    return _with_ops(output, tuple(ops))


def _v_on_the_input_axis(output: OutputTensor) -> OutputTensor:
    if output.role is not Role.V:
        return output
    return _with_ops(
        output, tuple(dataclasses.replace(op, axis="input") if isinstance(op, RotateHeads) else op for op in output.ops)
    )


def _full_width_r2(output: OutputTensor) -> OutputTensor:
    if output.role is not Role.O:
        return output
    ops = (*(op for op in output.ops if not isinstance(op, RotateHeads)), RotateInput(rotation=Rotation(n=48)))
    return _with_ops(output, ops)


def _half_of_r4(output: OutputTensor) -> OutputTensor:
    if output.role is not Role.DOWN:
        return output
    return _with_ops(output, (*output.ops, RotateInput(rotation=Rotation(n=44))))


def _unsigned_writers(output: OutputTensor) -> OutputTensor:
    return _with_ops(
        output,
        tuple(
            RotateOutput(rotation=Rotation(n=op.rotation.n)) if isinstance(op, RotateOutput) else op
            for op in output.ops
        ),
    )


def _rotated_keys(output: OutputTensor) -> OutputTensor:
    if output.role is not Role.K:
        return output
    return _with_ops(output, (*output.ops, RotateHeads(rotation=Rotation(n=12), axis="output")))


FAULTS: dict[str, Callable[[OutputTensor], OutputTensor]] = {
    "rotation before gain": _rotate_before_gain,
    "gain not folded": _without(ScaleInput),
    "gain not folded into the head": _without(ScaleInput, role=Role.HEAD),
    "norms not neutral": _without(Fill),
    "R2 on v's input axis": _v_on_the_input_axis,
    "R2 missing in o": _without(RotateHeads, role=Role.O),
    "v bias not rotated": _without(RotateHeads, role=Role.BIAS),
    "o and down bias not rotated": _without(RotateOutput, role=Role.BIAS),
    "down not rotated": _without(RotateOutput, role=Role.DOWN),
    "full-width R2": _full_width_r2,
    "offline half of R4": _half_of_r4,
    "writers without signs": _unsigned_writers,
    "keys rotated under RoPE": _rotated_keys,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_shows_in_the_logits(fault: str) -> None:
    config = random_config("llama", tied=True, **BIASED)
    weights = random_weights(config, seed=4)
    plan = plan_rotation(shapes(weights), config)
    broken = _every(plan, FAULTS[fault])
    assert broken != plan
    assert logit_error(config, weights, plan) < EXACT
    assert logit_error(config, weights, broken) > 1e-3


def _r2_on_rows(start: int, stop: int) -> Callable[[OutputTensor], OutputTensor]:
    def change(output: OutputTensor) -> OutputTensor:
        moved = [dataclasses.replace(op, start=start, stop=stop) if isinstance(op, OnRows) else op for op in output.ops]
        return _with_ops(output, tuple(moved))

    return change


# qkv of 4 query and 2 kv heads of 12: rows 0…47 are q, 48…71 are k, 72…95 are v.
FUSED_FAULTS = {
    "R2 missing in qkv": _without(OnRows),
    "R2 on k": _r2_on_rows(48, 72),
    "R2 on all of qkv": _r2_on_rows(0, 96),
    "R2 one head early": _r2_on_rows(60, 84),
    "R2 on one of two heads": _r2_on_rows(84, 96),
    "R2 missing in o": _without(RotateHeads, role=Role.O),
    "gain not folded into gate_up": _without(ScaleInput, role=Role.GATE_UP),
}


@pytest.mark.parametrize("fault", FUSED_FAULTS)
def test_a_planted_fault_in_a_fused_projection_shows(fault: str) -> None:
    config = random_config("phi3", tied=True)
    weights = random_weights(config, seed=4)
    plan = plan_rotation(shapes(weights), config)
    broken = _every(plan, FUSED_FAULTS[fault])
    assert broken != plan
    assert logit_error(config, weights, plan) < EXACT
    assert logit_error(config, weights, broken) > 1e-3


@pytest.mark.parametrize("name", MULTIPLIERS)
def test_the_oracle_knows_each_multiplier_of_granite(name: str) -> None:
    config = random_config("granite")
    weights = random_weights(config, seed=13)
    reference = forward(weights, config, TOKENS)
    other = forward(weights, config | {name: 2 * config[name]}, TOKENS)
    assert np.abs(other - reference).max() > 1e-3 * np.abs(reference).max()


def test_a_missing_qwen2_bias_fold_shows() -> None:
    config = random_config("qwen2")
    weights = random_weights(config, seed=5)
    plan = plan_rotation(shapes(weights), config)
    assert logit_error(config, weights, _every(plan, _without(RotateHeads, role=Role.BIAS))) > 1e-3


@pytest.mark.parametrize("hidden", [12, 60])
def test_the_transposed_matrix_on_one_side_shows(hidden: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """H on readers and Hᵀ on writers: wrong wherever the factor is not symmetric."""
    config = random_config("llama", hidden_size=hidden, head_dim=16)
    weights = random_weights(config, seed=6)
    plan = plan_rotation(shapes(weights), config)
    right = apply.hadamard_transform

    def wrong(x: Any, *, axis: int, **options: Any) -> Any:
        return right(x, axis=axis, transpose=axis == 0 and x.ndim == 2, **options)

    monkeypatch.setattr(apply, "hadamard_transform", wrong)
    assert logit_error(config, weights, plan) > 1e-3


def test_a_tied_head_left_tied_shows() -> None:
    config = random_config("llama", tied=True)
    weights = random_weights(config, seed=7)
    plan = plan_rotation(shapes(weights), config)
    assert logit_error(config, weights, dataclasses.replace(plan, config_updates={})) > 1e-3


# ------------------------------------------------------------------------------------- precision, bytes, memory
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_float32_folds_stay_within_their_rounding_bound(dtype: Any) -> None:
    config = random_config("qwen2", hidden_size=576, head_dim=64)
    stored = {name: array.astype(dtype) for name, array in random_weights(config, seed=8).items()}
    for output in plan_rotation(shapes(stored), config, signed_r2=True).outputs:
        single = apply_folds(output, stored.__getitem__)
        double = apply_folds(output, stored.__getitem__, dtype=np.float64)
        assert single.dtype == np.float32
        if not output.ops or isinstance(output.ops[0], Fill):
            assert np.array_equal(single, double)
            continue
        # Each fold of n = m·2^k rounds k + m + 1 times (gains: once), relative to sums that never exceed sqrt(n) times
        # the largest vector norm; folds are orthogonal, so norms before and after agree.
        roundings = sum(
            sum(require_size(op.rotation.n, what="n")) + 2 for op in output.ops if not isinstance(op, ScaleInput)
        )
        norm = np.sqrt(max((double**2).sum(axis=axis).max() for axis in range(double.ndim)))
        assert np.abs(single - double).max() <= (roundings + 1) * 2.0**-24 * norm


def test_inputs_are_never_written() -> None:
    config = random_config("qwen3", tied=False)
    weights = {name: array.astype(np.float32) for name, array in random_weights(config, seed=9).items()}
    for array in weights.values():
        array.flags.writeable = False
    before = {name: array.copy() for name, array in weights.items()}
    for output in plan_rotation(shapes(weights), config).outputs:
        folded = apply_folds(output, weights.__getitem__)
        assert folded.flags.writeable
        assert not np.shares_memory(folded, weights[output.source])
    assert all(np.array_equal(before[name], weights[name]) for name in weights)


def test_the_same_seed_gives_the_same_bytes_and_another_seed_does_not() -> None:
    config = random_config("llama")
    weights = random_weights(config, seed=10)
    first, again, other = (fold(weights, plan_rotation(shapes(weights), config, seed=seed)) for seed in (42, 42, 43))
    assert all(first[name].tobytes() == again[name].tobytes() for name in first)
    assert all(not np.array_equal(first[name], other[name]) for name in first if name.endswith("mlp.down_proj.weight"))


PREPARE = """
import numpy as np
from tqtool.transform.apply import apply_folds
from tqtool.transform.plan import OutputTensor, RotateHeads, RotateInput, RotateOutput, Rotation, ScaleInput

shape = (17408, 2560)
weight = np.zeros(shape, np.uint16).view(np.float16)
weight += np.float16(1)  # touch every page
r1, r2 = Rotation(n=2560, signs_lane=0, seed=42), Rotation(n=17408)
ops = (ScaleInput(gain="g"), RotateInput(rotation=r1), RotateOutput(rotation=r2))
output = OutputTensor(name="w", source="w", shape=shape, ops=ops)
arrays = {"w": weight, "g": np.ones(2560, np.float32)}
small = OutputTensor(name="w", source="w", shape=(20, 2560), ops=ops[:2])
apply_folds(small, {"w": weight[:20], "g": arrays["g"]}.__getitem__)  # everything is loaded
"""


def test_peak_memory_is_one_float32_copy_and_a_panel_per_thread() -> None:
    added, copy = added_peak_bytes(PREPARE, "apply_folds(output, arrays.__getitem__)"), 17408 * 2560 * 4
    panels = (os.cpu_count() or 1) * 64 * (17408 + 2 * 68)
    assert 0.9 * copy < added < copy + panels + (16 << 20)  # the allocator keeps freed panels


def test_an_array_that_does_not_fit_the_plan_is_refused() -> None:
    output = OutputTensor(name="w", source="w", shape=(4, 8), ops=(ScaleInput(gain="g"),))
    arrays: dict[str, Any] = {"w": np.zeros((4, 8), np.float32), "g": np.zeros(7, np.float32)}
    with pytest.raises(SourceError, match=r"g: expected \[8\], found \[7\]"):
        apply_folds(output, arrays.__getitem__)
    arrays["w"] = np.zeros((4, 7), np.float32)
    with pytest.raises(SourceError, match=r"w: expected \[4, 8\], found \[4, 7\]"):
        apply_folds(output, arrays.__getitem__)
    arrays["w"] = np.zeros((4, 8), np.int8)
    with pytest.raises(SourceError, match="w: expected a float dtype, found int8"):
        apply_folds(output, arrays.__getitem__)
    rotated = dataclasses.replace(output, ops=(RotateOutput(rotation=Rotation(n=8)),))
    with pytest.raises(SourceError, match="rotation of order 8 does not fit axis 0"):
        apply_folds(rotated, lambda name: np.zeros((4, 8), np.float32))
    part = OnRows(start=2, stop=6, fold=RotateHeads(rotation=Rotation(n=4), axis="output"))
    with pytest.raises(SourceError, match=r"rows 2…5 do not fit axis 0 of \[4, 8\]"):
        apply_folds(dataclasses.replace(output, ops=(part,)), lambda name: np.zeros((4, 8), np.float32))


def test_an_absurd_number_of_layers_is_refused_before_it_is_listed() -> None:
    config = random_config("llama") | {"num_hidden_layers": 10**9}
    with pytest.raises(SourceError, match=r"num_hidden_layers 1000000000: the checkpoint holds \d+ tensors"):
        plan_identity(shapes(random_weights(random_config("llama"), seed=1)), config)
