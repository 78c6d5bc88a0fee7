"""ASGI middleware in front of the routes: checks of every request, and metrics for Prometheus."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial

from prometheus_client import CollectorRegistry, Counter, GCCollector, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from graftlm.serving.errors import error_response, internal_error
from graftlm.serving.protocol import Engine, QueueFullError, ServingError, ShuttingDownError
from graftlm.serving.settings import ApiKeys, ServerSettings

_PROTECTED = ("/v1/", "/metrics/", "/tokenize/", "/detokenize/")
DOCUMENT_FACTOR = 8  # a body with a document, such as a PDF file, may be so many times as large as others
_DRAIN_FACTOR = 8  # a refused body is read up to this multiple of the limit, so that the client receives the error
_DRAIN_SECONDS = 2.0
_FIRST_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_REQUEST_BUCKETS = (*_FIRST_TOKEN_BUCKETS, 300, 600)


def user_of(request: Request) -> str:
    """The name of the request's API key, or without keys the client's address."""
    return getattr(request.state, "user", "")


class Guard:
    """Checks host, key, content type, size and speed of a request before its body is parsed.

    Once `closing` is set, the server accepts nothing new.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings, keys: ApiKeys, closing: threading.Event) -> None:
        self.app, self.settings, self.keys, self.closing = app, settings, keys or None, closing
        self.hosts = settings.allowed_hosts()
        self.open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        request = Request(scope, receive)
        try:
            self._check(scope, request.headers)
            self.open += 1
            try:
                await self._run_app(scope, _replay(await self._read(request), receive), send)
            finally:
                self.open -= 1
        except ClientDisconnect:
            pass
        except ServingError as error:
            if error.status != 408:
                await self._drain(Request(scope, receive))
            await error_response(error)(scope, receive, send)
        return None

    def _check(self, scope: Scope, headers: Headers) -> None:
        """Check what the headers tell; a refusal is a `ServingError`."""
        self._check_host(headers.get("host", ""))
        if f"{scope['path']}/".startswith(_PROTECTED):
            scope.setdefault("state", {})["user"] = self._user(scope, headers)
            if self.closing.is_set():
                raise ShuttingDownError("The server is shutting down and takes nothing new: try again in a moment.")
            if self.open >= self.settings.requests:
                raise QueueFullError(f"{self.open} requests are open, which is the most: try again in a moment.")
        _check_type(scope, headers)
        if int(headers.get("content-length") or 0) > (limit := self._body_limit(scope)):
            raise _too_large(limit)

    def _check_host(self, host: str) -> None:
        name = host.rpartition(":")[0] if ":" in host and not host.endswith("]") else host
        if self.hosts is not None and name.strip("[]").lower() not in self.hosts:
            message = f"This server does not go by the name {name[:100]!r}: call it by {', '.join(sorted(self.hosts))}"
            raise ServingError(f"{message}, or start it with --allow-host.", status=421, code="unknown_host")

    def _user(self, scope: Scope, headers: Headers) -> str:
        if self.keys is None:
            return (scope.get("client") or ("",))[0]
        header = headers.get("authorization", "")
        name = self.keys.name_of_header(header)
        if name is None:
            problem = "is not one that this server knows" if header else "is missing"
            message = f"The API key {problem}: send the header Authorization: Bearer KEY."
            raise ServingError(message, status=401, code="invalid_api_key")
        return name

    async def _run_app(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application; an unexpected exception becomes a response, or the connection would break."""
        started = False

        async def noting_send(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self.app(scope, receive, noting_send)
        except Exception as error:
            if started:
                raise
            await error_response(internal_error(scope["path"], error))(scope, receive, send)

    async def _read(self, request: Request) -> bytes:
        body, limit = bytearray(), self._body_limit(request.scope)
        try:
            async with asyncio.timeout(self.settings.body_seconds):
                async for part in request.stream():
                    body += part
                    if len(body) > limit:
                        raise _too_large(limit)
        except TimeoutError:
            message = f"The request did not arrive whole within {self.settings.body_seconds:g} seconds: send it faster."
            raise ServingError(message, status=408, code="request_timeout") from None
        return bytes(body)

    async def _drain(self, request: Request) -> None:
        """Discard the rest of a body: a client that still sends does not read the response of a closed connection."""
        if "expect" in request.headers:  # the client waits before it sends
            return
        left = _DRAIN_FACTOR * self.settings.body_bytes
        with suppress(TimeoutError, ClientDisconnect):
            async with asyncio.timeout(_DRAIN_SECONDS):
                async for part in request.stream():
                    left -= len(part)
                    if left <= 0:
                        return

    def _body_limit(self, scope: Scope) -> int:
        return self.settings.body_bytes * (DOCUMENT_FACTOR if scope["path"] == "/v1/graftlm/summarize" else 1)


def _too_large(limit: int) -> ServingError:
    message = f"The request is larger than {limit:,} bytes, which is the most: send less text."
    return ServingError(message, status=413, code="request_too_large")


def _check_type(scope: Scope, headers: Headers) -> None:
    """Require JSON: a page of another site may send text or forms without the browser's preflight request."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    has_body = "transfer-encoding" in headers or int(headers.get("content-length") or 0) > 0
    if scope["method"] == "POST" and has_body and kind != "application/json":
        message = f"The body is said to be {kind[:100] or 'of no type'}: send JSON as Content-Type: application/json."
        raise ServingError(message, status=415, code="unsupported_media_type")


def _replay(body: bytes, receive: Receive) -> Receive:
    """A receive function that returns a body that was read, then what `receive` returns."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return messages.pop() if messages else await receive()

    return replayed


class EngineCollector(Collector):
    """The state of an engine as metrics, read when Prometheus asks."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def collect(self) -> Iterator[Metric]:
        stats = self.engine.stats()
        yield GaugeMetricFamily("graftlm_running", "Continuations being generated.", stats.running)
        yield GaugeMetricFamily("graftlm_waiting", "Waiting continuations.", stats.waiting)
        yield CounterMetricFamily("graftlm_generated_tokens", "Tokens generated since the start.", stats.tokens)
        finished = CounterMetricFamily("graftlm_continuations", "Continuations by finish reason.", labels=["reason"])
        for reason, count in sorted(stats.finished.items()):
            finished.add_metric([reason], count)
        yield finished


class ServerMetrics:
    """The metrics of one server."""

    def __init__(self, engine: Engine) -> None:
        self.registry = registry = CollectorRegistry()
        registry.register(EngineCollector(engine))
        ProcessCollector(registry=registry)
        GCCollector(registry=registry)
        counter, histogram = partial(Counter, registry=registry), partial(Histogram, registry=registry)
        self.requests = counter(
            "graftlm_requests", "Requests by path and status; 499: the client left.", ["path", "status"]
        )
        self.request_seconds = histogram(
            "graftlm_request_seconds", "From a request to the end of its response.", ["path"], buckets=_REQUEST_BUCKETS
        )
        self.first_token_seconds = histogram(
            "graftlm_first_token_seconds", "From a request to its first token.", ["model"], buckets=_FIRST_TOKEN_BUCKETS
        )
        self.prompt_tokens = counter("graftlm_prompt_tokens", "Prompt tokens.", ["model"])
        self.completion_tokens = counter("graftlm_completion_tokens", "New tokens.", ["model"])
        self.loads = counter("graftlm_graft_loads", "Loaded graft files.", ["graft", "outcome"])


class RequestMetrics:
    """Counts and times the requests of an application by their route."""

    def __init__(self, app: ASGIApp, metrics: ServerMetrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        status, start = 499, time.perf_counter()

        async def noting_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, noting_send)
        finally:
            path = getattr(scope.get("route"), "path", None) or "other"
            self.metrics.requests.labels(path, str(status)).inc()
            self.metrics.request_seconds.labels(path).observe(time.perf_counter() - start)
        return None
