"""What stands before every request: its Host, its key, how many there are, how large it is and how slow."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from graftlm.serving.errors import (
    NotJsonError,
    TooLargeError,
    TooSlowError,
    UnknownHostError,
    UnknownKeyError,
    error_response,
    our_mistake,
)
from graftlm.serving.keys import Keys
from graftlm.serving.protocol import BusyError, ClosingError, ServingError
from graftlm.serving.settings import Settings
from graftlm.serving.state import Phase

PROTECTED = ("/v1", "/metrics")
_DRAINED = 8  # times the limit that is read and forgotten, so that a client hears why it was refused
_DRAIN_SECONDS = 2.0


class Guard:
    """Refuses, before anything of a body is parsed, what no route should see; hands whole bodies on.

    Args:
        app: what is guarded.
        settings: the limits.
        keys: who may ask.
        phase: whether the server still takes anything on.
    """

    def __init__(self, app: ASGIApp, settings: Settings, keys: Keys, phase: Phase) -> None:
        self.app, self.settings, self.keys, self.phase = app, settings, keys, phase
        self.hosts = settings.known_hosts()
        self.open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers = Headers(scope=scope)
        try:
            self._check(scope, headers)
        except ServingError as error:
            await self._drain(headers, receive)
            return await error_response(error)(scope, receive, send)
        self.open += 1
        try:
            await self._pass(scope, headers, receive, send)
        finally:
            self.open -= 1

    def _check(self, scope: Scope, headers: Headers) -> None:
        """Everything that the headers alone tell.

        Raises:
            ServingError: it is refused.
        """
        self._check_host(headers.get("host", ""))
        if is_under(scope["path"], PROTECTED):
            scope.setdefault("state", {})["user"] = self._user(scope, headers)
            if self.phase.closing:
                raise ClosingError("The server is shutting down and takes nothing new: try again in a moment.")
            if self.open >= self.settings.requests:
                raise BusyError(f"{self.open} requests are open, which is the most: try again in a moment.")
        _check_type(scope, headers)
        if int(headers.get("content-length") or 0) > self.settings.body_bytes:
            raise self._too_large()

    def _check_host(self, host: str) -> None:
        name = host.rpartition(":")[0] if ":" in host and not host.endswith("]") else host
        if self.hosts is not None and name.strip("[]").lower() not in self.hosts:
            raise UnknownHostError(
                f"This server does not go by the name {name[:100]!r}: call it by {', '.join(sorted(self.hosts))}, or "
                "start it with --allow-host."
            )

    def _user(self, scope: Scope, headers: Headers) -> str:
        """Who asks: the name of the key, or without keys the client's address."""
        if not self.keys:
            return (scope.get("client") or ("",))[0]
        header = headers.get("authorization", "")
        name = self.keys.of_header(header)
        if name is None:
            what = "is not one that this server knows" if header else "is missing"
            raise UnknownKeyError(f"The API key {what}: send the header Authorization: Bearer KEY.")
        return name

    async def _pass(self, scope: Scope, headers: Headers, receive: Receive, send: Send) -> None:
        try:
            body = await self._read(receive)
        except ServingError as error:
            if isinstance(error, TooLargeError):
                await self._drain(headers, receive)
            return await error_response(error)(scope, receive, send)
        if body is not None:
            await self._answer(scope, _Replay(body, receive), send)
        return None

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """What the app answers; an error of ours is caught here, or the connection would be lost with it."""
        begun = False

        async def noted(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self.app(scope, receive, noted)
        except Exception as error:
            if begun:
                raise
            await error_response(our_mistake(scope["path"], error))(scope, receive, send)

    async def _read(self, receive: Receive) -> bytes | None:
        """The whole body; None if the client left."""
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self.settings.body_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > self.settings.body_bytes:
                        raise self._too_large()
                    if not message.get("more_body"):
                        return b"".join(parts)
        except TimeoutError:
            raise TooSlowError(
                f"The request did not arrive whole within {self.settings.body_seconds:g} seconds: send it faster."
            ) from None

    async def _drain(self, headers: Headers, receive: Receive) -> None:
        """Read on and forget: a client that still sends would not see the answer of a connection that is closed."""
        if "expect" in headers:  # it waits for leave to send
            return
        left = _DRAINED * self.settings.body_bytes
        with suppress(TimeoutError):
            async with asyncio.timeout(_DRAIN_SECONDS):
                while left > 0:
                    message = await receive()
                    left -= len(message.get("body", b""))
                    if not message.get("more_body"):
                        return

    def _too_large(self) -> TooLargeError:
        limit = self.settings.body_bytes
        return TooLargeError(f"The request is larger than {limit:,} bytes, which is the most: send less text.")


def _check_type(scope: Scope, headers: Headers) -> None:
    """A page of another site may send text or forms without asking the browser, and JSON it may not."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    has_body = "transfer-encoding" in headers or int(headers.get("content-length") or 0) > 0
    if scope["method"] == "POST" and has_body and kind != "application/json":
        raise NotJsonError(
            f"The body is said to be {kind[:100] or 'of no type'}: send JSON, with Content-Type: application/json."
        )


def is_under(path: str, roots: Iterable[str]) -> bool:
    """Whether a path is one of these or below it."""
    return any(path == root or path.startswith(f"{root}/") for root in roots)


class _Replay:
    """Gives a body that was read, then whatever else comes, such as that the client left."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self.body: bytes | None = body
        self.receive = receive

    async def __call__(self) -> Message:
        if self.body is None:
            return await self.receive()
        body, self.body = self.body, None
        return {"type": "http.request", "body": body, "more_body": False}
