"""The check of the Host header."""

from __future__ import annotations

from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from graftlm.serving.protocol import ServingError


class AllowedHostMiddleware:
    """Refuses requests whose Host header is not an allowed name, which protects against DNS rebinding.

    Args:
        app: the wrapped application.
        hosts: allowed names in lower case, without ports; None allows any.

    Raises:
        ServingError: the name in the header is not allowed (status 421).
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str] | None) -> None:
        self.app = app
        self.hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            self._check(Headers(scope=scope).get("host", ""))
        await self.app(scope, receive, send)

    def _check(self, header: str) -> None:
        if self.hosts is None:
            return
        name = _without_port(header).strip("[]").lower()
        if name not in self.hosts:
            raise ServingError(
                f"The Host header names {name[:100]!r}, which is not a name of this server: use "
                f"{', '.join(sorted(self.hosts))}, or start the server with --allow-host.",
                status=421,
                code="unknown_host",
            )


def _without_port(host: str) -> str:
    has_port = ":" in host and not host.endswith("]")  # an IPv6 address without a port ends with a bracket
    return host.rpartition(":")[0] if has_port else host
