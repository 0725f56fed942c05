"""A server of this process, in a thread, for clients in the test."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqtool.cli.serve import describe
from tqtool.kv.scheme import FULL_CACHE, KVOptions
from tqtool.runtime.load import LoadedModel, load
from tqtool.serve.app import Access
from tqtool.serve.caches import choose_caches
from tqtool.serve.engine import EngineOptions
from tqtool.serve.server import Place, Server, listen


@contextmanager
def serving(
    model: Path | LoadedModel,
    *,
    api_key: str | None = None,
    context: int | None = None,
    max_tokens: int | None = None,
    body_mb: float = 1.0,
    grace: float = 5.0,
    kv: KVOptions = FULL_CACHE,
    origins: tuple[str, ...] = (),
    aliases: tuple[str, ...] = (),
    **options: Any,
) -> Iterator[Server]:
    """A ready server; ``options`` are of the engine."""
    loaded = model if isinstance(model, LoadedModel) else load(model)
    served = describe(loaded, name=None, aliases=aliases, context=context, max_tokens=max_tokens, body=body_mb)
    settings = replace(EngineOptions(make_caches=choose_caches(loaded, kv).make), **options)
    place = Place(port=0, grace=grace)
    ready = threading.Event()
    server = Server(served, settings, Access(api_key=api_key, origins=origins), place, listen(place), ready=ready.set)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        assert ready.wait(60)
        yield server
    finally:
        server.stop()
        thread.join(60)
        assert not thread.is_alive()
