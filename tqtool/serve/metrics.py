"""``/metrics``: counts, times and memory for Prometheus, in a registry of the server's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

if TYPE_CHECKING:
    from tqtool.serve.engine import Engine

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LONG = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_SHORT = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5)


class Metrics:
    """All of the server's figures; also the engine's watcher."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self._requests = Counter("tqtool_requests", "Requests answered.", ("endpoint", "status"), registry=registry)
        self._cancelled = Counter("tqtool_requests_cancelled", "Clients that left before the end.", registry=registry)
        self._prompt = Counter("tqtool_prompt_tokens", "Tokens of prompts.", registry=registry)
        self._cached = Counter("tqtool_prompt_tokens_cached", "Of those, taken from earlier ones.", registry=registry)
        self._tokens = Counter("tqtool_completion_tokens", "Tokens generated.", registry=registry)
        self._first = Histogram(
            "tqtool_time_to_first_token_seconds", "From request to token.", registry=registry, buckets=_LONG
        )
        self._prefill = Histogram("tqtool_prompt_seconds", "Computing a prompt.", registry=registry, buckets=_LONG)
        self._between = Histogram(
            "tqtool_time_between_tokens_seconds", "From token to token.", registry=registry, buckets=_SHORT
        )
        self._whole = Histogram("tqtool_request_seconds", "Whole requests.", registry=registry, buckets=_LONG)

    def watch(self, engine: Engine) -> None:
        """Figures that are read when they are asked for."""

        def gauge(name: str, text: str, read: object) -> None:
            Gauge(name, text, registry=self.registry).set_function(read)  # type: ignore[arg-type]

        gauge("tqtool_ready", "1 when the last completion ran.", lambda: float(engine.ready))
        gauge("tqtool_requests_running", "Requests being computed.", lambda: engine.running)
        gauge("tqtool_requests_waiting", "Requests in the queue.", lambda: engine.waiting)
        gauge("tqtool_prompt_cache_bytes", "Caches of earlier prompts.", lambda: engine.prefixes.nbytes)
        gauge("tqtool_prompt_cache_entries", "Caches of earlier prompts.", lambda: len(engine.prefixes))
        gauge("tqtool_mlx_active_bytes", "Memory of MLX's arrays.", lambda: _mlx("get_active_memory"))
        gauge("tqtool_mlx_cache_bytes", "Memory MLX keeps for reuse.", lambda: _mlx("get_cache_memory"))

    def answered(self, endpoint: str, status: int, seconds: float) -> None:
        """A request is over."""
        self._requests.labels(endpoint, str(status)).inc()
        if status == 200:
            self._whole.observe(seconds)

    def cancelled(self) -> None:
        """A client left."""
        self._cancelled.inc()

    def prompt(self, tokens: int, cached: int, seconds: float) -> None:
        """A prompt was computed."""
        self._prompt.inc(tokens)
        self._cached.inc(cached)
        self._prefill.observe(seconds)

    def first_token(self, seconds: float) -> None:
        """A first token came."""
        self._tokens.inc()
        self._first.observe(seconds)

    def token(self, seconds: float) -> None:
        """Another token came."""
        self._tokens.inc()
        self._between.observe(seconds)

    def text(self) -> bytes:
        """Prometheus's text format."""
        return generate_latest(self.registry)


def _mlx(name: str) -> float:
    import mlx.core as mx

    return float(getattr(mx, name)())
