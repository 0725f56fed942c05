"""The bridge to lm-evaluation-harness: our texts scored against the oracle; a stub in place of the package."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.oracles.loglikelihood import continuation_loglikelihood, greedy
from tests.support.command import Answer, run
from tests.support.tiny_bpe import write_bpe
from tests.support.tiny_models import Tiny, write_tiny
from tqtool.artifact.content import content_hash
from tqtool.errors import UserError
from tqtool.evals.lm_eval_bridge import TextScorer, rolling_windows
from tqtool.runtime.load import LoadedModel, load

TINY = Tiny(dtype="float32", seed=4)
WEIGHTS = {name: tensor.astype(np.float64) for name, tensor in TINY.tensors().items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny(tmp_path_factory.mktemp("bridge") / "model", TINY, tokenizer=False)
    write_bpe(folder)
    return folder


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return load(folder, compute="expand")


def oracle(loaded: LoadedModel, prefix: list[int], tokens: list[int]) -> float:
    return continuation_loglikelihood(WEIGHTS, loaded.config, prefix, tokens)


def encoded(loaded: LoadedModel, text: str) -> list[int]:
    return list(loaded.tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.parametrize(
    ("context", "continuation", "prefix", "scored"),
    [
        ("a cat", " dog", "a cat", " dog"),
        ("a cat ", "dog", "a cat", " dog"),  # the space goes to the continuation, as the harness does it
        ("bat", " catalog", "bat", " catalog"),
        ("", "dog", None, "dog"),
    ],
)
def test_loglikelihood_is_the_oracles(loaded, context, continuation, prefix, scored):
    found, is_greedy = TextScorer(loaded).loglikelihood(context, continuation)
    before = [1] if prefix is None else encoded(loaded, prefix)  # <s> where there is nothing
    tokens = encoded(loaded, scored)
    # Some 10 sums of 128 products in float32 a token; logits are near 1.
    assert found == pytest.approx(oracle(loaded, before, tokens), abs=1e-4)
    assert is_greedy == (greedy(WEIGHTS, loaded.config, before, len(tokens)) == tokens)


def test_what_greedy_decoding_gives_is_greedy(loaded):
    scorer = TextScorer(loaded)
    tokens = greedy(WEIGHTS, loaded.config, encoded(loaded, "a cat"), 2)
    assert scorer._score(encoded(loaded, "a cat"), tokens)[1]
    assert not scorer._score(encoded(loaded, "a cat"), [*tokens, tokens[0] + 1])[1]


def test_windows_of_a_long_text_score_each_token_once_with_full_context():
    assert list(rolling_windows([*range(10)], -1, 4)) == [
        ([-1], [0, 1, 2, 3]),
        ([3], [4, 5, 6, 7]),
        ([5, 6, 7], [8, 9]),
    ]
    assert list(rolling_windows([7], -1, 4)) == [([-1], [7])]
    assert list(rolling_windows([], -1, 4)) == []
    for length in range(1, 30):
        windows = list(rolling_windows([*range(length)], -1, 7))
        assert [token for _, part in windows for token in part] == [*range(length)]
        assert all(len(prefix) + len(part) - 1 <= 7 for prefix, part in windows)


def test_rolling_adds_up_the_windows(loaded, monkeypatch):
    scorer = TextScorer(loaded)
    scorer._limit = 6
    tokens = encoded(loaded, "a cat dog bat log at")
    expected = sum(oracle(loaded, prefix, part) for prefix, part in rolling_windows(tokens, 1, 6))
    assert len(tokens) > 6
    assert scorer.rolling("a cat dog bat log at") == pytest.approx(expected, abs=1e-3)


def test_a_context_that_is_too_long_is_cut_on_the_left_and_counted(loaded):
    scorer = TextScorer(loaded)
    scorer._limit = 8
    tokens = encoded(loaded, "x" * 30)
    found, _ = scorer.loglikelihood("x" * 30, " dog")
    assert found == pytest.approx(oracle(loaded, tokens[-8:], encoded(loaded, " dog")), abs=1e-4)
    assert scorer.truncated == 1
    scorer.loglikelihood("x", " dog")
    assert scorer.truncated == 1


def test_answers_are_greedy_and_end_before_a_stop(loaded):
    scorer = TextScorer(loaded)
    tokens = greedy(WEIGHTS, loaded.config, encoded(loaded, "a cat"), 6)
    text = scorer.generate("a cat", (), 6)
    assert text == loaded.tokenizer.decode(tokens)
    assert scorer.generate("a cat", (text[3:5],), 6) == text[: text.index(text[3:5])]


def test_a_continuation_without_tokens_and_a_foreign_token_are_refused(loaded):
    with pytest.raises(UserError, match="adds no token"):
        TextScorer(loaded).loglikelihood("a", "")
    with pytest.raises(UserError, match="token 320, the model has 320"):
        TextScorer(loaded)._score([1], [320])


# ------------------------------------------------------------------------------------ the package, as a stub
class StubLM:
    """What ``lm_eval.api.model.LM`` gives its subclasses."""

    def __init__(self) -> None:
        self.rank, self.world_size = 0, 1


def evaluate(**options: Any) -> dict[str, Any]:
    """A harness with one task of each kind of request."""
    if options["tasks"] != ["mine"]:
        raise KeyError(f"Task '{options['tasks'][0]}' not found")
    model, templated = options["model"], options["apply_chat_template"]
    request = lambda *arguments: SimpleNamespace(args=arguments)  # noqa: E731
    context = model.apply_chat_template([{"role": "user", "content": "a"}]) if templated else "a"
    (logprob, is_greedy), *_ = model.loglikelihood([request(context, " cat"), request(context, " dog")])
    (total,) = model.loglikelihood_rolling([request("a cat")])
    (text,) = model.generate_until([request(context, {"until": "\n", "max_gen_toks": 3, **EXTRA})])
    metrics = {
        "logprob,none": np.float64(logprob),
        "logprob_stderr,none": "N/A",
        "acc,none": float(is_greedy),
        "acc_stderr,none": np.float32(0.125),
        "total,none": total,
        "alias": text,
    }
    return {"results": {"mine": metrics}, "versions": {"mine": 1}, "n-samples": {"limit": options["limit"]}}


EXTRA: dict[str, Any] = {}


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("lm_eval", "lm_eval.api", "lm_eval.api.model", "lm_eval.evaluator", "lm_eval.tasks")
    modules = {name: ModuleType(name) for name in names}
    modules["lm_eval"].__spec__ = SimpleNamespace(name="lm_eval")  # type: ignore[assignment]
    modules["lm_eval.api.model"].LM = StubLM  # type: ignore[attr-defined]
    modules["lm_eval.evaluator"].simple_evaluate = evaluate  # type: ignore[attr-defined]
    modules["lm_eval.tasks"].TaskManager = SimpleNamespace  # type: ignore[attr-defined]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    from importlib import metadata

    version = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "0" if name == "lm-eval" else version(name))


@pytest.fixture
def tqtool(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path) -> Any:
    def call(*arguments: object) -> Answer:
        return run(capsys, monkeypatch, "eval", "tasks", folder, *arguments)

    return call


@pytest.mark.usefixtures("harness")
def test_tasks_of_the_harness_run_through_our_model(tqtool, loaded, folder, tmp_path):
    answer = tqtool("--lm-eval", "mine", "--limit", 5, "--out", tmp_path / "out.json", "--json")
    assert answer.code == 0, answer.err
    report = json.loads(answer.out)
    assert json.loads((tmp_path / "out.json").read_text()) == report
    assert (report["format"], report["model_hash"]) == ("tqtool-lm-eval", content_hash(folder))
    assert (report["limit"], report["configs"]["n-samples"]) == (5, {"limit": 5})
    assert set(report["results"]) == {"templated", "raw"}
    raw = report["results"]["raw"]["mine"]
    assert raw["logprob,none"] == pytest.approx(oracle(loaded, encoded(loaded, "a"), encoded(loaded, " cat")), abs=1e-4)
    assert raw["total,none"] == pytest.approx(oracle(loaded, [1], encoded(loaded, "a cat")), abs=1e-4)
    assert raw["acc_stderr,none"] == 0.125
    templated = report["results"]["templated"]["mine"]
    assert templated["logprob,none"] != raw["logprob,none"]
    shown = tqtool("--lm-eval", "mine", "--format", "raw")
    line = next(line.split() for line in shown.out.splitlines() if "acc," in line)
    assert line == ["mine", "raw", "acc,none", "0.0000", "0.1250"]
    assert "templated" not in shown.out


@pytest.mark.usefixtures("harness")
def test_what_the_harness_cannot_do_is_one_line(tqtool, tmp_path, monkeypatch):
    answer = tqtool("--lm-eval", "other", "--format", "raw")
    assert (answer.code, "lm-evaluation-harness: KeyError: \"Task 'other' not found\"" in answer.err) == (5, True)
    monkeypatch.setitem(EXTRA, "do_sample", True)
    answer = tqtool("--lm-eval", "mine", "--format", "raw")
    assert (answer.code, "the task samples its answers" in answer.err) == (2, True), answer.err


def test_without_the_package_the_extra_is_named_before_the_model_is_loaded(tqtool, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    answer = tqtool("--lm-eval", "mine")
    assert (answer.code, "pip install 'tqtool[lm-eval]'" in answer.err) == (5, True), answer.err


def test_options_that_do_not_go_together_are_refused(tqtool, tmp_path):
    for arguments, message in (
        ((), "expected either --items FILE, or --lm-eval TASK"),
        (("--items", "x", "--lm-eval", "y"), "expected either"),
        (("--items", "x", "--include", tmp_path), "expected either"),
        (("--lm-eval", "y", "--against", tmp_path / "b.json"), "--against pairs results of --items"),
        (("--lm-eval", "y", "--max-tokens", 256), "--max-tokens 256 with --lm-eval does nothing"),
        (("--lm-eval", " , "), "expected names of tasks"),
        (("--lm-eval", "y", "--limit", 0), "a limit of at least 1"),
    ):
        answer = tqtool(*arguments)
        assert (answer.code, message in answer.err) == (2, True), answer.err
