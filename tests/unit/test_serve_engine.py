"""The engine alone: exact reuse of prompts, answers that do not depend on others, places in the queue."""

from __future__ import annotations

import queue
from contextlib import contextmanager

import pytest

from tests.support.tiny_bpe import write_bpe
from tests.support.tiny_models import Tiny, write_tiny
from tqtool.kv.scheme import FULL_CACHE, KVOptions, parse_scheme
from tqtool.runtime.load import load
from tqtool.serve.answer import Piece
from tqtool.serve.caches import choose_caches
from tqtool.serve.engine import Busy, Engine, EngineOptions, Stopping
from tqtool.serve.jobs import Begun, Ended, Failed, Request
from tqtool.serve.prefix_store import PrefixStore
from tqtool.serve.sampling import Sampling

CHUNK = 16
PROMPT = tuple((7 * n * n + 3 * n) % 260 + 3 for n in range(5 * CHUNK + 5))
OTHER_END = PROMPT[: 3 * CHUNK + 2] + PROMPT[:20]
SAMPLED = Sampling(temperature=1.0, seed=3, repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.2)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """A model with attention that matters."""
    folder = tmp_path_factory.mktemp("engine") / "model"
    write_tiny(folder, Tiny(vocab=320, heads=2, kv_heads=1, head_dim=64, dtype="float32"), tokenizer=False)
    write_bpe(folder)
    return load(folder)


@contextmanager
def engine_of(loaded, kv=FULL_CACHE, **options):
    settings = {"chunk": CHUNK, "prefix_bytes": 1 << 24, **options}
    engine = Engine(loaded, EngineOptions(make_caches=choose_caches(loaded, kv).make, **settings))
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()


def begin(engine, prompt=PROMPT, sampling=SAMPLED, tokens=12, **more):
    events: queue.Queue = queue.Queue()
    request = Request(prompt=prompt, max_tokens=tokens, sampling=sampling, top=2, **more)
    return engine.submit(request, events.put), events


def outcome(events):
    """Ids and exact log-probabilities of the answer, and how many tokens came from the store."""
    found = []
    while True:
        event = events.get(timeout=60)
        if isinstance(event, Piece):
            found += [(choice.token, choice.logprob, choice.top) for choice in event.choices]
        if isinstance(event, Ended):
            return found, event.usage.cached
        assert not isinstance(event, Failed), event.message


def answer(engine, **parameters):
    return outcome(begin(engine, **parameters)[1])


SCHEMES = [FULL_CACHE, KVOptions(scheme=parse_scheme("turbo:k8v3")), KVOptions(scheme=parse_scheme("affine8"))]


@pytest.mark.parametrize("kv", SCHEMES, ids=["full", "turbo", "affine"])
def test_a_prompt_that_was_seen_gives_the_same_bits(loaded, kv):
    with engine_of(loaded, kv, prefix_bytes=0) as engine:
        alone = [answer(engine, prompt=prompt) for prompt in (PROMPT, OTHER_END)]
    assert [cached for _, cached in alone] == [0, 0]
    with engine_of(loaded, kv) as engine:
        first = answer(engine)
        again = answer(engine)
        branch = answer(engine, prompt=OTHER_END)
        third = answer(engine)
    assert (first[1], again[1], branch[1], third[1]) == (0, 5 * CHUNK, 3 * CHUNK, 5 * CHUNK)
    assert first[0] == again[0] == third[0] == alone[0][0]
    assert branch[0] == alone[1][0]


def test_an_answer_does_not_depend_on_others(loaded):
    with engine_of(loaded, parallel=3, queue=10, prefix_bytes=0) as engine:
        prompts = [PROMPT[n:] for n in range(6)]
        alone = [answer(engine, prompt=prompt, tokens=20) for prompt in prompts]
        jobs = [begin(engine, prompt=prompt, tokens=20)[1] for prompt in prompts]
        assert [outcome(events) for events in jobs] == alone


def test_scores_are_those_of_the_model(loaded):
    import mlx.core as mx
    import numpy as np

    with engine_of(loaded) as engine:
        _, events = begin(engine, score_prompt=True, tokens=0)
        scores = next(event.scores for event in iter(events.get, None) if hasattr(event, "scores"))
    logits = np.array(loaded.model(mx.array([PROMPT]))[0], dtype=np.float64)
    expected = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    assert scores[0].logprob is None
    # float32 sums in another order: a few units in the last place of logits around 10.
    np.testing.assert_allclose(
        [score.logprob for score in scores[1:]], expected[range(len(PROMPT) - 1), PROMPT[1:]], atol=1e-4
    )
    best = np.argsort(-expected[:-1], axis=1)[:, :2]
    assert [tuple(token for token, _ in score.top) for score in scores[1:]] == [tuple(row) for row in best.tolist()]


def test_the_engine_is_ready_when_the_last_event_comes(loaded):
    with engine_of(loaded) as engine:
        answer(engine)
        seen = []

        def emit(event):
            if isinstance(event, Begun):
                engine.ready, engine.failure = False, "broke"  # as the request before had left it
            if isinstance(event, Ended):
                seen.append((engine.ready, engine.failure))

        job = engine.submit(Request(prompt=PROMPT, max_tokens=2), emit)
        outcome(begin(engine)[1])
        del job
    assert seen == [(True, None)]


def test_the_queue_has_an_end(loaded):
    with engine_of(loaded, parallel=1, queue=2) as engine:
        jobs = [begin(engine, tokens=400)[0] for _ in range(3)]
        with pytest.raises(Busy) as caught:
            begin(engine)
        assert 1 <= caught.value.retry_after <= 60
        jobs[2].cancel()
        waiting = begin(engine, tokens=2)
        jobs[0].cancel()
        jobs[1].cancel()
        assert outcome(waiting[1])[0]
        engine.drain()
        with pytest.raises(Stopping):
            begin(engine)


def test_stopping_tells_who_waits(loaded):
    with engine_of(loaded, parallel=1) as engine:
        events = [begin(engine, tokens=5000)[1] for _ in range(2)]
        engine.abort()
        for one in events:
            last = one.get(timeout=60)
            while not isinstance(last, Failed):
                last = one.get(timeout=60)
            assert last.stopping


class Layer:
    """A cache of one layer that counts."""

    def __init__(self, size, *, trims=True, cost=10):
        self.size, self.trims, self.nbytes = size, trims, size * cost

    def is_trimmable(self):
        return self.trims

    def trim(self, count):
        self.size -= count


def test_the_store_keeps_borders_and_its_bound():
    store = PrefixStore(4, 250)
    store.put(range(8), [Layer(8)])
    assert store.take(range(8))[1] == 4  # the last token is always computed
    cache, held = store.take([*range(6), 99, 99, 99])
    assert (held, cache[0].size) == (4, 4)
    assert store.take([99, *range(8)]) == (None, 0)
    store.put(range(12), [Layer(12)])
    assert (len(store), store.nbytes) == (1, 120)  # the shorter one can be cut out of it
    store.put(range(100, 112), [Layer(12)])
    store.take(range(13))
    store.put(range(200, 212), [Layer(12)])  # 360 bytes: the one unused for longest goes
    assert (store.take(range(13))[1], store.take(range(100, 113))[1], store.nbytes) == (12, 0, 240)
    store.put(range(300, 400), [Layer(100)])
    assert store.nbytes == 240


def test_a_cache_that_cannot_be_cut_serves_its_own_beginning_only():
    store = PrefixStore(4, 1000)
    store.put(range(8), [Layer(8, trims=False)])
    assert store.take(range(9))[1] == 8
    assert store.take(range(7))[1] == 0


def test_an_engine_that_breaks_lets_nobody_wait(loaded, monkeypatch, caplog):
    with engine_of(loaded) as engine:
        _, before = begin(engine, tokens=5000)
        before.get(timeout=60)
        monkeypatch.setattr(engine, "_advance", None)
        event = before.get(timeout=60)
        while not isinstance(event, Failed):
            event = before.get(timeout=60)
        assert (event.stopping, event.message) == (False, "the engine stopped: TypeError")
        with pytest.raises(Stopping):
            begin(engine)
        assert not engine.ready
