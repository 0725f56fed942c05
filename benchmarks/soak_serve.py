"""Mixed requests from eight clients for half an hour: no error, and no memory beyond the bound of the prompt cache.

    python benchmarks/soak_serve.py MODEL --minutes 30 --json soak.json

Starts ``tqtool serve MODEL`` and asks it: chats and completions, streamed and not, with stop strings, seeds, long
prompts with a common beginning, scored prompts, tools, clients that leave in the middle, and requests that must be
refused. Resident memory of the server is read from ``/metrics`` every few seconds. Two figures decide: unexpected
answers (none may be), and by how much the largest memory of the last third exceeds that of the second third. The first
third is left out: there the prompt cache fills and the allocator finds its size.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from tqtool.serve.smoke.checks import BEGINNINGS, CHAT, COMPLETIONS, QUESTIONS, question
from tqtool.serve.smoke.client import BadAnswer, Client
from tqtool.serve.smoke.facts import ModelFacts, read_facts
from tqtool.serve.smoke.process import ServerProcess, running

GAUGES = (
    "process_resident_memory_bytes",
    "tqtool_prompt_cache_bytes",
    "tqtool_mlx_active_bytes",
    "tqtool_requests_running",
    "tqtool_completion_tokens_total",
    "tqtool_prompt_tokens_total",
    "tqtool_prompt_tokens_cached_total",
    "tqtool_requests_cancelled_total",
)


class Tally:
    """What clients saw."""

    def __init__(self) -> None:
        self.done: Counter[str] = Counter()
        self.errors: list[str] = []
        self._lock = threading.Lock()

    def ok(self, kind: str) -> None:
        """A request was answered as it should be."""
        with self._lock:
            self.done[kind] += 1

    def bad(self, kind: str, what: object) -> None:
        """It was not."""
        with self._lock:
            self.errors.append(f"{kind}: {what}")


def completion(rng: random.Random, facts: ModelFacts, **more: Any) -> dict[str, Any]:
    """A completion whose prompt may share its beginning with others."""
    length = rng.randint(1, min(1500, facts.context - 80))
    first = rng.choice((0, 0, 0, *range(1, 20)))  # more beginnings than the prompt cache holds, one of them often
    ids = [facts.passage[at % len(facts.passage)] for at in range(first, first + length)]
    prompt: Any = [*ids, rng.choice(facts.passage)] if rng.random() < 0.5 else rng.choice(BEGINNINGS)
    sampling = {"temperature": 0.9, "seed": rng.randrange(9)} if rng.random() < 0.5 else {"temperature": 0}
    return {"prompt": prompt, "max_tokens": rng.randint(1, 48), **sampling, **more}


def expect(client: Client, path: str, body: Any, status: int) -> None:
    """A request that must be answered with ``status``."""
    found = client.ask("POST", path, body)
    if found.status != status:
        raise BadAnswer(f"expected {status}, found {found.status}: {found.text[:200]}")


def leave(client: Client, body: dict[str, Any], after: int) -> None:
    """Go away in the middle of a stream."""
    events = client.events(COMPLETIONS, body)
    for _ in range(after):
        if next(events, None) is None:
            break
    events.close()  # type: ignore[attr-defined]


def one_request(client: Client, rng: random.Random, facts: ModelFacts) -> str:
    """Ask for something; its kind. BadAnswer or OSError when the answer is not as it must be."""
    kinds = [
        "whole",
        "stream",
        "stop",
        "score",
        "leave",
        "refused",
        "broken",
        *(["chat"] * 3 if facts.has_template else []),
    ]
    kind = rng.choice(kinds)
    body = completion(rng, facts)
    if kind == "whole":
        client.whole(COMPLETIONS, body)
    elif kind == "stream":
        client.streamed(COMPLETIONS, body)
    elif kind == "stop":
        client.streamed(COMPLETIONS, body | {"stop": ["e", "\n\n"]})
    elif kind == "score":
        scored = list(facts.passage[: rng.randint(2, 60)])
        client.whole(COMPLETIONS, {"prompt": scored, "echo": True, "logprobs": 2, "max_tokens": 0})
    elif kind == "leave":
        leave(client, body | {"max_tokens": 60}, rng.randint(1, 5))
    elif kind == "refused":
        expect(client, COMPLETIONS, {"prompt": "a", "n": 3}, 400)
    elif kind == "broken":
        expect(client, CHAT, b'{"messages": [', 400)
    else:
        chat = question(rng.choice(QUESTIONS), max_tokens=rng.randint(1, 48), logprobs=rng.random() < 0.3)
        (client.streamed if rng.random() < 0.5 else client.whole)(CHAT, chat)
    return kind


def run_client(server: ServerProcess, number: int, facts: ModelFacts, end: float, tally: Tally) -> None:
    """Ask until the time is over."""
    rng = random.Random(number)
    while time.monotonic() < end:
        try:
            tally.ok(one_request(server.client, rng, facts))
        except (BadAnswer, OSError, ValueError, KeyError) as error:
            tally.bad("client", f"{type(error).__name__}: {error}")


def sample(client: Client) -> dict[str, float]:
    """The server's figures now."""
    lines = [line.split() for line in client.ask("GET", "/metrics").text.splitlines() if not line.startswith("#")]
    found = {name: float(value) for name, value in lines}
    return {name: found[name] for name in GAUGES}


def soak(server: ServerProcess, facts: ModelFacts, arguments: argparse.Namespace) -> dict[str, Any]:
    """Clients in threads; memory every few seconds."""
    tally, begun = Tally(), time.monotonic()
    end = begun + 60 * arguments.minutes
    clients = [
        threading.Thread(target=run_client, args=(server, number, facts, end, tally))
        for number in range(arguments.clients)
    ]
    for client in clients:
        client.start()
    samples: list[dict[str, float]] = []
    while time.monotonic() < end:
        time.sleep(min(arguments.every, max(0.0, end - time.monotonic())))
        with suppress(BadAnswer):
            samples.append({"seconds": time.monotonic() - begun, **sample(server.client)})
    for client in clients:
        client.join()
    last = sample(server.client)
    third = 20 * arguments.minutes
    rss = [(one["seconds"], one["process_resident_memory_bytes"]) for one in samples]
    thirds = [max((b for s, b in rss if n * third <= s < (n + 1) * third), default=0.0) for n in range(3)]
    return {
        "requests": sum(tally.done.values()),
        "by_kind": dict(tally.done),
        "errors": tally.errors[:20],
        "n_errors": len(tally.errors),
        "rss_mib_by_third": [round(value / 2**20, 1) for value in thirds],
        "growth_mib": round((thirds[2] - thirds[1]) / 2**20, 2),
        "prompt_cache_mib_max": round(max(one["tqtool_prompt_cache_bytes"] for one in samples) / 2**20, 2),
        "mlx_active_mib_end": round(last["tqtool_mlx_active_bytes"] / 2**20, 1),
        "generated_tokens": int(last["tqtool_completion_tokens_total"]),
        "prompt_tokens": int(last["tqtool_prompt_tokens_total"]),
        "prompt_tokens_cached": int(last["tqtool_prompt_tokens_cached_total"]),
        "cancelled": int(last["tqtool_requests_cancelled_total"]),
        "still_running": int(last["tqtool_requests_running"]),
        "samples": samples,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--every", type=float, default=5.0, help="seconds between samples")
    parser.add_argument("--prompt-cache-mb", type=float, default=64.0)
    parser.add_argument("--kv-quant")
    parser.add_argument("--allowed-mib", type=float, default=16.0, help="growth that is no leak")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    facts = read_facts(arguments.model, None)
    options = [str(arguments.model), "--prompt-cache-mb", str(arguments.prompt_cache_mb)]
    options += ["--kv-quant", arguments.kv_quant] if arguments.kv_quant else []
    with running(options) as server:
        result = soak(server, facts, arguments)
        result["exit_code"] = server.end()
        result["said"] = server.said().splitlines()[-5:]
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1))
    print(json.dumps({name: value for name, value in result.items() if name != "samples"}, indent=1))
    bad = result["n_errors"] or result["still_running"] or result["exit_code"] != 0
    sys.exit(1 if bad or result["growth_mib"] > arguments.allowed_mib else 0)


if __name__ == "__main__":
    main()
