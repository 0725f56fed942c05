"""Calibration of experts: sums and counts against a float64 decoder, idle experts, and what solvers make of them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.oracles import decoder, experts
from tests.support.tiny_experts import TinyExperts
from tests.support.tiny_models import write_tiny, write_weights
from tqtool.calibration import taps
from tqtool.calibration.calibrate import CalibrationRequest, calibrate, plan_calibration
from tqtool.calibration.inputs import MAX_SINKS, ExpertInputs, RoutedRows
from tqtool.calibration.sinks import RATIO, sink_rows
from tqtool.errors import UserError
from tqtool.formats.hessians import InputMoments, open_calibration
from tqtool.pipeline.calibrated import WIDER_SHARE, blended, open_hessians
from tqtool.pipeline.convert import plan_transform
from tqtool.source.checkpoint import open_checkpoint
from tqtool.transform.apply import apply_folds

KINDS = ["qwen3_moe", "mixtral"]


def request(tmp_path: Path, tiny: TinyExperts, *, context: int = 24, tensors: Any = None, **options: Any):
    source = tmp_path / "source"
    if not source.exists():
        write_tiny(source, tiny)
        if tensors is not None:
            write_weights(source, tensors)
    text = tmp_path / "text.txt"
    words = np.random.default_rng(0).integers(3, 320, 500)
    text.write_text("\n".join(f"w{word}" for word in words) + "\n")
    out = options.pop("out", tmp_path / "out")
    return CalibrationRequest(source=str(source), out=out, text=text, rows=3, context=context, **options)


def oracle(source: Path, seed: int | None, sequences: Any, monkeypatch: pytest.MonkeyPatch):
    """Rows that every module reads in a float64 decoder, and of how many of them the position is a sink's."""
    checkpoint = open_checkpoint(str(source))
    plan = plan_transform(checkpoint, rotation_seed=seed)
    get = lambda name: checkpoint.tensors[name].read()  # noqa: E731
    weights = {piece.name: apply_folds(piece, get, dtype=np.float64) for piece in plan.pieces()}
    config = plan.updated_config(dict(checkpoint.config))
    seen: dict[str, list[np.ndarray]] = {}
    monkeypatch.setattr(experts, "read", lambda module, row: seen.setdefault(module, []).append(row))
    states: list[np.ndarray] = []
    norm = decoder.rms_norm
    names = [f"model.layers.{layer}.input_layernorm" for layer in range(config["num_hidden_layers"])]
    entering = [weights[f"{name}.weight"] for name in (*names, "model.norm")]

    def recording(x, gain, config):
        if any(gain is each for each in entering):
            states.append(x)
        return norm(x, gain, config)

    monkeypatch.setattr(decoder, "rms_norm", recording)
    rows: dict[str, list[np.ndarray]] = {}
    sinks: dict[str, list[np.ndarray]] = {}
    for tokens in sequences:
        seen.clear()
        states.clear()
        decoder.forward(weights, config, tokens.astype(int))
        block = experts.BLOCKS[config["model_type"]]
        for layer in range(config["num_hidden_layers"]):
            if not experts.is_sparse(config, layer):
                continue
            mask = sink_rows(states[layer], states[layer + 1], ratio=RATIO)
            sent = experts_of_tokens(weights, config, layer, states, norm)
            places: dict[int, int] = {}
            for token, chosen in enumerate(sent):
                for expert, _ in chosen:
                    place = places.get(expert, 0)
                    places[expert] = place + 1
                    for name in experts.NAMES[config["model_type"]]:
                        module = f"model.layers.{layer}.{block}.experts.{expert}.{name}"
                        (sinks if mask[token] else rows).setdefault(module, []).append(seen[module][place])
    return rows, sinks


def experts_of_tokens(weights, config, layer, states, norm):
    """Where the oracle sends each token: from the state behind attention, which it computes again."""
    stem = f"model.layers.{layer}"
    entering = norm(states[layer], weights[f"{stem}.input_layernorm.weight"], config)
    middle = states[layer] + decoder.attention(weights, config, f"{stem}.self_attn", entering, is_turned=True)
    return experts.routes(
        weights, config, layer, norm(middle, weights[f"{stem}.post_attention_layernorm.weight"], config)
    )


@pytest.mark.parametrize("seed", [None, 42], ids=["plain", "rotated"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("context", [24, 50], ids=["in order of tokens", "sorted by expert"])
def test_moments_and_counts_are_those_of_a_float64_decoder(tmp_path, monkeypatch, kind, seed, context):
    """mlx-lm sorts 64 or more pairs of token and expert by expert: 24 · 2 stay in order, 50 · 2 do not."""
    tiny = TinyExperts(model_type=kind, dtype="float32", layers=4, is_stacked=seed is None)
    job = plan_calibration(request(tmp_path, tiny, rotation_seed=seed, context=context))
    info = calibrate(job)
    folder = open_calibration(tmp_path / "out")
    assert folder.info == info
    rows, sinks = oracle(tmp_path / "source", seed, job.rows.sequences, monkeypatch)
    down = experts.NAMES[kind][2]
    layers = [layer for layer in range(tiny.layers) if tiny.is_sparse(layer)]
    assert [record.block for record in info.routing] == [
        f"model.layers.{layer}.{experts.BLOCKS[kind]}.switch_mlp" for layer in layers
    ]
    for layer, routing in zip(layers, info.routing, strict=True):
        stem = f"model.layers.{layer}.{experts.BLOCKS[kind]}"
        assert routing.router == f"{stem}.gate"
        found = [
            len(rows.get(f"{stem}.experts.{expert}.{down}", []) + sinks.get(f"{stem}.experts.{expert}.{down}", []))
            for expert in range(tiny.experts)
        ]
        assert routing.tokens == found
        assert sum(found) == 3 * context * tiny.top_k
    for module, ordinary in rows.items():
        moments = folder.moments(module)
        stacked = np.stack(ordinary)
        matrix = stacked.T @ stacked / len(stacked)
        assert moments.rows == len(stacked)
        # float32 forward and sum: a few hundred roundings of 2^-24 each, relative to the diagonal.
        scale = np.sqrt(np.outer(np.diagonal(matrix), np.diagonal(matrix)))
        assert (np.abs(moments.matrix - matrix) <= 1e-4 * scale + 1e-9).all()
    for module, massive in sinks.items():
        stacked = np.stack(massive)
        assert np.abs(folder.moments(module).sinks - stacked).max() <= 1e-4 * np.abs(stacked).max()


def idle(tiny: TinyExperts, expert: int) -> dict[str, Any]:
    """The checkpoint of ``tiny`` in which no token of layer 0 goes to ``expert``.

    The hidden state gets a constant channel that only this router reads, against that expert.
    """
    tensors = tiny.tensors()
    block = "mlp" if tiny.model_type == "qwen3_moe" else "block_sparse_moe"
    tensors["model.embed_tokens.weight"][:, 0] = 3
    tensors["model.layers.0.input_layernorm.weight"][0] = 0
    router = tensors[f"model.layers.0.{block}.gate.weight"]
    router[:, 0] = 0
    router[expert, 0] = -100
    return tensors


@pytest.mark.parametrize("kind", KINDS)
def test_an_expert_that_reads_nothing_is_counted_and_solved_by_rule(tmp_path, kind):
    tiny = TinyExperts(model_type=kind, dtype="float32")
    tensors = idle(tiny, 2)
    info = calibrate(plan_calibration(request(tmp_path, tiny, tensors=tensors, rotation_seed=1)))
    assert info.routing[0].tokens[2] == 0
    assert min(info.routing[0].tokens[:2] + info.routing[0].tokens[3:]) > 0
    checkpoint = open_checkpoint(str(tmp_path / "source"))
    plan = plan_transform(checkpoint, rotation_seed=1)
    hessians = open_hessians(tmp_path / "out", checkpoint, plan, sink_weight=32.0)
    stem = f"model.layers.0.{experts.BLOCKS[kind]}"
    gate, up, down = (f"{stem}.experts.2.{name}" for name in experts.NAMES[kind])
    outputs = {piece.module: piece for piece in plan.pieces() if piece.module}
    assert hessians.calibration.moments(gate) is None
    assert hessians.calibration.moments(down) is None
    # gate and up can be solved under what all tokens bring; of what down would read nothing is known.
    assert [hessians.has(outputs[module]) for module in (gate, up, down)] == [True, True, False]
    assert np.array_equal(hessians.moments(gate).matrix, hessians.moments(f"{stem}.gate").matrix)
    assert hessians.notes(outputs[up]) == ("calibrated on all tokens of its layer: none was sent to it",)
    assert hessians.notes(outputs[f"{stem}.experts.1.{experts.NAMES[kind][0]}"]) == ()


def test_few_rows_are_blended_with_what_all_tokens_bring():
    rng = np.random.default_rng(3)
    own_rows, all_rows = rng.standard_normal((5, 40)), rng.standard_normal((300, 40))
    own = InputMoments(
        matrix=(own_rows.T @ own_rows / 5).astype(np.float32), sinks=np.ones((2, 40), np.float32), rows=5
    )
    wider = InputMoments(
        matrix=(all_rows.T @ all_rows / 300).astype(np.float32), sinks=np.ones((7, 40), np.float32), rows=300
    )
    found = blended(own, wider)
    share = WIDER_SHARE * 40
    expected = (own_rows.T @ own_rows + share * (all_rows.T @ all_rows) / 300) / (5 + share)
    assert np.abs(found.matrix - expected).max() < 1e-6
    assert found.rows == 5 + round(share)
    assert np.array_equal(found.sinks, own.sinks)
    assert blended(None, wider) is wider
    assert blended(own, None) is own
    assert blended(None, None) is None


def test_an_expert_of_sinks_alone_keeps_them(tmp_path):
    """First tokens may go to an expert of their own: all it knows are sinks, and they are not shortened to nothing."""
    rows = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)
    inputs = ExpertInputs(3)
    chosen = np.array([[1], [0], [0], [0]], np.int32)
    sinks = np.array([True, False, False, False])
    inputs.add(RoutedRows(rows=rows, experts=chosen, tokens=np.arange(4, dtype=np.int32)), sinks)
    first, second, third = inputs.sums()
    assert third is None
    assert inputs.tokens() == [3, 1, 0]
    assert inputs.sinks() == [0, 1, 0]
    assert (second.moments.rows, len(second.sinks)) == (0, 1)
    assert not second.matrix().any()
    assert np.array_equal(second.stacked(), rows[:1])
    assert np.allclose(first.matrix(), rows[1:].T @ rows[1:] / 3, atol=1e-6)


def test_sinks_are_counted_as_they_are_kept():
    """More sinks than are kept, some not finite: the counts say beforehand what the sums will hold."""
    rng = np.random.default_rng(5)
    inputs = ExpertInputs(2)
    for _ in range(3):
        rows = rng.standard_normal((MAX_SINKS, 3)).astype(np.float32)
        rows[rng.random(MAX_SINKS) < 0.1] = np.inf
        chosen = rng.integers(0, 2, (MAX_SINKS, 1)).astype(np.int32)
        tokens = np.arange(MAX_SINKS, dtype=np.int32)
        inputs.add(RoutedRows(rows=rows, experts=chosen, tokens=tokens), rng.random(MAX_SINKS) < 0.8)
    assert [len(total.sinks) for total in inputs.sums()] == inputs.sinks()
    assert max(inputs.sinks()) == MAX_SINKS


def test_an_interrupted_run_ends_in_the_same_bytes(tmp_path):
    tiny = TinyExperts(layers=4)
    calibrate(plan_calibration(request(tmp_path, tiny, out=tmp_path / "whole")))
    done = []

    def stop(layers: int) -> None:
        done.append(layers)
        if sum(done) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate(plan_calibration(request(tmp_path, tiny)), stop)
    calibrate(plan_calibration(request(tmp_path, tiny, resume=True)))
    files = {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()}
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == files
    assert len(json.loads(files["calibration.json"])["routing"]) == 3


def test_both_spellings_of_a_checkpoint_are_calibrated_alike(tmp_path):
    folders = []
    for is_stacked in (False, True):
        work = tmp_path / str(is_stacked)
        work.mkdir()
        calibrate(plan_calibration(request(work, TinyExperts(is_stacked=is_stacked))))
        folders.append(open_calibration(work / "out"))
    one, two = folders
    assert one.info.inputs == two.info.inputs
    assert one.info.files == two.info.files


def test_rows_in_an_order_that_is_not_known_are_refused(tmp_path, monkeypatch):
    """A mlx-lm that sorted otherwise would have rows summed for the wrong positions."""
    other = SimpleNamespace(argsort=lambda values: mx.arange(values.size), array=mx.array, float32=mx.float32)
    monkeypatch.setattr(taps, "mx", other)
    with pytest.raises(UserError, match="hands the rows of a sequence to its experts in an unknown order"):
        calibrate(plan_calibration(request(tmp_path, TinyExperts(), context=50)))
