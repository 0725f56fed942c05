"""--kv-quant and --kv-start as a user gives them: generate, eval, inspect; what is refused, and before what."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.cli.test_instrument_verbs import tqtool
from tests.support.tiny_bpe import write_bpe
from tests.support.tiny_models import Tiny, write_tiny


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kv_options")
    for name, head_dim in (("model", 64), ("small", 32)):
        write_tiny(folder / name, Tiny(head_dim=head_dim, seed=4))
    write_bpe(folder / "model")
    words = np.random.default_rng(5).integers(3, 320, 400)
    (folder / "text.txt").write_text(" ".join(f"w{word}" for word in words))
    items = [{"id": "a", "kind": "choice", "prompt": "w3 w4", "choices": ["w5", "w6 w7", "w8"], "answer": 1}]
    (folder / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    return folder


def score(work, *options):
    done = tqtool("eval", "ppl", work / "model", "--text", work / "text.txt", "-n", 2, "-c", 48, "--json", *options)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_perplexity_with_packed_caches(work):
    full = score(work)
    assert full["kv"] is None
    found = {text: score(work, "--kv-quant", text) for text in ("turbo", "turbo:k8v8", "affine4")}
    assert [report["kv"] for report in found.values()] == ["turbo:k8v3", "turbo:k8v8", "affine4"]
    distance = {text: abs(report["nll"]["mean"] - full["nll"]["mean"]) for text, report in found.items()}
    assert 0 < distance["turbo:k8v8"] < 0.01
    late = score(work, "--kv-quant", "turbo", "--kv-start", 47)
    assert late["kv"] == "turbo:k8v3 from 47"
    assert late["nll"] == full["nll"]  # every window ends before


def test_generate(work):
    answers = []
    for options in ([], ["--kv-quant", "turbo:k8v8"], ["--kv-quant", "affine8", "--kv-start", 3]):
        done = tqtool("generate", work / "model", "-p", "w5 w6", "--raw", "-m", 4, "--verbose", *options)
        assert done.returncode == 0, done.stderr
        answers.append(done.stdout)
        name = "turbo:k8v8" if "turbo:k8v8" in options else "affine8 from 3" if options else "full"
        assert f"bytes a token, {name}\n" in done.stderr
    assert len(answers) == 3


def test_tasks(work):
    found = {}
    for options in ((), ("--kv-quant", "turbo:k8v8"), ("--kv-quant", "turbo:k8v8", "--kv-start", 500)):
        done = tqtool(
            "eval", "tasks", work / "model", "--items", work / "items.jsonl", "--format", "raw", "--json", *options
        )
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout)
        found[report["kv"]] = report["outcomes"][0]["logprobs"]
    assert list(found) == [None, "turbo:k8v8", "turbo:k8v8 from 500"]
    np.testing.assert_allclose(found["turbo:k8v8"], found[None], atol=0.2)
    np.testing.assert_allclose(found["turbo:k8v8 from 500"], found[None], atol=1e-5)
    assert found["turbo:k8v8"] != found[None]


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("model", ("--kv-quant", "turbo:k3v3"), "3-bit keys"),
        ("model", ("--kv-quant", "q8"), "no such KV scheme"),
        ("model", ("--kv-start", 5), "--kv-start 5"),
        ("small", ("--kv-quant", "turbo"), "head dimension 32"),
    ],
)
def test_refusals(work, model, options, message):
    done = tqtool("eval", "ppl", work / model, "--text", work / "text.txt", "-n", 2, "-c", 48, *options)
    assert done.returncode == 2
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(done.stderr)


def test_inspect_says_what_caches_take(work):
    rows = {}
    for name in ("model", "small"):
        report = json.loads(tqtool("inspect", work / name, "--json").stdout)
        rows[name] = {row["scheme"]: row["bytes_per_token"] for row in report["sizes"]["kv"]}
    layers_and_heads = 2 * 2
    assert rows["model"]["full"] == layers_and_heads * 2 * 64 * 2
    assert rows["model"]["turbo:k8v3"] == layers_and_heads * 100
    assert rows["small"]["turbo:k8v3"] is None
    assert "no turbo: head dimension 32" in tqtool("inspect", work / "small").stdout
