"""Greedy answers against a dense decoder; ends by end token, stop string and limit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.oracles.loglikelihood import greedy
from tests.support.eos_first import write_eos_first
from tests.support.tiny_models import Tiny, write_tiny
from tqtool.errors import NumericalError
from tqtool.evals.extract import Extractor
from tqtool.evals.generative import answer, first_stop
from tqtool.evals.items import GenerateItem, parse_item
from tqtool.evals.prefix import PrefixCache
from tqtool.evals.prompts import GeneratePrompt, Prompter
from tqtool.runtime.load import LoadedModel, load

TINY = Tiny(dtype="float32", seed=5)
PROMPT = (231, 106, 77, 315)
NEW = 12


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(write_tiny(tmp_path_factory.mktemp("generative") / "m", TINY), dtype="float32")


@pytest.fixture(scope="module")
def words() -> list[str]:
    """What the dense decoder says; no end token in it, so that it must be the limit that ends the answer."""
    weights = {name: array.astype(np.float64) for name, array in TINY.tensors().items()}
    tokens = greedy(weights, TINY.config(), list(PROMPT), NEW)
    assert min(tokens) > 2
    return [f"w{token}" for token in tokens]


def prompt(expected: str = "x", *, stop: tuple[str, ...] = (), tokens: tuple[int, ...] = PROMPT) -> GeneratePrompt:
    item = GenerateItem(
        id="g", task="t", prompt="p", messages=(), answer=expected, extractor=Extractor(kind="text"), stop=stop
    )
    return GeneratePrompt(item=item, format="raw", tokens=tokens)


def run(model: LoadedModel, asked: GeneratePrompt, max_tokens: int = NEW) -> Any:
    return answer(model, asked, PrefixCache(model.model), max_tokens=max_tokens)


def test_the_answer_is_the_dense_decoders_up_to_the_limit(tiny: LoadedModel, words: list[str]) -> None:
    outcome = run(tiny, prompt(" ".join(words)))
    assert outcome.text.strip() == " ".join(words)
    assert (outcome.tokens, outcome.finish) == (NEW, "length")
    assert outcome.flags == {"exact_match": True, "instant_eos": False, "truncated": True}
    assert run(tiny, prompt("other")).flags["exact_match"] is False


def test_a_prompt_of_one_token(tiny: LoadedModel) -> None:
    weights = {name: array.astype(np.float64) for name, array in TINY.tensors().items()}
    first = greedy(weights, TINY.config(), [9], 1)[0]
    assert run(tiny, prompt(tokens=(9,)), 1).text.strip() == f"w{first}"


def test_a_stop_string_ends_the_answer_and_is_not_in_it(tiny: LoadedModel, words: list[str]) -> None:
    place = next(index for index, word in enumerate(words) if index > 1 and word not in words[:index])
    outcome = run(tiny, prompt(" ".join(words[:place]), stop=("nowhere", words[place])))
    assert outcome.text.strip() == " ".join(words[:place])
    assert outcome.finish == "stop"
    assert outcome.flags == {"exact_match": True, "instant_eos": False, "truncated": False}
    # mlx-lm's detokenizer may hold a word back until the next one comes.
    assert place + 1 <= outcome.tokens <= place + 2


def test_what_was_answered_before_changes_nothing(tiny: LoadedModel) -> None:
    cache = PrefixCache(tiny.model)
    first = answer(tiny, prompt(), cache, max_tokens=NEW)
    longer = answer(tiny, prompt(tokens=(*PROMPT, 5, 6)), cache, max_tokens=NEW)
    assert answer(tiny, prompt(), cache, max_tokens=NEW) == first
    assert run(tiny, prompt(tokens=(*PROMPT, 5, 6))) == longer
    assert cache.computed == 3 + 2  # nothing of a prompt twice


def test_a_model_that_ends_at_once(tmp_path: Path) -> None:
    loaded = load(write_eos_first(tmp_path / "m"))
    item = parse_item({"id": "g", "kind": "generate", "prompt": "2+2=", "answer": "4", "extractor": "last_number"})
    for format_ in ("raw", "templated"):
        asked = Prompter(loaded.tokenizer, "m").prompt(item, format_)  # type: ignore[arg-type]
        assert isinstance(asked, GeneratePrompt)
        for limit in (1, 8):  # also where the end token is the last one allowed
            outcome = run(loaded, asked, limit)
            assert (outcome.text, outcome.extracted, outcome.tokens, outcome.finish) == ("", None, 0, "eos")
            assert outcome.flags == {"exact_match": False, "instant_eos": True, "truncated": False}


def test_logits_that_are_not_finite_name_the_item(tmp_path: Path) -> None:
    loaded = load(write_tiny(tmp_path / "m", TINY), dtype="float32")
    loaded.model.model.norm.weight = loaded.model.model.norm.weight * float("nan")
    with pytest.raises(NumericalError, match="item 'g', raw: the model's logits are not finite"):
        run(loaded, prompt())


@pytest.mark.parametrize(
    ("text", "stops", "place"),
    [("a Q: b", ("Q:",), 2), ("xyz", ("z", "y"), 1), ("abc", ("d",), None), ("abc", (), None), ("aab", ("ab",), 1)],
)
def test_first_stop(text: str, stops: tuple[str, ...], place: int | None) -> None:
    assert first_stop(text, stops) == place
