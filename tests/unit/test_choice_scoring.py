"""Log-likelihoods of choices against a dense float64 decoder; planted faults in cache and split must show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.oracles.loglikelihood import continuation_loglikelihood
from tests.support.tiny_models import Tiny, write_tiny
from tqtool.errors import NumericalError
from tqtool.evals import choice, prefix
from tqtool.evals.choice import ChoiceScorer, batches
from tqtool.evals.items import ChoiceItem, Message
from tqtool.evals.prefix import PrefixCache
from tqtool.evals.prompts import ChoicePrompt
from tqtool.runtime.load import LoadedModel, load

TINY = Tiny(dtype="float32", seed=5)
# float32 products of width ≤ 256 err by about 1e-6 of a logit near 1; a continuation here has up to 40 tokens.
CLOSE = 1e-4


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(write_tiny(tmp_path_factory.mktemp("choice") / "m", TINY), dtype="float32")


def prompt(prefix_: list[int], *continuations: list[int], texts: list[str] | None = None, answer: int = 0) -> Any:
    item = ChoiceItem(
        id="i",
        task="t",
        prompt="p",
        messages=(Message(role="user", content="p"),),
        choices=tuple(texts or [f"{index}" for index in range(len(continuations))]),
        answer=answer,
    )
    return ChoicePrompt(
        item=item, format="raw", prefix=tuple(prefix_), continuations=tuple(map(tuple, continuations)), merged=0
    )


def oracle(scored: ChoicePrompt) -> list[float]:
    weights = {name: array.astype(np.float64) for name, array in TINY.tensors().items()}
    config = TINY.config()
    return [
        continuation_loglikelihood(weights, config, list(scored.prefix), list(tokens))
        for tokens in scored.continuations
    ]


def random_tokens(seed: int, count: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(3, 320, count)]


# Several lengths at once: ragged rows, equal rows (one token each), a prefix of one token, one longer than a step.
PROMPTS = {
    "ragged": prompt(random_tokens(1, 9), random_tokens(2, 1), random_tokens(3, 7), random_tokens(4, 40), [5, 6]),
    "letters": prompt(random_tokens(5, 20), [7], [8], [9], [10]),
    "one token of prefix": prompt([11], [12, 13], [14]),
    "shared starts": prompt(random_tokens(6, 5), [20, 21, 22], [20, 21, 23], [20]),
    "the same twice": prompt(random_tokens(7, 5), [20, 21], [20, 21]),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_logprobs_are_the_dense_decoders(tiny: LoadedModel, name: str) -> None:
    found = ChoiceScorer(tiny.model, PrefixCache(tiny.model)).logprobs(PROMPTS[name])
    np.testing.assert_allclose(found, oracle(PROMPTS[name]), atol=CLOSE, rtol=0)


def test_a_prefix_longer_than_a_step_and_a_batch_cut_in_pieces(
    tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix, "STEP", 4)
    monkeypatch.setattr(choice, "LOGITS", 320 * 9)
    found = ChoiceScorer(tiny.model, PrefixCache(tiny.model)).logprobs(PROMPTS["ragged"])
    np.testing.assert_allclose(found, oracle(PROMPTS["ragged"]), atol=CLOSE, rtol=0)


def test_neighbours_share_their_beginning_and_change_nothing(tiny: LoadedModel) -> None:
    shots = random_tokens(8, 30)
    prompts = [prompt([*shots, *random_tokens(seed, size)], [7, 8], [9]) for seed, size in ((1, 6), (2, 3), (3, 9))]
    cache = PrefixCache(tiny.model)
    scorer = ChoiceScorer(tiny.model, cache)
    for scored in [*prompts, prompts[0], PROMPTS["one token of prefix"], prompts[1]]:
        np.testing.assert_allclose(scorer.logprobs(scored), oracle(scored), atol=CLOSE, rtol=0)
    # 35 at first, then what lies after the 30 shared ones; after the odd one everything anew.
    assert cache.computed == 35 + 2 + 8 + 5 + 0 + 32


def test_a_sliding_window_model_scores_as_without_a_cache() -> None:
    from mlx_lm.models.gemma3_text import Model, ModelArgs

    mx.random.seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 8, "vocab_size": 320, "num_hidden_layers": 3}
    model = Model(ModelArgs(model_type="gemma3_text", sliding_window=8, sliding_window_pattern=2, **sizes))
    cache = PrefixCache(model)
    scorer = ChoiceScorer(model, cache)
    for length in (5, 30, 31, 4):  # inside the window, beyond it (cannot be trimmed), back
        scored = prompt(random_tokens(9, length), [7, 8, 9], random_tokens(2, 12), [10])
        expected = []
        for tokens in scored.continuations:
            whole = [*scored.prefix, *tokens]
            logits = np.array(model(mx.array([whole])).astype(mx.float32))[0].astype(np.float64)
            logs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
            expected.append(sum(logs[place - 1, whole[place]] for place in range(len(scored.prefix), len(whole))))
        np.testing.assert_allclose(scorer.logprobs(scored), expected, atol=CLOSE, rtol=0)


def test_the_three_ways_to_choose_can_differ(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    # Sums -6, -7, -7.5; per token -6, -7, -2.5; per byte of the text (2 bytes of one letter) -3, -1.75, -7.5.
    scorer = ChoiceScorer(tiny.model, PrefixCache(tiny.model))
    monkeypatch.setattr(scorer, "logprobs", lambda scored: np.array([-6.0, -7.0, -7.5]))
    for answer, flags in enumerate(("acc", "acc_norm", "acc_token")):
        scored = prompt([3], [4], [5], [6, 7, 8], texts=["é", "four", "x"], answer=answer)
        outcome = scorer.score(scored)
        assert [name for name, right in outcome.flags.items() if right] == [flags]
        assert (outcome.tokens, outcome.logprobs) == ((1, 1, 3), (-6.0, -7.0, -7.5))


def test_logits_that_are_not_finite_name_the_item(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "m", TINY)
    loaded = load(folder, dtype="float32")
    loaded.model.model.norm.weight = loaded.model.model.norm.weight * float("nan")
    with pytest.raises(NumericalError, match="item 'i', raw: the model's logits are not finite"):
        ChoiceScorer(loaded.model, PrefixCache(loaded.model)).score(PROMPTS["letters"])


@pytest.mark.parametrize(
    ("lengths", "limit", "cut"),
    [((3, 3, 3), 6, [2, 1]), ((1, 5, 1), 4, [1, 1, 1]), ((1, 1, 4), 100, [3]), ((2, 3, 1), 6, [2, 1]), ((), 5, [])],
)
def test_batches(lengths: tuple[int, ...], limit: int, cut: list[int]) -> None:
    rows = [(index,) * length for index, length in enumerate(lengths)]
    found = batches(rows, limit)
    assert [len(batch) for batch in found] == cut
    assert [row for batch in found for row in batch] == rows


# ----------------------------------------------------------------------------------------------- planted faults
def _untrimmed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_lm.models.cache.trim_prompt_cache", lambda cache, count: count)


def _one_too_many_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = prefix.shared_length
    monkeypatch.setattr(prefix, "shared_length", lambda sequences: min(honest(sequences) + 1, *map(len, sequences)))


def _first_row_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = ChoiceScorer._logits
    monkeypatch.setattr(ChoiceScorer, "_logits", lambda self, scored, rows: honest(self, scored, [rows[0]] * len(rows)))


def _copies_share_their_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("copy.deepcopy", lambda value: value)


def _prefix_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    from mlx_lm.models.cache import make_prompt_cache

    monkeypatch.setattr(PrefixCache, "copies", lambda self, rows: make_prompt_cache(self._model))


@pytest.mark.parametrize(
    "plant", [_untrimmed, _one_too_many_kept, _first_row_for_all, _copies_share_their_state, _prefix_lost]
)
def test_a_planted_fault_shows(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch, plant: Any) -> None:
    shots = random_tokens(8, 12)
    prompts = [prompt([*shots, *random_tokens(seed, 5)], [7, 8, 9], [10, 11, 12]) for seed in (1, 2)]
    plant(monkeypatch)
    scorer = ChoiceScorer(tiny.model, PrefixCache(tiny.model))
    found: list[float] = []
    try:
        for scored in prompts:
            found.extend(scorer.logprobs(scored))
    except (ValueError, AssertionError, IndexError):  # some faults do not even fit
        return
    assert np.abs(np.array(found) - [value for scored in prompts for value in oracle(scored)]).max() > 100 * CLOSE
