"""A packed artifact in stock mlx-lm: loads with trust, fails loudly without, gives tqtool's logits."""

from __future__ import annotations

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest

from tests.support.packed_artifact import write_packed
from tests.support.tiny_models import Tiny
from tqtool.runtime.load import load

TOKENS = mx.array([[5, 9, 31, 7, 7, 200, 3, 11]])


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def packed(request, tmp_path_factory):
    tiny = Tiny(model_type=request.param, hidden=128, intermediate=200, tied=request.param == "llama")
    return write_packed(tmp_path_factory.mktemp("stock") / "model", tiny)


def test_stock_mlx_lm_refuses_without_trust(packed):
    with pytest.raises(ValueError, match=r"custom module \('tqtool_model.py'\)"):
        mlx_lm.load(str(packed))


def test_stock_mlx_lm_with_trust_gives_the_same_logits(packed):
    model, tokenizer = mlx_lm.load(str(packed), trust_remote_code=True)
    assert type(model.model.layers[0].mlp.down_proj).__module__ == "custom_model"
    model.set_dtype(mx.float32)
    found, expected = np.array(model(TOKENS)[0]), np.array(load(packed).model(TOKENS)[0])
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())
    text = mlx_lm.generate(model, tokenizer, [5, 6], max_tokens=4)
    assert isinstance(text, str)
