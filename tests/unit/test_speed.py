"""``tqtool bench``: counts, units and order; no test of speed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from tests.support.candidates import write_trellis
from tests.support.command import run
from tests.support.tiny_models import Tiny, write_tiny
from tqtool.errors import BackendError, UserError
from tqtool.kv.scheme import parse_options
from tqtool.reports.speed import SpeedRequest, run_speed, spread, total_runs
from tqtool.runtime.load import load
from tqtool.runtime.machine import machine_facts
from tqtool.runtime.speed import Point, Run, measure, prompt_ids
from tqtool.runtime.speed_worker import LoadRequest, Worker

TINY = Tiny(hidden=128, heads=2, kv_heads=1, head_dim=64, intermediate=64, layers=2)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return write_tiny(tmp_path_factory.mktemp("speed") / "source", TINY)


@pytest.fixture(scope="module")
def model(source: Any) -> Any:
    return load(source).model


def test_rates_are_tokens_over_the_clock(model: Any) -> None:
    """Ten tokens in 2 s until the first; three more after it in 6 s."""
    times = iter([100.0, 102.0, 108.0])
    done = measure(model, TINY.vocab, Point(prompt_tokens=10, new_tokens=4), clock=lambda: next(times))
    assert (done.prompt_tokens, done.new_tokens) == (10, 4)
    assert (done.first_token_s, done.rest_s) == (2.0, 6.0)
    assert (done.prompt_tokens_per_s, done.new_tokens_per_s) == (5.0, 0.5)


def test_the_clock_is_read_around_the_first_token(model: Any) -> None:
    ticks, read = count(), list[int]()

    def steps(prompt: mx.array, model: Any, *, max_tokens: int, prompt_cache: Any) -> Iterator[int]:
        assert prompt.tolist() == prompt_ids(5, TINY.vocab)
        for number in range(max_tokens):
            read.append(next(ticks))
            yield number

    done = measure(
        model, TINY.vocab, Point(prompt_tokens=5, new_tokens=3), clock=lambda: float(next(ticks)), steps=steps
    )
    # 0: the start; 1: the first token is made; 2: it is there; 3, 4: two more; 5: the end.
    assert read == [1, 3, 4]
    assert (done.first_token_s, done.rest_s, done.new_tokens) == (2.0, 3.0, 3)


@pytest.mark.parametrize(("scheme", "per_token"), [(None, 2 * 64 * 4), ("turbo:k8v3", 64 * 11 // 8 + 64 // 32 * 6)])
def test_memory_of_the_cache_is_that_of_its_tokens(scheme: str | None, per_token: int, model: Any) -> None:
    """Room is made for 256 tokens at a time; float32 on a CPU, or 11 bits an element and three float16 for each 32."""
    tokens = 300 + 2
    point = Point(prompt_tokens=300, new_tokens=2, kv=parse_options(scheme, 0))
    done = measure(model, TINY.vocab, point)
    held = done.cache_bytes / (TINY.layers * TINY.kv_heads * per_token)
    assert tokens <= held <= tokens + 512
    assert held % 1 == 0
    assert done.mlx_peak_bytes >= done.cache_bytes
    assert done.peak_rss_bytes > 1 << 20


def test_prompts_are_the_same_for_every_arm() -> None:
    assert prompt_ids(9, 50) == prompt_ids(9, 50)
    assert max(prompt_ids(500, 7)) == 6


PEAK_OF_A_RUN = """
import numpy as np
from tqtool.runtime.machine import PeakMemory
memory, size = PeakMemory(), 256 << 20
before = memory.read()
assert before > 0
if memory.is_of_run:  # not where the kernel lets nobody reset it
    held = np.ones(size, np.uint8)
    assert memory.read() >= before + 0.9 * size, "what was held"
    del held
    memory.reset()
    assert memory.read() < before + 0.5 * size, "begun again"
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not forget a peak")
def test_peak_memory_is_that_of_the_run() -> None:
    """In a process of its own: what other tests leave behind may go back to the system while this one looks."""
    done = subprocess.run([sys.executable, "-c", PEAK_OF_A_RUN], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_machine_facts() -> None:
    found = machine_facts()
    assert found.processor
    assert 1 <= found.usable_cores <= found.logical_cores
    assert set(found.versions) == {"tqtool", "mlx", "mlx-lm", "numpy"}
    assert found.device in ("cpu", "gpu")
    json.dumps(asdict(found))


RUN = Run(
    prompt_tokens=8,
    new_tokens=5,
    first_token_s=2.0,
    rest_s=1.0,
    cache_bytes=1000,
    peak_rss_bytes=5000,
    is_peak_of_run=True,
    mlx_peak_bytes=3000,
)
FACTS = {
    "machine": {"usable_cores": 2},
    "blas": {"status": "fast", "library": "x"},
    "positions": 16,
}


class FakeWorker:
    """Runs of given lengths, in turn; what was asked is noted in ``log``."""

    def __init__(self, request: LoadRequest, log: list[tuple[str, Any]], rest_s: list[float]) -> None:
        self.name = f"{request.engine}:{request.model}"
        self.facts, self.log, self.times = dict(FACTS), log, iter(rest_s)

    def __enter__(self) -> FakeWorker:
        return self

    def __exit__(self, *unused: object) -> None:
        self.log.append((self.name, "closed"))

    def run(self, prompt_tokens: int, new_tokens: int, kv: str | None, kv_start: int = 0) -> Run:
        self.log.append((self.name, (prompt_tokens, kv, kv_start)))
        return replace(RUN, prompt_tokens=prompt_tokens, new_tokens=new_tokens, rest_s=next(self.times))


def test_arms_take_turns_and_ratios_are_of_a_round() -> None:
    log: list[tuple[str, Any]] = []
    times = {"a": [99.0, 1.0, 2.0, 4.0], "b": [99.0, 2.0, 2.0, 2.0]}
    request = SpeedRequest(model="a", against="b", prompt_tokens=(8,), new_tokens=5, repeats=3)
    ticks: list[str] = []
    report = run_speed(request, ticks.append, lambda each: FakeWorker(each, log, times[each.model]))
    names = [name for name, what in log if what != "closed"]
    # The round that warms up is the reverse of the first that counts.
    assert names == [f"tqtool:{each}" for each in "baabbaab"]
    assert len(ticks) == total_runs(request) == 8
    assert log[-2:] == [("tqtool:b", "closed"), ("tqtool:a", "closed")]
    ours = report.arms[0].results[0]
    assert ours.new_tokens_per_s == spread([4.0, 2.0, 1.0])
    assert (ours.new_tokens_per_s.median, ours.new_tokens_per_s.low, ours.new_tokens_per_s.high) == (2.0, 1.0, 4.0)
    assert ours.prompt_tokens_per_s.median == 4.0
    (ratio,) = report.ratios
    assert ratio.new_tokens_per_s == spread([2.0, 1.0, 0.5])
    assert (ratio.new_wins, ratio.prompt_wins) == (1, 0)


def test_schemes_are_rows_and_stock_mlx_lm_has_the_full_cache() -> None:
    log: list[tuple[str, Any]] = []
    request = SpeedRequest(
        model="a",
        against="mlx-lm:b",
        prompt_tokens=(8, 20),
        new_tokens=5,
        kv=(None, "turbo"),
        kv_start=4,
        repeats=1,
        warmup=0,
    )
    report = run_speed(request, lambda what: None, lambda each: FakeWorker(each, log, [1.0] * 9))
    assert [each for each in log if each[1] != "closed"] == [
        ("tqtool:a", (8, None, 0)),
        ("tqtool:a", (8, "turbo", 4)),
        ("mlx-lm:b", (8, None, 0)),
        ("tqtool:a", (20, None, 0)),
        ("tqtool:a", (20, "turbo", 4)),
        ("mlx-lm:b", (20, None, 0)),
    ]
    assert [(each.prompt_tokens, each.kv) for each in report.arms[0].results] == [
        (8, None),
        (8, "turbo:k8v3 from 4"),
        (20, None),
        (20, "turbo:k8v3 from 4"),
    ]
    assert report.arms[1].name == "b in stock mlx-lm"
    assert [(each.kv, each.against_kv) for each in report.ratios[:2]] == [(None, None), ("turbo:k8v3", None)]
    assert total_runs(request) == 6
    notes = " ".join(report.notes)
    assert "1 rounds say little" in notes
    assert "a: made for 16 positions, run up to 25" in notes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"repeats": 0}, "--repeats 0"),
        ({"prompt_tokens": (8, 8)}, "expected numbers that differ"),
        ({"prompt_tokens": (0,)}, "--prompt-tokens 0: expected at least 1"),
        ({"new_tokens": 1}, "--new-tokens 1: expected at least 2"),
        ({"kv": ("turbo", "turbo:k8v3")}, "expected schemes that differ"),
        ({"kv": ("turbo:k3v3",)}, "KV scheme turbo"),
    ],
)
def test_what_cannot_be_measured_is_said_before_anything_is_loaded(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        SpeedRequest(model="a", **changes)


def field_names(value: Any) -> Iterator[str]:
    """Names of all fields, but those that MLX gives to devices, packages, and spreads."""
    if isinstance(value, list):
        for each in value:
            yield from field_names(each)
    elif isinstance(value, dict):
        for name, each in value.items():
            yield name
            if name not in ("device_facts", "versions"):
                yield from field_names(each)


@pytest.mark.slow
def test_the_command(source: Any, tmp_path: Any, capsys: Any, monkeypatch: Any) -> None:
    """A packed artifact beside itself in stock mlx-lm, in processes of their own."""
    packed = write_trellis(source, tmp_path / "k3", k=3)
    asked = ("--prompt-tokens", "6,9", "--new-tokens", 3, "--repeats", 2, "--warmup", 0)
    answer = run(capsys, monkeypatch, "bench", packed, "--against", f"mlx-lm:{packed}", *asked, "--json")
    assert answer.code == 0, answer.err
    report = json.loads(answer.out)
    assert report["format"] == "tqtool-bench-1"
    assert [arm["name"] for arm in report["arms"]] == ["k3", "k3 in stock mlx-lm"]
    assert [arm["engine"] for arm in report["arms"]] == ["tqtool", "mlx-lm"]
    assert {row["path"] for row in report["arms"][0]["load"]["layers"]} == {"NativeTrellisLinear"}
    assert report["arms"][0]["load"]["blas"]["status"] != "slow"
    for arm in report["arms"]:
        assert [(each["prompt_tokens"], each["new_tokens"]) for each in arm["results"]] == [(6, 3), (9, 3)]
        for each in arm["results"]:
            assert len(each["runs"]) == each["new_tokens_per_s"]["n"] == 2
            for made in each["runs"]:
                assert (made["prompt_tokens"], made["new_tokens"]) == (each["prompt_tokens"], 3)
                assert all(made[key] > 0 for key in ("first_token_s", "rest_s", "cache_bytes", "peak_rss_bytes"))
            assert (
                each["new_tokens_per_s"]["low"]
                <= each["new_tokens_per_s"]["median"]
                <= each["new_tokens_per_s"]["high"]
            )
    assert len(report["ratios"]) == 2
    page = (Path(__file__).parents[2] / "docs" / "formats" / "bench.md").read_text()
    assert not [name for name in field_names(report) if not re.search(rf"`{name}(\[\])?`", page)]
    assert report["machine"]["versions"]["mlx-lm"]

    table = run(capsys, monkeypatch, "bench", packed, *asked[:1], 6, *asked[2:])
    assert table.code == 0, table.err
    assert "new tokens/s" in table.out
    assert "trellis layers at 1 rows: NativeTrellisLinear" in table.out


def test_errors_of_the_other_process_are_ours(tmp_path: Any, capsys: Any, monkeypatch: Any) -> None:
    absent = run(capsys, monkeypatch, "bench", tmp_path / "absent")
    assert (absent.code, "expected a model folder, found no such folder" in absent.err) == (2, True)
    wrong = run(capsys, monkeypatch, "bench", "x", "--prompt-tokens", "a")
    assert (wrong.code, "--prompt-tokens a: expected numbers" in wrong.err) == (2, True)


def test_a_process_that_ends_is_said() -> None:
    worker = Worker(LoadRequest(model="x"))
    worker._process.kill()
    with pytest.raises(BackendError, match="x: the process that measured it ended with -9"), worker:
        pass
