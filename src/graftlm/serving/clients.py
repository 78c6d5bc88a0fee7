"""The engine as the language model of pipelines, which run in threads of their own."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any

from graftlm.pipelines.clarify import Cost, Reply
from graftlm.pipelines.summarize import LanguageModelWriter, PromptLayout, SummaryDecoding
from graftlm.serving.protocol import (
    Engine,
    EngineError,
    Finish,
    GenerationRequest,
    RequestStream,
    ServingError,
    ShuttingDownError,
)
from graftlm.serving.tokenization import ServingTokenizer


class EngineClient:
    """Sends the requests of one HTTP client to an engine, one at a time, and waits for each result.

    Args:
        engine: the engine.
        model: a model's name.
        user: name of the API key or address of the client.
    """

    def __init__(self, engine: Engine, model: str, user: str = "") -> None:
        self.model = model
        self._engine, self._user = engine, user
        self._lock, self._disconnected = threading.Lock(), False
        self._stream: RequestStream | None = None

    def generate(self, prompt: Sequence[int], max_tokens: int, **options: Any) -> Finish:
        """Generate a continuation; call it from a thread without an event loop.

        Args:
            prompt: token ids.
            max_tokens: maximum number of new tokens.
            options: further attributes of `GenerationRequest`.

        Returns:
            The end with the whole text.

        Raises:
            ServingError: the engine refuses the request, fails or shuts down, or the HTTP client has disconnected.
        """
        request = GenerationRequest(tuple(prompt), self.model, max_tokens, user=self._user, **options)
        with self._lock:
            if self._disconnected:
                raise ServingError("The client has disconnected.")
            self._stream = self._engine.submit([request])
        return asyncio.run(_read(self._stream))

    def disconnect(self) -> None:
        """Cancel the running request, and accept no other."""
        with self._lock:
            self._disconnected = True
            if self._stream is not None:
                self._stream.cancel()


async def _read(stream: RequestStream) -> Finish:
    text = ""
    async for item in stream:
        text += item.text
        if isinstance(item, Finish):
            if item.reason == "cancelled":
                raise ShuttingDownError("The server is shutting down: ask again in a moment.")
            if item.reason == "time":
                message = "The time of a request was over before the model had finished: ask for less, or try later."
                raise ServingError(message, status=503, code="timed_out")
            return dataclasses.replace(item, text=text)
    raise EngineError("The engine stopped before its answer had an end: ask again.")


class ClarifyWriter:
    """The `ChatModel` of clarifying conversations (`pipelines.clarify`).

    Args:
        client: generates.
        tokenizer: the backbone's; prompts are chats if it has a chat template, else plain texts.
        max_tokens: of a reply.
    """

    def __init__(self, client: EngineClient, tokenizer: ServingTokenizer, max_tokens: int) -> None:
        self.name = client.model
        self._client, self._tokenizer, self._max_tokens = client, tokenizer, max_tokens

    def generate(
        self,
        prompt: Any,
        *,
        temperature: float = 0.0,
        seed: int | None = None,
        on_text: Callable[[str], None] | None = None,
    ) -> Reply:
        """Reply to a prompt; a failure is a `ServingError`."""
        if self._tokenizer.plain:
            ids = self._tokenizer.encode(prompt.text())
        else:
            ids = self._tokenizer.encode_chat([(message["role"], message["content"]) for message in prompt.messages()])
        end = self._client.generate(ids, self._max_tokens, temperature=temperature, seed=seed, stop=(prompt.stop,))
        if on_text is not None:
            on_text(end.text)
        cost = Cost(calls=1, prompt_tokens=end.prompt_tokens, new_tokens=end.completion_tokens)
        return Reply(end.text, cost, end.reason == "length")


class SummaryWriter(LanguageModelWriter):
    """The writer of summaries (`pipelines.summarize`), without sampling.

    Args:
        client: generates.
        tokenizer: the backbone's.
        context: maximum tokens of prompt and summary.
        max_tokens: of the summary.
        layout: the prompt layout that the graft was trained with.
    """

    def __init__(
        self,
        client: EngineClient,
        tokenizer: ServingTokenizer,
        context: int,
        max_tokens: int,
        layout: PromptLayout | None,
    ) -> None:
        decoding = SummaryDecoding(max_new_tokens=max_tokens)
        super().__init__(None, tokenizer.tokenizer, client.model, layout, decoding)
        self._client, self._context = client, context

    @property
    def window(self) -> int:
        return min(self.layout.window or self._context, self._context)

    def complete(self, prompt: list[int]) -> tuple[str, bool]:
        end = self._client.generate(prompt, self.decoding.max_new_tokens)
        return end.text, end.reason == "length"
