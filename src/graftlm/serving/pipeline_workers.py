"""Threads for pipelines, which take long and wait for the engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request

from graftlm.errors import MissingExtraError
from graftlm.serving.clients import EngineClient, Event, OnEvent
from graftlm.serving.protocol import QueueFullError, ServingError
from graftlm.serving.streaming import EventStream, as_event, run_until_disconnect

_T = TypeVar("_T")


class PipelineWorkers:
    """Runs pipelines in threads. Its methods must be called in an event loop.

    Args:
        threads: number of pipelines that run at the same time.
        max_open: maximum number of running and waiting pipelines.
    """

    def __init__(self, threads: int, max_open: int) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="graftlm-pipelines")
        self._max_open = max_open
        self._open: set[asyncio.Future[Any]] = set()

    async def run(self, request: Request, client: EngineClient, work: Callable[[], _T]) -> _T:
        """Run a pipeline in a thread, and return its result.

        Args:
            request: the HTTP request; if its client disconnects, the pipeline ends at its next call of the engine.
            client: disconnected from the engine at the end.
            work: the pipeline, whose exceptions are raised.

        Raises:
            QueueFullError: too many pipelines are open.
            ServingError: the pipeline needs a package that is not installed (status 501).
            ClientDisconnectedError: the HTTP client has disconnected.
        """
        try:
            return await run_until_disconnect(request, self._start(work))
        except MissingExtraError as error:
            raise ServingError(str(error), status=501, code="not_installed") from None
        finally:
            client.disconnect()

    def stream(self, client: EngineClient, work: Callable[[OnEvent], Event], seconds: float) -> EventStream:
        """Run a pipeline in a thread, and return the stream of its events, the last of which is its result.

        Args:
            client: disconnected from the engine at the end.
            work: the pipeline, which calls its argument with each event except the last, and returns the last one.
            seconds: time after which a client that does not read the stream counts as disconnected.

        Raises:
            QueueFullError: too many pipelines are open.
        """
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[Event | None] = asyncio.Queue()

        def on_event(event: Event) -> None:
            loop.call_soon_threadsafe(queue.put_nowait, event)

        result = self._start(partial(work, on_event))
        result.add_done_callback(lambda _: queue.put_nowait(None))

        async def events() -> AsyncGenerator[str, None]:
            while True:
                event = await queue.get()
                if event is None:
                    break
                yield as_event(event)
            yield as_event(await result)

        def on_end() -> None:
            result.cancel()
            client.disconnect()

        return EventStream(events(), seconds, on_end)

    def _start(self, work: Callable[[], _T]) -> asyncio.Future[_T]:
        count = len(self._open)
        if count >= self._max_open:
            raise QueueFullError(
                f"The number of open requests of this kind is {count}, but the limit is {self._max_open}: try again in "
                "a moment."
            )
        future = asyncio.get_running_loop().run_in_executor(self._pool, work)
        self._open.add(future)
        future.add_done_callback(self._open.discard)
        return future
