"""Our GPTQ beside mlx-lm's (0.32.2 or later; earlier ones are wrong beyond the first group)."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.quant.gptq import gptq_quantize as peer_quantize

from tqtool.formats.affine import AffineSpec, dequantize, unpack
from tqtool.formats.dtypes import DType
from tqtool.mathx.ldl import proxy_loss
from tqtool.solve.gptq import GptqOptions, gptq_quantize
from tqtool.solve.hessian import HessianSum

NAME = "linear.weight"
ROWS, WIDTH = 96, 320


class Net(nn.Module):
    def __init__(self, weight: np.ndarray) -> None:
        super().__init__()
        self.linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        self.linear.weight = mx.array(weight)

    def __call__(self, x: mx.array) -> mx.array:
        return self.linear(x)


# Both work in float32, along other ways: mlx-lm inverts the Hessian and updates columns in place, so targets differ by
# about 1e-6 of their size. A code flips where a target lies that close to a tie: probability 2e-6 · |w|/step, |w|/step
# up to 2^bits. Per row of 320 weights that is 3e-4 · 2^bits, an eighth of the rows at 8 bits. A row that flipped once
# is another, equally good run of the same algorithm: its loss moves by a few per cent either way, the sum far less.
@pytest.mark.parametrize(("bits", "same_rows"), [(2, 0.97), (4, 0.95), (8, 0.75)])
@pytest.mark.parametrize("group", [32, 64])
def test_the_same_codes_and_the_same_loss(bits: int, same_rows: float, group: int) -> None:
    """Five or ten groups; float32 scales, because mlx-lm rounds them to the model's dtype after the fact."""
    rng = np.random.default_rng(bits * group)
    mix = rng.standard_normal((WIDTH, WIDTH)) / np.sqrt(WIDTH)
    inputs = (rng.standard_normal((8, 160, WIDTH)) @ mix + rng.standard_normal((8, 160, 1))).astype(np.float32)
    weight = (rng.standard_normal((ROWS, WIDTH)) * 0.02).astype(np.float32)

    model, _ = peer_quantize(Net(weight), mx.array(inputs), bits, group, bits, group)
    theirs = [np.array(getattr(model.linear, part)) for part in ("weight", "scales", "biases")]

    total = HessianSum(WIDTH)
    total.accumulate(inputs.reshape(-1, WIDTH))
    statistics = total.finish()
    ours = gptq_quantize(NAME, weight, statistics, GptqOptions(bits=bits, group_size=group, dtype=DType.F32))
    assert [attempt.damping for attempt in ours.attempts] == [0.01]

    spec = AffineSpec(bits=bits, group_size=group)
    same = (unpack(ours.words, bits) == unpack(theirs[0], bits)).all(axis=1)
    assert same.mean() >= same_rows
    # A scale is a range over levels and codes, each off by 1e-6; the edge of a range may be a smaller number.
    np.testing.assert_allclose(ours.scales[same], theirs[1][same], rtol=1e-4)
    np.testing.assert_allclose(ours.biases[same], theirs[2][same], rtol=1e-4, atol=1e-6)
    their_loss = proxy_loss(dequantize(*theirs, spec) - weight, statistics.matrix)
    assert ours.loss == pytest.approx(their_loss, rel=0.01)
    assert ours.loss < 0.8 * ours.plain_loss
