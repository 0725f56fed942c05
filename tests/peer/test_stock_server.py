"""A packed artifact in stock mlx-lm's server: with trust it answers what stock generate says."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import mlx_lm
import pytest

from tests.support.packed_artifact import write_packed
from tests.support.tiny_models import Tiny


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    return write_packed(tmp_path_factory.mktemp("stock") / "model", Tiny(hidden=128, intermediate=200, seed=3))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def ask(port, path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.loads(answer.read())


@pytest.mark.slow
def test_the_stock_server_answers_as_stock_generate(packed, tmp_path):
    port = free_port()
    command = [sys.executable, "-m", "mlx_lm", "server", "--model", str(packed), "--trust-remote-code"]
    with (tmp_path / "said").open("wb") as said:
        server = subprocess.Popen([*command, "--port", str(port)], stdout=said, stderr=said)
    try:
        wait_for(server, port, tmp_path / "said")
        messages = [{"role": "user", "content": "w5 w9 w31"}]
        body = {"model": "default_model", "temperature": 0.0, "max_tokens": 8, "messages": messages}
        answer = ask(port, "/v1/chat/completions", body)
    finally:
        server.terminate()
        server.wait(60)
    # The same random weights decoded by the module file that travels in the artifact, in this process.
    model, tokenizer = mlx_lm.load(str(packed), trust_remote_code=True)
    assert type(model.model.layers[0].mlp.down_proj).__module__ == "custom_model"
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    expected = mlx_lm.generate(model, tokenizer, prompt, max_tokens=8)
    choice = answer["choices"][0]
    assert len(expected.split()) >= 4
    assert choice["message"]["content"].strip() == expected.strip()
    assert answer["usage"]["prompt_tokens"] == len(prompt)


def wait_for(server, port, said):
    end = time.monotonic() + 120
    while time.monotonic() < end:
        assert server.poll() is None, said.read_text()
        try:
            ask(port, "/health")
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.1)
        else:
            return
    raise AssertionError(said.read_text())
