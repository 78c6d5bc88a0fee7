"""The receipt of request bodies within limits on size and time."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from graftlm.serving.protocol import ServingError


class RequestBodyMiddleware:
    """Receives the whole body of a request before the application runs.

    Args:
        app: the wrapped application.
        max_bytes: maximum size of a body.
        seconds: maximum time for a body to arrive.
        max_bytes_of_paths: maximum sizes of bodies for paths with another limit than `max_bytes`.

    Raises:
        ServingError: the body is too large (status 413) or does not arrive in time (408).
        ClientDisconnect: the client disconnected before the end of the body.
    """

    def __init__(
        self,
        app: ASGIApp,
        max_bytes: int,
        seconds: float,
        max_bytes_of_paths: Mapping[str, int] | None = None,
    ) -> None:
        self.app = app
        self.max_bytes = max_bytes
        self.seconds = seconds
        self.max_bytes_of_paths = max_bytes_of_paths or {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        limit = self.max_bytes_of_paths.get(scope["path"], self.max_bytes)
        if int(Headers(scope=scope).get("content-length") or 0) > limit:
            raise _too_large(limit)
        body = await self._read(Request(scope, receive), limit)
        await self.app(scope, _replay(body, receive), send)

    async def _read(self, request: Request, limit: int) -> bytes:
        body = bytearray()
        try:
            async with asyncio.timeout(self.seconds):
                async for part in request.stream():
                    body += part
                    if len(body) > limit:
                        raise _too_large(limit)
        except TimeoutError:
            raise ServingError(
                f"The body of the request did not arrive within {self.seconds:g} seconds: send a smaller one, or use a "
                "faster connection.",
                status=408,
                code="request_timeout",
            ) from None
        return bytes(body)


def _too_large(limit: int) -> ServingError:
    return ServingError(
        f"The body of the request is larger than {limit:,} bytes, which is the maximum: send less text.",
        status=413,
        code="request_too_large",
    )


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return an ASGI receive function that first returns a body that was received before."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        if messages:
            return messages.pop()
        return await receive()

    return replayed
