"""Counts and durations of requests."""

from __future__ import annotations

import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from graftlm.serving.metrics import ServerMetrics

_CLIENT_DISCONNECTED = 499  # the status that nginx logs for a client that disconnected before the response


class RequestMetricsMiddleware:
    """Counts and times the requests of an application by route and status.

    Args:
        app: the wrapped application.
        metrics: receives the counts and durations.
    """

    def __init__(self, app: ASGIApp, metrics: ServerMetrics) -> None:
        self.app = app
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status = _CLIENT_DISCONNECTED
        start = time.perf_counter()

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
