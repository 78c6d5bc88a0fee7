"""Responses in OpenAI's form, whole or as server-sent events, and clients that disconnect before the end."""

from __future__ import annotations

import asyncio
import codecs
import json
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, Literal, TypeVar

from openai.types import Completion, CompletionChoice, CompletionUsage, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessage, ChatCompletionTokenLogprob
from openai.types.chat.chat_completion import Choice, ChoiceLogprobs
from openai.types.chat.chat_completion_chunk import Choice as ChunkChoice
from openai.types.chat.chat_completion_chunk import ChoiceDelta
from openai.types.chat.chat_completion_token_logprob import TopLogprob
from openai.types.completion_choice import Logprobs
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from graftlm.errors import GraftError
from graftlm.serving.errors import error_body, internal_error
from graftlm.serving.protocol import Finish, ServingError, ShuttingDownError, TokenOutput
from graftlm.serving.requests import ParsedRequest
from graftlm.serving.tokenization import ServingTokenizer

FinishReason = Literal["stop", "length"]
Outputs = AsyncGenerator[TokenOutput | Finish, None]
_T = TypeVar("_T")
_EVENT_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


class TokenTrace(BaseModel):
    """A token, and what the grafts did there, by label."""

    token: str
    values: dict[str, float]


class ChoiceExtras(BaseModel):
    """What GraftLM adds to a choice: the trace, if requested, and whether the time limit ended the text."""

    trace: list[TokenTrace] | None = None
    ended: Literal["time"] | None = None


class TextChoice(CompletionChoice):
    """A continuation, or a part of it in a stream, where the finish reason comes last."""

    finish_reason: FinishReason | None  # type: ignore[assignment]  # OpenAI's type does not know streams
    graftlm: ChoiceExtras | None = None


class TextCompletion(Completion):
    """The response of /v1/completions, and each event of its stream."""

    choices: list[TextChoice]  # type: ignore[assignment]  # a list of a subclass


class ChatChoice(Choice):
    """A message."""

    graftlm: ChoiceExtras | None = None


class Chat(ChatCompletion):
    """The response of /v1/chat/completions."""

    choices: list[ChatChoice]  # type: ignore[assignment]  # a list of a subclass


class ChatChunkChoice(ChunkChoice):
    """A part of a message; openai has a class of log-probabilities for chunks, with the same keys."""

    logprobs: ChoiceLogprobs | None = None  # type: ignore[assignment]  # of whole messages
    graftlm: ChoiceExtras | None = None


class ChatChunk(ChatCompletionChunk):
    """An event of a streamed chat."""

    choices: list[ChatChunkChoice]  # type: ignore[assignment]  # a list of a subclass


class ModelCard(Model):
    """A name that requests may use; `graftlm` tells its kind and whether its chats have a template."""

    graftlm: dict[str, str]


class ModelList(BaseModel):
    """The response of /v1/models."""

    object: Literal["list"]
    data: list[ModelCard]


class Health(BaseModel):
    """The response of /health; `broken` names the grafts whose new files can not be loaded."""

    status: Literal["ready", "closing"]
    running: int
    waiting: int
    models: int
    broken: list[str]


def to_json(model: BaseModel) -> str:
    """A response as JSON, without the keys that were not set."""
    return model.model_dump_json(exclude_unset=True)


class ChoiceState:
    """One continuation so far. A token appears together with the text that it belongs to.

    Attributes:
        text: the final text.
        outputs: the tokens of the text.
        end: the end, once it is reached.
    """

    def __init__(self) -> None:
        self.text, self.outputs, self.end = "", list[TokenOutput](), None
        self._held: list[TokenOutput] = []
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._characters = 0

    def add(self, item: TokenOutput | Finish, tokenizer: ServingTokenizer) -> tuple[str, list[TokenOutput]]:
        """The text and the tokens that an item of the stream adds.

        Raises:
            ServingError: the continuation ended without a usable text.
        """
        new: list[TokenOutput] = []
        if isinstance(item, Finish):
            self.end = _checked(item)
            new = _tokens_within(self._held, item, tokenizer)
        else:
            self._held.append(item)
            if item.text:
                new, self._held = self._held, []
        self.text += item.text
        self.outputs += new
        return item.text, new

    @property
    def finish_reason(self) -> FinishReason | None:
        """The reason of the end in OpenAI's words."""
        if self.end is None:
            return None
        return "stop" if self.end.reason == "stop" else "length"

    def offset(self, data: bytes) -> int:
        """The number of characters before a token with these bytes; call it once for each token."""
        start = self._characters
        self._characters += len(self._decoder.decode(data))
        return start


def _checked(finish: Finish) -> Finish:
    if finish.reason == "cancelled":
        raise ShuttingDownError("The server shut down before the answer was whole: ask again in a moment.")
    if finish.reason == "time" and finish.completion_tokens == 0:
        message = "The time limit of requests passed before a word was written: try again later."
        raise ServingError(message, status=503, code="timed_out")
    return finish


def _tokens_within(held: list[TokenOutput], finish: Finish, tokenizer: ServingTokenizer) -> list[TokenOutput]:
    """The held tokens that belong to the text: those of an end token or a stop string do not."""
    if finish.reason != "stop":
        return held
    size, start, within = len(finish.text.encode()), 0, []
    for output in held:
        if start < size:
            within.append(output)
        start += len(tokenizer.bytes_of(output.token))
    return within


class ResponseBuilder:
    """The response to one request; subclasses define the form of its choices.

    Args:
        parsed: the request.
        tokenizer: the backbone's.
        fingerprint: of the backbone.
    """

    prefix = ""

    def __init__(self, parsed: ParsedRequest, tokenizer: ServingTokenizer, fingerprint: str) -> None:
        self.parsed, self.tokenizer = parsed, tokenizer
        self.choices = [ChoiceState() for _ in parsed.requests]
        self.head: dict[str, Any] = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": parsed.model,
            "system_fingerprint": fingerprint,
        }

    async def complete(self, outputs: Outputs) -> str:
        """The whole response as JSON."""
        async for item in outputs:
            self.choices[item.index].add(item, self.tokenizer)
        return self._response()

    async def events(self, outputs: Outputs) -> AsyncGenerator[str, None]:
        """The events of the stream as JSON."""
        started = set[int]()
        async for item in outputs:
            if item.index not in started and (first := self._first(item.index)):
                yield first
            started.add(item.index)
            text, new = self.choices[item.index].add(item, self.tokenizer)
            if text or new:
                yield self._chunk(item.index, text, new)
            if isinstance(item, Finish):
                yield self._chunk(item.index, "", [], self.choices[item.index].finish_reason)
        if self.parsed.include_usage:
            yield self._json([], chunk=True, usage=self.usage)

    @property
    def usage(self) -> CompletionUsage:
        """The numbers of tokens; a prompt with several continuations counts once."""
        ends = [choice.end for choice in self.choices]
        prompt = sum(end.prompt_tokens for end in ends[:: self.parsed.n] if end is not None)
        completion = sum(end.completion_tokens for end in ends if end is not None)
        return CompletionUsage(prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion)

    def _base(self, index: int, outputs: list[TokenOutput], finish_reason: FinishReason | None) -> dict[str, Any]:
        """The keys of every choice; `graftlm` is set only if it has content."""
        extras: dict[str, Any] = {}
        if self.parsed.trace and outputs:
            extras["trace"] = [TokenTrace(token=self._text_of(output), values=output.trace) for output in outputs]
        end = self.choices[index].end
        if finish_reason is not None and end is not None and end.reason == "time":
            extras["ended"] = "time"
        graftlm = {"graftlm": ChoiceExtras(**extras)} if extras else {}
        return {"index": index, "finish_reason": finish_reason, **graftlm}

    def _text_of(self, output: TokenOutput) -> str:
        return self.tokenizer.text_of(output.token)

    def _response(self) -> str:
        choices = [
            self._choice(index, state.text, state.outputs, state.finish_reason)
            for index, state in enumerate(self.choices)
        ]
        return self._json(choices, usage=self.usage)

    def _chunk(
        self, index: int, text: str, outputs: list[TokenOutput], finish_reason: FinishReason | None = None
    ) -> str:
        return self._chunk_json(self._chunk_choice(index, text, outputs, finish_reason))

    def _chunk_json(self, choice: Any) -> str:
        """A chunk; with `include_usage` OpenAI sets usage to null in all but the last."""
        return self._json([choice], chunk=True, **({"usage": None} if self.parsed.include_usage else {}))

    def _first(self, index: int) -> str | None:
        """The chunk before the text of a choice."""
        return None

    def _choice(
        self, index: int, text: str, outputs: list[TokenOutput], finish_reason: FinishReason | None
    ) -> BaseModel:
        raise NotImplementedError

    def _chunk_choice(
        self, index: int, text: str, outputs: list[TokenOutput], finish_reason: FinishReason | None
    ) -> BaseModel:
        return self._choice(index, text, outputs, finish_reason)

    def _json(self, choices: list[Any], *, chunk: bool = False, **usage: Any) -> str:
        raise NotImplementedError


class CompletionBuilder(ResponseBuilder):
    """The response of /v1/completions."""

    prefix = "cmpl"

    def _json(self, choices: list[Any], *, chunk: bool = False, **usage: Any) -> str:
        return to_json(TextCompletion(object="text_completion", choices=choices, **usage, **self.head))

    def _choice(
        self, index: int, text: str, outputs: list[TokenOutput], finish_reason: FinishReason | None
    ) -> TextChoice:
        logprobs = self._logprobs(index, outputs) if self.parsed.logprobs else None
        return TextChoice(text=text, logprobs=logprobs, **self._base(index, outputs, finish_reason))

    def _logprobs(self, index: int, outputs: list[TokenOutput]) -> Logprobs:
        offset, bytes_of = self.choices[index].offset, self.tokenizer.bytes_of
        return Logprobs(
            tokens=[self._text_of(output) for output in outputs],
            token_logprobs=[output.logprob or 0.0 for output in outputs],
            top_logprobs=[self._top_logprobs(output) for output in outputs],
            text_offset=[offset(bytes_of(output.token)) for output in outputs],
        )

    def _top_logprobs(self, output: TokenOutput) -> dict[str, float]:
        """The most likely tokens, and the sampled token."""
        tokens = (*output.top, (output.token, output.logprob or 0.0))
        return {self.tokenizer.text_of(token): logprob for token, logprob in tokens}


class ChatBuilder(ResponseBuilder):
    """The response of /v1/chat/completions."""

    prefix = "chatcmpl"

    def _json(self, choices: list[Any], *, chunk: bool = False, **usage: Any) -> str:
        if chunk:
            return to_json(ChatChunk(object="chat.completion.chunk", choices=choices, **usage, **self.head))
        return to_json(Chat(object="chat.completion", choices=choices, **usage, **self.head))

    def _choice(
        self, index: int, text: str, outputs: list[TokenOutput], finish_reason: FinishReason | None
    ) -> ChatChoice:
        message = ChatCompletionMessage(role="assistant", content=text, refusal=None)
        logprobs = self._logprobs(outputs)
        return ChatChoice(message=message, logprobs=logprobs, **self._base(index, outputs, finish_reason))

    def _first(self, index: int) -> str | None:
        delta = ChoiceDelta(role="assistant", content="")
        return self._chunk_json(ChatChunkChoice(delta=delta, logprobs=None, **self._base(index, [], None)))

    def _chunk_choice(
        self, index: int, text: str, outputs: list[TokenOutput], finish_reason: FinishReason | None
    ) -> ChatChunkChoice:
        delta = ChoiceDelta(content=text) if text or finish_reason is None else ChoiceDelta()
        logprobs = self._logprobs(outputs) if outputs else None
        return ChatChunkChoice(delta=delta, logprobs=logprobs, **self._base(index, outputs, finish_reason))

    def _logprobs(self, outputs: list[TokenOutput]) -> ChoiceLogprobs | None:
        if not self.parsed.logprobs:
            return None
        return ChoiceLogprobs(content=[self._token_logprob(output) for output in outputs], refusal=None)

    def _token_logprob(self, output: TokenOutput) -> ChatCompletionTokenLogprob:
        top = [TopLogprob(**self._named(token, logprob)) for token, logprob in output.top]
        return ChatCompletionTokenLogprob(top_logprobs=top, **self._named(output.token, output.logprob or 0.0))

    def _named(self, token: int, logprob: float) -> dict[str, Any]:
        data = list(self.tokenizer.bytes_of(token))
        return {"token": self.tokenizer.text_of(token), "logprob": logprob, "bytes": data}


class ClientDisconnectedError(Exception):
    """The client has disconnected."""


async def run_until_disconnect(request: Request, work: Coroutine[Any, Any, _T]) -> _T:
    """The result of `work`, which is cancelled when the client disconnects.

    Raises:
        ClientDisconnectedError: the client has disconnected.
    """
    task, disconnect = asyncio.create_task(work), asyncio.create_task(_disconnected(request.receive))
    try:
        await asyncio.wait((task, disconnect), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnectedError
        return task.result()
    finally:
        await _cancel(task, disconnect)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class EventStream(Response):
    """Server-sent events from a generator, until it ends or the client disconnects.

    Args:
        events: JSON texts; an exception becomes the last event.
        send_seconds: a client that accepts nothing for so long counts as disconnected.
        on_end: called at the end in every case.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[str, None], send_seconds: float, on_end: Callable[[], None]) -> None:
        super().__init__(headers=_EVENT_HEADERS)
        del self.headers["content-length"]
        self.events, self.send_seconds, self.on_end = events, send_seconds, on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending, disconnect = asyncio.create_task(self._send_all(send)), asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait((sending, disconnect), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.on_end()
            await _cancel(sending, disconnect)
            await self.events.aclose()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async for event in self.events:
                await self._send(send, event)
            await self._send(send, "[DONE]")
        except (OSError, TimeoutError):  # the client has disconnected, or accepts nothing
            return
        except Exception as error:
            if not isinstance(error, GraftError):
                error = internal_error("a stream", error)
            await self._send(send, json.dumps(error_body(error)))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, event: str) -> None:
        async with asyncio.timeout(self.send_seconds):
            await send({"type": "http.response.body", "body": f"data: {event}\n\n".encode(), "more_body": True})
