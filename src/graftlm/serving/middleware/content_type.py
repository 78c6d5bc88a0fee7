"""The check of the Content-Type header."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from graftlm.serving.protocol import ServingError


class JsonContentMiddleware:
    """Requires the content type application/json in a POST request with a body.

    Otherwise a page of another site could use the server from a browser, which sends text and forms without a CORS
    preflight request.

    Args:
        app: the wrapped application.

    Raises:
        ServingError: the content type is another one or missing (status 415).
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            _check(Headers(scope=scope))
        await self.app(scope, receive, send)


def _check(headers: Headers) -> None:
    has_body = "transfer-encoding" in headers or int(headers.get("content-length") or 0) > 0
    content_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if has_body and content_type != "application/json":
        raise ServingError(
            f"The Content-Type is {content_type[:100] or 'missing'}, but application/json is expected: send JSON.",
            status=415,
            code="unsupported_media_type",
        )
