"""Where paths are searched: chosen when a job is planned, said in plan and manifest, the same bytes from everywhere."""

from __future__ import annotations

import json
from functools import partial

import numpy as np
import pytest

from tests.support.command import run
from tests.support.tiny_models import Tiny, write_tiny
from tqtool import native
from tqtool.errors import BackendError, UserError
from tqtool.kernels import cuda, cuda_encoder
from tqtool.kernels.sources import digest
from tqtool.mathx import codes
from tqtool.solve import search as module
from tqtool.solve.search import DeviceChoice, choose_device, parse_backend, search

TINY = Tiny(hidden=64, intermediate=128, heads=2, kv_heads=1, head_dim=32, layers=1, vocab=40)
LIKE = {"window": 12, "k": 3, "code": "mul1", "warmup": 32}


@pytest.fixture
def card(monkeypatch):
    """A card that the kernels have run on; launches are the CPU's search."""
    calls = []

    def run(call, arrays):
        x, levels, dims = (np.array(array) for array in arrays)
        template = dict(call.launch.template)
        calls.append(len(x))
        states, _ = native.viterbi_encode(x, levels, window=template["L"], k=template["K"], warmup=int(dims[1]))
        return [states]

    monkeypatch.setattr(cuda, "is_search_proven_here", lambda: True)
    monkeypatch.setattr(module, "is_present", lambda device: device != "metal")
    monkeypatch.setattr(
        cuda_encoder, "CUDA_ENCODER", cuda_encoder.CUDA_ENCODER.with_runner(lambda call: partial(run, call))
    )
    module._refusal.cache_clear()
    yield calls
    module._refusal.cache_clear()


def test_without_a_card():
    if cuda.is_proven_here():
        pytest.skip("here is one")
    assert choose_device("cpu", **LIKE) == DeviceChoice("cpu")
    found = choose_device("auto", **LIKE)
    assert found.device == "cpu"
    assert "no card" in found.reason
    with pytest.raises(BackendError, match="--backend cuda: this MLX has no such device") as error:
        choose_device("cuda", **LIKE)
    assert error.value.exit_code == 5
    with pytest.raises(UserError, match="expected auto, cuda, metal, cpu"):
        parse_backend("gpu")


def test_a_search_that_has_run_on_no_card_is_taken_only_when_asked_for(monkeypatch):
    monkeypatch.setattr(cuda, "is_proven_here", lambda: True)
    monkeypatch.setattr(cuda, "SEARCH_THAT_RAN", digest(cuda.SEARCH_SOURCES))
    assert cuda.is_search_proven_here()
    monkeypatch.setattr(cuda, "SEARCH_THAT_RAN", digest(cuda.SEARCH_SOURCES[:2]))
    assert not cuda.is_search_proven_here()
    assert choose_device("auto", **LIKE).device == "cpu"


def test_with_a_card(card):
    assert choose_device("auto", **LIKE) == DeviceChoice("cuda")
    assert choose_device("cpu", **LIKE) == DeviceChoice("cpu")
    refused = choose_device("auto", **{**LIKE, "warmup": 33})
    assert refused == DeviceChoice("cpu", "cuda: warmup 33: passes begin and end at even steps")
    with pytest.raises(BackendError, match="--backend cuda: warmup 33"):
        choose_device("cuda", **{**LIKE, "warmup": 33})
    with pytest.raises(BackendError, match="no such device"):
        choose_device("metal", **LIKE)
    x = np.random.default_rng(0).integers(-560, 561, (5, 256)).astype(np.int16)
    options = {"window": 12, "k": 3, "warmup": 32}
    found = [search(x, codes.levels("mul1", 12), device=device, **options) for device in ("cuda", "cpu")]
    np.testing.assert_array_equal(*found)
    assert card == [module.TRIED, 5]


@pytest.mark.parametrize("form", [[], ["--layout", "tile"]])
def test_the_same_artifact(form, tmp_path, card, capsys, monkeypatch):
    """All files but the manifest are the same bytes; plan and manifest say who searched."""
    source = write_tiny(tmp_path / "source", TINY)
    for backend in ("cpu", "cuda"):
        arguments = ["trellis", source, tmp_path / backend, "--k", 2, "--warmup", 16, "--check", "none"]
        assert run(capsys, monkeypatch, *arguments, *form, "--backend", backend).code == 0
    assert card, "the card was asked"
    files = {path.name for path in (tmp_path / "cpu").glob("*.safetensors")} | {"config.json"}
    for name in files:
        assert (tmp_path / "cpu" / name).read_bytes() == (tmp_path / "cuda" / name).read_bytes(), name
    manifests = [json.loads((tmp_path / b / "tqtool" / "manifest.json").read_text()) for b in ("cpu", "cuda")]
    assert [manifest["request"]["backend"] for manifest in manifests] == [{"k2": "cpu"}, {"k2": "cuda"}]
    assert "paths of k = 2 are searched by cuda" in json.dumps(manifests[1])
    plan = run(capsys, monkeypatch, "trellis", source, tmp_path / "plan", "--dry-run", "--warmup", 21)
    assert "searched by cpu: cuda: warmup 21" in " ".join(plan.out.split())


def test_a_card_that_finds_other_paths_is_left(card, monkeypatch):
    """One wrong state in one of the blocks tried."""
    encoder = cuda_encoder.CUDA_ENCODER

    def wrong(call, arrays):
        states = np.array(encoder.run(call)(arrays)[0])
        states[7, 100] ^= 1
        return [states]

    monkeypatch.setattr(cuda_encoder, "CUDA_ENCODER", encoder.with_runner(lambda call: partial(wrong, call)))
    reason = "of 16 paths tried here 1 are not the CPU's"
    assert choose_device("auto", **LIKE) == DeviceChoice("cpu", f"cuda: {reason}")
    with pytest.raises(BackendError, match=reason):
        choose_device("cuda", **LIKE)


def test_a_missing_card_ends_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(module, "is_present", lambda device: False)
    source = write_tiny(tmp_path / "source", TINY)
    answer = run(capsys, monkeypatch, "trellis", source, tmp_path / "out", "--backend", "cuda")
    assert answer.code == 5
    assert "--backend cuda: this MLX has no such device" in answer.err
    assert not (tmp_path / "out").exists()
