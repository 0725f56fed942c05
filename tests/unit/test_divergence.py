"""KL and perplexity against dense float64 oracles; the dump's laws."""

from __future__ import annotations

import json
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from tests.oracles import divergence
from tests.support.tiny_models import Tiny, write_tiny
from tqtool.errors import ArtifactError, NumericalError, UserError
from tqtool.evals import logits as logits_module
from tqtool.evals.context import context_limit
from tqtool.evals.estimate import estimate, perplexity
from tqtool.evals.kl import check_kl, check_text, score_kl, score_window
from tqtool.evals.logits import top_ids, vocabulary_sums, window_logits
from tqtool.evals.ppl import score_ppl
from tqtool.evals.teacher import TeacherRequest, dump_teacher, summarize
from tqtool.formats.safetensors import read_header
from tqtool.formats.teacher import open_dump
from tqtool.runtime.load import load

VOCAB = 320
WINDOWS, CONTEXT = 3, 40


def quiet(done):
    assert done == 1


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    """Two models of one tokenizer, a text, and the whole logits of both on it."""
    folder = tmp_path_factory.mktemp("kl")
    rng = np.random.default_rng(5)
    text = folder / "text.txt"
    text.write_text(" ".join(f"w{token}" for token in rng.integers(3, VOCAB, 400)))
    teacher = load(write_tiny(folder / "teacher", Tiny(seed=1, dtype="float32")))
    model = load(write_tiny(folder / "model", Tiny(seed=2, dtype="float32")))
    tokens = np.array([int(word[1:]) for word in text.read_text().split()])[: WINDOWS * CONTEXT]
    tokens = tokens.reshape(WINDOWS, CONTEXT)
    full = [
        np.stack([np.array(loaded.model(mx.array(row[None, :-1]))[0]) for row in tokens]) for loaded in (teacher, model)
    ]
    return folder, text, teacher, model, tokens, full[0], full[1]


def dump(setting, name, *, top=2048, replace_file=False):
    folder, text, teacher = setting[:3]
    request = TeacherRequest(text=text, windows=WINDOWS, context=CONTEXT, top=top, replace=replace_file)
    return dump_teacher(teacher, folder / name, request, quiet), open_dump(folder / name)


def test_whole_vocabulary_equals_the_dense_oracle(setting):
    _, _, _, model, tokens, p, q = setting
    report, opened = dump(setting, "all")
    score = score_kl(model, opened, quiet)
    expected = divergence.kl(p, q)
    assert opened.info.top == VOCAB
    assert expected.mean() > 0.1  # two different models, not two copies
    assert score.kl.mean == pytest.approx(expected.mean(), rel=1e-12)
    assert score.kl_max == pytest.approx(expected.max(), rel=1e-12)
    assert score.kl_median == pytest.approx(np.median(expected), rel=1e-12)
    assert score.kl.se_tokens == pytest.approx(expected.std(ddof=1) / np.sqrt(expected.size), rel=1e-9)
    assert score.kl.se_windows == pytest.approx(expected.mean(axis=1).std(ddof=1) / np.sqrt(WINDOWS), rel=1e-9)
    assert score.top1.mean == (p.argmax(-1) == q.argmax(-1)).mean()
    assert score.flip_count == (p.argmax(-1) != q.argmax(-1)).sum()
    assert score.ppl == pytest.approx(np.exp(divergence.nll(q, tokens[:, 1:]).mean()), rel=1e-12)
    teacher_ppl = np.exp(divergence.nll(p, tokens[:, 1:]).mean())
    assert (score.teacher_ppl, report.ppl) == pytest.approx((teacher_ppl, teacher_ppl), rel=1e-12)
    assert score.mass_outside_top == score.model_mass_outside_top == 0.0


@pytest.mark.parametrize("top", [1, 7, 100, VOCAB - 1])
def test_a_truncated_dump_is_the_merged_oracle_and_a_lower_bound(setting, top):
    _, _, _, model, _, p, q = setting
    score = score_kl(model, dump(setting, f"top{top}", top=top)[1], quiet)
    expected = divergence.merged_kl(p, q, top)
    assert score.kl.mean == pytest.approx(expected.mean(), rel=1e-9)
    whole = divergence.kl(p, q).mean()
    assert score.kl.mean < whole if top < VOCAB - 1 else score.kl.mean == pytest.approx(whole, rel=1e-12)
    outside = np.sort(np.exp(divergence.log_softmax(p)), axis=-1)[..., :-top].sum(-1)
    assert score.mass_outside_top == pytest.approx(outside.mean(), rel=1e-9)


@pytest.mark.parametrize("top", [5, VOCAB])
def test_self_kl_is_exactly_zero_through_the_file(setting, top):
    folder, _, _, _, _, _, _ = setting
    _, opened = dump(setting, f"self{top}", top=top)
    again = load(folder / "teacher")
    score = score_kl(again, opened, quiet)
    assert (score.kl.mean, score.kl_max, score.kl.se_tokens) == (0.0, 0.0, 0.0)
    assert (score.top1.mean, score.flip_count, score.flips) == (1.0, 0, ())
    assert score.mass_outside_top == score.model_mass_outside_top
    assert score.ppl == pytest.approx(score.teacher_ppl, rel=1e-12)


def test_flips_carry_both_margins(setting):
    _, _, _, model, _, p, q = setting
    score = score_kl(model, dump(setting, "flips")[1], quiet, keep_flips=-1)
    assert len(score.flips) == score.flip_count
    assert [flip.teacher_margin for flip in score.flips] == sorted(
        (flip.teacher_margin for flip in score.flips), reverse=True
    )
    for flip in score.flips:
        rows = p[flip.window, flip.position], q[flip.window, flip.position]
        assert (flip.teacher_token, flip.model_token) == (rows[0].argmax(), rows[1].argmax())
        assert flip.teacher_margin == pytest.approx(rows[0].max() - rows[0][flip.model_token], abs=1e-6)
        assert flip.model_margin == pytest.approx(rows[1].max() - rows[1][flip.teacher_token], abs=1e-6)
    assert len(score_kl(model, dump(setting, "flips", replace_file=True)[1], quiet, keep_flips=2).flips) == 2


def test_a_margin_below_the_top_is_a_lower_bound(setting):
    _, _, _, model, _, p, _ = setting
    score = score_kl(model, dump(setting, "few", top=2)[1], quiet, keep_flips=-1)
    assert score.flips
    for flip in score.flips:
        row = p[flip.window, flip.position]
        assert 0 <= flip.teacher_margin <= row.max() - row[flip.model_token] + 1e-6


def test_windows_can_be_fewer_but_not_more(setting):
    _, _, _, model, _, p, q = setting
    _, opened = dump(setting, "windows")
    score = score_kl(model, opened, quiet, windows=1)
    assert score.kl.mean == pytest.approx(divergence.kl(p, q)[0].mean(), rel=1e-12)
    assert score.kl.se_windows is None
    with pytest.raises(UserError, match="--windows 4: the dump has 3"):
        score_kl(model, opened, quiet, windows=4)


def test_perplexity_equals_the_oracle(setting):
    _, text, _, model, tokens, _, q = setting
    report = score_ppl(model, text, windows=WINDOWS, context=CONTEXT, tick=quiet)
    expected = divergence.nll(q, tokens[:, 1:])
    assert report.nll.mean == pytest.approx(expected.mean(), rel=1e-12)
    assert report.ppl == pytest.approx(np.exp(expected.mean()), rel=1e-12)
    assert report.nll.se_tokens == pytest.approx(expected.std(ddof=1) / np.sqrt(expected.size), rel=1e-9)
    assert report.tokens == WINDOWS * (CONTEXT - 1)


def test_dump_layout_is_the_documented_one(setting):
    report, opened = dump(setting, "layout", top=4)
    _, _, _, _, tokens, p, _ = setting
    header = read_header(opened.header.path)
    assert header.metadata["format"] == "tqtool-teacher"
    assert {name: (str(t.dtype), t.shape) for name, t in header.tensors.items()} == {
        "log_sum_exp": ("F64", (3, 39)),
        "tail_log_sum_exp": ("F64", (3, 39)),
        "tokens": ("U32", (3, 40)),
        "target_logits": ("F32", (3, 39)),
        "top_ids": ("U32", (3, 39, 4)),
        "top_logits": ("F32", (3, 39, 4)),
    }
    for index in range(WINDOWS):
        window = opened.window(index)
        order = np.argsort(-p[index], axis=-1, kind="stable")[:, :4]
        np.testing.assert_array_equal(window.tokens, tokens[index])
        np.testing.assert_array_equal(window.top_ids, order)
        np.testing.assert_array_equal(window.top_logits, np.take_along_axis(p[index], order, -1))
        np.testing.assert_array_equal(
            window.target_logits, np.take_along_axis(p[index], tokens[index][1:, None], -1)[:, 0]
        )
        np.testing.assert_allclose(window.log_sum_exp, np.log(np.exp(p[index].astype(np.float64)).sum(-1)), rtol=1e-12)
    info = report.info
    assert (info.bos, info.windows, info.context, info.top, info.vocab_size) == (None, 3, 40, 4, VOCAB)
    assert set(info.versions) == {"tqtool", "mlx", "mlx-lm", "numpy"}


def test_dumps_repeat_byte_for_byte(setting):
    folder = setting[0]
    dump(setting, "one", top=9)
    dump(setting, "two", top=9)
    assert (folder / "one").read_bytes() == (folder / "two").read_bytes()


def test_an_existing_dump_is_kept_unless_told(setting):
    dump(setting, "kept")
    with pytest.raises(UserError, match="exists already"):
        dump(setting, "kept")
    dump(setting, "kept", replace_file=True)


def test_nothing_half_written_stays(setting, monkeypatch):
    folder = setting[0]
    calls = []

    def fail(window_rows, *rest):
        calls.append(1)
        if len(calls) == 2:
            raise NumericalError("stop")
        return summarize(window_rows, *rest)

    monkeypatch.setattr("tqtool.evals.teacher.summarize", fail)
    before = {path.name for path in folder.iterdir()}
    with pytest.raises(NumericalError, match="stop"):
        dump(setting, "half")
    assert {path.name for path in folder.iterdir()} == before


def test_another_tokenizer_vocabulary_or_text_is_refused(setting, tmp_path):
    _, text, _, _, _, _, _ = setting
    _, opened = dump(setting, "refuse")
    other = load(write_tiny(tmp_path / "other", Tiny(vocab=VOCAB - 1)))
    with pytest.raises(UserError, match=r"its tokenizer \(\w{12}\) is not the teacher's"):
        score_kl(other, opened, quiet)
    wider = replace(load(write_tiny(tmp_path / "wider", Tiny(vocab=VOCAB + 8))), tokenizer=setting[2].tokenizer)
    with pytest.raises(UserError, match="the model has 328 logits, the teacher had 320"):
        score_kl(wider, opened, quiet)
    check_text(opened, text)
    changed = tmp_path / "text.txt"
    changed.write_text(text.read_text() + "x")
    with pytest.raises(UserError, match=r"the dump was made from text\.txt"):
        check_text(opened, changed)


def test_damaged_dumps(setting, tmp_path):
    folder = setting[0]
    dump(setting, "good", top=3)
    data = (folder / "good").read_bytes()

    def refuse(content, message):
        path = tmp_path / "bad"
        path.write_bytes(content)
        with pytest.raises(ArtifactError, match=message):
            open_dump(path)

    refuse(data[:-1], "bad")
    refuse(b"", "bad")
    refuse(data.replace(b'"format":"tqtool-teacher"', b'"format":"some-other-app"'), "not a teacher dump")
    refuse(data.replace(b'"format_version":"1"', b'"format_version":"2"'), "expected 1, found 2")
    refuse(data.replace(b'"top_ids"', b'"top_idz"'), "tensor top_id")
    refuse(data.replace(b'\\"windows\\": 3', b'\\"windows\\": 4'), "'info': SHA-256 expected")
    with pytest.raises(UserError, match="cannot be read"):
        open_dump(tmp_path / "absent")


def test_logits_that_are_not_finite_are_an_error():
    def model(tokens):
        values = mx.zeros((1, tokens.shape[1], 5))
        values[0, 1, 2] = float("nan")
        return values

    with pytest.raises(NumericalError, match="window 0: 1 of 3 positions"):
        next(window_logits(model, [np.arange(4, dtype=np.uint32)]))


@pytest.mark.parametrize("value", [np.nan, np.inf, -1e-9])
def test_a_kl_that_cannot_be_is_an_error_that_says_where(value):
    kl = np.full(5, 0.5)
    kl[3] = value
    with pytest.raises(NumericalError, match=r"window 7, position 3: KL .*1 such positions"):
        check_kl(7, kl, np.full(5, 20.0), np.full(5, 20.0))


def test_a_kl_may_round_below_zero_but_not_further():
    """ε·(20 + 20) is what the two subtractions alone can lose; a wrong log Σ exp of float32 gives -1e-7 or so."""
    eps = np.finfo(np.float64).eps
    check_kl(0, np.array([0.0, -40 * eps]), np.full(2, 20.0), np.full(2, 20.0))
    with pytest.raises(NumericalError, match="position 1"):
        check_kl(0, np.array([0.0, -1e-12]), np.full(2, 20.0), np.full(2, 20.0))


def test_scoring_checks_its_kl():
    values = np.random.default_rng(1).normal(0, 3, (4, 50)).astype(np.float32)
    window = summarize(values, np.arange(5, dtype=np.uint32), 50)
    wrong = replace(window, log_sum_exp=window.log_sum_exp + np.array([0, 0, 1e-3, 0]))
    with pytest.raises(NumericalError, match="window 2, position 2"):
        score_window(2, wrong, values)


def test_a_perplexity_beyond_float64_is_an_error():
    assert perplexity(700.0) == pytest.approx(np.exp(700.0))
    for nll in (710.0, float("nan")):
        with pytest.raises(NumericalError, match="perplexity is not finite"):
            perplexity(nll)


def test_tokens_the_model_lacks_never_reach_it():
    def model(tokens):
        assert tokens.shape == (1, 1), "only the width may be asked for"
        return mx.zeros((1, 1, 5))

    with pytest.raises(UserError, match="token 5, the model has 5"):
        next(window_logits(model, [np.array([0, 5, 1], np.uint32)]))


def test_windows_longer_than_the_model_was_made_for(setting, caplog):
    _, text, _, model, _, _, _ = setting
    _, opened = dump(setting, "long")
    assert context_limit(model.config) == 512
    assert score_kl(model, opened, quiet).warnings == ()
    assert context_limit({"text_config": {"n_positions": 9}, "max_position_embeddings": "x"}) == 9
    short = replace(model, config={**model.config, "max_position_embeddings": CONTEXT - 1})
    for report in (
        score_kl(short, opened, quiet),
        score_ppl(short, text, windows=1, context=CONTEXT, tick=quiet),
        dump_teacher(short, setting[0] / "long2", TeacherRequest(text=text, windows=1, context=CONTEXT), quiet),
    ):
        assert report.warnings == ("windows of 40 tokens, the model was made for 39: later positions may score badly",)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 3


def test_extreme_logits_stay_finite_and_a_bound():
    """A teacher that is certain, a model that excludes its answer, tails beyond float64's smallest number."""
    teacher = np.full((4, 50), -2000.0, np.float32)
    teacher[:, 3] = 0.0
    teacher[1] = 0.0
    model = np.full((4, 50), -3000.0, np.float32)
    model[:, 4] = 0.0
    model[2] = teacher[2]
    window = summarize(teacher, np.arange(5, dtype=np.uint32), 2)
    score = score_window(0, window, model)
    exact = divergence.kl(teacher, model)
    assert np.isfinite(score.kl).all()
    assert (score.kl <= exact * (1 + 1e-12)).all()
    assert score.kl[2] == 0.0
    assert score.kl[0] == pytest.approx(3000)


def test_sums_do_not_depend_on_the_chunk(monkeypatch):
    values = np.random.default_rng(0).normal(0, 5, (33, 200)).astype(np.float32)
    ids = top_ids(values, 10)
    whole = vocabulary_sums(values, ids)
    monkeypatch.setattr(logits_module, "ROWS", 7)
    np.testing.assert_array_equal(top_ids(values, 10), ids)
    np.testing.assert_array_equal(vocabulary_sums(values, ids).tail, whole.tail)


def test_equal_logits_are_ranked_by_id():
    np.testing.assert_array_equal(top_ids(np.array([[1, 3, 3, 0, 3]], np.float32), 5), [[1, 2, 4, 0, 3]])
    many = np.random.default_rng(0).integers(0, 40, (50, 200)).astype(np.float32)
    found = top_ids(many, 30).astype(np.int64)
    ranks = list(zip(-np.take_along_axis(many, found, axis=1), found, strict=True))
    assert all((np.lexsort((ids, values)) == np.arange(30)).all() for values, ids in ranks)


def test_estimate_of_one_value_has_no_error():
    assert json.dumps(estimate(np.ones((1, 1))).se) == "null"
