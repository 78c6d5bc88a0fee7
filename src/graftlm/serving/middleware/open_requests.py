"""The limit on the number of open requests."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from graftlm.serving.middleware.protected_paths import is_protected
from graftlm.serving.protocol import QueueFullError


class OpenRequestsMiddleware:
    """Counts open requests, and refuses requests for protected paths while the limit is reached.

    Args:
        app: the wrapped application.
        limit: maximum number of open requests.

    Attributes:
        open: number of requests that are not answered yet.

    Raises:
        QueueFullError: the limit is reached (status 429).
    """

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self.app = app
        self.limit = limit
        self.open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if is_protected(scope) and self.open >= self.limit:
            raise QueueFullError(
                f"The number of open requests is {self.open}, but the limit is {self.limit}: try again in a moment."
            )
        self.open += 1
        try:
            await self.app(scope, receive, send)
        finally:
            self.open -= 1
