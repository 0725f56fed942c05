"""Routes: what comes in is checked, what goes out has OpenAI's shape."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tqtool.serve import strict_json
from tqtool.serve.api_error import ApiError, broken, from_validation, not_unicode, unavailable
from tqtool.serve.engine import Engine
from tqtool.serve.jobs import Request as Wanted
from tqtool.serve.metrics import CONTENT_TYPE, Metrics
from tqtool.serve.model_format import parse_tool_call, tool_markers
from tqtool.serve.reply import ChatReply, CompletionReply, Head, Reply
from tqtool.serve.schema import ChatBody, CompletionBody
from tqtool.serve.served import Served
from tqtool.serve.transport import Events, EventStream, Message, Receive, Send, collect

log = logging.getLogger(__name__)
Body = TypeVar("Body", bound=BaseModel)
Result = TypeVar("Result")
HEALTH, METRICS, MODELS = "/health", "/metrics", "/v1/models"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ENDPOINTS = (HEALTH, METRICS, MODELS, COMPLETIONS, CHAT)
OTHER = "other"
"""What a path that nobody knows is counted as: whoever asks must not be able to fill the metrics with names."""
BODY_SECONDS = 60.0
"""A body that is not there after so long is not waited for."""
DISCARDED = 64 << 20
"""A body over the limit is read up to here and dropped: most clients hear an answer only after they have sent all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Who may ask.

    Attributes:
        api_key: Bearer token that every request but ``/health`` needs; None lets everybody in.
        origins: Web pages that browsers may call from.
    """

    api_key: str | None = None
    origins: tuple[str, ...] = ()


def build_app(engine: Engine, served: Served, metrics: Metrics, access: Access) -> Starlette:
    """The ASGI application; it starts and stops ``engine``."""
    server = _Server(engine, served, metrics)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        del app
        engine.start()
        try:
            yield
        finally:
            await asyncio.to_thread(engine.stop)
            server.tokenizing.shutdown(wait=False)

    routes = [
        Route(HEALTH, server.health),
        Route(METRICS, server.metrics_text),
        Route(MODELS, server.models),
        Route(f"{MODELS}/{{name:path}}", server.model),
        Route(COMPLETIONS, server.completions, methods=["POST"]),
        Route(CHAT, server.chat, methods=["POST"]),
    ]

    def refused(path: str, status: int) -> None:
        endpoint = path if path in ENDPOINTS else MODELS if path.startswith(f"{MODELS}/") else OTHER
        metrics.answered(endpoint, status, 0.0)

    async def http_error(request: Request, error: HTTPException) -> Response:
        refused(request.url.path, error.status_code)
        return await _http_error(request, error)

    async def api_error(request: Request, error: ApiError) -> Response:  # of routes that do not count themselves
        refused(request.url.path, error.status)
        return await _api_error(request, error)

    middleware = [Middleware(_Outermost), Middleware(_KeyCheck, key=access.api_key, refused=refused)]
    if access.origins:
        cors = Middleware(CORSMiddleware, allow_origins=list(access.origins), allow_methods=["*"], allow_headers=["*"])
        middleware.insert(0, cors)
    handlers: dict[Any, Any] = {HTTPException: http_error, ApiError: api_error}
    return Starlette(routes=routes, middleware=middleware, exception_handlers=handlers, lifespan=lifespan)


class _Server:
    def __init__(self, engine: Engine, served: Served, metrics: Metrics) -> None:
        self._engine = engine
        self._served = served
        self._metrics = metrics
        self._fingerprint = f"tqtool-{secrets.token_hex(4)}"
        # One thread: a tokenizer is not made for several at once, and a long prompt must not stop the event loop.
        self.tokenizing = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tqtool-tokenizer")

    async def health(self, request: Request) -> Response:
        """200 once a completion ran, 503 before and after a failure, with the reason."""
        del request
        engine = self._engine
        if engine.stopping:
            return JSONResponse({"status": "stopping"}, status_code=503)
        if not engine.ready:
            status = {"status": "failing" if engine.failure else "starting"}
            return JSONResponse(status | ({"reason": engine.failure} if engine.failure else {}), status_code=503)
        return JSONResponse({"status": "ok", "running": engine.running, "waiting": engine.waiting})

    async def metrics_text(self, request: Request) -> Response:
        """Prometheus."""
        del request
        return Response(self._metrics.text(), headers={"content-type": CONTENT_TYPE})

    async def models(self, request: Request) -> Response:
        """The one model."""
        del request
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """The one model, by name."""
        self._served.check_name(request.path_params["name"])
        return JSONResponse(self._model())

    async def completions(self, request: Request) -> Response:
        """Continue a text."""
        return await self._counted(request, self._complete)

    async def chat(self, request: Request) -> Response:
        """Answer a conversation."""
        return await self._counted(request, self._chat)

    async def _counted(self, request: Request, handler: Callable[[Request], Awaitable[Response]]) -> Response:
        path = request.url.path
        try:
            try:
                return await handler(request)
            except ApiError as error:
                refusal = await _api_error(request, error)  # made here: what cannot be written is a 500
                self._metrics.answered(path, refusal.status_code, 0.0)
                return refusal
        except Exception:
            self._metrics.answered(path, 500, 0.0)  # as _Outermost sends it
            raise

    async def _complete(self, request: Request) -> Response:
        body, wanted = await self._read(request, CompletionBody, self._served.completion)
        reply = CompletionReply(
            self._head("completion"),
            self._engine.text,
            prompt=wanted.prompt,
            echo=bool(body.echo),
            echoed=_only_text(body.prompt),
            logprobs=body.logprobs is not None,
        )
        return await self._answer(request, body, wanted, reply)

    async def _chat(self, request: Request) -> Response:
        body, wanted = await self._read(request, ChatBody, self._served.chat)
        tokenizer = self._served.loaded.tokenizer
        tools = [tool.model_dump(exclude_none=True) for tool in body.tools or []]
        reply = ChatReply(
            self._head("chat"),
            self._engine.text,
            tool=tool_markers(tokenizer),
            parse=lambda text: parse_tool_call(tokenizer, text, tools),
            logprobs=bool(body.logprobs),
            one_call=wanted.one_tool_call,
        )
        return await self._answer(request, body, wanted, reply)

    async def _read(self, request: Request, kind: type[Body], prepare: Callable[[Body], Wanted]) -> tuple[Body, Wanted]:
        """The body, checked, and what the engine is to do; refused at once when the queue is full."""
        raw = await _body(request, self._served.limits.body_bytes)
        try:
            body = kind.model_validate(_json(raw))
        except ValidationError as error:
            raise from_validation(error) from error
        if self._engine.full:
            raise unavailable("The server is busy: its queue is full. Try again later.", self._engine.retry_after)
        wanted = await asyncio.get_running_loop().run_in_executor(self.tokenizing, prepare, body)
        return body, wanted

    async def _answer(
        self, request: Request, body: ChatBody | CompletionBody, wanted: Wanted, reply: Reply
    ) -> Response:
        began = time.monotonic()
        path = request.url.path

        def over(status: int) -> None:
            seconds = time.monotonic() - began
            self._metrics.answered(path, status, seconds)
            if status == 499:
                self._metrics.cancelled()
            tokens = reply.usage.completion if reply.usage else 0
            log.info("%s %d, %d + %d tokens, %.2f s", path, status, len(wanted.prompt), tokens, seconds)

        events = Events(self._engine, wanted)
        if body.stream:
            usage = body.stream_options is not None and body.stream_options.include_usage
            return _Application(EventStream(events, reply, include_usage=usage, over=over))
        whole = await collect(events, reply, request.receive)
        if whole is None:
            over(499)
            return Response(status_code=499)
        response = JSONResponse(whole)  # written before it is counted
        over(response.status_code)
        return response

    def _head(self, kind: str) -> Head:
        return Head(kind=kind, model=self._served.name, fingerprint=self._fingerprint)

    def _model(self) -> dict[str, Any]:
        served = self._served
        return {
            "id": served.name,
            "object": "model",
            "created": served.created,
            "owned_by": "tqtool",
            "max_model_len": served.limits.context,
        }


class _Application(Response):
    """A response that is an application of its own."""

    def __init__(self, application: Callable[[Message, Receive, Send], Awaitable[None]]) -> None:
        self._application = application
        self.background = None

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        await self._application(scope, receive, send)


class _KeyCheck:
    """401 without the key; ``/health`` is open, so that whoever watches needs no secret."""

    def __init__(
        self, app: Callable[..., Awaitable[None]], key: str | None, refused: Callable[[str, int], None]
    ) -> None:
        self._app = app
        self._key = key
        self._refused = refused

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._key is None or scope["path"] == HEALTH:
            await self._app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, token = given.partition(b" ")
        if scheme.lower() == b"bearer" and hmac.compare_digest(token.strip(), self._key.encode()):
            await self._app(scope, receive, send)
            return
        message = (
            "Incorrect API key provided." if given else "You didn't provide an API key: Authorization: Bearer KEY."
        )
        error = ApiError(status=401, message=message, code="invalid_api_key")
        self._refused(scope["path"], error.status)
        await JSONResponse(error.body(), status_code=401, headers={"www-authenticate": "Bearer"})(scope, receive, send)


class _Outermost:
    """A name for each request, which OpenAI's client shows, and 500 for a fault of ours."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        name = f"req_{secrets.token_hex(8)}".encode()
        started = False

        async def named(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message = {**message, "headers": [*message.get("headers", ()), (b"x-request-id", name)]}
            await send(message)

        try:
            await self._app(scope, receive, named)
        except Exception as error:
            log.exception("a request could not be handled")
            if started:
                raise  # half an answer is out; closing the connection is all that is left
            body = broken(f"The server had an error: {type(error).__name__}.").body()
            await JSONResponse(body, status_code=500)(scope, receive, named)


async def _body(request: Request, limit: int) -> bytes:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # Also what keeps a web page from posting here without asking its browser's leave.
        message = f"Expected 'Content-Type: application/json', found {kind or 'none'!r}."
        raise ApiError(status=415, message=message, code="unsupported_media_type")
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared) > max(limit, DISCARDED):
        raise _too_large(limit)
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                size += len(part)
                if size > max(limit, DISCARDED):
                    raise _too_large(limit)
                if size <= limit:
                    parts.append(part)
    except TimeoutError as error:
        raise ApiError(status=408, message="The request's body did not come in time.", code="timeout") from error
    except ClientDisconnect as error:
        raise ApiError(status=400, message="The client left before its request was complete.") from error
    if size > limit:
        raise _too_large(limit)
    return b"".join(parts)


def _too_large(limit: int) -> ApiError:
    # Where the rest of the body is not read, the connection cannot be used again.
    return ApiError(
        status=413,
        message=f"The request's body is too large: at most {limit} bytes are taken.",
        code="request_too_large",
        headers={"connection": "close"},
    )


def _json(raw: bytes) -> Any:
    try:
        value = strict_json.parse(raw)
    except ValueError as error:
        message = f"We could not parse the JSON body of your request: {error}."
        raise ApiError(status=400, message=message, code="invalid_json") from error
    if not isinstance(value, dict):
        message = f"Expected a JSON object, found {strict_json.kind(value)}."
        raise ApiError(status=400, message=message, code="invalid_json")
    at = strict_json.lone_surrogate(value)
    if at is not None:
        raise not_unicode(".".join(map(str, at)))
    return value


def _only_text(prompt: Any) -> str | None:
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    return prompt if isinstance(prompt, str) else None


async def _api_error(request: Request, error: ApiError) -> Response:
    del request
    return JSONResponse(error.body(), status_code=error.status, headers=dict(error.headers))


async def _http_error(request: Request, error: HTTPException) -> Response:
    message = {
        404: f"Invalid URL ({request.method} {request.url.path})",
        405: f"Method {request.method} is not allowed for {request.url.path}",
    }.get(error.status_code, error.detail)
    code = {404: "unknown_url", 405: "method_not_allowed"}.get(error.status_code)
    shaped = ApiError(status=error.status_code, message=message, code=code, headers=dict(error.headers or {}))
    return await _api_error(request, shaped)
