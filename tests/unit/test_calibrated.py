"""Hessians of a job: how long a sink counts, in which basis, where damping begins; and that keys know it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tqtool.formats.dtypes import DType
from tqtool.formats.hessians import InputMoments, InputRecord
from tqtool.pipeline.calibrated import LONGEST_SINK, Hessians, calibrated_affine, capped, dampings_of
from tqtool.pipeline.coding import encoder_of
from tqtool.pipeline.plan import Work
from tqtool.pipeline.reuse import tensor_key
from tqtool.solve.feedback import DAMPINGS
from tqtool.solve.gptq import GptqOptions
from tqtool.solve.ldlq_coder import LdlqOptions
from tqtool.solve.rtn import AffineRtn
from tqtool.solve.trellis import TrellisOptions, TrellisPacked
from tqtool.transform.folds import Channels
from tqtool.transform.outputs import OutputTensor, Role

WIDTH = 37
EPSILON = 2.0**-24
"""Half a unit in the last place of a float32 near 1."""


def moments_of(rng: np.random.Generator, *lengths: float) -> InputMoments:
    """90 rows of uneven channels, and sinks of ``lengths`` in units of the root mean square row."""
    rows = (rng.standard_normal((90, WIDTH)) * np.exp(rng.normal(0, 1, WIDTH))).astype(np.float32)
    matrix = (rows.T @ rows / 90).astype(np.float32)
    directions = rng.standard_normal((len(lengths), WIDTH))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    usual = np.sqrt(np.trace(matrix.astype(np.float64)))
    sinks = directions * np.array(lengths, np.float64).reshape(-1, 1) * usual
    return InputMoments(matrix=matrix, sinks=sinks.astype(np.float32), rows=90)


class _Folder:
    """Stands for a calibration folder: one module, or any."""

    folder = "calibration"

    class info:  # noqa: N801
        files = {"layer-00000.safetensors": "0" * 64}  # noqa: RUF012

        @staticmethod
        def input_of(module: str) -> Any:
            common = {"width": WIDTH, "rows": 256, "sinks": 0, "dropped": 0, "wider": None}
            return InputRecord(key="down_proj", file="layer-00000.safetensors", modules=[module], **common)

    def __init__(self, moments: InputMoments) -> None:
        self._moments = moments

    def moments(self, module: str) -> InputMoments:
        return self._moments


def hessians_of(moments: InputMoments, **options: Any) -> Hessians:
    folder: Any = _Folder(moments)
    return Hessians(calibration=folder, **options)


def output_of(role: Role) -> OutputTensor:
    return OutputTensor(name="m.weight", source="m.weight", shape=(32, 256), module="m", role=role)


# ------------------------------------------------------------------------------------------------- length of a sink
def test_a_sink_is_as_long_as_a_few_ordinary_rows_at_most() -> None:
    """The mean energy of rows is the trace of their mean second moment; shorter sinks stay as they are, bit for bit."""
    moments = moments_of(np.random.default_rng(0), 0.0, 0.3, 0.99 * LONGEST_SINK, 1.5 * LONGEST_SINK, 1e3)
    found = capped(moments)
    assert np.array_equal(found.sinks[:3], moments.sinks[:3])
    wide = found.sinks.astype(np.float64)
    energies = np.sum(wide**2, axis=1)
    # Each element is rounded once to float32, and so is the factor's product: 2 · (1 + 2)·ε of an energy.
    longest = LONGEST_SINK**2 * np.trace(moments.matrix.astype(np.float64))
    assert np.allclose(energies[3:], longest, rtol=6 * EPSILON, atol=0)
    long = moments.sinks[3:].astype(np.float64)
    turned = long / np.linalg.norm(long, axis=1, keepdims=True) - wide[3:] / np.sqrt(energies[3:, None])
    assert np.abs(turned).max() <= 4 * EPSILON
    assert (found.rows, found.sinks.dtype) == (90, np.float32)
    assert np.array_equal(found.matrix, moments.matrix)
    assert np.array_equal(capped(found).sinks[:3], found.sinks[:3])


def test_nothing_is_divided_by_zero() -> None:
    moments = moments_of(np.random.default_rng(1), 0.0, 2.0)
    with np.errstate(all="raise"):
        none = capped(InputMoments(matrix=moments.matrix, sinks=np.empty((0, WIDTH), np.float32), rows=90))
        assert none.sinks.shape == (0, WIDTH)
        silent = InputMoments(matrix=np.zeros_like(moments.matrix), sinks=moments.sinks, rows=90)
        assert np.array_equal(capped(silent).sinks, np.zeros((2, WIDTH), np.float32))
        still = InputMoments(matrix=silent.matrix, sinks=np.zeros((1, WIDTH), np.float32), rows=0)
        assert np.array_equal(capped(still).sinks, still.sinks)
        assert np.array_equal(capped(moments).sinks[0], np.zeros(WIDTH, np.float32))


@pytest.mark.parametrize("is_reordered", [False, True], ids=["as-they-are", "reordered"])
def test_the_hessian_is_of_shortened_sinks_in_the_basis_of_the_weight(is_reordered: bool) -> None:
    """Row by row: what is ordinary is decided before the channels are scaled, which lengthens and shortens rows."""
    rng = np.random.default_rng(2)
    moments = moments_of(rng, 0.5, 1.0, 40.0, 1e3)
    order, scale = np.arange(WIDTH, dtype=np.int32), np.ones(WIDTH, np.float32)
    if is_reordered:
        order, scale = rng.permutation(order), np.exp(rng.normal(0, 1, WIDTH)).astype(np.float32)
    channels = {"m": Channels(order=order, scale=scale)} if is_reordered else {}
    hessians = hessians_of(moments, sink_weight=7, channels=channels)
    longest = LONGEST_SINK * np.sqrt(np.trace(moments.matrix.astype(np.float64)))
    total = np.zeros((WIDTH, WIDTH))
    turn = np.diag(scale.astype(np.float64))[:, order]  # x → (x ∘ scale)[order]
    total += 90 * turn.T @ moments.matrix.astype(np.float64) @ turn
    for sink in moments.sinks.astype(np.float64):
        short = sink * min(1.0, longest / np.linalg.norm(sink)) @ turn
        total += 7 * np.outer(short, short)
    expected = total / 94
    found = hessians.hessian(hessians.moments("m"))
    # Moments and sinks are float32 and each is multiplied twice: up to four roundings, relative to the diagonal.
    size = np.sqrt(np.outer(np.diagonal(expected), np.diagonal(expected)))
    assert (np.abs(found.matrix - expected) <= 8 * EPSILON * size).all()
    assert np.allclose(hessians.curvature("m"), np.diagonal(found.matrix), rtol=1e-12, atol=0)
    assert found.rows == 94


# ------------------------------------------------------------------------------------------------- damping
@pytest.mark.parametrize("role", list(Role))
def test_damping_begins_by_role(role: Role) -> None:
    expected = (0.3, 1.0, 3.0, 10.0) if role is Role.DOWN else (0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
    output = output_of(role)
    assert dampings_of(output, rows=output.shape[-1]) == expected
    few = dampings_of(output, rows=output.shape[-1] - 1)
    assert few == ((1.0, 3.0, 10.0) if role is Role.DOWN else expected)
    hessians = hessians_of(moments_of(np.random.default_rng(3)))
    if not hessians.has(output):
        return
    plain = AffineRtn(bits=4, group_size=64, mode="affine", dtype=DType.BF16)
    solved, _ = calibrated_affine({output.name: plain}, (output,), hessians)
    encoder, _ = encoder_of(output, hessians)
    affine: Any = solved[output.name]
    trellis: Any = encoder
    assert affine.options.dampings == trellis.dampings == expected
    assert affine.recipe(output.name)["dampings"] == trellis.recipe(output.name)["dampings"] == expected


def test_the_solvers_own_defaults_are_the_usual_ones() -> None:
    """The peer's GPTQ is met at 0.01; a job begins elsewhere because it knows what a module is."""
    assert DAMPINGS[0] == 0.01
    assert GptqOptions(bits=4, group_size=64).dampings == LdlqOptions(trellis=TrellisOptions(k=2)).dampings == DAMPINGS


def test_other_dampings_are_another_key() -> None:
    hessians = hessians_of(moments_of(np.random.default_rng(4)))
    keys = set()
    for role in (Role.UP, Role.DOWN):
        output = output_of(role)
        encoder, _ = encoder_of(output, hessians)
        coded = TrellisPacked(options=TrellisOptions(k=2), axis=1, tile=True, encoder=encoder)
        plain = AffineRtn(bits=4, group_size=64, mode="affine", dtype=DType.BF16)
        solved, _ = calibrated_affine({output.name: plain}, (output,), hessians)
        for quantizer in (coded, solved[output.name]):
            keys.add(tensor_key(Work(output=output, quantizer=quantizer, stored=()), lambda name: "0" * 64))
    assert len(keys) == 4
    assert None not in keys
