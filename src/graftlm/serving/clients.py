"""A blocking client of an engine, for pipelines that run in threads."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Callable, Sequence

from graftlm.serving.protocol import (
    Engine,
    EngineError,
    Finish,
    GenerationRequest,
    RequestStream,
    ServingError,
    ShuttingDownError,
)

Event = dict[str, object]
"""A JSON object of an event stream."""
OnText = Callable[[str], object] | None
"""Called with each piece of a text."""
OnEvent = Callable[[Event], object]
"""Called with each event."""


class EngineClient:
    """Sends requests of one HTTP client to a model, one at a time, and waits for each result.

    Args:
        engine: the engine.
        model: name of the backbone or of a graft, or names of grafts joined by `+`.
        user: name of the API key or address of the HTTP client; users take turns in the engine's queue.
    """

    def __init__(self, engine: Engine, model: str, user: str = "") -> None:
        self.model = model
        self._engine = engine
        self._user = user
        self._lock = threading.Lock()
        self._disconnected = False
        self._stream: RequestStream | None = None

    def generate(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        on_text: OnText = None,
        *,
        stop: tuple[str, ...] = (),
        turn_ends: tuple[int, ...] = (),
    ) -> Finish:
        """Generate a continuation greedily. Call it from a thread without an event loop.

        Args:
            prompt: token ids, at least one.
            max_tokens: maximum number of new tokens.
            on_text: called with each piece of the text, which may be empty.
            stop: stop strings; the continuation ends before the first one that it would contain.
            turn_ends: tokens that end an answer in a conversation, beside the model's own end tokens.

        Returns:
            The end of the continuation, with its whole text.

        Raises:
            ServingError: the engine refuses the request, fails or shuts down, the time limit passed, or `disconnect`
                was called before.
        """
        request = GenerationRequest(
            prompt=tuple(prompt),
            model=self.model,
            max_tokens=max_tokens,
            stop=stop,
            turn_ends=turn_ends,
            user=self._user,
        )
        with self._lock:
            if self._disconnected:
                raise ServingError("The client has disconnected.")
            self._stream = self._engine.submit([request])
        return asyncio.run(_read(self._stream, on_text))

    def disconnect(self) -> None:
        """Cancel the running request, and refuse further ones. It may be called from any thread."""
        with self._lock:
            self._disconnected = True
            if self._stream is not None:
                self._stream.cancel()


async def _read(stream: RequestStream, on_text: OnText) -> Finish:
    text = ""
    async for item in stream:
        text += item.text
        if on_text is not None:
            on_text(item.text)
        if isinstance(item, Finish):
            _check_complete(item)
            return dataclasses.replace(item, text=text)
    raise EngineError("The stream of the engine ended before the continuation was finished: try again.")


def _check_complete(finish: Finish) -> None:
    if finish.reason == "cancelled":
        raise ShuttingDownError
    if finish.reason == "time":
        when = "before the first token: try again later"
        if finish.completion_tokens:
            when = "during generation: send a shorter text, or try again later"
        raise ServingError(
            f"The request exceeded the server's time limit {when}.",
            status=503,
            code="timed_out",
        )
