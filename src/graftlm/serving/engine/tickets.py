"""A request under way: a thread writes its pieces, an event loop reads them."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncIterator

from graftlm.serving.protocol import End, Piece, ServingError

Listener = tuple[asyncio.AbstractEventLoop, asyncio.Event]
"""Who reads a ticket: the event is set, in its loop, when there is something new."""


class LiveTicket:
    """A `Ticket` of `protocol.py`, and where an engine puts what it writes."""

    def __init__(self) -> None:
        self._items: deque[Piece | End | ServingError] = deque()
        self._lock = threading.Lock()
        self._listener: Listener | None = None
        self._cancelled = False
        self._over = False

    @property
    def cancelled(self) -> bool:
        return self._cancelled

    def cancel(self) -> None:
        """Nobody waits for it any more."""
        self._cancelled = True

    def put(self, item: Piece | End | ServingError) -> Listener | None:
        """Keep what was written, and tell who is to be woken; behind an end or an error nothing is kept."""
        with self._lock:
            if self._over:
                return None
            self._over = not isinstance(item, Piece)
            self._items.append(item)
            return self._listener

    async def __aiter__(self) -> AsyncIterator[Piece | End]:
        event = asyncio.Event()
        loop = asyncio.get_running_loop()
        with self._lock:
            self._listener = (loop, event)
        while True:
            event.clear()
            while self._items:
                item = self._items[0]
                if isinstance(item, ServingError):
                    raise item
                if isinstance(item, Piece):
                    self._items.popleft()
                yield item
                if isinstance(item, End):
                    return
            await event.wait()


class Mail:
    """What was written since the last `send`: each event loop is woken once for all of it."""

    def __init__(self) -> None:
        self._due: dict[asyncio.AbstractEventLoop, list[asyncio.Event]] = {}

    def put(self, ticket: LiveTicket, item: Piece | End | ServingError) -> None:
        """Hand on what was written for a ticket."""
        listener = ticket.put(item)
        if listener is not None:
            loop, event = listener
            self._due.setdefault(loop, []).append(event)

    def send(self) -> None:
        """Wake those who read."""
        due, self._due = self._due, {}
        for loop, events in due.items():
            with contextlib.suppress(RuntimeError):  # the loop was closed, and who read with it is gone
                loop.call_soon_threadsafe(_set, events)


def _set(events: list[asyncio.Event]) -> None:
    for event in events:
        event.set()
