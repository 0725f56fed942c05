"""A session of the openai client against ``serve``: what it sends is understood, what it gets is what it expects."""

from __future__ import annotations

import json
import math
from itertools import pairwise

import openai
import pytest

from tests.support.http_server import serving
from tests.support.scripted_model import (
    BROKEN,
    DICE,
    EMPTY,
    HELLO,
    LOOP,
    NO_TOOL,
    THINK,
    TOOL,
    TWO_TOOLS,
    token_id,
    write_scripted,
)  # fmt: skip

ANSWER = "Hello, wörld 😀 and STOP more text."
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(write_scripted(tmp_path_factory.mktemp("scripted") / "model"), aliases=("other-name",)) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="any", max_retries=0) as found:
        yield found


def chat(client, mode=HELLO, **parameters):
    parameters = {"temperature": 0, **parameters}
    kwargs = {} if mode == HELLO else {"chat_template_kwargs": {"mode": mode}}
    return client.chat.completions.create(
        model="model", messages=[{"role": "user", "content": "hi"}], extra_body=kwargs, **parameters
    )


def streamed(stream):
    """Content, reasoning, tool calls by index, finish reason and usage, put together as clients do."""
    content, reasoning, calls, finish, usage = "", "", {}, None, None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            content += choice.delta.content or ""
            reasoning += getattr(choice.delta, "reasoning_content", None) or ""
            for call in choice.delta.tool_calls or []:
                calls[call.index] = (call.function.name, call.function.arguments)
            finish = choice.finish_reason or finish
    return content, reasoning, calls, finish, usage


def test_models(client):
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by) == ("model", "model", "tqtool")
    assert client.models.retrieve("model") == model
    assert client.models.retrieve("other-name").id == "model"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("gpt-4o")
    assert caught.value.code == "model_not_found"


def test_chat(client):
    answer = chat(client)
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].finish_reason == "stop"
    assert answer.object == "chat.completion"
    prompt = len(b"<|user|>hi<|assistant|>") + 1  # bytes, and </s>
    assert answer.usage.prompt_tokens == prompt
    assert answer.usage.completion_tokens == 9  # eight of the script and the end
    assert answer.usage.total_tokens == prompt + 9


def test_a_stream_is_the_same_answer(client):
    stream = chat(client, stream=True, stream_options={"include_usage": True})
    content, _, _, finish, usage = streamed(stream)
    assert (content, finish) == (ANSWER, "stop")
    assert usage == chat(client).usage


def test_a_stream_is_in_pieces_and_never_shows_half_a_character(client):
    pieces = [c.choices[0].delta.content for c in chat(client, stream=True) if c.choices[0].delta.content]
    assert len(pieces) > 5
    assert "".join(pieces) == ANSWER
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("tokens", range(1, 9))
def test_an_answer_that_is_cut_off_ends_with_a_whole_character(client, tokens):
    answer = chat(client, max_tokens=tokens)
    assert ANSWER.startswith(answer.choices[0].message.content)
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", tokens)


@pytest.mark.parametrize(("stop", "expected"), [("STOP", "Hello, wörld 😀 and "), (["xx", "ld 😀"], "Hello, wör")])
@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_cross_tokens_and_are_never_seen(client, stop, expected, stream):
    if stream:
        content, _, _, finish, _ = streamed(chat(client, stop=stop, stream=True))
        assert (content, finish) == (expected, "stop")
    else:
        (choice,) = chat(client, stop=stop).choices
        assert (choice.message.content, choice.finish_reason) == (expected, "stop")


def test_half_a_stop_string_at_the_end_is_text(client):
    assert chat(client, stop="text. And").choices[0].message.content == ANSWER


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("mode", "content", "calls"),
    [
        (TOOL, "I look.", {0: ("get_weather", {"city": "Zürich"})}),
        (TWO_TOOLS, "", {0: ("one", {}), 1: ("two", {"a": 1})}),
        (NO_TOOL, "<tool_call>no JSON</tool_call> after", {}),
    ],
)
def test_tool_calls(client, mode, content, calls, stream):
    finish = "tool_calls" if calls else "stop"
    if stream:
        text, _, found, reason, _ = streamed(chat(client, mode, tools=TOOLS, stream=True))
    else:
        (choice,) = chat(client, mode, tools=TOOLS).choices
        text, reason = choice.message.content or "", choice.finish_reason
        made = choice.message.tool_calls or []
        found = {index: (call.function.name, call.function.arguments) for index, call in enumerate(made)}
        assert len({call.id for call in made}) == len(made)
    assert (text, reason) == (content, finish)
    assert {index: (name, json.loads(arguments)) for index, (name, arguments) in found.items()} == calls


def test_tools_reach_the_template_and_only_then_calls_are_parsed(client):
    assert chat(client, tools=TOOLS).choices[0].finish_reason == "tool_calls"  # the template's own end, given tools
    assert chat(client, tools=TOOLS, tool_choice="none").choices[0].message.content == ANSWER
    assert chat(client, TOOL).choices[0].message.content.startswith("I look.<tool_call>{")


def test_one_tool_call_at_a_time(client):
    answer = chat(client, TWO_TOOLS, tools=TOOLS, parallel_tool_calls=False)
    assert [call.function.name for call in answer.choices[0].message.tool_calls] == ["one"]


def test_a_conversation_with_tools_goes_on(client):
    call = chat(client, tools=TOOLS).choices[0].message
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
        call.model_dump(),
        {"role": "tool", "tool_call_id": call.tool_calls[0].id, "content": "sunny"},
    ]
    answer = client.chat.completions.create(model="model", messages=messages, temperature=0)
    assert answer.choices[0].message.content == ANSWER


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_is_apart(client, stream):
    answer = chat(client, THINK)
    message = answer.choices[0].message
    text, thought = message.content, message.reasoning_content
    if stream:
        text, thought, _, _, _ = streamed(chat(client, THINK, stream=True))
    assert (thought, text) == ("Let me think. ", "42")
    assert answer.usage.completion_tokens_details.reasoning_tokens == 3


def test_an_empty_answer_and_bytes_that_are_no_text(client):
    assert chat(client, EMPTY).choices[0].message.content == ""
    assert chat(client, BROKEN).choices[0].message.content == "bad \ufffd\ufffd byte "  # two wrong bytes, no half one


def test_logprobs(client):
    (choice,) = chat(client, logprobs=True, top_logprobs=3).choices
    tokens = choice.logprobs.content
    assert b"".join(bytes(token.bytes) for token in tokens).decode() == ANSWER
    assert all(-0.01 < token.logprob <= 0 and len(token.top_logprobs) == 3 for token in tokens)
    assert all(token.top_logprobs[0].token == token.token for token in tokens)
    assert tokens[1].token == "bytes:\\x2c\\x20\\x77\\xc3"
    stream = chat(client, logprobs=True, top_logprobs=3, stream=True)
    found = [token for c in stream if c.choices[0].logprobs for token in c.choices[0].logprobs.content]
    assert found == tokens
    (choice,) = chat(client, logprobs=True, stop="STOP").choices
    assert b"".join(bytes(token.bytes) for token in choice.logprobs.content).decode().startswith(choice.message.content)
    assert len(choice.logprobs.content) == 6


def test_completions(client):
    answer = client.completions.create(model="model", prompt="say>", temperature=0, max_tokens=40, logprobs=2)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == (ANSWER, "stop")
    assert choice.logprobs.text_offset == [0, 5, 8, 13, 13, 18, 21, 28]
    assert all(len(top) == 2 for top in choice.logprobs.top_logprobs)
    stream = client.completions.create(model="model", prompt="say>", temperature=0, max_tokens=40, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == ANSWER
    by_id = client.completions.create(model="model", prompt=[token_id(b">")], temperature=0, max_tokens=3)
    assert by_id.choices[0].text == "Hello, wörld "
    assert len(client.completions.create(model="model", prompt=LOOP, temperature=0).choices[0].text.split()) == 16


def test_a_prompt_is_scored(client):
    prompt = "the end 😀>"
    answer = client.completions.create(model="model", prompt=prompt, echo=True, logprobs=1, max_tokens=0)
    (choice,) = answer.choices
    assert choice.text == prompt
    scores = choice.logprobs
    assert scores.token_logprobs[0] is None
    assert len(scores.token_logprobs) == len(prompt.encode())
    assert scores.text_offset[-2:] == [8, 9]
    from tests.support.scripted_model import WIDTH, table

    ids = [3 + byte for byte in prompt.encode()]
    logits = table() / math.sqrt(1 + 1e-5 * WIDTH)  # the norm's epsilon, beside a mean square of 1 / WIDTH
    expected = [logits[a, b] - math.log(sum(math.exp(x) for x in logits[a])) for a, b in pairwise(ids)]
    assert scores.token_logprobs[1:] == pytest.approx(expected, abs=1e-3)
    stream = client.completions.create(
        model="model", prompt=prompt, echo=True, max_tokens=3, temperature=0, stream=True
    )
    pieces = [chunk.choices[0].text for chunk in stream]
    assert "".join(pieces) == prompt + "Hello, wörld "
    assert not any("\ufffd" in piece for piece in pieces)


def test_seeds(client):
    def roll(**parameters):
        answer = client.completions.create(model="model", prompt=DICE, max_tokens=20, **parameters)
        return answer.choices[0].text

    assert roll(seed=7) == roll(seed=7) != roll(seed=8)
    assert roll() != roll()
    assert roll(temperature=0) == roll(temperature=0, seed=9)


@pytest.mark.parametrize(
    ("parameters", "allowed"),
    [
        ({"extra_body": {"top_k": 1}}, 1),
        ({"top_p": 0.25, "logit_bias": {str(token_id(b"3;")): 2}}, 1),
        ({"extra_body": {"min_p": 0.5}}, 10),
        ({"logit_bias": {str(token_id(b"3;")): 100}}, 1),
    ],
)
def test_filters(client, parameters, allowed):
    answer = client.completions.create(model="model", prompt=DICE, max_tokens=40, seed=1, **parameters)
    assert 1 <= len(set(answer.choices[0].text.split(";")) - {""}) <= allowed


@pytest.mark.parametrize(
    "parameters", [{"frequency_penalty": 2}, {"presence_penalty": 2}, {"extra_body": {"repetition_penalty": 3.0}}]
)
def test_penalties_make_repeating_dearer(client, parameters):
    bias = {str(token_id(b"%d;" % side)): -0.5 if side == 3 else -1 for side in range(10)}

    def sides(**more):
        answer = client.completions.create(
            model="model", prompt=DICE, max_tokens=4, temperature=0, logit_bias=bias, **more
        )
        return answer.choices[0].text.split(";")[:4]

    assert sides() == ["3"] * 4
    assert sides(**parameters)[:2] == ["3", "0"]


def test_a_client_that_leaves_stops_the_work(server, client):
    stream = client.completions.create(model="model", prompt=LOOP, max_tokens=900, temperature=0, stream=True)
    for _, _chunk in zip(range(3), stream, strict=False):
        pass
    assert server.engine.running == 1
    stream.close()
    wait_until(lambda: server.engine.running == 0)


def wait_until(condition, seconds=10.0):
    import time

    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("parameters", "param", "code"),
    [
        ({"n": 2}, "n", "unsupported_parameter"),
        ({"temperature": 3}, "temperature", "invalid_value"),
        ({"top_p": "much"}, "top_p", "invalid_type"),
        ({"extra_body": {"shiny": 1}}, "shiny", "unknown_parameter"),
        ({"max_tokens": 5000}, "max_tokens", "context_length_exceeded"),
        ({"response_format": {"type": "json_object"}}, "response_format", "unsupported_parameter"),
        ({"tools": TOOLS, "tool_choice": "required"}, "tool_choice", "unsupported_parameter"),
        ({"top_logprobs": 3}, None, "invalid_value"),
        ({"stream_options": {"include_usage": True}}, None, "invalid_value"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, None, "invalid_value"),
        ({"reasoning_effort": "high"}, "reasoning_effort", "unsupported_parameter"),
        ({"logit_bias": {"99999": 1}}, "logit_bias", "invalid_value"),
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": [{"role": "user"}]}, "messages.0", "invalid_value"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages",
            "invalid_value",
        ),
        ({"messages": [{"role": "user", "content": "a" * 2000}]}, "messages", "context_length_exceeded"),
        ({"model": "gpt-4o"}, "model", "model_not_found"),
    ],
)
def test_refusals_say_what_is_wrong(client, parameters, param, code):
    parameters = {"model": "model", "messages": [{"role": "user", "content": "hi"}], **parameters}
    with pytest.raises(openai.APIStatusError) as caught:
        client.chat.completions.create(**parameters)
    error = caught.value
    assert error.status_code == (404 if code == "model_not_found" else 400)
    assert (error.param, error.code, error.type) == (param, code, "invalid_request_error")
    assert error.request_id.startswith("req_")


def test_parameters_at_their_ends(client):
    for seed in (-(1 << 63), -1, 0, (1 << 63) - 1):
        answers = [client.completions.create(model="model", prompt=DICE, max_tokens=5, seed=seed) for _ in range(2)]
        assert answers[0].choices[0].text == answers[1].choices[0].text
    never = {str(token_id(b"%d;" % side)): -100 for side in range(9)}
    answer = client.completions.create(
        model="model", prompt=DICE, max_tokens=5, logit_bias=never, logprobs=5, extra_body={"top_k": -1}
    )
    assert answer.choices[0].text == "9;" * 5


@pytest.mark.parametrize("kwargs", [{"chat_template": "{{ 1 }}"}, {"tokenize": True}, {"tools": []}])
def test_templates_are_the_models(client, kwargs):
    with pytest.raises(openai.BadRequestError, match="is set by the server"):
        client.chat.completions.create(
            model="model", messages=[{"role": "user", "content": "hi"}], extra_body={"chat_template_kwargs": kwargs}
        )


def test_null_is_nothing_said(client):
    names = ("max_tokens", "min_p", "top_p", "n", "stop", "stream", "stream_options", "seed", "logprobs", "user")
    names += ("presence_penalty", "frequency_penalty", "logit_bias", "tools", "tool_choice", "response_format")
    answer = client.chat.completions.create(
        model="model", messages=[{"role": "user", "content": "hi"}], temperature=0, extra_body=dict.fromkeys(names)
    )
    assert answer.choices[0].message.content == ANSWER
    body = dict.fromkeys(("echo", "suffix", "best_of", "logprobs", "max_tokens"))
    answer = client.completions.create(model="model", prompt=">", temperature=0, extra_body=body)
    assert answer.choices[0].text == ANSWER
