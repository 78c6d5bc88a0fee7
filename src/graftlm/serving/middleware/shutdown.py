"""The refusal of requests during shutdown."""

from __future__ import annotations

import threading

from starlette.types import ASGIApp, Receive, Scope, Send

from graftlm.serving.middleware.protected_paths import is_protected
from graftlm.serving.protocol import ShuttingDownError


class ShutdownMiddleware:
    """Refuses requests for protected paths once the server is shutting down.

    Args:
        app: the wrapped application.
        closing: set when the shutdown begins.

    Raises:
        ShuttingDownError: the server is shutting down (status 503).
    """

    def __init__(self, app: ASGIApp, closing: threading.Event) -> None:
        self.app = app
        self.closing = closing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and is_protected(scope) and self.closing.is_set():
            raise ShuttingDownError
        await self.app(scope, receive, send)
