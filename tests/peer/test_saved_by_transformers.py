"""Checkpoints as transformers 5 saves them: what is converted from them computes what transformers computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch
from mlx_lm.utils import load_model

from tests.support.tiny_gguf import TinyGguf
from tests.support.tiny_models import write_tokenizer
from tqtool.formats.dtypes import DType
from tqtool.pipeline.convert import ConvertRequest, plan_convert

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

TOKENS = list(range(3, 43))
FAST = {"rope_type": "default", "rope_theta": 1_000_000.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
CASES = {
    "llama": TinyGguf(settings={"rope_parameters": FAST}),
    "qwen2 yarn": TinyGguf(family="qwen2", settings={"rope_parameters": YARN}),
    "gemma3": TinyGguf(family="gemma3", settings={"tie_word_embeddings": True}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_dense_copy_computes_the_same(tmp_path: Path, name: str) -> None:
    model: Any = CASES[name].model()
    model.save_pretrained(tmp_path / "m")
    write_tokenizer(tmp_path / "m", 320)
    plan_convert(ConvertRequest(source=str(tmp_path / "m"), out=tmp_path / "out", dtype=DType.F32)).run()
    with torch.no_grad():
        expected = model(torch.tensor([TOKENS])).logits[0].numpy()
    copy, _ = load_model(tmp_path / "out")
    found = np.array(copy(mx.array([TOKENS]))[0])
    # As in test_import_families: 6 layers of 7 products of up to 512 terms, twice over, errors adding up.
    bound = float(expected.std()) * 2 * 6 * 7 * 512**0.5 * 2.0**-24 * 4
    np.testing.assert_allclose(found, expected, rtol=0, atol=bound)
