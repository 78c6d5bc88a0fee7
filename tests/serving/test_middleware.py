"""Each middleware alone, in front of an application that records its calls."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from graftlm.serving.middleware import (
    AllowedHostMiddleware,
    ApiKeyMiddleware,
    InternalErrorMiddleware,
    JsonContentMiddleware,
    OpenRequestsMiddleware,
    RefusalMiddleware,
    RequestBodyMiddleware,
    ShutdownMiddleware,
)
from graftlm.serving.protocol import QueueFullError, ServingError, ShuttingDownError
from graftlm.serving.settings import ApiKeys

KEY = "k" * 32


class RecordingApp:
    """Receives the whole request, and answers nothing."""

    def __init__(self) -> None:
        self.scopes: list[Scope] = []
        self.bodies: list[bytes] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scopes.append(scope)
        self.bodies.append((await receive()).get("body", b""))


def scope_of(path: str = "/v1/models", method: str = "POST", **headers: str) -> Scope:
    encoded = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http", "method": method, "path": path, "headers": encoded, "client": ("1.2.3.4", 5)}


def call(app: ASGIApp, scope: Scope, parts: Sequence[bytes] = (b"",), *, stalls: bool = False) -> list[Message]:
    """Send a request with a body in parts, after which the client disconnects or stalls; returns what was sent."""
    sent: list[Message] = []
    last = len(parts) - 1
    messages: list[Message] = [
        {"type": "http.request", "body": part, "more_body": stalls or number < last}
        for number, part in enumerate(parts)
    ]

    async def receive() -> Message:
        if messages:
            return messages.pop(0)
        if stalls:
            await asyncio.sleep(60)
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    return sent


def refusal(app: ASGIApp, scope: Scope, parts: Sequence[bytes] = (b"",), *, stalls: bool = False) -> ServingError:
    with pytest.raises(ServingError) as caught:
        call(app, scope, parts, stalls=stalls)
    return caught.value


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:80", "[::1]", "[::1]:80"])
def test_allowed_hosts_pass(host: str) -> None:
    app = RecordingApp()
    call(AllowedHostMiddleware(app, {"localhost", "::1"}), scope_of(host=host))
    assert len(app.scopes) == 1


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example:80", ""])
def test_other_hosts_are_refused(host: str) -> None:
    app = RecordingApp()
    assert refusal(AllowedHostMiddleware(app, {"localhost"}), scope_of(host=host)).status == 421
    call(AllowedHostMiddleware(app, None), scope_of(host=host))
    assert len(app.scopes) == 1


def test_keys_name_users() -> None:
    app = RecordingApp()
    guarded = ApiKeyMiddleware(app, ApiKeys([("ann", KEY)]))
    assert refusal(guarded, scope_of()).status == 401
    assert refusal(guarded, scope_of(authorization=f"Bearer {KEY}x")).status == 401
    call(guarded, scope_of(authorization=f"Bearer {KEY}"))
    call(guarded, scope_of("/health"))
    call(ApiKeyMiddleware(app, ApiKeys()), scope_of())
    assert [scope.get("state", {}).get("user") for scope in app.scopes] == ["ann", None, "1.2.3.4"]


def test_a_closing_server_refuses_protected_paths() -> None:
    app = RecordingApp()
    closing = threading.Event()
    guarded = ShutdownMiddleware(app, closing)
    call(guarded, scope_of())
    closing.set()
    assert isinstance(refusal(guarded, scope_of()), ShuttingDownError)
    call(guarded, scope_of("/health"))
    assert len(app.scopes) == 2


def test_open_requests_are_counted() -> None:
    async def nested(scope: Scope, receive: Receive, send: Send) -> None:
        assert guarded.open == 1
        with pytest.raises(QueueFullError):
            await guarded(scope_of(), receive, send)
        raise ZeroDivisionError

    guarded = OpenRequestsMiddleware(nested, limit=1)
    with pytest.raises(ZeroDivisionError):
        call(guarded, scope_of())
    assert guarded.open == 0


def test_a_post_is_json() -> None:
    app = RecordingApp()
    guarded = JsonContentMiddleware(app)
    assert refusal(guarded, scope_of(content_length="1", content_type="text/plain")).status == 415
    assert refusal(guarded, scope_of(transfer_encoding="chunked")).status == 415
    call(guarded, scope_of(content_length="1", content_type="application/JSON; charset=utf-8"))
    call(guarded, scope_of(content_length="0"))
    call(guarded, scope_of(method="GET", content_length="1"))
    assert len(app.scopes) == 3


def test_bodies_are_bounded_in_size_and_time() -> None:
    app = RecordingApp()
    guarded = RequestBodyMiddleware(app, max_bytes=4, seconds=0.05, max_bytes_of_paths={"/large": 6})
    call(guarded, scope_of(), [b"ab", b"cd"])
    call(guarded, scope_of("/large"), [b"abcdef"])
    assert app.bodies == [b"abcd", b"abcdef"]
    assert refusal(guarded, scope_of(), [b"abcd", b"e"]).status == 413
    assert refusal(guarded, scope_of(content_length="5")).status == 413
    assert refusal(guarded, scope_of(), [b"ab"], stalls=True).status == 408


def test_unexpected_exceptions_become_responses() -> None:
    async def fails(scope: Scope, receive: Receive, send: Send) -> None:
        raise ZeroDivisionError("secret")

    start, body = call(InternalErrorMiddleware(fails), scope_of())
    assert start["status"] == 500
    assert b"secret" not in body["body"]

    async def fails_late(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        call(InternalErrorMiddleware(fails_late), scope_of())


@pytest.mark.parametrize(("headers", "left"), [({}, 1), ({"expect": "100-continue"}, 3)])
def test_refusals_are_sent_after_some_of_the_body(headers: dict[str, str], left: int) -> None:
    parts = [b"ab"] * 3
    remaining: list[Any] = []

    async def refuses(scope: Scope, receive: Receive, send: Send) -> None:
        raise QueueFullError("full")

    async def counting(scope: Scope, receive: Receive, send: Send) -> None:
        await RefusalMiddleware(refuses, max_bytes=4)(scope, receive, send)
        while (await receive())["type"] == "http.request":
            remaining.append(1)

    start, _ = call(counting, scope_of(**headers), parts)
    assert start["status"] == 429
    assert len(remaining) == left


def test_a_client_that_left_gets_no_response() -> None:
    async def left(scope: Scope, receive: Receive, send: Send) -> None:
        raise ClientDisconnect

    assert call(RefusalMiddleware(left, max_bytes=4), scope_of()) == []
