"""Answers that come piece by piece, and clients that leave before they are whole."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from graftlm.errors import GraftError
from graftlm.serving.errors import error_body, our_mistake

_T = TypeVar("_T")
DONE = "[DONE]"
HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


class ClientLeftError(Exception):
    """Nobody waits for the answer any more."""


async def unless_gone(request: Request, work: Coroutine[Any, Any, _T]) -> _T:
    """What `work` gives; it is cancelled when the client leaves.

    Raises:
        ClientLeftError: it did.
    """
    doing, gone = asyncio.create_task(work), asyncio.create_task(_left(request.receive))
    try:
        await asyncio.wait((doing, gone), return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise ClientLeftError
        return doing.result()
    finally:
        await _end(doing, gone)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class EventStream(Response):
    """Server-sent events, one for each text of a generator, until that ends or the client leaves.

    Args:
        events: JSON texts; a `GraftError` out of it becomes the last event.
        seconds: how long a client may take nothing before it counts as gone.
        after: called at the end, whichever it is.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[str, None], seconds: float, after: Callable[[], None]) -> None:
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self.events, self.seconds, self.after = events, seconds, after

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writing, gone = asyncio.create_task(self._write(send)), asyncio.create_task(_left(receive))
        try:
            await asyncio.wait((writing, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.after()
            await _end(writing, gone)
            await self.events.aclose()

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async for event in self.events:
                await self._send(send, event)
            await self._send(send, DONE)
        except (OSError, TimeoutError):  # the client left, or takes nothing
            return
        except Exception as error:
            if not isinstance(error, GraftError):
                error = our_mistake("a stream", error)
            await self._send(send, json.dumps(error_body(error)))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, event: str) -> None:
        async with asyncio.timeout(self.seconds):
            await send({"type": "http.response.body", "body": f"data: {event}\n\n".encode(), "more_body": True})
