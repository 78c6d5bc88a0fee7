"""A request under way: a thread writes its pieces, an event loop reads them."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable

from graftlm.serving.protocol import End, Piece, ServingError


class LiveTicket:
    """A `Ticket` of `protocol.py`, and where an engine puts what it writes.

    Args:
        on_cancel: called, from any thread, when nobody waits any more.
    """

    def __init__(self, on_cancel: Callable[[], None] = lambda: None) -> None:
        self._items: deque[Piece | End | ServingError] = deque()
        self._lock = threading.Lock()
        self._wake: Callable[[], None] | None = None
        self._on_cancel = on_cancel
        self._cancelled = threading.Event()
        self._over = False

    @property
    def cancelled(self) -> bool:
        return self._cancelled.is_set()

    def cancel(self) -> None:
        """Nobody waits for it any more."""
        if not self._cancelled.is_set():
            self._cancelled.set()
            self._on_cancel()

    def put(self, item: Piece | End | ServingError) -> None:
        """Hand on what was written; an end or an error is the last thing, and what comes behind it is dropped."""
        with self._lock:
            if self._over:
                return
            self._over = not isinstance(item, Piece)
            self._items.append(item)
            wake = self._wake
        if wake is not None:
            wake()

    async def __aiter__(self) -> AsyncIterator[Piece | End]:
        event = asyncio.Event()
        loop = asyncio.get_running_loop()
        with self._lock:
            self._wake = lambda: _wake(loop, event)
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


def _wake(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    with contextlib.suppress(RuntimeError):  # the loop was closed, and who read with it is gone
        loop.call_soon_threadsafe(event.set)
