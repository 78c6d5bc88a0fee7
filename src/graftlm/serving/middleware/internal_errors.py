"""Responses to unexpected exceptions."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from graftlm.serving.errors import error_response, internal_error


class InternalErrorMiddleware:
    """Logs an unexpected exception of the application, and sends an error response with status 500.

    If a response has started already, the exception is raised again.

    Args:
        app: the wrapped application.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
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
            response = error_response(internal_error(scope["path"], error))
            await response(scope, receive, send)
