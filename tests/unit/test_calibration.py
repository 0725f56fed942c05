"""Calibration: sums against a float64 decoder, sinks, rows, the folder format, kill and resume."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.oracles import decoder
from tests.support.tiny_models import Tiny, write_tiny, write_weights
from tqtool.calibration.calibrate import CalibrationRequest, calibrate, plan_calibration
from tqtool.calibration.rows import read_rows, require_disjoint
from tqtool.calibration.sinks import sink_rows
from tqtool.errors import ArtifactError, NumericalError, UserError
from tqtool.formats.hessians import INFO_NAME, open_calibration, pack_triangle, unpack_triangle
from tqtool.pipeline.convert import plan_transform
from tqtool.runtime.load import load_tokenizer
from tqtool.source.checkpoint import open_checkpoint
from tqtool.transform.apply import apply_folds

WORDS = 400


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(write_tiny(tmp_path_factory.mktemp("tokenizer") / "model"))


def text_of(path: Path, seed: int = 0) -> Path:
    words = np.random.default_rng(seed).integers(3, 320, WORDS)
    path.write_text("\n".join(f"w{word}" for word in words) + "\n")
    return path


def request(tmp_path: Path, tiny: Tiny, **options: Any) -> CalibrationRequest:
    source = tmp_path / "source"
    if not source.exists():
        write_tiny(source, tiny)
    text = options.pop("text", None) or text_of(tmp_path / "text.txt")
    return CalibrationRequest(
        source=str(source), out=options.pop("out", tmp_path / "out"), text=text, rows=3, context=24, **options
    )


def oracle_inputs(source: Path, seed: int | None, sequences: list[np.ndarray], monkeypatch: pytest.MonkeyPatch):
    """What every linear layer reads in the float64 decoder on folded weights: module → list of [T, in]."""
    checkpoint = open_checkpoint(str(source))
    plan = plan_transform(checkpoint, rotation_seed=seed)
    read = lambda name: checkpoint.tensors[name].read()  # noqa: E731
    weights = {output.name: apply_folds(output, read, dtype=np.float64) for output in plan.outputs}
    seen: dict[str, list[np.ndarray]] = {}
    plain = decoder.linear

    def recording(all_weights, module, x):
        seen.setdefault(module, []).append(x)
        return plain(all_weights, module, x)

    monkeypatch.setattr(decoder, "linear", recording)
    norm = decoder.rms_norm

    def recording_norm(x, gain, config):
        result = norm(x, gain, config)
        if gain is weights["model.norm.weight"]:
            seen.setdefault("head", []).append(result)
        return result

    monkeypatch.setattr(decoder, "rms_norm", recording_norm)
    config = plan.updated_config(dict(checkpoint.config))
    for tokens in sequences:
        decoder.forward(weights, config, tokens.astype(int))
    return seen


@pytest.mark.parametrize("seed", [None, 42], ids=["plain", "rotated"])
@pytest.mark.parametrize(
    "tiny", [Tiny(layers=3, dtype="float32"), Tiny(model_type="qwen2", tied=False, dtype="float32")]
)
def test_moments_are_those_of_a_float64_decoder(tmp_path, monkeypatch, tokenizer, tiny, seed):
    # A word-level tokenizer under model_type qwen2 is read as a byte-level one.
    monkeypatch.setattr("tqtool.calibration.calibrate.load_tokenizer", lambda folder: tokenizer)
    job = plan_calibration(request(tmp_path, tiny, rotation_seed=seed))
    info = calibrate(job)
    expected = oracle_inputs(tmp_path / "source", seed, list(job.rows.sequences), monkeypatch)
    folder = open_calibration(tmp_path / "out")
    assert folder.info == info
    head = "lm_head" if seed is not None or not tiny.tied else "model.embed_tokens"
    assert {module for record in info.inputs for module in record.modules} == {*expected, head} - {"head"}
    for module, inputs in expected.items():
        moments = folder.moments(head if module == "head" else module)
        rest = np.concatenate([rows[1:] for rows in inputs])
        matrix = rest.T @ rest / len(rest)
        assert moments.rows == len(rest) == 3 * 23
        # float32 products of the forward and the sum: a few hundred roundings of 2^-24 each, relative to the diagonal.
        scale = np.sqrt(np.outer(np.diagonal(matrix), np.diagonal(matrix)))
        assert np.abs(moments.matrix - matrix).max() <= (1e-4 * scale + 1e-12).max()
        assert (np.abs(moments.matrix - matrix) <= 1e-4 * scale + 1e-9).all()
        first = np.stack([rows[0] for rows in inputs])
        assert np.abs(moments.sinks - first).max() <= 1e-4 * np.abs(first).max()


def test_modules_that_read_the_same_share_one_sum(tmp_path):
    info = calibrate(plan_calibration(request(tmp_path, Tiny())))
    by_key = {record.key.removeprefix("model.layers.1."): record for record in info.inputs if ".1." in record.key}
    assert [name.rpartition(".")[2] for name in by_key["self_attn.q_proj"].modules] == ["q_proj", "k_proj", "v_proj"]
    assert [name.rpartition(".")[2] for name in by_key["mlp.gate_proj"].modules] == ["gate_proj", "up_proj"]
    assert {record.width for record in by_key.values()} == {128, 256}


def test_sinks_are_the_first_row_and_massive_ones():
    rng = np.random.default_rng(0)
    entering, leaving = rng.standard_normal((2, 50, 64)).astype(np.float32)
    entering[7] *= 5
    leaving[31, 3] = 200
    assert np.flatnonzero(sink_rows(entering, leaving, ratio=4.0)).tolist() == [0, 7, 31]
    # A rotation moves no norm, so it moves no sink.
    turn = np.linalg.qr(rng.standard_normal((64, 64)))[0].astype(np.float32)
    assert np.flatnonzero(sink_rows(entering @ turn, leaving @ turn, ratio=4.0)).tolist() == [0, 7, 31]


@pytest.mark.parametrize("width", [1, 2, 37])
def test_triangles_come_back(width):
    half = np.random.default_rng(1).standard_normal((width, width)).astype(np.float32)
    matrix = half + half.T
    packed = pack_triangle(matrix)
    assert packed.shape == (width * (width + 1) // 2,)
    assert np.array_equal(packed, matrix[np.triu_indices(width)])
    assert np.array_equal(unpack_triangle(packed, width), matrix)


# ------------------------------------------------------------------------------------------------- rows
def test_plain_text_is_read_from_its_end(tokenizer, tmp_path):
    path = text_of(tmp_path / "text.txt")
    whole = np.array(tokenizer.encode(path.read_text(), add_special_tokens=False), np.uint32)
    rows = read_rows(tokenizer, path, rows=3, context=20)
    assert np.array_equal(np.concatenate(rows.sequences), whole[-60:])
    assert path.read_bytes()[: rows.record.first_byte].endswith(b"\n")
    require_disjoint(rows, [whole[:300]], "the start")
    with pytest.raises(UserError, match="window 1 of it is part of the calibration text"):
        require_disjoint(rows, [whole[:100], whole[-80:-30]], "it")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"text": "w5 w6 w7"}', "nope"], "line 2: not JSON"),
        (['{"text": 5}', "{}"], "line 1: expected an object with 'text'"),
        (['{"messages": []}'], "line 1: expected an object"),
        (['{"text": "\\ud800 w5"}'], "line 1: the tokenizer refuses it"),
        (['{"text": "w5 w6"}', '{"messages": [{"role": "user", "content": "w7 w8"}]}'], "some lines have 'text'"),
        (['{"text": "w5 w6"}'], "--rows 2, the file gives 1"),
        (['{"text": "w5 w6"}', '{"text": "w5", "messages": []}'], "line 2: has both 'text' and 'messages'"),
    ],
)
def test_malformed_lines_name_their_number(tokenizer, tmp_path, lines, message):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(UserError, match=message):
        read_rows(tokenizer, path, rows=2, context=8)


@pytest.mark.parametrize("suffix", [".jsonl", ".JSONL", ".Jsonl"])
def test_lines_are_known_by_their_suffix_however_it_is_written(tokenizer, tmp_path, suffix):
    path = tmp_path / f"rows{suffix}"
    path.write_text('{"text": "w5 w6 w7"}\n')
    rows = read_rows(tokenizer, path, rows=1, context=8)
    assert (rows.record.kind, rows.sequences[0].tolist()) == ("jsonl", [5, 6, 7])


@pytest.mark.parametrize("suffix", [".json", ".JSON"])
def test_json_is_neither_text_nor_lines(tokenizer, tmp_path, suffix):
    path = tmp_path / f"rows{suffix}"
    path.write_text(json.dumps([{"text": " ".join(["w5"] * 200)}]))
    with pytest.raises(UserError, match=r"rows\.(json|JSON): one JSON document") as error:
        read_rows(tokenizer, path, rows=1, context=8)
    assert ".jsonl" in (error.value.hint or "")


def test_too_little_text_says_how_much_is_missing(tokenizer, tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("w5 " * 30)
    with pytest.raises(UserError, match="2 rows of 20 need 40 tokens, the text has 30") as error:
        read_rows(tokenizer, path, rows=2, context=20)
    assert error.value.hint == "at most --rows 1, or a longer text"
    with pytest.raises(UserError, match="1 rows of 40 need 40 tokens, the text has 30") as error:
        read_rows(tokenizer, path, rows=1, context=40)
    assert error.value.hint == "the text is 10 tokens too short for one row: a longer text, or at most --context 30"
    path.write_text("w5")
    with pytest.raises(UserError, match="the text has 1") as error:
        read_rows(tokenizer, path, rows=1, context=4)
    assert error.value.hint == "the text is 3 tokens too short for one row: a longer text"


def test_one_short_row_does_not_make_everything_overlap(tokenizer, tmp_path):
    path = tmp_path / "rows.jsonl"
    long = " ".join(f"w{number}" for number in range(10, 40))
    path.write_text(json.dumps({"text": "w5 w6"}) + "\n" + json.dumps({"text": long}) + "\n")
    rows = read_rows(tokenizer, path, rows=2, context=40)
    require_disjoint(rows, [np.arange(3, 9, dtype=np.uint32), np.arange(20, 40, dtype=np.uint32)], "it")
    with pytest.raises(UserError, match="window 0"):
        require_disjoint(rows, [np.arange(8, 40, dtype=np.uint32)], "it")


def test_lines_are_sequences_of_their_own_length(tokenizer, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "w5 w6 w7"}\n\n{"text": "w9 w10 w11 w12 w13"}\n{"text": "w1"}\n')
    rows = read_rows(tokenizer, path, rows=2, context=4)
    assert [sequence.tolist() for sequence in rows.sequences] == [[5, 6, 7], [9, 10, 11, 12]]
    assert (rows.record.kind, rows.record.tokens) == ("jsonl", 7)
    chat = tmp_path / "chat.jsonl"
    chat.write_text(json.dumps({"messages": [{"role": "user", "content": "w7 w8"}]}) + "\n")
    assert read_rows(tokenizer, chat, rows=1, context=8).record.kind == "chat"


# ------------------------------------------------------------------------------------------ interruptions
def stop_behind_the_second_layer():
    """A ``tick`` that interrupts there."""
    done = []

    def tick(layers: int) -> None:
        done.append(layers)
        if sum(done) == 2:
            raise KeyboardInterrupt

    return tick


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_an_interrupted_run_ends_in_the_same_bytes(tmp_path):
    tiny = Tiny(layers=4)
    calibrate(plan_calibration(request(tmp_path, tiny, out=tmp_path / "whole")))

    with pytest.raises(KeyboardInterrupt):
        calibrate(plan_calibration(request(tmp_path, tiny)), stop_behind_the_second_layer())
    with pytest.raises(UserError, match="holds an interrupted calibration"):
        plan_calibration(request(tmp_path, tiny))
    with pytest.raises(UserError, match="begun with another source, text or setting"):
        plan_calibration(request(tmp_path, tiny, rotation_seed=1, resume=True))
    with pytest.raises(UserError, match="not a finished calibration"):
        open_calibration(tmp_path / "out")
    seen = []
    calibrate(plan_calibration(request(tmp_path, tiny, resume=True)), seen.append)
    assert seen == [2, 1, 1]
    assert files(tmp_path / "out") == files(tmp_path / "whole")
    with pytest.raises(UserError, match="holds a finished calibration"):
        plan_calibration(request(tmp_path, tiny, resume=True))


@pytest.mark.slow
def test_killed_at_random_moments_it_ends_in_the_same_bytes(tmp_path):
    tiny = Tiny(layers=12)
    calibrate(plan_calibration(request(tmp_path, tiny, out=tmp_path / "whole")))
    command = [
        *(str(Path(sys.executable).with_name("tqtool")), "calibrate", str(tmp_path / "source"), str(tmp_path / "out")),
        *("--text", str(tmp_path / "text.txt"), "--rows", "3", "--context", "24", "--resume"),
    ]
    chance = random.Random(7)
    for _ in range(3):
        with subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as process:
            deadline = time.monotonic() + 60
            while not (tmp_path / "out" / "progress.json").exists() and time.monotonic() < deadline:
                time.sleep(0.005)
            time.sleep(chance.random() * 0.1)
            process.send_signal(signal.SIGKILL)
    if not (tmp_path / "out" / INFO_NAME).exists():
        assert subprocess.run(command, capture_output=True, check=False).returncode == 0
    left = files(tmp_path / "out")
    assert {name: left[name] for name in files(tmp_path / "whole")} == files(tmp_path / "whole")


def test_damage_is_found(tmp_path):
    calibrate(plan_calibration(request(tmp_path, Tiny())))
    out = tmp_path / "out"
    data = bytearray((out / "layer-00001.safetensors").read_bytes())
    data[-1] ^= 1
    (out / "layer-00001.safetensors").write_bytes(data)
    with pytest.raises(ArtifactError, match="its SHA-256 is not the one"):
        open_calibration(out)
    (out / "layer-00001.safetensors").unlink()
    with pytest.raises(ArtifactError, match="cannot be read"):
        open_calibration(out)
    for text in ("{", "[1]", '{"format_version": 2}', (out / INFO_NAME).read_text() + " "):
        (out / INFO_NAME).write_text(text)
        with pytest.raises(ArtifactError, match=INFO_NAME):
            open_calibration(out)


def test_a_weight_that_is_not_finite_is_refused(tmp_path):
    tiny = Tiny()
    tensors = tiny.tensors()
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = np.inf
    job_request = request(tmp_path, tiny)
    write_weights(tmp_path / "source", tensors)
    with pytest.raises(NumericalError, match="up_proj"):
        calibrate(plan_calibration(job_request))


@pytest.mark.parametrize(
    "change", [{"layers_done": 0}, {"layers_done": "x"}, {"inputs": []}, {"files": []}, {"key": 5}]
)
def test_an_edited_progress_file_is_refused(tmp_path, change):
    with pytest.raises(KeyboardInterrupt):
        calibrate(plan_calibration(request(tmp_path, Tiny(layers=3))), stop_behind_the_second_layer())
    path = tmp_path / "out" / "progress.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ArtifactError, match=r"progress\.json"):
        plan_calibration(request(tmp_path, Tiny(layers=3), resume=True))


def test_another_run_in_the_same_folder_is_refused(tmp_path):
    job = plan_calibration(request(tmp_path, Tiny()))

    def other(layers: int) -> None:
        with pytest.raises(ArtifactError, match="another run is calibrating"):
            calibrate(job)

    calibrate(job, other)


@pytest.mark.parametrize("is_there", [True, False], ids=["the user's", "ours"])
def test_a_run_that_fails_at_once_takes_only_its_own_folder(tmp_path, is_there):
    tiny = Tiny()
    tensors = tiny.tensors()
    tensors["model.layers.0.mlp.up_proj.weight"][0, 0] = np.nan
    job_request = request(tmp_path, tiny)
    write_weights(tmp_path / "source", tensors)
    if is_there:
        (tmp_path / "out").mkdir()
    with pytest.raises(NumericalError):
        calibrate(plan_calibration(job_request))
    assert (tmp_path / "out").is_dir() is is_there
    assert not is_there or not any((tmp_path / "out").iterdir())
