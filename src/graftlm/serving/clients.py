"""The engine as a function that waits, for pipelines, which run in threads of their own."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any

from graftlm.serving import protocol

OnText = Callable[[str], object] | None  # called with each piece of a text
OnEvent = Callable[[dict[str, Any]], object]  # called with each event of a stream


class EngineClient:
    """Sends the requests of one HTTP client to a model of an engine, one at a time, and waits for each result."""

    def __init__(self, engine: protocol.Engine, model: str, user: str = "") -> None:
        self.model = model
        self._engine, self._user = engine, user
        self._lock, self._disconnected = threading.Lock(), False
        self._stream: protocol.RequestStream | None = None

    def generate(
        self, prompt: Sequence[int], max_tokens: int, on_text: OnText = None, **options: Any
    ) -> protocol.Finish:
        """The end of a continuation, with its whole text; call it from a thread without an event loop.

        Raises ServingError if the engine refuses the request, fails or shuts down, or the HTTP client has disconnected.
        """
        request = protocol.GenerationRequest(tuple(prompt), self.model, max_tokens, user=self._user, **options)
        with self._lock:
            if self._disconnected:
                raise protocol.ServingError("The client has disconnected.")
            self._stream = self._engine.submit([request])
        return asyncio.run(_read(self._stream, on_text or (lambda text: None)))

    def disconnect(self) -> None:
        """Cancel the running request, and accept no other."""
        with self._lock:
            self._disconnected = True
            if self._stream is not None:
                self._stream.cancel()


async def _read(stream: protocol.RequestStream, on_text: Callable[[str], object]) -> protocol.Finish:
    text = ""
    async for item in stream:
        text += item.text
        on_text(item.text)
        if isinstance(item, protocol.Finish):
            if item.reason == "cancelled":
                raise protocol.ShuttingDownError("The server is shutting down: ask again in a moment.")
            if item.reason == "time":
                message = "The time of a request was over before the model had finished: ask for less, or try later."
                raise protocol.ServingError(message, status=503, code="timed_out")
            return dataclasses.replace(item, text=text)
    raise protocol.EngineError("The engine stopped before its answer had an end: ask again.")
