"""LDLQ on the trellis: exact feedback whatever the blocks do, honest losses, told fallbacks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.oracles import gptq as oracle
from tests.oracles.udu import block_udu
from tqtool.errors import UserError
from tqtool.formats.trellis import BLOCK, TrellisSpec, check_closed, spec_for, unpack
from tqtool.mathx import ldl
from tqtool.mathx.ldl import feedback_gain, proxy_loss, upper_factor
from tqtool.native import trellis_expand
from tqtool.solve import feedback, ldlq, ldlq_coder
from tqtool.solve.feedback import GROWTH_LIMIT, code_with_feedback
from tqtool.solve.hessian import Hessian
from tqtool.solve.ldlq import LdlqMatrix, ldlq_encode
from tqtool.solve.ldlq_coder import LdlqOptions, coding_order, fit_stored_scales, trellis_coder
from tqtool.solve.trellis import TrellisOptions, encode_weight

NAME = "model.layers.0.mlp.up_proj.weight"
# Rows that share blocks in every way: whole blocks; 4 rows to 9 blocks; 64 rows to 25; narrower than a block; padding.
SHAPES = [(40, 512), (30, 576), (70, 100), (19, 301)]


def hessian(width: int, seed: int = 0, *, common: float = 1.0, spread: float = 0.5) -> Hessian:
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((3 * width, width)) + common * rng.standard_normal((3 * width, 1))
    rows *= np.exp(rng.normal(0, spread, width))
    return Hessian(matrix=rows.T @ rows / len(rows), rows=len(rows))


def gaussian(rows: int, width: int, seed: int = 1) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((rows, width)) * 0.02).astype(np.float32)


def served(found: LdlqMatrix) -> np.ndarray:
    stored = trellis_expand(found.matrix.words, found.matrix.scales, found.matrix.spec)
    return stored if found.matrix.spec.axis == 1 else stored.T


def options(k: int = 3, **more: object) -> LdlqOptions:
    return LdlqOptions(trellis=TrellisOptions(k=k), **more)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("axis", "columns", "tile"), [(1, 1, False), (0, 1, False), (0, 16, False), (1, 1, True)])
@pytest.mark.parametrize("pad_rows", [False, True])
def test_stored_bytes_have_the_loss_that_is_told(
    shape: tuple[int, int], axis: int, columns: int, tile: bool, pad_rows: bool
) -> None:
    """And less of it than the plain trellis; the words are closed paths of the format."""
    weight, statistics = gaussian(*shape), hessian(shape[1])
    spec = spec_for(shape, k=3, axis=axis, pad_rows=pad_rows, tile=tile)
    before = weight.copy(), statistics.matrix.copy()
    found = ldlq_encode(NAME, weight, statistics, spec, options(columns=columns))
    assert (found.matrix.words.shape, found.matrix.words.dtype) == (spec.words_shape, np.uint32)
    assert (found.matrix.scales.shape, found.matrix.scales.dtype) == ((spec.rows,), np.float16)
    states = unpack(found.matrix.words.reshape(spec.n_blocks, spec.words_per_block), spec.k, spec.window)
    check_closed(states, spec.k, spec.window)
    assert found.method == "ldlq"
    # The loss is summed in float64 from float32 values: decode and subtraction round 1e-7 of values 10 errors large.
    assert found.loss == pytest.approx(oracle.loss(weight, served(found), statistics.matrix), rel=1e-5)
    plain = encode_weight(NAME, weight, spec, TrellisOptions(k=3, warmup=ldlq.PLAIN_WARMUP))
    stored = trellis_expand(plain.words, plain.scales, spec)
    plain_loss = oracle.loss(weight, stored if axis == 1 else stored.T, statistics.matrix)
    assert found.plain_loss == pytest.approx(plain_loss, rel=1e-5)
    is_coarse = axis == 1 and not tile
    assert found.loss < (0.95 if is_coarse else 0.8) * plain_loss or (is_coarse and spec.stride <= BLOCK)
    assert found.loss <= plain_loss
    np.testing.assert_array_equal(weight, before[0])
    np.testing.assert_array_equal(statistics.matrix, before[1])


def cuts_of(spec: TrellisSpec, output: int, length: int) -> list[int]:
    """Inputs at which feedback reaches ``output``: where the stream passes a multiple of ``length``; every tile."""
    if spec.tile:
        return sorted({*range(0, spec.cols, spec.tile), spec.cols})
    if spec.axis == 1:
        return sorted({0, *range(-output * spec.stride % length, spec.cols, length), spec.cols})
    positions = [row * spec.stride + output for row in range(spec.rows)]
    return [0, *(r for r in range(1, spec.rows) if positions[r] // length != positions[r - 1] // length), spec.rows]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("axis", "columns", "tile"), [(1, 1, False), (0, 1, False), (0, 5, False), (0, 16, False), (1, 1, True)]
)
def test_every_output_was_asked_for_what_the_oracle_asks(
    shape: tuple[int, int], axis: int, columns: int, tile: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given what was served before, the target of each block is the minimum of the loss: dense, from the format alone.

    Natural order in the stream, so that rows share steps in every phase. The targets are float32: 1e-6 of their size.
    """
    monkeypatch.setattr(ldlq_coder, "LARGEST_GROUP", 0)
    weight, statistics = gaussian(*shape), hessian(shape[1])
    spec = spec_for(shape, k=3, axis=axis, tile=tile)
    choice = replace(options(columns=columns, order="natural", headroom=1.0), trellis=TrellisOptions(k=3, refit=False))
    damped = statistics.damped(0.05)
    coder = trellis_coder(NAME, weight, spec, choice, np.arange(shape[1]))
    asked = np.full(shape, np.nan)
    encode = coder.encode

    def watched(step, targets, factor):
        for piece, target in zip(step.pieces, targets, strict=True):
            assert np.isnan(asked[piece.outputs, piece.start : piece.stop]).all()  # each element is coded once
            asked[piece.outputs, piece.start : piece.stop] = target
        return encode(step, targets, factor)

    monkeypatch.setattr(coder, "encode", watched)
    result = code_with_feedback(weight, upper_factor(damped), coder)
    stored = trellis_expand(coder.words.reshape(spec.words_shape), coder.scales, spec)
    np.testing.assert_array_equal(weight + result.error, weight + ((stored if axis == 1 else stored.T) - weight))
    length = BLOCK if axis == 1 else max(columns * spec.stride // BLOCK, 1) * BLOCK
    for output in (0, 1, shape[0] // 2, shape[0] - 1):
        row = (stored[output : output + 1] if axis == 1 else stored.T[output : output + 1]).astype(np.float64)
        seen: list[np.ndarray] = []

        def code(target: np.ndarray, start: int, row: np.ndarray = row, seen: list[np.ndarray] = seen) -> np.ndarray:
            seen.append(target)
            return row[:, start : start + target.shape[1]]

        oracle.obq_blocks(weight[output : output + 1], damped, cuts_of(spec, output, length), code)
        np.testing.assert_allclose(asked[output], np.concatenate(seen, axis=1)[0], rtol=0, atol=2e-6)
    assert result.loss == pytest.approx(proxy_loss(result.error, damped), rel=1e-4)


@pytest.mark.parametrize("fault", [lambda self, coded: coded, lambda self, coded: np.roll(right(self, coded), 1)])
def test_a_block_in_the_wrong_place_shows(fault, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: blocks stored in the order of coding, or one off. What is told is then not what is stored."""
    weight, statistics = gaussian(256, 64), hessian(64)
    monkeypatch.setattr(ldlq_coder.AlongOutputs, "_stored_blocks", fault)
    spec = spec_for(weight.shape, k=3, axis=0)
    found = ldlq_encode(
        NAME, weight, statistics, spec, LdlqOptions(trellis=TrellisOptions(k=3, refit=False), columns=4)
    )
    assert oracle.loss(weight, served(found), statistics.matrix) > 10 * found.loss


right = ldlq_coder.AlongOutputs._stored_blocks


@pytest.mark.parametrize("shape", [(256, 40), (64, 48), (100, 70)])
def test_groups_by_falling_curvature(shape: tuple[int, int]) -> None:
    """Every input once; groups whole; what is left of a group last; and it pays on a spread Hessian."""
    statistics = hessian(shape[1], spread=1.5)
    spec = spec_for(shape, k=4, axis=0)
    group = BLOCK // np.gcd(shape[0], BLOCK)
    order = coding_order(spec, statistics, options())
    assert sorted(order) == list(range(shape[1]))
    whole = order[: shape[1] // group * group].reshape(-1, group)
    assert (whole == whole[:, :1] + np.arange(group)).all()
    assert (whole[:, 0] % group == 0).all()
    curvature = np.diagonal(statistics.matrix)[whole].mean(axis=1)
    assert (np.diff(curvature) <= 0).all()
    assert (order[whole.size :] == np.arange(whole.size, shape[1])).all()
    weight = gaussian(*shape)
    ordered = ldlq_encode(NAME, weight, statistics, spec, options(4))
    natural = ldlq_encode(NAME, weight, statistics, spec, options(4, order="natural"))
    assert ordered.loss == pytest.approx(oracle.loss(weight, served(ordered), statistics.matrix), rel=1e-5)
    if len(whole) > 8:
        assert ordered.loss < 0.95 * natural.loss


def test_headroom_is_made_where_feedback_widens_the_targets() -> None:
    """One bit and inputs of very different curvature: the row scale of the weight alone clips its targets."""
    weight, statistics = gaussian(64, 512), hessian(512, spread=1.5)
    spec = spec_for(weight.shape, k=1, axis=1, tile=True)
    found = ldlq_encode(NAME, weight, statistics, spec, options(1))
    alone = ldlq_encode(NAME, weight, statistics, spec, options(1, headroom=1.0))
    assert found.headroom > 1.1
    assert alone.headroom == 1.0
    assert found.loss < 0.97 * alone.loss


@pytest.mark.parametrize("probes", [ldl.GAIN_PROBES, 64 * ldl.GAIN_PROBES])
@pytest.mark.parametrize("spread", [0.5, 1.5])
@pytest.mark.parametrize("seed", range(4))
def test_the_gain_of_feedback_is_what_white_errors_add(
    seed: int, spread: float, probes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the dense definition, 4 sigma: zᵀ·A·z of signs z has mean tr A and variance 2·Σ A_ij² off the diagonal.

    The probes of the product know the gain to some 2 %; 64 times as many would tell blocks of 8 or 32 from those of 16.
    """
    monkeypatch.setattr(ldl, "GAIN_PROBES", probes)
    damped = hessian(509, seed, spread=spread).damped(0.01)
    unit, _ = block_udu(damped, 16)
    forward = np.eye(509) - np.linalg.inv(unit)
    gram = forward @ forward.T
    off_diagonal = np.linalg.norm(gram - np.diag(np.diag(gram)))
    sigma = np.sqrt(2 / probes) * off_diagonal / np.trace(gram)
    assert sigma < 0.05 * np.sqrt(32 / probes)
    assert feedback_gain(upper_factor(damped), 16) == pytest.approx(np.trace(gram) / 509, rel=4 * sigma)


def test_nothing_is_fed_forward_where_inputs_do_not_correlate() -> None:
    assert feedback_gain(upper_factor(np.eye(40)), 16) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("axis", [0, 1])
def test_the_refit_is_kept_only_where_the_loss_falls(axis: int) -> None:
    weight, statistics = gaussian(64, 512), hessian(512)
    spec = spec_for(weight.shape, k=2, axis=axis)
    found = ldlq_encode(NAME, weight, statistics, spec, options(2))
    without = ldlq_encode(NAME, weight, statistics, spec, LdlqOptions(trellis=TrellisOptions(k=2, refit=False)))
    assert found.refitted > 0
    assert without.refitted == 0
    assert found.loss < without.loss


def test_stored_scales_are_the_joint_minimum() -> None:
    """The gradient of the loss in every scale is zero, up to float16; checked by moving each scale by one unit."""
    rng = np.random.default_rng(5)
    values = rng.standard_normal((6, 50)).astype(np.float32)
    true = np.array([0.5, 1, 2, 0.25, 1.5, 1])
    wanted = (values * true[:, None] + 0.1 * rng.standard_normal((6, 50))).astype(np.float32)
    metric = hessian(6).matrix
    scales = fit_stored_scales(values, wanted, np.ones(6, np.float16), metric)

    def loss(s: np.ndarray) -> float:
        error = values * s[:, None] - wanted
        return float(np.sum(error * (metric @ error)))

    best = loss(scales.astype(np.float64))
    for row in range(6):
        for factor in (0.995, 1.005):
            moved = scales.astype(np.float64)
            moved[row] *= factor
            assert loss(moved) > best
    zero = np.array([1, 0, 1, 1, 1, 1], np.float16)
    assert fit_stored_scales(values, wanted, zero, metric)[1] == 0
    np.testing.assert_array_equal(fit_stored_scales(values, -wanted, zero, metric), zero)  # none may be negative


def test_what_wanders_off_is_damped_and_at_last_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, statistics = gaussian(256, 64), hessian(64, common=3.0, spread=2.0)
    spec = spec_for(weight.shape, k=1, axis=0)
    choice = options(1, order="natural", dampings=(1e-6, 10.0))
    found = ldlq_encode(NAME, weight, statistics, spec, choice)
    assert [a.verdict for a in found.attempts] == ["diverged", "accepted"]
    assert found.attempts[0].growth > GROWTH_LIMIT >= found.attempts[1].growth
    assert np.isnan(found.attempts[0].loss)
    last = ldlq_encode(NAME, weight, statistics, spec, replace(choice, dampings=(1e-6,)))
    plain = encode_weight(NAME, weight, spec, TrellisOptions(k=1))
    assert last.method == "plain"
    assert np.array_equal(last.matrix.words, plain.words)
    assert np.array_equal(last.matrix.scales, plain.scales)
    assert last.loss == last.plain_loss
    assert [note.split(" (")[0] for note in found.report()[1]] == ["damping 1e-06: diverged"]
    assert found.report()[0]["damping"] == 10
    assert last.report()[1][-1] == "fell back to the trellis without feedback"
    assert "damping" not in last.report()[0]
    assert np.isfinite(list(last.report()[0].values())).all()  # the manifest takes no others


def test_an_attempt_that_scatters_the_weight_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The unweighted error is looked at too: with the limit planted below what feedback costs, nothing is accepted."""
    weight, statistics = gaussian(64, 128), hessian(128)
    spec = spec_for(weight.shape, k=3, axis=1, tile=True)
    assert ldlq_encode(NAME, weight, statistics, spec, options()).method == "ldlq"
    monkeypatch.setattr(feedback, "SPREAD_LIMIT", 1.0)
    found = ldlq_encode(NAME, weight, statistics, spec, options(dampings=(0.01, 0.03)))
    assert found.method == "plain"
    assert [attempt.verdict for attempt in found.attempts] == ["scattered", "scattered"]
    assert found.report()[1][0].startswith("damping 0.01: scattered")


def test_rows_of_zeros_and_threads() -> None:
    weight, statistics = gaussian(40, 576), hessian(576)
    weight[3] = 0
    spec = spec_for(weight.shape, k=3, axis=1)
    found = [
        ldlq_encode(NAME, weight, statistics, spec, LdlqOptions(trellis=TrellisOptions(k=3, threads=threads)))
        for threads in (1, 3)
    ]
    assert found[0].matrix.scales[3] == 0
    assert (served(found[0])[3] == 0).all()
    assert np.array_equal(found[0].matrix.words, found[1].matrix.words)
    assert np.array_equal(found[0].matrix.scales, found[1].matrix.scales)


def test_refusals() -> None:
    with pytest.raises(UserError, match="every 0 columns"):
        options(columns=0)
    with pytest.raises(UserError, match="headroom 0"):
        options(headroom=0.0)
    with pytest.raises(UserError, match="width 48 do not fit"):
        ldlq_encode(NAME, gaussian(8, 64), hessian(48), spec_for((8, 64), k=3, axis=1), options())
