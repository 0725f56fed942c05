"""Penalties, biases and filters against their definitions in numpy."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from tqtool.serve.sampling import Sampling, make_processors, make_sampler

VOCAB = 12
PROMPT = (1, 2, 3, 4, 5, 6, 7)
ANSWER = (8, 8, 9, 2)


def logits() -> np.ndarray:
    return np.random.default_rng(4).standard_normal(VOCAB).astype(np.float32) * 3


def processed(sampling: Sampling, fed: int) -> np.ndarray:
    """What the generation loop would get: it was fed the last ``fed`` tokens of the prompt, then the answer."""
    tokens, values = mx.array([*PROMPT[-fed:], *ANSWER]), mx.array(logits())[None]
    for processor in make_processors(sampling, PROMPT, fed):
        values = processor(tokens, values)
    return np.array(values[0])


@pytest.mark.parametrize("fed", [1, 3, len(PROMPT)])
@pytest.mark.parametrize("context", [2, 5, 7, 100])
def test_repetition_counts_prompt_and_answer_whatever_came_from_a_cache(fed, context):
    expected = logits()
    for token in set([*PROMPT, *ANSWER][-context:]):
        expected[token] = expected[token] / 1.5 if expected[token] > 0 else expected[token] * 1.5
    found = processed(Sampling(repetition_penalty=1.5, repetition_context=context), fed)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("fed", [1, 3, len(PROMPT)])
def test_presence_and_frequency_count_the_answer_alone(fed):
    expected = logits()
    for token in range(VOCAB):
        count = ANSWER.count(token)
        expected[token] -= 0.7 * count + 0.4 * (count > 0)
    found = processed(Sampling(presence_penalty=0.4, frequency_penalty=0.7), fed)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_biases_are_added_and_nothing_is_left_out():
    expected = logits()
    expected[3] += 5
    np.testing.assert_allclose(processed(Sampling(logit_bias={3: 5.0}), 2), expected, rtol=1e-6)
    assert make_processors(Sampling(), PROMPT, 2) == []


def shares(sampling: Sampling, draws: int = 2000) -> np.ndarray:
    values = mx.array(logits())[None]
    logprobs = values - mx.logsumexp(values)
    sample = make_sampler(sampling)
    found = [int(sample(logprobs).item()) for _ in range(draws)]
    return np.bincount(found, minlength=VOCAB) / draws


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.5),
        Sampling(temperature=2.0, top_k=4),
        Sampling(temperature=1.5, top_p=0.8),
        Sampling(temperature=1.5, min_p=0.1),
        Sampling(top_k=VOCAB),
        Sampling(temperature=0),
    ],
)
def test_tokens_come_as_often_as_they_should(sampling):
    probability = np.exp(logits().astype(float))
    probability /= probability.sum()
    order = np.argsort(-probability)
    kept = np.ones(VOCAB, bool)
    if sampling.top_p < 1:
        above = np.cumsum(probability[order]) - probability[order]
        kept[order[above >= sampling.top_p]] = False
    if sampling.min_p > 0:
        kept &= probability >= sampling.min_p * probability.max()
    if 0 < sampling.top_k < VOCAB:
        kept &= np.isin(np.arange(VOCAB), order[: sampling.top_k])
    if sampling.temperature == 0:
        expected = np.eye(VOCAB)[order[0]]
    else:
        expected = np.where(kept, probability ** (1 / sampling.temperature), 0)
        expected /= expected.sum()
    found = shares(sampling)
    assert not found[expected == 0].any()
    # Five standard deviations of a share of 2000 draws; the seed is fixed, so this either holds or does not.
    np.testing.assert_allclose(found, expected, atol=5 * np.sqrt(0.25 / 2000))
