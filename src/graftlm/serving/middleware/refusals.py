"""Responses to the errors that other middleware raises."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from graftlm.serving.errors import error_response
from graftlm.serving.protocol import ServingError

_SECONDS = 2.0  # maximum time to receive the rest of a refused body


class RefusalMiddleware:
    """Sends the response of a `ServingError` that the wrapped middleware raises.

    The rest of the body is received and discarded first, because a client that is still sending does not read the
    response of a connection that is closed.

    Args:
        app: the wrapped application.
        max_bytes: maximum number of bytes to discard.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app = app
        self.max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            await self.app(scope, receive, send)
        except ClientDisconnect:
            return
        except ServingError as error:
            if error.status != 408:  # the rest of a slow body is not awaited
                await self._discard_body(Request(scope, receive))
            response = error_response(error)
            await response(scope, receive, send)

    async def _discard_body(self, request: Request) -> None:
        if "expect" in request.headers:  # the client waits for the response before it sends the body
            return
        remaining = self.max_bytes
        with suppress(TimeoutError, ClientDisconnect):
            async with asyncio.timeout(_SECONDS):
                async for part in request.stream():
                    remaining -= len(part)
                    if remaining <= 0:
                        return
