"""`eval kl` on text that an artifact was calibrated on, or that its bits were chosen on, says so."""

from __future__ import annotations

import json

import pytest

from tests.support.calibrations import write_words
from tests.support.candidates import affine_setup
from tests.support.command import run
from tests.support.tiny_models import Tiny

pytestmark = pytest.mark.usefixtures("reload_by_fork")

CALIBRATED, CHOSEN = "was calibrated on this text", "bits were chosen on these windows"


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    folder = tmp_path_factory.mktemp("flattered")
    setup = affine_setup(folder, Tiny(), rates=(3, 4))
    write_words(folder / "words.txt", 2500)
    return setup


@pytest.fixture
def verbs(work, capsys, monkeypatch):
    def call(*arguments):
        answer = run(capsys, monkeypatch, *arguments)
        assert answer.code == 0, answer.err
        return answer

    return call


def said(answer):
    report = json.loads(answer.out)
    text = " ".join(report["warnings"])
    found = {line for line in (CALIBRATED, CHOSEN) if line in text}
    assert found == {line for line in (CALIBRATED, CHOSEN) if line in answer.err}
    return found


def test_calibrated_on_the_text(work, verbs, tmp_path):
    text = work.source.parent / "words.txt"
    for rows, flattering in ((8, set()), (22, {CALIBRATED})):  # 22 of 100 tokens reach into the first 400
        verbs("calibrate", work.source, tmp_path / f"h{rows}", "--text", text, "-n", rows, "-c", 100)
        made = ("--bits", 4, "--method", "gptq", "--hessians", tmp_path / f"h{rows}", "--check", "none")
        verbs("convert", work.source, tmp_path / f"q{rows}", *made)
        for skip, dump in ((0, tmp_path / f"d{rows}"), (16, tmp_path / f"late{rows}")):
            if not dump.exists():
                verbs("teacher", work.source, dump, "--text", text, "-n", 4, "-c", 100, "--skip", skip)
            expected = {CALIBRATED} if skip == 16 else flattering
            assert said(verbs("eval", "kl", tmp_path / f"q{rows}", "--teacher", dump, "--json")) == expected, (
                rows,
                skip,
            )
    assert said(verbs("eval", "kl", work.coded[4], "--teacher", tmp_path / "d8", "--json")) == set()


def test_bits_chosen_on_the_windows(work, verbs, tmp_path):
    text = work.source.parent / "words.txt"
    recipe = tmp_path / "mix.yaml"
    recipe.write_text(
        f"name: mix\nsource: {work.source}\n"
        f"allocation: {{candidates: [3, 4], target_bpw: 4.2, text: {text}, windows: 3, context: 40, skip: 2}}\n"
        "quantize: {verb: convert, group_size: 64}\n"
    )
    verbs("run", recipe, tmp_path / "out")
    for skip, expected in ((0, set()), (1, {CHOSEN}), (4, {CHOSEN}), (5, set())):
        dump = tmp_path / f"d{skip}"
        verbs("teacher", work.source, dump, "--text", text, "-n", 2, "-c", 40, "--skip", skip)
        answer = verbs("eval", "kl", tmp_path / "out" / "artifact", "--teacher", dump, "--json")
        assert said(answer) == expected, skip
