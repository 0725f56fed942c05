"""generate, teacher, eval kl, eval ppl as a user runs them: output, JSON, exit codes."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from tests.support.packed_artifact import write_packed
from tests.support.tiny_models import Tiny, write_tiny
from tqtool.cli.app import main
from tqtool.evals import teacher as teacher_module

MAIN = "import sys; from tqtool.cli.app import main; sys.argv[0] = 'tqtool'; main()"


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


def tqtool(*arguments):
    """Run the entry point in this process: starting one costs seconds of imports."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["tqtool", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main()
    return Done(caught.value.code or 0, out.getvalue(), err.getvalue())


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    folder = tmp_path_factory.mktemp("verbs")
    write_packed(folder / "packed", Tiny(seed=3))
    words = np.random.default_rng(5).integers(3, 320, 200)
    (folder / "text.txt").write_text(" ".join(f"w{word}" for word in words))
    made = tqtool(
        *("teacher", folder / "packed-fake", folder / "dump", "--text", folder / "text.txt"),
        *("--windows", 2, "--context", 32, "--json"),
    )
    assert made.returncode == 0, made.stderr
    report = json.loads(made.stdout)
    assert (report["info"]["windows"], report["info"]["top"], report["info"]["vocab_size"]) == (2, 320, 320)
    assert "teacher: 100%" in made.stderr
    return folder


@pytest.mark.parametrize("compute", ["packed", "expand"])
def test_packed_scores_zero_against_its_fake_twin(work, compute):
    done = tqtool("eval", "kl", work / "packed", "--teacher", work / "dump", "--compute", compute, "--json")
    report = json.loads(done.stdout)
    # Only the embedding's and the products' float32 rounding differs.
    assert 0 <= report["kl"]["mean"] < 1e-9
    assert (report["windows"], report["tokens"], report["compute"]) == (2, 62, compute)


def test_a_dry_run_of_teacher_writes_nothing_and_knows_the_size(work, tmp_path):
    sizes = ("--text", work / "text.txt", "--windows", 2, "--context", 32)
    done = tqtool("teacher", work / "packed-fake", tmp_path / "dump", *sizes, "--dry-run", "--json")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert (plan["tokens"], plan["top"], plan["vocab_size"]) == (64, 320, 320)
    assert 0 <= plan["size_bytes"] - (work / "dump").stat().st_size < 4096
    assert list(tmp_path.iterdir()) == []
    taken = tqtool("teacher", work / "packed-fake", work / "dump", *sizes, "--dry-run")
    assert (taken.returncode, "exists already" in taken.stderr) == (2, True)


def test_self_score_is_zero_from_another_process(work):
    arguments = ("eval", "kl", work / "packed-fake", "--teacher", work / "dump", "--text", work / "text.txt", "--json")
    command = [sys.executable, "-c", MAIN, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    report = json.loads(done.stdout)
    assert (report["kl"]["mean"], report["kl_max"], report["flip_count"]) == (0.0, 0.0, 0)


def test_tables_for_people(work):
    done = tqtool("eval", "kl", work / "packed", "--teacher", work / "dump", "--windows", 1)
    for text in ("KL(teacher ‖ model)", "same first token", "perplexity", "31 tokens, 1 windows"):
        assert text in done.stdout
    done = tqtool("eval", "ppl", work / "packed", "--text", work / "text.txt", "-n", 2, "-c", 16)
    assert "nats per token" in done.stdout


def test_ppl_json_agrees_with_the_teacher(work):
    arguments = ("eval", "ppl", work / "packed-fake", "--text", work / "text.txt", "-n", 2, "-c", 32, "--json")
    report = json.loads(tqtool(*arguments).stdout)
    kl = json.loads(tqtool("eval", "kl", work / "packed", "--teacher", work / "dump", "--json").stdout)
    assert report["ppl"] == pytest.approx(kl["teacher_ppl"], rel=1e-12)


def test_generate_is_the_same_packed_and_dense(work):
    texts = set()
    for model, compute in (("packed", "packed"), ("packed", "expand"), ("packed-fake", "packed")):
        done = tqtool("generate", work / model, "--prompt", "w5 w9", "--compute", compute, "-m", 12, "--json")
        report = json.loads(done.stdout)
        assert report["finish_reason"] in {"stop", "length"}
        texts.add(report["text"])
    assert len(texts) == 1


def test_generate_streams_to_stdout_and_counts_on_stderr(work):
    done = tqtool(
        "generate", work / "packed", "--prompt", "w5", "--raw", "-m", 3, "--temp", 0.7, "--top-p", 0.9, "--verbose"
    )
    assert done.returncode == 0, done.stderr
    assert "14 trellis layers, packed, float32" in done.stderr
    assert "answer 3 tokens" in done.stderr
    assert len(done.stdout.split()) == 3


def test_sampling_repeats_with_its_seed(work):
    def sample(seed):
        arguments = ("generate", work / "packed", "--prompt", "w5", "--raw", "-m", 8, "--temp", 1, "--seed", seed)
        return tqtool(*arguments).stdout

    assert sample(1) == sample(1) != sample(2)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("generate", "absent", "--prompt", "x"), 2, "error: absent: expected a model folder, found no such folder"),
        (("generate", "packed", "--prompt", "x", "--max-tokens", 0), 2, "--max-tokens 0"),
        (("generate", "packed", "--prompt", "x", "--raw", "--system", "y"), 2, "--system needs the chat template"),
        (("generate", "packed", "--prompt", "x", "--temp", -1), 2, "expected temp"),
        (("generate", "packed", "--prompt", "", "--raw"), 2, "the prompt is empty"),
        (("teacher", "packed", "dump", "--text", "text.txt"), 2, "dump: exists already"),
        (("teacher", "packed", "new", "--text", "text.txt", "--windows", 99), 2, "the text has 200"),
        (("teacher", "packed", "new", "--text", "text.txt", "--top", 0), 2, "--top 0"),
        (("eval", "kl", "packed", "--teacher", "text.txt"), 4, "text.txt"),
        (("eval", "kl", "packed", "--teacher", "dump", "--text", "packed/config.json"), 2, "the dump was made from"),
        (("eval", "kl", "packed", "--teacher", "absent"), 2, "absent: the dump cannot be read"),
        (("eval", "kl", "packed", "--teacher", "packed"), 2, "packed: the dump cannot be read"),
        (("eval", "kl", "packed", "--teacher", "dump", "--text", "absent"), 2, "absent: cannot be read"),
        (("eval", "kl", "packed", "--teacher", "dump", "--flips", -2), 2, "--flips"),
        (("eval", "ppl", "absent", "--text", "absent"), 2, "expected a UTF-8 text file"),
        (("eval", "ppl", "packed", "--text", "text.txt", "-c", 999), 2, "not one window fits"),
        (("teacher", "absent", "new", "--text", "absent"), 2, "expected a UTF-8 text file"),
        (("teacher", "packed", "packed", "--text", "text.txt", "--force"), 2, "packed: is a folder"),
        (("teacher", "packed", "text.txt/new", "--text", "text.txt"), 4, "text.txt/new: cannot be written"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, tuple) else None,
)
def test_mistakes(work, arguments, code, message):
    def place(word):
        return (
            work / str(word)
            if str(word) in {"absent", "packed", "dump", "new", "text.txt", "text.txt/new", "packed/config.json"}
            else word
        )

    done = tqtool(*map(place, arguments))
    assert done.returncode == code, done.stderr
    assert message in done.stderr.replace(f"{work}/", "")
    assert "Traceback" not in done.stderr
    assert not (work / "new").exists()


def test_flips_are_a_table_when_asked_for(work):
    def word(token):
        return ("<unk>", "<s>", "</s>")[token] if token < 3 else f"w{token}"

    other = write_tiny(work / "other", Tiny(seed=9))
    arguments = ("eval", "kl", other, "--teacher", work / "dump")
    report = json.loads(tqtool(*arguments, "--json").stdout)
    assert len(report["flips"]) == min(20, report["flip_count"])
    assert "teacher → model" not in tqtool(*arguments).stdout
    lines = tqtool(*arguments, "--flips", 3).stdout.splitlines()
    assert lines[-5] == f"3 of {report['flip_count']} flips; margins in logits"
    assert " ".join(lines[-4].split()) == "window position teacher margin model margin teacher → model"
    for line, flip in zip(lines[-3:], report["flips"], strict=False):
        theirs, ours = flip["teacher_token"], flip["model_token"]
        margins = f"{flip['teacher_margin']:.4f} {flip['model_margin']:.4f}"
        tokens = f"{word(theirs)!r} ({theirs}) → {word(ours)!r} ({ours})"
        assert " ".join(line.split()) == f"{flip['window']} {flip['position']} {margins} {tokens}"
    assert "0 of 0 flips" in tqtool("eval", "kl", work / "packed-fake", *arguments[3:], "--flips", 3).stdout
    assert len(json.loads(tqtool(*arguments, "--flips", 0, "--json").stdout)["flips"]) == 0
    assert len(json.loads(tqtool(*arguments, "--flips", -1, "--json").stdout)["flips"]) == report["flip_count"]


def test_one_token_has_no_error_to_print(work):
    done = tqtool("eval", "ppl", work / "packed", "--text", work / "text.txt", "-n", 1, "-c", 2)
    line = next(line for line in done.stdout.splitlines() if line.startswith("NLL"))
    assert "±" not in line
    assert "±" in tqtool("eval", "ppl", work / "packed", "--text", work / "text.txt", "-n", 1, "-c", 3).stdout


def test_a_window_too_long_for_the_model_is_a_warning_for_both_readers(work):
    short = shutil.copytree(work / "packed-fake", work / "short")
    config = json.loads((short / "config.json").read_text()) | {"max_position_embeddings": 16}
    (short / "config.json").write_text(json.dumps(config))
    arguments = ("eval", "ppl", short, "--text", work / "text.txt", "-n", 1, "-c", 20, "--json")
    command = [sys.executable, "-c", MAIN, *map(str, arguments)]  # in pytest the log goes elsewhere
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "warning: windows of 20 tokens, the model was made for 16" in done.stderr
    assert json.loads(done.stdout)["warnings"] == [
        "windows of 20 tokens, the model was made for 16: later positions may score badly"
    ]


def test_a_damaged_dump_is_exit_code_4_before_the_model_is_looked_at(work):
    data = bytearray((work / "dump").read_bytes())
    data[-1] ^= 1
    (work / "bad-dump").write_bytes(data)
    done = tqtool("eval", "kl", work / "no-such-model", "--teacher", work / "bad-dump")
    assert done.returncode == 4
    assert "bad-dump: " in done.stderr


def test_where_nothing_can_be_written_no_model_is_looked_at(work, tmp_path):
    tmp_path.chmod(0o555)
    folder = Path("/proc/self") if os.access(tmp_path, os.W_OK) else tmp_path  # root may write anywhere else
    done = tqtool("teacher", work / "no-such-model", folder / "x", "--text", work / "text.txt")
    assert done.returncode == 4
    assert f"{folder / 'x'}: cannot be written" in done.stderr
    assert "hint: choose a place" in done.stderr


def test_what_a_killed_run_left_is_removed_and_named(work):
    left = work / ".again.partial-1"
    left.write_bytes(b"half")
    done = tqtool("teacher", work / "packed", work / "again", "--text", work / "text.txt", "-n", 1, "-c", 8)
    assert done.returncode == 0, done.stderr
    assert "removed .again.partial-1" in done.stderr
    assert not left.exists()


def test_a_text_of_impossible_words_leaves_no_dump(work, tmp_path, monkeypatch):
    """The NLL is finite, its exponential is not: the verb fails, so nothing may lie under the name."""
    summarize = teacher_module.summarize

    def unlikely(logits, tokens, top):
        window = summarize(logits, tokens, top)
        return replace(window, target_logits=window.target_logits - np.float32(1e6))

    monkeypatch.setattr(teacher_module, "summarize", unlikely)
    sizes = ("--text", work / "text.txt", "--windows", 2, "--context", 32)
    done = tqtool("teacher", work / "packed-fake", tmp_path / "dump", *sizes)
    assert (done.returncode, "perplexity is not finite" in done.stderr) == (3, True)
    assert list(tmp_path.iterdir()) == []
