"""Server-sent events, and the detection of clients that disconnect. `ResponseBuilder.events` makes the events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from graftlm.errors import GraftError
from graftlm.serving.errors import error_body, internal_error

_T = TypeVar("_T")
_EVENT_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
_LAST_EVENT = "data: [DONE]"


class ClientDisconnectedError(Exception):
    """The client has disconnected."""


def as_event(value: object) -> str:
    """Return a JSON value as a server-sent event, without the blank line that ends it."""
    return f"data: {json.dumps(value)}"


async def run_until_disconnect(request: Request, work: Awaitable[_T]) -> _T:
    """Return the result of `work`, which is cancelled when the client disconnects.

    Args:
        request: the HTTP request, whose body must have been received.
        work: an awaitable, whose exceptions are raised.

    Raises:
        ClientDisconnectedError: the client disconnected before the result.
    """
    task = asyncio.ensure_future(work)
    disconnected = asyncio.ensure_future(_wait_for_disconnect(request.receive))
    try:
        await asyncio.wait([task, disconnected], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnectedError
        return task.result()
    finally:
        task.cancel()
        disconnected.cancel()
        await asyncio.gather(task, disconnected, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return


class EventStream(StreamingResponse):
    """A response of server-sent events, until they end or the client disconnects.

    The last event is `data: [DONE]`, or the JSON of the error if `events` raises an exception.

    Args:
        events: the other events, without the blank lines that end them.
        send_seconds: time after which a client that does not read the stream counts as disconnected.
        on_end: called once at the end of the stream, also if the client has disconnected.
    """

    def __init__(self, events: AsyncGenerator[str, None], send_seconds: float, on_end: Callable[[], object]) -> None:
        super().__init__(self._lines(), headers=_EVENT_HEADERS, media_type="text/event-stream")
        self.events = events
        self.send_seconds = send_seconds
        self.on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.on_end()
            await self.events.aclose()

    async def stream_response(self, send: Send) -> None:
        """Send the events; end without an error if the client has disconnected or does not read them."""

        async def timed_send(message: Message) -> None:
            async with asyncio.timeout(self.send_seconds):
                await send(message)

        with suppress(OSError):  # the client has disconnected, or does not read the stream (TimeoutError)
            await super().stream_response(timed_send)

    async def _lines(self) -> AsyncGenerator[str, None]:
        last = _LAST_EVENT
        try:
            async for event in self.events:
                yield f"{event}\n\n"
        except Exception as error:
            known = error if isinstance(error, GraftError) else internal_error("a stream", error)
            last = as_event(error_body(known))
        yield f"{last}\n\n"
