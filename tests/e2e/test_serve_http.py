"""What goes on below the API: limits, keys, queue, health, metrics, disconnects and the end."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from dataclasses import replace
from urllib.parse import urlsplit

import pytest

from tests.support.http_server import serving
from tests.support.scripted_model import LOOP, write_scripted
from tqtool.runtime.load import load
from tqtool.serve.reply import CompletionReply
from tqtool.serve.served import Served


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return load(write_scripted(tmp_path_factory.mktemp("scripted") / "model"))


@pytest.fixture(scope="module")
def server(loaded):
    with serving(loaded, body_mb=0.01) as running:
        yield running


def connect(server) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=30)


def ask(server, method, path, body=None, headers=None):
    """Status, headers, parsed body."""
    connection = connect(server)
    data = body if isinstance(body, bytes | None) else json.dumps(body)
    connection.request(method, path, data, {"content-type": "application/json", **(headers or {})})
    answer = connection.getresponse()
    raw = answer.read()
    connection.close()
    value = json.loads(raw) if answer.headers["content-type"].startswith("application/json") else raw.decode()
    return answer.status, answer.headers, value


def complete(server, **parameters):
    return ask(server, "POST", "/v1/completions", {"prompt": LOOP, "temperature": 0, **parameters})


def endless(server, path="/v1/completions", **parameters):
    """A connection to a stream that has begun and goes on for long."""
    connection = connect(server)
    body = {"prompt": LOOP, "max_tokens": 1000, "temperature": 0, "stream": True, **parameters}
    connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
    answer = connection.getresponse()
    assert answer.status == 200
    assert answer.readline().startswith(b"data: {")
    return connection, answer


def wait_until(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status", "code"),
    [
        ("POST", "/v1/completions", b"{not json", {}, 400, "invalid_json"),
        ("POST", "/v1/completions", b"[1]", {}, 400, "invalid_json"),
        ("POST", "/v1/completions", b"[" * 9000, {}, 400, "invalid_json"),
        ("POST", "/v1/completions", {"prompt": "x" * 20000}, {}, 413, "request_too_large"),
        ("POST", "/v1/completions", b"{}", {"content-type": "text/plain"}, 415, "unsupported_media_type"),
        ("POST", "/v1/completions", {}, {}, 400, "missing_required_parameter"),
        ("POST", "/v1/completions", {"prompt": ""}, {}, 400, "invalid_value"),
        ("POST", "/v1/completions", {"prompt": [1, 9999]}, {}, 400, "invalid_value"),
        ("POST", "/v1/completions", {"prompt": ["a", "b"]}, {}, 400, "invalid_value"),
        ("POST", "/v1/completions", {"prompt": "a", "best_of": 2}, {}, 400, "unsupported_parameter"),
        ("POST", "/v1/completions", {"prompt": "a", "suffix": "b"}, {}, 400, "unsupported_parameter"),
        ("POST", "/v1/completions", {"prompt": "a", "stop": [""]}, {}, 400, "invalid_value"),
        ("POST", "/v1/completions", {"prompt": "a", "stop": ""}, {}, 400, "invalid_value"),
        ("POST", "/v1/completions", {"prompt": "a", "max_tokens": 0}, {}, 400, "invalid_value"),
        ("GET", "/v1/completions", None, {}, 405, "method_not_allowed"),
        ("POST", "/v1/embeddings", {}, {}, 404, "unknown_url"),
    ],
)
def test_what_is_wrong_has_a_status_and_the_shape_of_openai(server, method, path, body, headers, status, code):
    found, _, answer = ask(server, method, path, body, headers)
    assert (found, answer["error"]["code"]) == (status, code)
    assert set(answer["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", rb'{"prompt": "a\ud800", "max_tokens": 2}', "prompt"),
        ("/v1/completions", b'{"prompt": "a\xed\xa0\x80"}', "prompt"),
        ("/v1/completions", rb'{"prompt": "a", "model": "\udc00"}', "model"),
        ("/v1/completions", rb'{"prompt": "a", "stop": ["b", "\udfff\ud800"]}', "stop.1"),
        ("/v1/completions", rb'{"prompt": "a", "user": "\udbff"}', "user"),
        ("/v1/completions", rb'{"prompt": "a", "\ud800": 1}', None),
        ("/v1/completions", rb'{"prompt": "a", "metadata": {"b": {"\ud800": 1}}}', "metadata.b"),
        ("/v1/chat/completions", rb'{"messages": [{"role": "user", "content": "\ud800"}]}', "messages.0.content"),
        (
            "/v1/chat/completions",
            rb'{"messages": [{"role": "assistant", "tool_calls": '
            rb'[{"function": {"name": "f", "arguments": "{\"a\": \"\\ud800\"}"}}]}]}',
            "messages",
        ),
    ],
)
def test_half_a_surrogate_pair_is_refused_wherever_it_stands(server, path, body, param):
    status, _, answer = ask(server, "POST", path, body)
    assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, param, "invalid_value")
    assert "surrogate" in answer["error"]["message"]


def test_a_whole_surrogate_pair_is_a_character(server):
    status, _, answer = ask(server, "POST", "/v1/completions", rb'{"prompt": "\ud83d\ude00", "max_tokens": 1}')
    assert (status, answer["usage"]["prompt_tokens"]) == (200, 4)


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (b"[]", "found an array"),
        (b"null", "found null"),
        (b"true", "found a boolean"),
        (b"1e3", "found a number"),
        (b'"a"', "found a string"),
        (b'{"prompt": "a", "temperature": NaN}', "NaN is no JSON"),
        (b'{"prompt": "a", "logit_bias": {"1": -Infinity}}', "-Infinity is no JSON"),
        (b"[" * 9000, "nested too deeply"),
    ],
)
def test_a_body_that_is_no_object_is_told_in_words_of_json(server, body, found):
    status, _, answer = ask(server, "POST", "/v1/completions", body)
    assert (status, answer["error"]["code"]) == (400, "invalid_json")
    assert found in answer["error"]["message"]


@pytest.mark.parametrize(
    ("parameters", "param", "detail"),
    [
        ({"prompt": 5}, "prompt", "expected a string or an array"),
        ({"prompt": "a" * 2000}, "prompt", "This model's maximum context length is 1024 tokens"),
        ({"temperature": "much"}, "temperature", "expected a number"),
        ({"stop": False}, "stop", "expected a string or an array"),
        ({"stop": ["a", 5]}, "stop.1", "expected a string"),
        ({"stop": ["a"] * 17}, "stop", "List should have at most 16 items"),
        ({"stop": ["a", ""]}, "stop", "an empty stop string"),
        ({"stream_options": 1}, "stream_options", "expected an object"),
    ],
)
def test_a_wrong_value_is_told_by_its_name_and_what_is_expected(server, parameters, param, detail):
    status, _, answer = complete(server, **parameters)
    assert (status, answer["error"]["param"]) == (400, param)
    assert answer["error"]["message"].removeprefix(f"Invalid '{param}': ").startswith(detail)


def test_a_body_without_a_length_is_bounded_too(server):
    connection = connect(server)
    parts = (b"x" * 1000 for _ in range(100))
    connection.request("POST", "/v1/completions", parts, {"content-type": "application/json"}, encode_chunked=True)
    assert connection.getresponse().status == 413
    connection.close()


def test_health_and_metrics(server):
    assert ask(server, "GET", "/health")[::2] == (200, {"status": "ok", "running": 0, "waiting": 0})
    before = metric(server, "tqtool_completion_tokens_total")
    complete(server, max_tokens=7)
    assert metric(server, "tqtool_completion_tokens_total") == before + 7
    assert metric(server, 'tqtool_requests_total{endpoint="/v1/completions",status="200"}') >= 1
    assert metric(server, "tqtool_ready") == 1
    assert metric(server, "process_resident_memory_bytes") > 1e6


def metric(server, name):
    _, headers, text = ask(server, "GET", "/metrics")
    assert headers["content-type"].startswith("text/plain; version=0.0.4")
    return float(next(line for line in text.splitlines() if line.startswith(name + " ")).split()[-1])


def test_refusals_are_counted_too(loaded):
    """Without a key, of unknown paths, wrong methods and other models; a path's name is not taken over."""
    with serving(loaded, api_key="k") as server:
        key = {"authorization": "Bearer k"}
        asked = {
            ("/v1/completions", "401"): ("POST", "/v1/completions", {}),
            ("other", "401"): ("GET", "/nowhere", {}),
            ("other", "404"): ("GET", "/v1/nowhere", key),
            ("/v1/completions", "405"): ("GET", "/v1/completions", key),
            ("/v1/models", "404"): ("GET", "/v1/models/another/model", key),
        }
        for (_, status), (method, path, headers) in asked.items():
            assert ask(server, method, path, headers=headers)[0] == int(status)
        _, _, text = ask(server, "GET", "/metrics", headers=key)
        for endpoint, status in asked:
            assert f'tqtool_requests_total{{endpoint="{endpoint}",status="{status}"}} 1.0' in text.splitlines()


@pytest.mark.parametrize("fault", ["before", "after", "refusal"])
def test_the_status_that_is_counted_is_the_one_sent(server, monkeypatch, caplog, fault):
    """A fault of ours is one 500, also where the answer or the refusal was made and cannot be written."""

    def broken(*arguments, **named):
        raise TypeError("a fault of ours")

    counted = {status: count(server, status) for status in (200, 400, 500)}
    if fault == "before":
        monkeypatch.setattr(Served, "completion", broken)
    elif fault == "after":
        monkeypatch.setattr(CompletionReply, "whole", lambda reply: {"choices": "\ud800"})
    else:
        monkeypatch.setattr("tqtool.serve.api_error.ApiError.body", broken)
    status = complete(server, max_tokens=2, **({"n": 2} if fault == "refusal" else {}))[0]
    assert status == 500
    assert {status: count(server, status) for status in (200, 400, 500)} == counted | {500: counted[500] + 1}


def count(server, status):
    try:
        return metric(server, f'tqtool_requests_total{{endpoint="/v1/completions",status="{status}"}}')
    except StopIteration:
        return 0


def test_a_connection_is_used_again(server):
    connection = connect(server)
    for _ in range(2):
        connection.request("GET", "/v1/models")
        assert json.loads(connection.getresponse().read())["object"] == "list"
    connection.close()


def test_the_queue_is_bounded(loaded):
    with serving(loaded, parallel=1, queue=1) as server:
        first, second = endless(server), None
        try:
            thread = threading.Thread(target=complete, args=(server,), kwargs={"max_tokens": 2})
            thread.start()
            wait_until(lambda: server.engine.waiting == 1)
            status, headers, answer = complete(server)
            assert (status, answer["error"]["code"]) == (503, "unavailable")
            assert 1 <= int(headers["retry-after"]) <= 60
            assert ask(server, "GET", "/health")[0] == 200
        finally:
            first[0].close()
            thread.join(30)
        wait_until(lambda: server.engine.running == 0)
        assert complete(server)[0] == 200
        del second


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_place(loaded, stream):
    with serving(loaded, parallel=1) as server:
        body = json.dumps({"prompt": LOOP, "max_tokens": 1000, "temperature": 0, "stream": stream})
        connection = connect(server)
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        wait_until(lambda: server.engine.running == 1)
        connection.sock.shutdown(socket.SHUT_RDWR)
        connection.close()
        wait_until(lambda: server.engine.running == 0)
        assert metric(server, "tqtool_requests_cancelled_total") == 1
        assert metric(server, "tqtool_completion_tokens_total") < 1000


def test_keys(loaded):
    with serving(loaded, api_key="secret-1") as server:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret-1"}):
            status, _, answer = ask(server, "GET", "/v1/models", headers=headers)
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
            assert ask(server, "GET", "/metrics", headers=headers)[0] == 401
        assert ask(server, "GET", "/v1/models", headers={"authorization": "Bearer secret-1"})[0] == 200
        assert ask(server, "GET", "/health")[0] == 200


def test_browsers_may_call_from_named_pages_only(loaded, server):
    preflight = {"origin": "https://chat.example", "access-control-request-method": "POST"}
    assert ask(server, "OPTIONS", "/v1/chat/completions", headers=preflight)[0] == 405
    with serving(loaded, api_key="k", origins=("https://chat.example",)) as open_server:
        status, headers, _ = ask(open_server, "OPTIONS", "/v1/chat/completions", headers=preflight)
        assert (status, headers["access-control-allow-origin"]) == (200, "https://chat.example")
        preflight["origin"] = "https://else.example"
        assert ask(open_server, "OPTIONS", "/v1/chat/completions", headers=preflight)[0] == 400


def refused(server):
    try:
        ask(server, "GET", "/health")
    except ConnectionRefusedError:
        return True
    return False


def test_the_end_lets_short_answers_finish_and_ends_long_ones_in_order(loaded):
    class Slow:
        def __call__(self, *arguments, **named):
            time.sleep(0.02)
            return loaded.model(*arguments, **named)

    with serving(loaded, grace=1.0) as server:
        # A thousand tokens take twenty times the grace.
        server.engine._tools = replace(server.engine._tools, model=Slow())
        connection, stream = endless(server)
        short = []
        thread = threading.Thread(target=lambda: short.append(complete(server, max_tokens=5)))
        thread.start()
        wait_until(lambda: server.engine.running == 2)
        server.stop()
        wait_until(lambda: refused(server))
        thread.join(30)
        lines = stream.read().decode().split("\n\n")
        connection.close()
    assert short[0][0] == 200
    assert short[0][2]["choices"][0]["finish_reason"] == "length"
    assert json.loads(lines[-3].removeprefix("data: "))["error"]["message"] == "The server is shutting down."
    assert lines[-2:] == ["data: [DONE]", ""]


def test_a_fault_in_one_request_does_not_end_the_others(loaded, caplog):
    with serving(loaded) as server:
        working = server.engine._tools

        def broken_caches():
            raise RuntimeError("out of memory")

        server.engine._tools = replace(working, make_caches=broken_caches)
        status, _, answer = complete(server)
        assert (status, answer["error"]["message"]) == (500, "RuntimeError: out of memory")
        wait_until(lambda: ask(server, "GET", "/health")[0] == 503)
        assert ask(server, "GET", "/health")[2]["status"] == "failing"
        server.engine._tools = working
        assert complete(server)[0] == 200
        assert ask(server, "GET", "/health")[0] == 200
