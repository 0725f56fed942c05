"""The order and scale of an MLP's channels change weights and not the function; and what is chosen obeys its laws."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.oracles.decoder import random_config, random_weights
from tests.property.test_folds import BIASED, EXACT, fold, logit_error, shapes
from tqtool.errors import SourceError, UserError
from tqtool.formats.hessians import InputMoments
from tqtool.pipeline.calibrated import Hessians, capped, combine, reordered
from tqtool.transform.apply import apply_folds
from tqtool.transform.channels import LARGEST_SCALE, choose_channels, mlps, tame_outliers, with_channels
from tqtool.transform.folds import Channels, FoldChannels, OnRows, Op, op_to_json
from tqtool.transform.outputs import OutputTensor, Role, TransformPlan
from tqtool.transform.plan import plan_identity, plan_rotation

FAMILIES = ["llama", "llama-biases", "qwen2", "qwen3", "gemma3_text", "granite-biases", "phi3"]


def random_channels(rng: np.random.Generator, n: int) -> Channels:
    return Channels(order=rng.permutation(n).astype(np.int32), scale=np.exp(rng.normal(0, 2, n)).astype(np.float32))


def random_fold(plan: TransformPlan, seed: int) -> dict[str, Channels]:
    rng = np.random.default_rng(seed)
    return {path: random_channels(rng, down.shape[1]) for path, down in mlps(plan).items()}


# ---------------------------------------------------------------------------------------------------- exactness
@settings(max_examples=40, deadline=None)
@given(
    family=st.sampled_from(FAMILIES),
    rotated=st.booleans(),
    inner=st.sampled_from([1, 2, 17, 44, 51]),
    tied=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_order_and_scale_leave_the_logits(family: str, rotated: bool, inner: int, tied: bool, seed: int) -> None:
    name, _, biases = family.partition("-")
    config = random_config(name, tied=tied, intermediate_size=inner, **(BIASED if biases else {}))
    weights = random_weights(config, seed=seed)
    planner = plan_rotation if rotated and name != "gemma3_text" else plan_identity
    plain = planner(shapes(weights), config)
    plan = with_channels(plain, random_fold(plain, seed))
    assert plan != plain
    assert logit_error(config, weights, plan) < EXACT


def _change(role: Role, change: Callable[[FoldChannels], Op | None]) -> Callable[[OutputTensor], OutputTensor]:
    def changed(output: OutputTensor) -> OutputTensor:
        wanted = role is output.role and (role is not Role.BIAS or "gate_proj" in output.name)
        if not wanted or not output.ops or not isinstance(output.ops[-1], FoldChannels):
            return output
        op = change(output.ops[-1])
        return dataclasses.replace(output, ops=(*output.ops[:-1], *([] if op is None else [op])))

    return changed


def _other(op: FoldChannels, **changes: Any) -> FoldChannels:
    return dataclasses.replace(op, channels=dataclasses.replace(op.channels, **changes))


def _ones(op: FoldChannels) -> FoldChannels:
    return _other(op, scale=np.ones_like(op.channels.scale))


def _unsorted(op: FoldChannels) -> FoldChannels:
    return _other(op, order=np.arange(len(op.channels.order), dtype=np.int32))


def _inverse(op: FoldChannels) -> FoldChannels:
    return _other(op, order=np.argsort(op.channels.order).astype(np.int32))


FAULTS: dict[str, Callable[[OutputTensor], OutputTensor]] = {
    "gate scaled": _change(Role.GATE, lambda op: dataclasses.replace(op, is_scaled=True)),
    "gate in its old order": _change(Role.GATE, lambda op: None),
    "up not scaled": _change(Role.UP, lambda op: dataclasses.replace(op, is_scaled=False)),
    "up in its old order": _change(Role.UP, _unsorted),
    "down not scaled": _change(Role.DOWN, _ones),
    "down in its old order": _change(Role.DOWN, _unsorted),
    "down in the inverse order": _change(Role.DOWN, _inverse),
    "down multiplied": _change(Role.DOWN, lambda op: _other(op, scale=1 / op.channels.scale)),
    "scale in the new order": _change(Role.DOWN, lambda op: _other(op, scale=op.channels.scale[op.channels.order])),
    "gate's bias in its old order": _change(Role.BIAS, lambda op: None),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_shows_in_the_logits(fault: str) -> None:
    config = random_config("llama", **BIASED)
    weights = random_weights(config, seed=3)
    plain = plan_rotation(shapes(weights), config)
    plan = with_channels(plain, random_fold(plain, 3))
    broken = dataclasses.replace(plan, outputs=tuple(FAULTS[fault](output) for output in plan.outputs))
    assert broken != plan
    assert logit_error(config, weights, plan) < EXACT
    assert logit_error(config, weights, broken) > 1e-3


def _halves(*changes: Callable[[OnRows], OnRows | None]) -> Callable[[OutputTensor], OutputTensor]:
    """Changes gate_up's two folds, or leaves one out."""

    def changed(output: OutputTensor) -> OutputTensor:
        if output.role is not Role.GATE_UP:
            return output
        halves = [change(op) for change, op in zip(changes, output.ops[-2:], strict=True)]
        return dataclasses.replace(output, ops=(*output.ops[:-2], *(op for op in halves if op is not None)))

    return changed


def _same(op: OnRows) -> OnRows:
    return op


def _scaled(is_scaled: bool) -> Callable[[OnRows], OnRows]:
    return lambda op: dataclasses.replace(op, fold=dataclasses.replace(op.fold, is_scaled=is_scaled))


FUSED_FAULTS: dict[str, Callable[[OutputTensor], OutputTensor]] = {
    "gate scaled": _halves(_scaled(True), _same),
    "up not scaled": _halves(_same, _scaled(False)),
    "gate scaled instead of up": _halves(_scaled(True), _scaled(False)),
    "gate in its old order": _halves(lambda op: None, _same),
    "up in its old order": _halves(_same, lambda op: None),
    "gate twice": _halves(_same, lambda op: dataclasses.replace(op, start=0, stop=op.stop - op.start)),
    "down in its old order": _change(Role.DOWN, _unsorted),
}


@pytest.mark.parametrize("fault", FUSED_FAULTS)
def test_a_planted_fault_in_a_fused_mlp_shows(fault: str) -> None:
    config = random_config("phi3")
    weights = random_weights(config, seed=3)
    plain = plan_rotation(shapes(weights), config)
    plan = with_channels(plain, random_fold(plain, 3))
    broken = dataclasses.replace(plan, outputs=tuple(FUSED_FAULTS[fault](output) for output in plan.outputs))
    assert broken != plan
    assert logit_error(config, weights, plan) < EXACT
    assert logit_error(config, weights, broken) > 1e-3


def test_a_fused_gate_that_stays_in_order_is_left_alone() -> None:
    config = random_config("phi3")
    weights = random_weights(config, seed=6)
    norms = np.ones(44)
    norms[7] = 30.0
    tamed = tame_outliers(norms)
    assert tamed is not None
    plan = with_channels(plan_identity(shapes(weights), config), {"model.layers.1.mlp": tamed})
    up = FoldChannels(channels=tamed, axis="output", is_scaled=True)
    assert plan.output("model.layers.1.mlp.gate_up_proj.weight").ops == (OnRows(start=44, stop=88, fold=up),)
    assert logit_error(config, weights, plan) < EXACT


def test_up_s_bias_is_scaled_as_its_weight() -> None:
    config = random_config("llama", **BIASED)
    weights = random_weights(config, seed=4)
    plain = plan_identity(shapes(weights), config)
    plan = with_channels(plain, random_fold(plain, 4))

    def unscaled(output: OutputTensor) -> OutputTensor:
        if not output.name.endswith("up_proj.bias"):
            return output
        return dataclasses.replace(output, ops=(dataclasses.replace(output.ops[-1], is_scaled=False),))

    assert logit_error(config, weights, dataclasses.replace(plan, outputs=tuple(map(unscaled, plan.outputs)))) > 1e-3


# ---------------------------------------------------------------------------------------------- what is left alone
def test_every_other_tensor_is_left_alone() -> None:
    config = random_config("llama", tied=False, **BIASED)
    weights = random_weights(config, seed=5)
    plain = plan_rotation(shapes(weights), config)
    chosen = random_fold(plain, 5)
    del chosen["model.layers.1.mlp"]
    plan = with_channels(plain, chosen)
    changed = {new.name for old, new in zip(plain.outputs, plan.outputs, strict=True) if old != new}
    parts = ("gate_proj.weight", "gate_proj.bias", "up_proj.weight", "up_proj.bias", "down_proj.weight")
    assert changed == {f"model.layers.{layer}.mlp.{part}" for layer in (0, 2) for part in parts}
    for old, new in zip(plain.outputs, plan.outputs, strict=True):
        assert dataclasses.replace(new, ops=old.ops) == old
        assert new.ops[: len(old.ops)] == old.ops
    assert with_channels(plain, {}) == plain
    assert (plan.id, plan.seed, plan.config_updates) == (plain.id, plain.seed, plain.config_updates)
    before, after = fold(weights, plain), fold(weights, plan)
    assert all(before[name].tobytes() == after[name].tobytes() for name in before.keys() - changed)


def test_mlps_are_those_with_all_three_layers() -> None:
    config = random_config("qwen2")
    plan = plan_identity(shapes(random_weights(config, seed=6)), config)
    assert list(mlps(plan)) == [f"model.layers.{layer}.mlp" for layer in range(3)]
    assert mlps(plan)["model.layers.2.mlp"].name == "model.layers.2.mlp.down_proj.weight"
    lame = dataclasses.replace(plan, outputs=tuple(o for o in plan.outputs if "1.mlp.gate" not in o.name))
    assert list(mlps(lame)) == ["model.layers.0.mlp", "model.layers.2.mlp"]


def test_the_source_is_not_written_and_channels_must_fit() -> None:
    rng = np.random.default_rng(7)
    channels = random_channels(rng, 5)
    weight = rng.standard_normal((5, 3)).astype(np.float32)
    weight.flags.writeable = False
    op = FoldChannels(channels=channels, axis="output", is_scaled=True)
    output = OutputTensor(name="w", source="w", shape=(5, 3), ops=(op,))
    folded = apply_folds(output, lambda name: weight)
    assert np.array_equal(folded, (weight * channels.scale[:, None])[channels.order])
    wrong = dataclasses.replace(output, ops=(dataclasses.replace(op, axis="input"),))
    with pytest.raises(SourceError, match=r"5 channels do not fit axis 1 of \[5, 3\]"):
        apply_folds(wrong, lambda name: weight)


# ---------------------------------------------------------------------------------------------- what is chosen
positive = st.floats(1e-3, 1e3)


@settings(max_examples=60, deadline=None)
@given(
    norms=st.lists(st.one_of(st.just(0.0), positive), min_size=1, max_size=30),
    seed=st.integers(0, 2**32 - 1),
)
def test_laws_of_the_choice(norms: list[float], seed: int) -> None:
    wide = np.array(norms)
    curvature = np.random.default_rng(seed).choice([0.0, 1e-8, 1.0, 1.0, 3.0], len(wide))
    chosen = choose_channels(wide, curvature)
    assert (chosen.order.dtype, chosen.scale.dtype) == (np.int32, np.float32)
    assert sorted(chosen.order) == list(range(len(wide)))
    assert (chosen.scale[wide == 0] == 1).all()
    live = chosen.scale[wide > 0].astype(np.float64)
    assert ((live >= 1 / LARGEST_SCALE) & (live <= LARGEST_SCALE)).all()
    if live.size and (live > 1 / LARGEST_SCALE).all() and (live < LARGEST_SCALE).all():
        # float32 rounds each scale by 2^-24 at most, relative; so their geometric mean.
        assert abs(np.log(live).mean()) < 2.0**-23
        equal = wide[wide > 0] / live
        assert equal.max() / equal.min() < 1 + 2.0**-22
    scaled = (curvature * chosen.scale.astype(np.float64) ** 2)[chosen.order]
    assert (np.diff(scaled) <= 0).all()
    for first, second in zip(chosen.order, chosen.order[1:], strict=False):
        if (
            curvature[first] * np.float64(chosen.scale[first]) ** 2
            == curvature[second] * np.float64(chosen.scale[second]) ** 2
        ):
            assert first < second  # ties keep their order


@settings(max_examples=60, deadline=None)
@given(norms=st.lists(st.one_of(st.just(0.0), positive), min_size=1, max_size=30))
def test_laws_of_taming(norms: list[float]) -> None:
    """No live column is longer than twice the median afterwards, no other is touched, nothing moves."""
    wide = np.array(norms)
    tamed = tame_outliers(wide)
    live = wide > 0
    limit = 2 * np.median(wide[live]) if live.any() else np.inf
    if tamed is None:
        assert (wide <= limit * (1 + 2.0**-23)).all()
        return
    assert tamed.is_in_order
    assert (tamed.scale[wide <= limit] == 1).all()
    after = wide / tamed.scale
    assert (after[tamed.scale < LARGEST_SCALE] <= limit * (1 + 2.0**-23)).all()
    assert tame_outliers(np.array([1.0, np.inf, np.nan, 0.0])) is None


def test_equal_channels_stay_where_they_are() -> None:
    chosen = choose_channels(np.full(6, 2.5), np.full(6, 0.1))
    assert np.array_equal(chosen.order, np.arange(6))
    assert np.array_equal(chosen.scale, np.ones(6, np.float32))


def test_columns_that_are_all_but_dead_take_no_scale_with_them() -> None:
    """1e-30 of the norm would leave up_proj a row whose scale float16 cannot hold."""
    norms = np.array([1.0, 2.0, 1e-30, 1e30, np.inf, np.nan])
    chosen = choose_channels(norms, np.ones(6))
    assert np.isfinite(chosen.scale).all()
    assert chosen.scale.min() == np.float32(1 / LARGEST_SCALE)
    assert chosen.scale.max() == np.float32(LARGEST_SCALE)
    assert sorted(chosen.order) == list(range(6))


# ---------------------------------------------------------------------------------------------- value and text
def test_channels_are_compared_by_content() -> None:
    order, scale = np.array([2, 0, 1], np.int32), np.array([1, 2, 0.25], np.float32)
    one = Channels(order=order, scale=scale)
    same = Channels(order=order.copy(), scale=scale.copy())
    others = [
        Channels(order=order[::-1].copy(), scale=scale),
        Channels(order=order, scale=scale[::-1].copy()),
        Channels(order=order, scale=np.nextafter(scale, np.float32(9))),
    ]
    assert one == same
    assert hash(one) == hash(same)
    assert all(one != other and hash(one) != hash(other) for other in others)
    assert one != "channels"
    op, twin = (FoldChannels(channels=c, axis="input", is_scaled=True) for c in (one, same))
    assert op == twin
    assert len({op, twin, *(dataclasses.replace(op, channels=other) for other in others)}) == 4


def test_json_and_text_name_the_content() -> None:
    channels = random_channels(np.random.default_rng(8), 44)
    config = random_config("llama")
    weights = random_weights(config, seed=8)
    plain = plan_identity(shapes(weights), config)
    plan = with_channels(plain, {"model.layers.0.mlp": channels})
    op = plan.output("model.layers.0.mlp.down_proj.weight").ops[-1]
    data = op_to_json(op)
    assert data == {"op": "fold_channels", "axis": "input", "is_scaled": True, "sha256": channels.sha256}
    rows = {row.name.rsplit(".", 2)[-2]: row.folds for row in plan.describe() if ".0.mlp." in row.name}
    short = channels.sha256[:8]
    assert rows == {
        "gate_proj": f"channels[{short}] by curvature ·",
        "up_proj": f"channels[{short}] by curvature, of equal norm ·",
        "down_proj": f"· channels[{short}] by curvature, of equal norm",
    }
    assert len(plain.diff(plan)) == 6  # three lines out, three in
    other = with_channels(plain, {"model.layers.0.mlp": random_channels(np.random.default_rng(9), 44)})
    assert len(plan.diff(other)) == 6
    with pytest.raises(UserError, match="fold_channels"):  # the arrays are not in the file
        TransformPlan.from_json(json.loads(json.dumps(plan.to_json())))


# ---------------------------------------------------------------------------------------------- Hessians
def random_moments(rng: np.random.Generator, n: int, *, rows: int, sinks: int) -> tuple[np.ndarray, InputMoments]:
    inputs = rng.standard_normal((rows + sinks, n)) * np.exp(rng.normal(0, 1, n))
    body = inputs[sinks:]
    return inputs, InputMoments(
        matrix=(body.T @ body / rows).astype(np.float32), sinks=inputs[:sinks].astype(np.float32), rows=rows
    )


@pytest.mark.parametrize("sinks", [0, 3])
def test_moments_of_reordered_inputs_are_the_reordered_moments(sinks: int) -> None:
    rng = np.random.default_rng(10)
    inputs, moments = random_moments(rng, 37, rows=90, sinks=sinks)
    channels = random_channels(rng, 37)
    found = reordered(moments, channels)
    mixed = np.stack([inputs[:, source] * float(channels.scale[source]) for source in channels.order], axis=1)
    expected = mixed[sinks:].T @ mixed[sinks:] / 90
    # Three float32 roundings of each product, relative to the diagonal: |h_ij| is at most sqrt(h_ii·h_jj).
    size = np.sqrt(np.outer(np.diagonal(expected), np.diagonal(expected)))
    assert (np.abs(found.matrix - expected) <= 4 * 2.0**-24 * size).all()
    assert np.allclose(found.sinks, mixed[:sinks], rtol=2.0**-22, atol=0)
    assert (found.rows, found.matrix.dtype, found.sinks.dtype) == (90, np.float32, np.float32)


class _OneModule:
    """Stands for a calibration folder."""

    info = SimpleNamespace(input_of=lambda module: None)

    def __init__(self, moments: InputMoments) -> None:
        self._moments = moments

    def moments(self, module: str) -> InputMoments | None:
        return self._moments


@pytest.mark.parametrize("sinks", [0, 3])
def test_curvature_is_the_diagonal_of_the_hessian_in_either_order(sinks: int) -> None:
    rng = np.random.default_rng(11)
    _, moments = random_moments(rng, 37, rows=90, sinks=sinks)
    moments.sinks[1:2] *= 30  # one that is shortened, by what it is in the source's order
    channels = random_channels(rng, 37)
    calibration: Any = _OneModule(moments)
    short = capped(moments)
    for hessians, expected in (
        (Hessians(calibration=calibration, sink_weight=5), short),
        (Hessians(calibration=calibration, sink_weight=5, channels={"m": channels}), reordered(short, channels)),
    ):
        dense = combine(expected, sink_weight=5)
        assert np.allclose(hessians.curvature("m"), np.diagonal(dense.matrix), rtol=1e-12, atol=0)
        assert np.array_equal(hessians.hessian(hessians.moments("m")).matrix, dense.matrix)
        assert np.array_equal(hessians.moments("other").matrix, moments.matrix)
    chosen = choose_channels(np.ones(37), Hessians(calibration=calibration).curvature("m"))
    assert (np.diff(Hessians(calibration=calibration, channels={"m": chosen}).curvature("m")) <= 0).all()


def test_the_loss_is_the_same_in_either_basis() -> None:
    """tr(E·H·Eᵀ) of a served weight does not depend on the basis it was coded in."""
    rng = np.random.default_rng(12)
    _, moments = random_moments(rng, 37, rows=90, sinks=2)
    channels = random_channels(rng, 37)
    error = rng.standard_normal((8, 37))
    op = FoldChannels(channels=channels, axis="input", is_scaled=True)
    output = OutputTensor(name="w", source="w", shape=(8, 37), ops=(op,))
    folded = apply_folds(output, lambda name: error, dtype=np.float64)
    plain, mixed = combine(moments, sink_weight=5).matrix, combine(reordered(moments, channels), sink_weight=5).matrix
    assert np.trace(folded @ mixed @ folded.T) == pytest.approx(np.trace(error @ plain @ error.T), rel=1e-5)
