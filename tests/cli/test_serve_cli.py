"""``tqtool serve`` on the command line: what is refused before a model is loaded, and keys."""

from __future__ import annotations

import importlib.util
import json
import socket
from pathlib import Path

import pytest

from tests.support.command import run
from tests.support.scripted_model import write_scripted
from tests.support.tiny_models import Tiny, write_tiny
from tqtool.cli.serve import api_key, describe
from tqtool.errors import UserError
from tqtool.runtime.load import load


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_scripted(tmp_path_factory.mktemp("serve") / "model")


def test_a_missing_extra_says_what_to_install(model, capsys, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "uvicorn" else found(name))
    answer = run(capsys, monkeypatch, "serve", model)
    assert answer.code == 2
    assert "not installed: uvicorn" in answer.err
    assert "tqtool[serve]" in answer.err


def test_a_port_that_is_taken(model, capsys, monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        answer = run(capsys, monkeypatch, "serve", model, "--port", taken.getsockname()[1])
    assert answer.code == 2
    assert "cannot listen on 127.0.0.1" in answer.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--context", 5000], "was made for 1024 tokens"),
        (["--kv-quant", "turbo:k3v3"], "KV scheme"),
        (["--kv-start", 5], "--kv-quant with it"),
        (["--api-key-file", "/nowhere/key"], "cannot be read"),
    ],
)
def test_refusals(model, arguments, message, capsys, monkeypatch):
    answer = run(capsys, monkeypatch, "serve", model, "--port", 0, *arguments)
    assert answer.code == 2
    assert message in answer.err


def test_a_cache_that_does_not_go_with_the_model_is_refused_at_load(tmp_path, capsys, monkeypatch):
    folder = write_tiny(tmp_path / "model", Tiny(dtype="float32"))
    answer = run(capsys, monkeypatch, "serve", folder, "--port", 0, "--kv-quant", "turbo")
    assert answer.code == 2
    assert "head dimension 32" in answer.err


def test_keys(tmp_path, monkeypatch):
    monkeypatch.delenv("TQTOOL_API_KEY", raising=False)
    assert api_key(None) is None
    monkeypatch.setenv("TQTOOL_API_KEY", "from-environment")
    assert api_key(None) == "from-environment"
    (tmp_path / "key").write_text("from-file\n")
    assert api_key(tmp_path / "key") == "from-file"
    for bad in ("", "two words", "schlüssel"):
        (tmp_path / "key").write_text(bad)
        with pytest.raises(UserError, match="expected one key"):
            api_key(tmp_path / "key")


def test_a_model_is_described_by_its_files(model, tmp_path):
    (model / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "top_k": 20, "do_sample": True}))
    settings = {"name": None, "aliases": (), "max_tokens": None, "body": 1.0}
    served = describe(load(model), context=None, **settings)
    assert (served.name, served.limits.context, served.vocab) == ("model", 1024, 384)
    assert served.defaults == {"temperature": 0.6, "top_k": 20.0}
    assert describe(load(model), context=100, **settings).limits.context == 100
