"""The real SmolLM2 as ``import-gguf`` made it: transformers and mlx-lm compute the same, and it models English."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch
from mlx.utils import tree_map
from mlx_lm.utils import load
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.real_models import smollm2
from tqtool.source.checkpoint import open_checkpoint

pytestmark = [
    pytest.mark.model,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]

TEXT = (
    "The sky is blue because of a process called Rayleigh scattering. Light from the sun reaches the atmosphere and is "
    "scattered in all directions by the gases and particles in the air. Blue light is scattered more than other "
    "colors because it travels as shorter, smaller waves. This is why we see a blue sky most of the time."
)


@pytest.fixture(scope="module")
def folder() -> Path:
    return smollm2()


def log_softmax(logits: NDArray[Any]) -> NDArray[np.float64]:
    wide = logits.astype(np.float64)
    wide -= wide.max(-1, keepdims=True)
    result: NDArray[np.float64] = wide - np.log(np.exp(wide).sum(-1, keepdims=True))
    return result


def test_both_implementations_agree(folder: Path) -> None:
    model, tokenizer = load(str(folder))
    model.update(tree_map(lambda value: value.astype(mx.float32), model.parameters()))
    ids = tokenizer.encode(TEXT)[:64]
    assert len(ids) == 64
    assert AutoTokenizer.from_pretrained(folder).encode(TEXT)[:64] == ids
    ours = np.array(model(mx.array([ids]))[0])
    with torch.no_grad():
        theirs = (
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(torch.tensor([ids])).logits[0].numpy()
        )
    # 30 layers of 7 products over up to 1536 terms in another order, the same again for everything else.
    bound = float(theirs.std()) * 2 * 30 * 7 * 1536**0.5 * 2.0**-24
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=bound)
    assert (ours.argmax(-1) == theirs.argmax(-1)).all()
    p, q = log_softmax(theirs), log_softmax(ours)
    # A difference of d in the logits is at most d² / 2 in KL where the probabilities are the same to first order.
    assert 0 <= (np.exp(p) * (p - q)).sum(-1).mean() <= bound**2 / 2
    # Rows left in llama.cpp's order cost this model more than two nats; it has about 2.1 here.
    loss = -p[np.arange(63), ids[1:]].mean()
    assert 1.0 < loss < 3.0


def test_the_tokenizer_gives_text_back(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for text in ("naïve café", "123 4567", "\ttabs\n\n  and  spaces ", "🙂👩‍👩‍👧", "日本語 Привет", "a\r\nb"):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
    # Every digit is a token of its own in this model.
    assert len(tokenizer.encode("1234567890")) == 10
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.encode("<|im_end|>") == [tokenizer.eos_token_id] == [2]


def test_the_folder_is_what_the_models_card_says(folder: Path) -> None:
    checkpoint = open_checkpoint(str(folder))
    assert sum(int(np.prod(shape)) for shape in checkpoint.shapes().values()) == 134_515_008
    assert checkpoint.warnings == ()
    config = checkpoint.config
    assert (config["hidden_size"], config["num_hidden_layers"], config["tie_word_embeddings"]) == (576, 30, True)
    assert (config["rope_theta"], config["rms_norm_eps"]) == (100000.0, 1e-05)
    record = json.loads((folder / "tqtool" / "import.json").read_text())
    assert record["source"]["sha256"] == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
