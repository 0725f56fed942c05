"""The draft head of qwen3_5 beside its trunk: exact in float64 for both taps, and a fault in any corridor shows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.oracles import decoder, delta_net, draft_head
from tests.oracles.decoder import Weights, random_config, random_weights
from tests.property.test_folds import EXACT, TOKENS, fold, shapes
from tqtool.errors import NumericalError, SourceError, UserError
from tqtool.mathx.signs import sign_vector
from tqtool.transform.companion import CompanionSource, Tap, plan_companion
from tqtool.transform.families import FAMILIES
from tqtool.transform.folds import Fill, OnColumns, RotateInput, RotateOutput, ScaleInput
from tqtool.transform.plan import OutputTensor, TransformPlan, plan_identity, plan_rotation

CONFIG = random_config("qwen3_5", tied=False)
TAPS: tuple[Tap, ...] = ("post_norm", "pre_norm")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
    """A trunk with its draft head, by plain names."""

    config: dict[str, Any]
    trunk: Weights
    head: Weights

    def drafts(
        self, tap: Tap, *, gain: NDArray[np.float64] | None = None, norm: NDArray[np.float64] | None = None
    ) -> NDArray[np.float64]:
        """Logits of the first and of the second token drafted behind every position.

        ``gain``: the state is normalized without a gain first and multiplied by this one behind its second norm.
        ``norm``: the final gain in place of the head's own.
        """
        head = self.head if norm is None else {**self.head, "norm.weight": norm}
        table = self.trunk["model.embed_tokens.weight"]
        state = decoder.residual(self.trunk, self.config, TOKENS)
        if tap == "post_norm":
            own = self.trunk["model.norm.weight"]
            state = decoder.rms_norm(state, np.ones_like(own) if gain is not None else own, self.config)
        first, before = draft_head.forward(head, self.config, table[np.roll(TOKENS, -1)], state, state_gain=gain)
        chained = before
        if tap == "post_norm":
            chained = first if gain is None else first / head["norm.weight"]
        second, _ = draft_head.forward(head, self.config, table[np.roll(TOKENS, -2)], chained, state_gain=gain)
        return np.concatenate([first, second]) @ decoder.head(self.trunk, self.config).T


def pair(config: dict[str, Any], *, seed: int = 3, flat: bool = False) -> tuple[Weights, Weights]:
    """Trunk and head as Hugging Face stores them; ``flat``: their final gains are one, of one size and both signs."""
    trunk, head = random_weights(config, seed=seed), draft_head.random_head(config, seed=seed + 1)
    if flat:
        signs = np.random.default_rng(seed).choice([-1.0, 1.0], config["hidden_size"])
        trunk["model.norm.weight"] = head["mtp.norm.weight"] = 0.7 * signs - 1.0
    return trunk, head


def source_pair(config: dict[str, Any], trunk: Weights, head: Weights) -> Pair:
    return Pair(config=config, trunk=delta_net.plain(trunk, config), head=draft_head.plain(head))


def plan(config: dict[str, Any], trunk: Weights, head: Weights, **options: Any) -> TransformPlan:
    is_hf = any(name.startswith("mtp.") for name in head)
    source = CompanionSource(shapes=shapes(head), gain_offset=1.0 if is_hf else 0.0)
    return plan_companion(FAMILIES[config["model_type"]], shapes(trunk), config, source, **{"seed": 42, **options})


def folded_pair(config: dict[str, Any], trunk: Weights, head: Weights, companion: TransformPlan) -> Pair:
    whole = plan_rotation(shapes(trunk), config, seed=42)
    updated = whole.updated_config(config)
    return Pair(
        config=updated, trunk=delta_net.plain(fold(trunk, whole), updated), head=fold({**trunk, **head}, companion)
    )


def error(found: NDArray[np.float64], expected: NDArray[np.float64]) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def as_folded(source: Pair, tap: Tap) -> NDArray[np.float64]:
    """The source's drafts with what the fold states in place of what it cannot keep: see the deviations of the plan."""
    final = source.trunk["model.norm.weight"]
    if tap == "pre_norm":
        return source.drafts(tap, norm=final)
    return source.drafts(tap, norm=final, gain=final / np.sqrt(np.mean(final**2)))


def first_half(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    return logits[: len(TOKENS)]


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("model_type", ["qwen3_5", "qwen3_5_moe"])
@pytest.mark.parametrize("tap", TAPS)
def test_drafts_of_both_taps_are_exact(tap: Tap, model_type: str, tied: bool) -> None:
    """Against the source with the trunk's final gain in place of the head's, and of the post tap also with the norm
    before fc taken without it: both are deviations of the plan."""
    config = random_config(model_type, tied=tied)
    trunk, head = pair(config)
    companion = plan(config, trunk, head, tap=tap)
    folded = folded_pair(config, trunk, head, companion)
    expected = as_folded(source_pair(config, trunk, head), tap)
    assert error(folded.drafts(tap), expected) < EXACT
    names = [line.partition(":")[0] for line in companion.deviations]
    assert ("mtp-hidden-scale" in names) is (tap == "post_norm")
    assert "mtp-final-gamma-dropped" in names


@pytest.mark.parametrize("tap", TAPS)
def test_nothing_is_lost_where_both_final_gains_are_one_of_one_size(tap: Tap) -> None:
    trunk, head = pair(CONFIG, flat=True)
    folded = folded_pair(CONFIG, trunk, head, plan(CONFIG, trunk, head, tap=tap))
    expected = source_pair(CONFIG, trunk, head).drafts(tap)
    found = folded.drafts(tap)
    # The post tap's hidden state is normalized twice: eps counts under two sizes of the same vector.
    assert error(found, expected) < (EXACT if tap == "pre_norm" else 1e-4)


def test_the_tap_decides_which_gains_fc_reads_through() -> None:
    trunk, head = pair(CONFIG)
    gains = {
        tap: [
            op.fold.gain
            for op in plan(CONFIG, trunk, head, tap=tap).output("fc.weight").ops
            if isinstance(op, OnColumns) and isinstance(op.fold, ScaleInput)
        ]
        for tap in TAPS
    }
    own = ["mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight"]
    assert gains == {"pre_norm": own, "post_norm": [*own, "model.norm.weight"]}
    assert plan(CONFIG, trunk, head, tap="pre_norm").config_updates == {"hidden_tap": "pre_norm"}


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("spelling", ["alone", "inside a model", "mlx"])
def test_every_spelling_is_the_same_head(spelling: str, depth: int) -> None:
    trunk, head = random_weights(CONFIG, seed=3), draft_head.random_head(CONFIG, seed=4, depth=depth)
    source = CompanionSource(shapes=shapes(head), depth=depth, gain_offset=1.0)
    first = plan_companion(FAMILIES["qwen3_5"], shapes(trunk), CONFIG, source, seed=42)
    expected = fold({**trunk, **head}, first)
    other, offset = {name.removeprefix("mtp."): array for name, array in head.items()}, 1.0
    if spelling == "inside a model":
        other = {f"language_model.{name}": array for name, array in head.items()}
    if spelling == "mlx":
        other, offset = draft_head.plain(head), 0.0
    source = CompanionSource(shapes=shapes(other), depth=depth, gain_offset=offset)
    second = plan_companion(FAMILIES["qwen3_5"], shapes(trunk), CONFIG, source, seed=42)
    found = fold({**trunk, **other}, second)
    assert list(found) == list(expected)
    assert all(np.abs(found[name] - expected[name]).max() < 1e-12 for name in found)


def test_without_a_rotation_gains_are_stored_as_they_are() -> None:
    trunk, head = pair(CONFIG)
    companion = plan(CONFIG, trunk, head, seed=None)
    found, expected = fold(head, companion), draft_head.plain(head)
    assert companion.id == "identity"
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name], expected[name]) for name in found)


def test_a_plan_survives_json() -> None:
    companion = plan(CONFIG, *pair(CONFIG))
    assert TransformPlan.from_json(companion.to_json()) == companion


# ---------------------------------------------------------------------------------------------------- faults
Change = Callable[[OutputTensor], OutputTensor]


def _fc(change: Callable[[Any], Any | None]) -> Change:
    def changed(output: OutputTensor) -> OutputTensor:
        if output.name != "fc.weight":
            return output
        return dataclasses.replace(output, ops=tuple(op for op in map(change, output.ops) if op is not None))

    return changed


def _without(ends: str, kind: type) -> Change:
    def changed(output: OutputTensor) -> OutputTensor:
        if not output.name.endswith(ends):
            return output
        return dataclasses.replace(output, ops=tuple(op for op in output.ops if not isinstance(op, kind)))

    return changed


def _is(op: Any, start: int, kind: type) -> bool:
    return isinstance(op, OnColumns) and op.start == start and isinstance(op.fold, kind)


HIDDEN = CONFIG["hidden_size"]
FAULTS: dict[str, Change] = {
    "the embedding's half is not turned": _fc(lambda op: None if _is(op, 0, RotateInput) else op),
    "the state's half is not turned": _fc(lambda op: None if _is(op, HIDDEN, RotateInput) else op),
    "the state's gain is left out": _fc(
        lambda op: None if _is(op, HIDDEN, ScaleInput) and "pre_fc" in op.fold.gain else op
    ),
    "the trunk's gain is left out": _fc(
        lambda op: None if _is(op, HIDDEN, ScaleInput) and "pre_fc" not in op.fold.gain else op
    ),
    "the trunk's gain keeps its size": _fc(
        lambda op: (
            dataclasses.replace(op, fold=dataclasses.replace(op.fold, is_unit=False))
            if _is(op, HIDDEN, ScaleInput)
            else op
        )
    ),
    "gains as stored, not 1 + w": _fc(
        lambda op: (
            dataclasses.replace(op, fold=dataclasses.replace(op.fold, offset=0.0)) if _is(op, 0, ScaleInput) else op
        )
    ),
    "the halves are one": _fc(
        lambda op: dataclasses.replace(op, start=0, stop=HIDDEN) if isinstance(op, OnColumns) else op
    ),
    "what fc writes is not turned": _fc(lambda op: None if isinstance(op, RotateOutput) else op),
    "a reader in the old basis": _without("mlp.up_proj.weight", RotateInput),
    "a writer in the old basis": _without("self_attn.o_proj.weight", RotateOutput),
    "the state's norm keeps its gain": _without("pre_fc_norm_hidden.weight", Fill),
    "the final norm keeps its gain": _without("norm.weight", Fill),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_shows(fault: str) -> None:
    trunk, head = pair(CONFIG)
    good = plan(CONFIG, trunk, head)
    bad = dataclasses.replace(good, outputs=tuple(FAULTS[fault](output) for output in good.outputs))
    assert bad != good
    expected = first_half(as_folded(source_pair(CONFIG, trunk, head), "post_norm"))
    found = first_half(folded_pair(CONFIG, trunk, head, bad).drafts("post_norm"))
    assert error(found, expected) > 1e-3


def test_another_seed_than_the_trunk_s_shows() -> None:
    trunk, head = pair(CONFIG)
    assert (sign_vector(42, HIDDEN, lane=0) != sign_vector(43, HIDDEN, lane=0)).any()
    expected = first_half(as_folded(source_pair(CONFIG, trunk, head), "post_norm"))
    other = folded_pair(CONFIG, trunk, head, plan(CONFIG, trunk, head, seed=43))
    assert error(first_half(other.drafts("post_norm")), expected) > 1e-3


# ---------------------------------------------------------------------------------------------------- refusals
def test_what_does_not_fit_is_named() -> None:
    trunk, head = pair(CONFIG)
    del head["mtp.fc.weight"]
    with pytest.raises(SourceError, match=r"companion of model_type 'qwen3_5'.*missing tensors: mtp\.fc\.weight\n"):
        plan(CONFIG, trunk, head)
    wide = {**pair(CONFIG)[1], "mtp.embed_tokens.weight": np.zeros((50, 36))}
    with pytest.raises(SourceError, match=r"tensors no rule claims: mtp\.embed_tokens\.weight"):
        plan(CONFIG, trunk, wide)
    more = {**pair(CONFIG)[1], "mtp.layers.1.foo.weight": np.zeros(36), "mtp.norm.weight": np.zeros(35)}
    with pytest.raises(SourceError, match=r"claims: mtp\.layers\.1\.foo\.weight; shapes .*: mtp\.norm\.weight: exp"):
        plan(CONFIG, trunk, more)
    nested = {f"model.{name}": array for name, array in pair(CONFIG)[1].items() if "q_proj" not in name}
    with pytest.raises(SourceError, match=r"missing tensors: model\.mtp\.layers\.0\.self_attn\.q_proj\.weight"):
        plan(CONFIG, trunk, nested)
    with pytest.raises(SourceError, match="two spellings"):
        plan(CONFIG, trunk, {**pair(CONFIG)[1], "fc.weight": np.zeros((36, 72))})
    llama = random_config("llama")
    source = CompanionSource(shapes=shapes(pair(CONFIG)[1]))
    with pytest.raises(UserError, match="llama"):
        plan_companion(FAMILIES["llama"], shapes(trunk), llama, source, seed=42)


def test_a_final_gain_without_a_size_is_named_with_its_channel() -> None:
    trunk, head = pair(CONFIG)
    trunk["model.norm.weight"] = np.full(HIDDEN, -1.0)
    for tap in TAPS:
        companion = plan(CONFIG, trunk, head, tap=tap)
        if tap == "pre_norm":  # divides by nothing
            assert all(np.isfinite(array).all() for array in fold({**trunk, **head}, companion).values())
            continue
        with pytest.raises(
            NumericalError, match=r"model\.norm\.weight: .*gain of 0 \(stored -1, \+1\) in all 36 channels"
        ):
            fold({**trunk, **head}, companion)
    trunk["model.norm.weight"][5] = np.inf
    with pytest.raises(NumericalError, match=r"gain of inf .* in channel 5"):
        fold({**trunk, **head}, plan(CONFIG, trunk, head))
    trunk["model.norm.weight"][5] = -0.5  # one channel is enough
    assert all(np.isfinite(array).all() for array in fold({**trunk, **head}, plan(CONFIG, trunk, head)).values())


def test_the_trunk_s_own_plan_still_leaves_it_out() -> None:
    trunk, head = pair(CONFIG)
    whole = plan_identity(shapes({**trunk, **head}), CONFIG)
    assert {drop.name for drop in whole.dropped} == set(head)
