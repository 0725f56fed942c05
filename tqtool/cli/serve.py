"""``tqtool serve``: an OpenAI-compatible server for any artifact or mlx-lm model, and its smoke test."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from tqtool.cli.generate import KV_QUANT, KV_START, Activations, Compute
from tqtool.cli.render import emit_line, note

if TYPE_CHECKING:
    from tqtool.runtime.load import LoadedModel
    from tqtool.serve.app import Access
    from tqtool.serve.caches import CacheChoice
    from tqtool.serve.served import Served
    from tqtool.serve.server import Place

KEY_VARIABLE = "TQTOOL_API_KEY"


def register(app: typer.Typer) -> None:
    """Add the verb."""

    @app.command()
    def serve(
        model: str = typer.Argument(..., metavar="MODEL", help="Artifact, model folder or hub id."),
        host: str = typer.Option("127.0.0.1", "--host", help="Address to listen on; only this machine by default."),
        port: int = typer.Option(8080, "--port", min=0, max=65535, help="0 takes a free one."),
        name: str | None = typer.Option(None, "--name", help="Id of the model; by default its folder's name."),
        alias: list[str] = typer.Option([], "--alias", help="Another name that requests may use; repeatable."),
        api_key_file: Path | None = typer.Option(
            None, "--api-key-file", help=f"File with the key that requests must bring; or {KEY_VARIABLE}."
        ),
        allow_origin: list[str] = typer.Option(
            [], "--allow-origin", help="Web origin that browsers may call from (CORS); repeatable."
        ),
        context: int | None = typer.Option(
            None, "--context", min=8, help="Tokens of prompt and answer together; by default the model's own."
        ),
        max_tokens: int | None = typer.Option(None, "--max-tokens", min=1, help="Upper limit of an answer's tokens."),
        max_body_mb: float = typer.Option(8.0, "--max-body-mb", min=0.001, help="Upper limit of a request's size."),
        parallel: int = typer.Option(4, "--parallel", min=1, help="Requests computed in turn, token by token."),
        queue: int = typer.Option(32, "--queue", min=0, help="Requests that may wait; beyond that 503."),
        prompt_cache_mb: float = typer.Option(
            1024.0, "--prompt-cache-mb", min=0, help="Memory for caches of earlier prompts; 0 is off."
        ),
        prefill_step: int = typer.Option(512, "--prefill-step", min=1, help="Tokens of a prompt computed at once."),
        grace: float = typer.Option(30.0, "--grace", min=0, help="Seconds for running requests when told to end."),
        kv_quant: str | None = KV_QUANT,
        kv_start: int = KV_START,
        compute: Compute = typer.Option(Compute.PACKED, "--compute", help="Keep layers packed, or make them dense."),
        activations: Activations = typer.Option(
            Activations.FLOAT, "--activations", help="int8: inputs of CUDA kernels rounded to 8 bits."
        ),
        smoke: bool = typer.Option(
            False, "--smoke", help="Serve on a free port, ask as clients do, report, end; exit code 4 if a check fails."
        ),
        as_json: bool = typer.Option(
            False, "--json", help="One line of JSON with the URL on stdout; with --smoke the report."
        ),
        verbose: bool = typer.Option(False, "--verbose", help="A line on stderr for each request."),
    ) -> None:
        """Serve a model over HTTP as OpenAI's API does (docs/serve.md)."""
        import json
        import sys

        need_extra()
        from tqtool.errors import UserError
        from tqtool.kv.scheme import parse_options
        from tqtool.runtime.load import load
        from tqtool.serve.app import Access
        from tqtool.serve.caches import choose_caches
        from tqtool.serve.engine import EngineOptions
        from tqtool.serve.server import Place, Server, listen, url_of

        kv = parse_options(kv_quant, kv_start)
        if smoke:
            more = ["--compute", compute.value, "--activations", activations.value]
            run_smoke(model, more, kv_quant=kv_quant or "turbo", context=context, as_json=as_json)
            return
        log_to_stderr(verbose)
        access = Access(api_key=api_key(api_key_file), origins=tuple(allow_origin))
        place = Place(host=host, port=port, grace=grace)
        listening = listen(place)  # before a model is loaded for nothing
        listening.close()
        loaded = load(model, compute=compute.value, activations=activations.value)
        served = describe(
            loaded, name=name, aliases=tuple(alias), context=context, max_tokens=max_tokens, body=max_body_mb
        )
        caches = choose_caches(loaded, kv)
        options = EngineOptions(
            parallel=parallel,
            queue=queue,
            chunk=prefill_step,
            prefix_bytes=int(prompt_cache_mb * 2**20) if caches.prefixes_are_exact else 0,
            make_caches=caches.make,
        )
        listening = listen(place)
        url = url_of(place, listening)
        say_start(served, caches, access, place)

        def ready() -> None:
            note(f"ready: {url}/v1")
            if as_json:
                facts = {
                    "url": url,
                    "model": served.name,
                    "context": served.limits.context,
                    "kv": caches.name,
                    "kv_bytes_per_token": caches.bytes_per_token,
                }
                emit_line(json.dumps(facts))
                sys.stdout.flush()

        try:
            Server(served, options, access, place, listening, ready=ready).run()
        except OSError as error:
            raise UserError(f"the server could not run: {error}") from error


def run_smoke(model: str, more: list[str], *, kv_quant: str, context: int | None, as_json: bool) -> None:
    """Check the model as clients would; leaves with ArtifactError's exit code when something is not sound."""
    from tqtool.cli.render import emit_json, emit_table
    from tqtool.errors import ArtifactError
    from tqtool.runtime.load import model_folder
    from tqtool.serve.smoke.run import Row, smoke

    def say(row: Row) -> None:
        if not as_json:
            note(f"{row.kv}: {row.check}: {row.outcome}, {row.seconds:.1f} s")

    if context is not None:
        more = [*more, "--context", str(context)]
    report = smoke(model_folder(model), more, kv_quant=kv_quant, context=context, say=say)
    if as_json:
        emit_json(report.to_json())
    else:
        rows = [(row.kv, row.check, row.outcome, f"{row.seconds:.1f}", row.detail) for row in report.rows]
        emit_table(("KV cache", "check", "result", "s", "seen"), rows)
    failed = [f"{row.check} ({row.kv})" for row in report.rows if row.outcome == "FAIL"]
    if failed:
        raise ArtifactError(f"{model}: {len(failed)} checks failed: {', '.join(failed)}")


def need_extra() -> None:
    """UserError where the packages of the extra are missing."""
    from importlib.util import find_spec

    from tqtool.errors import UserError

    missing = [name for name in ("prometheus_client", "starlette", "uvicorn") if find_spec(name) is None]
    if missing:
        raise UserError(
            f"serving needs packages that are not installed: {', '.join(missing)}",
            hint="pip install 'tqtool[serve]'",
        )


def api_key(path: Path | None) -> str | None:
    """The key of the file or the environment; never of the command line, which every user of the machine can read."""
    import os

    from tqtool.errors import UserError

    if path is None:
        key = os.environ.get(KEY_VARIABLE)
    else:
        try:
            key = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{path}: the API key cannot be read ({error})") from error
    if key is None:
        return None
    key = key.strip()
    if not key or not key.isascii() or any(character.isspace() for character in key):
        raise UserError(
            f"{path or KEY_VARIABLE}: expected one key, letters without spaces",
            hint=f"unset {KEY_VARIABLE} to serve without" if path is None else None,
        )
    return key


def describe(
    loaded: LoadedModel,
    *,
    name: str | None,
    aliases: tuple[str, ...],
    context: int | None,
    max_tokens: int | None,
    body: float,
) -> Served:
    """What clients are told; UserError where the context is unknown or beyond the model's."""
    import time

    from tqtool.errors import UserError
    from tqtool.formats.json_file import read_json_object
    from tqtool.serve.model_format import context_length, sampling_defaults
    from tqtool.serve.served import Limits, Served

    path = loaded.report.path
    own = context_length(loaded.config)
    if context is None and own is None:
        raise UserError(f"{path}: config.json does not say how long a context may be", hint="say it: --context N")
    if context is not None and own is not None and context > own:
        raise UserError(f"--context {context}: this model was made for {own} tokens")
    generation = path / "generation_config.json"
    recommended = read_json_object(generation) if generation.is_file() else {}
    return Served(
        loaded=loaded,
        name=name or path.resolve().name,
        aliases=aliases,
        limits=Limits(context=context or own or 0, max_tokens=max_tokens, body_bytes=int(body * 2**20)),
        defaults=sampling_defaults(recommended),
        created=int(time.time()),
    )


def say_start(served: Served, caches: CacheChoice, access: Access, place: Place) -> None:
    """What is served and to whom, on stderr."""
    from tqtool.serve.server import is_loopback

    limits = served.limits
    cost = caches.bytes_per_token * limits.context / 2**20
    note(f"{served.name}: {limits.context} tokens of context")
    note(f"KV cache: {caches.name}, {caches.bytes_per_token} bytes a token, {cost:.1f} MiB for a full context")
    if served.defaults:
        recommended = ", ".join(f"{name} {value:g}" for name, value in served.defaults.items())
        note(f"defaults of generation_config.json: {recommended}")
    if not is_loopback(place.host) and access.api_key is None:
        note(f"warning: {place.host} can be reached from other machines, and no API key is asked for ({KEY_VARIABLE})")


def log_to_stderr(verbose: bool) -> None:
    """Warnings, and with ``verbose`` a line for each request."""
    import logging

    logging.basicConfig(format="%(message)s")
    logging.getLogger("tqtool").setLevel(logging.INFO if verbose else logging.WARNING)
