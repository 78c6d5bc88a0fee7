"""The check of API keys."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from graftlm.serving.middleware.protected_paths import is_protected
from graftlm.serving.protocol import ServingError
from graftlm.serving.settings import ApiKeys


class ApiKeyMiddleware:
    """Requires an API key for protected paths, and stores the user in the request's state.

    Args:
        app: the wrapped application.
        keys: known keys. Without keys all requests are accepted, and the user is the client's address.

    Raises:
        ServingError: the request has no known key (status 401).
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self.app = app
        self.keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and is_protected(scope):
            scope.setdefault("state", {})["user"] = self._user(scope)
        await self.app(scope, receive, send)

    def _user(self, scope: Scope) -> str:
        if not self.keys:
            client = scope.get("client")
            return client[0] if client else ""
        header = Headers(scope=scope).get("authorization", "")
        name = self.keys.name_of_header(header)
        if name is None:
            problem = "unknown" if header else "missing"
            raise ServingError(
                f"The API key is {problem}: send Authorization: Bearer KEY with a key of this server.",
                status=401,
                code="invalid_api_key",
            )
        return name
