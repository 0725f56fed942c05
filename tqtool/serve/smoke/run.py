"""The whole smoke test: one server with the full KV cache, one with a quantized one, a row for each check."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from tqtool.serve.smoke.checks import COMPLETIONS, FULL, QUANTIZED, Check, Context, Skipped, Wrong
from tqtool.serve.smoke.client import BadAnswer, Client
from tqtool.serve.smoke.facts import read_facts
from tqtool.serve.smoke.process import NotStarted, ServerProcess, running

Outcome = Literal["ok", "FAIL", "skipped"]
USER_ERROR = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One check: its server's KV cache, its name, how it went, what was seen."""

    kv: str
    check: str
    outcome: Outcome
    detail: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SmokeReport:
    """Everything that was checked."""

    model: str
    rows: tuple[Row, ...]

    @property
    def ok(self) -> bool:
        """Nothing failed."""
        return all(row.outcome != "FAIL" for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        """As printed by ``--json``."""
        return {"model": self.model, "ok": self.ok, "checks": [asdict(row) for row in self.rows]}


def smoke(
    folder: Path,
    arguments: Sequence[str],
    *,
    kv_quant: str,
    context: int | None,
    say: Callable[[Row], None],
) -> SmokeReport:
    """Check the model in ``folder``.

    Args:
        folder: The model.
        arguments: Further ones of ``tqtool serve``.
        kv_quant: Scheme of the second server.
        context: Tokens of context, where they are not the model's own.
        say: Told about each row as it comes.
    """
    rows: list[Row] = []

    def add(row: Row) -> None:
        rows.append(row)
        say(row)

    facts, notes = read_facts(folder, context), dict[str, Any]()
    for kv, checks in (("full", FULL), (kv_quant, QUANTIZED)):
        more = [] if kv == "full" else ["--kv-quant", kv]
        began = time.monotonic()
        try:
            with running([str(folder), *arguments, *more]) as server:
                add(_row(kv, "start", began, "ok", server.url))
                anonymous = Client(server.url)
                shared = Context(client=server.client, anonymous=anonymous, facts=facts, notes=notes)
                for name, check in checks.items():
                    add(run_check(kv, name, check, shared))
                add(_end(kv, server))
        except NotStarted as error:
            # The second server may be refused for what the model is: no fault of the artifact's.
            refused = kv != "full" and error.code == USER_ERROR
            add(_row(kv, "start", began, "skipped" if refused else "FAIL", _last(error, refused)))
            break  # a model that does not start with the full cache does not with another
    return SmokeReport(model=str(folder), rows=tuple(rows))


def run_check(kv: str, name: str, check: Check, context: Context) -> Row:
    """One row."""
    began = time.monotonic()
    try:
        return _row(kv, name, began, "ok", check(context))
    except Skipped as reason:
        return _row(kv, name, began, "skipped", str(reason))
    except (Wrong, BadAnswer) as fault:
        return _row(kv, name, began, "FAIL", str(fault))
    except Exception as fault:  # noqa: BLE001 - a check that breaks has found something
        return _row(kv, name, began, "FAIL", f"{type(fault).__name__}: {fault}")


def _end(kv: str, server: ServerProcess) -> Row:
    """SIGTERM while an answer is streamed: the stream ends in order, and so does the process."""
    began = time.monotonic()
    data = json.dumps({"prompt": "Once", "max_tokens": 30, "stream": True}).encode()
    try:
        with server.client.open("POST", COMPLETIONS, data) as response:
            response.readline()
            code = server.end()
            rest = response.read().decode()
    except OSError as fault:
        return _row(kv, "shutdown", began, "FAIL", f"the stream broke off: {fault}")
    if code != 0 or not rest.endswith("data: [DONE]\n\n"):
        return _row(kv, "shutdown", began, "FAIL", f"exit code {code}, the stream ended with {rest[-80:]!r}")
    return _row(kv, "shutdown", began, "ok", "the stream was finished, exit code 0")


def _row(kv: str, name: str, began: float, outcome: Outcome, detail: str) -> Row:
    return Row(kv=kv, check=name, outcome=outcome, detail=detail, seconds=round(time.monotonic() - began, 2))


def _last(error: NotStarted, refused: bool) -> str:
    lines = [line for line in str(error).splitlines() if refused is False or line.startswith("error:")]
    return f"exit code {error.code}: {' / '.join(lines[-2:])}"
