"""The checks: each asks the server something and raises ``Wrong`` when the answer is not what it must be."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from tqtool.serve.smoke.client import Client, Said
from tqtool.serve.smoke.facts import ModelFacts

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
QUESTIONS = ("What is the capital of France?", "Write a sentence about a dog.", "How many days are in a week?")
BEGINNINGS = ("The capital of France is", "Question: What is 2 + 3?\nAnswer:", "Once upon a time there was")
EMOJI = "😀 🎉 😀 🎉 😀 🎉 😀"
UNICODE = "Grüße — 世界, नमस्ते 😀👩‍👩‍👧 é"
CLIENTS = 8
TOKENS = 8
LONG = 1100
"""Tokens of the long prompt: more than two of the chunks that prompts are computed in."""
SHARE = 0.75
"""Surprise at a text over that at its tokens mixed up: SmolLM2 .42, at 3 to 4 bits .42 to .47, with the scales of its
MLPs swapped .86; 1 knows no order."""
SCORED = 400


class Wrong(Exception):  # noqa: N818 - what it is
    """The server, or the model behind it, is not sound."""


class Skipped(Exception):  # noqa: N818 - what it is
    """The model has no such thing."""


@dataclass(slots=True)
class Context:
    """What checks have in common; ``notes`` go from one server to the next."""

    client: Client
    anonymous: Client
    facts: ModelFacts
    notes: dict[str, Any] = field(default_factory=dict)


Check = Callable[[Context], str]


def prompts(context: Context) -> list[tuple[str, dict[str, Any]]]:
    """Requests in every format that the model has: greedy, short."""
    found = [(COMPLETIONS, {"prompt": text, "max_tokens": TOKENS, "temperature": 0}) for text in BEGINNINGS]
    if context.facts.has_template:
        found += [(CHAT, question(text)) for text in QUESTIONS]
    return found


def question(text: str, **more: Any) -> dict[str, Any]:
    """A chat of one message."""
    return {"messages": [{"role": "user", "content": text}], "max_tokens": TOKENS, "temperature": 0, **more}


def answers(context: Context, path: str, bodies: list[dict[str, Any]]) -> str:
    """Every answer has text: the first token does not end it, and no character is broken."""
    shown = ""
    for body in bodies:
        said, _ = context.client.whole(path, body)
        asked = body.get("prompt") or body["messages"][-1]["content"]
        if said.new_tokens <= 1 and said.finish == "stop":
            raise Wrong(f"{asked!r} is answered with nothing: the first token ended it")
        if not said.text.strip():
            raise Wrong(f"{asked!r} is answered with white space only: {said.text!r}")
        if "\ufffd" in said.text:
            raise Wrong(f"{asked!r} is answered with broken characters: {said.text!r}")
        shown = shown or f"{asked!r} → {said.text[:60]!r}"
    return shown


def models(context: Context) -> str:
    """The server is ready, lists its model and wants its key."""
    health = context.anonymous.ask("GET", "/health")
    listed = context.client.ask("GET", "/v1/models")
    if (health.status, listed.status) != (200, 200) or len(listed.value["data"]) != 1:
        raise Wrong(f"/health {health.status}, /v1/models {listed.status}: {listed.text[:200]}")
    expect_error(context.anonymous.ask("GET", "/v1/models"), 401, "invalid_api_key")
    return str(listed.value["data"][0]["id"])


def templated(context: Context) -> str:
    """Questions through the chat template."""
    if not context.facts.has_template:
        raise Skipped("the model has no chat template")
    return answers(context, CHAT, [question(text) for text in QUESTIONS])


def raw(context: Context) -> str:
    """Texts to continue, without template."""
    bodies = [{"prompt": text, "max_tokens": TOKENS, "temperature": 0} for text in BEGINNINGS]
    return answers(context, COMPLETIONS, bodies)


def language(context: Context) -> str:
    """English is likelier to the model than the same tokens in random order, and than guessing."""
    ids = list(context.facts.passage[: min(SCORED, context.facts.context - 1)])
    mixed = ids[:]
    random.Random(0).shuffle(mixed)
    loss, other = surprise(context.client, ids), surprise(context.client, mixed)
    before = context.notes.setdefault("loss", loss)
    text = f"{loss:.2f} nats a token, {other:.2f} in random order"
    if not loss < math.log(context.facts.vocab) or loss > SHARE * other:
        raise Wrong(f"{text}, {math.log(context.facts.vocab):.2f} by guessing: this model does not know its language")
    if loss - before > 0.5:
        raise Wrong(f"{text}; {before:.2f} with the full KV cache")
    return text


def surprise(client: Client, ids: list[int]) -> float:
    """Mean of minus the log-probabilities of the tokens of a prompt."""
    body = {"prompt": ids, "echo": True, "logprobs": 0, "max_tokens": 0}
    _, answer = client.whole(COMPLETIONS, body)
    scores = answer["choices"][0]["logprobs"]["token_logprobs"]
    if len(scores) != len(ids) or scores[0] is not None:
        raise Wrong(f"{len(scores)} scores for {len(ids)} tokens, the first {scores[0]}")
    return float(-sum(scores[1:]) / (len(ids) - 1))


def streaming(context: Context) -> str:
    """A streamed answer is the whole one: greedy and sampled, text, reason and usage."""
    compared = 0
    for path, body in prompts(context)[::3]:
        for sampling in ({}, {"temperature": 0.8, "seed": 5}):
            whole, _ = context.client.whole(path, body | sampling)
            pieces = context.client.streamed(path, body | sampling)
            same(f"{path} {sampling}", pieces, whole)
            compared += 1
    return f"{compared} pairs equal"


def same(what: str, found: Said, expected: Said) -> None:
    """Both say the same; how much came from the cache may differ."""
    left = (found.text, found.finish, found.prompt_tokens, found.new_tokens)
    right = (expected.text, expected.finish, expected.prompt_tokens, expected.new_tokens)
    if left != right:
        raise Wrong(f"{what}: {left} is not {right}")


def stops(context: Context) -> str:
    """A stop string taken from the middle of an answer cuts it there, streamed and not, and is not seen."""
    body = {"prompt": BEGINNINGS[2], "max_tokens": 3 * TOKENS, "temperature": 0}
    full = context.client.whole(COMPLETIONS, body)[0].text
    if len(full) < 8:
        raise Wrong(f"an answer of {len(full)} characters only: {full!r}")
    stop = full[len(full) // 2 - 2 : len(full) // 2 + 3]
    expected = full[: full.index(stop)]
    for said in (
        context.client.whole(COMPLETIONS, body | {"stop": [stop]})[0],
        context.client.streamed(COMPLETIONS, body | {"stop": [stop]}),
    ):
        if (said.text, said.finish) != (expected, "stop"):
            raise Wrong(f"stop {stop!r}: {said.text!r} ({said.finish}), expected {expected!r} (stop)")
    return f"{stop!r}"


def end_token(context: Context) -> str:
    """The token that ends a turn ends an answer: it is made certain, and nothing must come."""
    if context.facts.end_of_turn is None:
        raise Skipped("the template has no token after an answer" if context.facts.has_template else "no template")
    token = context.facts.end_of_turn
    said, _ = context.client.whole(CHAT, question(QUESTIONS[0], logit_bias={str(token): 100.0}))
    if (said.finish, said.new_tokens) != ("stop", 1):
        raise Wrong(
            f"token {token} ends a turn in the chat template, and no answer: {said.text[:40]!r} ({said.finish}); "
            "it is missing from eos_token_id"
        )
    return f"token {token}"


def seeds(context: Context) -> str:
    """A seed repeats, another one does not say the same."""
    body = {"prompt": BEGINNINGS[2], "max_tokens": TOKENS, "temperature": 1.5}
    texts = [context.client.whole(COMPLETIONS, body | {"seed": seed})[0].text for seed in (1, 1, 2, 3)]
    if texts[0] != texts[1]:
        raise Wrong(f"seed 1 says {texts[0]!r} and then {texts[1]!r}")
    if len(set(texts)) == 1:
        raise Wrong(f"three seeds all say {texts[0]!r}")
    return f"{len(set(texts))} of 3 seeds differ"


def logprobs(context: Context) -> str:
    """Log-probabilities of a greedy answer: those of its tokens are the highest."""
    body = {"prompt": BEGINNINGS[0], "max_tokens": 4, "temperature": 0, "logprobs": 3}
    _, answer = context.client.whole(COMPLETIONS, body)
    scores = answer["choices"][0]["logprobs"]
    for value, top in zip(scores["token_logprobs"], scores["top_logprobs"], strict=True):
        if not -1e4 < value <= 1e-3 or abs(max(top.values()) - value) > 1e-3:
            raise Wrong(f"log-probability {value} of a greedy token, highest {top}")
    return f"{scores['token_logprobs'][0]:.2f} for {scores['tokens'][0]!r}"


def long_prompt(context: Context) -> str:
    """A long prompt is answered, the same again with its cache; one beyond the context is refused."""
    length = min(LONG, context.facts.context - TOKENS)
    passage = context.facts.passage
    ids = [passage[at % len(passage)] for at in range(length)]
    body = {"prompt": ids, "max_tokens": TOKENS, "temperature": 0}
    first, _ = context.client.whole(COMPLETIONS, body)
    again, _ = context.client.whole(COMPLETIONS, body)
    if first.prompt_tokens != length or not first.new_tokens:
        raise Wrong(f"a prompt of {length} tokens was read as {first.prompt_tokens}")
    same("the same long prompt again", again, first)
    beyond = {"prompt": [ids[0]] * (context.facts.context + 1), "max_tokens": 1}
    expect_error(context.client.ask("POST", COMPLETIONS, beyond), 400, "context_length_exceeded")
    return f"{length} tokens, {again.cached} of them from the cache the second time"


def concurrency(context: Context) -> str:
    """Eight clients at once get what each gets alone."""
    bodies = [
        (COMPLETIONS, {"prompt": f"{n + 1}. {BEGINNINGS[n % 3]}", "max_tokens": TOKENS, "temperature": 0.7, "seed": n})
        for n in range(CLIENTS)
    ]
    alone = [context.client.whole(path, body)[0] for path, body in bodies]
    with ThreadPoolExecutor(CLIENTS) as pool:
        together = list(pool.map(lambda job: context.client.streamed(*job), bodies))
    for (_, body), one, other in zip(bodies, alone, together, strict=True):
        same(f"{body['prompt']!r} beside seven others", other, one)
    return f"{CLIENTS} answers equal"


def characters(context: Context) -> str:
    """Characters of several bytes come back whole, however tokens cut them and wherever an answer ends."""
    body = {"prompt": UNICODE, "echo": True, "max_tokens": 1, "temperature": 0}
    for event in context.client.events(COMPLETIONS, body):
        if any("\ufffd" in choice["text"] for choice in event["choices"]):
            raise Wrong(f"half a character in {event['choices'][0]['text']!r}")
    said = context.client.streamed(COMPLETIONS, body)
    if not said.text.startswith(UNICODE):
        raise Wrong(f"{UNICODE!r} came back as {said.text!r}")
    for limit in range(1, 5):
        text = context.client.whole(COMPLETIONS, {"prompt": EMOJI, "max_tokens": limit, "temperature": 0})[0].text
        if "\ufffd" in text:
            raise Wrong(f"{limit} tokens after emoji end in half a character: {text!r}")
    return f"{EMOJI[-5:]!r} → {text!r}"


def cancel(context: Context) -> str:
    """A client that leaves in the middle stops the work."""
    body = {"prompt": BEGINNINGS[2], "max_tokens": min(2000, context.facts.context // 2), "temperature": 1.0}
    events = context.client.events(COMPLETIONS, body | {"logit_bias": _never_end(context)})
    next(events)
    events.close()  # type: ignore[attr-defined]
    left = time.monotonic()
    while (running := gauge(context.client, "tqtool_requests_running")) > 0:
        if time.monotonic() - left > 60:
            raise Wrong(f"{running:.0f} requests still run a minute after their client left")
        time.sleep(0.05)
    if gauge(context.client, "tqtool_requests_cancelled_total") < 1:
        raise Wrong("the request was not stopped but ran to its end")
    return "stopped"


def _never_end(context: Context) -> dict[str, float]:
    token = context.facts.end_of_turn
    return {} if token is None else {str(token): -100.0}


def gauge(client: Client, name: str) -> float:
    """A figure of ``/metrics``."""
    lines = client.ask("GET", "/metrics").text.splitlines()
    return float(next(line for line in lines if line.startswith(name + " ")).split()[-1])


def bad_requests(context: Context) -> str:
    """Broken JSON, unknown and impossible parameters, a body that is too large: refused in OpenAI's shape."""
    ask = context.client.ask
    expect_error(ask("POST", COMPLETIONS, b'{"prompt": "a"'), 400, "invalid_json")
    expect_error(ask("POST", COMPLETIONS, {"prompt": "a", "no_such_thing": 1}), 400, "unknown_parameter")
    expect_error(ask("POST", COMPLETIONS, {"prompt": "a", "n": 2}), 400, "unsupported_parameter")
    expect_error(ask("POST", COMPLETIONS, {"prompt": "a", "temperature": 9}), 400, "invalid_value")
    expect_error(ask("GET", "/v1/nothing"), 404, "unknown_url")
    huge = {"content-length": str(1 << 40)}
    expect_error(ask("POST", COMPLETIONS, b"", huge), 413, "request_too_large")
    context.client.whole(COMPLETIONS, {"prompt": "a", "max_tokens": 1})
    return "refused, and the next request is answered"


def expect_error(reply: Any, status: int, code: str) -> None:
    """An error of OpenAI's shape."""
    error = reply.value.get("error") if isinstance(reply.value, dict) else None
    if reply.status != status or not isinstance(error, dict) or error.get("code") != code:
        raise Wrong(f"expected status {status} and code {code}, found {reply.status}: {reply.text[:200]}")


def tools(context: Context) -> str:
    """A tool that is offered reaches the template, and the answer is well formed."""
    if not context.facts.takes_tools:
        raise Skipped("the chat template has no place for tools")
    weather = {"name": "get_weather", "description": "Weather of a city", "parameters": {"type": "object"}}
    body = question("What is the weather in Paris?", tools=[{"type": "function", "function": weather}])
    plain, _ = context.client.whole(CHAT, question("What is the weather in Paris?"))
    offered, answer = context.client.whole(CHAT, body)
    if offered.prompt_tokens <= plain.prompt_tokens:
        raise Wrong("the prompt is no longer with a tool than without")
    calls = answer["choices"][0]["message"].get("tool_calls", [])
    return f"{len(calls)} calls"


FULL: dict[str, Check] = {
    "models": models,
    "templated": templated,
    "raw": raw,
    "language": language,
    "streaming": streaming,
    "stop strings": stops,
    "end token": end_token,
    "seeds": seeds,
    "logprobs": logprobs,
    "long prompt": long_prompt,
    "8 clients": concurrency,
    "characters": characters,
    "tools": tools,
    "cancel": cancel,
    "bad requests": bad_requests,
}
QUANTIZED = {
    name: FULL[name]
    for name in ("templated", "raw", "language", "streaming", "seeds", "long prompt", "8 clients", "characters")
}
