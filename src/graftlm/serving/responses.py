"""Responses in OpenAI's form, whole or as server-sent events, and clients that disconnect before the end."""

from __future__ import annotations

import asyncio
import base64
import codecs
import json
import time
import uuid
from abc import ABC, abstractmethod
from array import array
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate
from typing import Any, Literal, NamedTuple, TypeVar

from openai.types import Completion, CompletionChoice, CompletionUsage, CreateEmbeddingResponse, Embedding, Model, chat
from openai.types.chat.chat_completion import Choice, ChoiceLogprobs
from openai.types.chat.chat_completion_chunk import Choice as ChunkChoice
from openai.types.chat.chat_completion_chunk import ChoiceDelta, ChoiceDeltaToolCall
from openai.types.chat.chat_completion_chunk import ChoiceLogprobs as ChunkLogprobs
from openai.types.chat.chat_completion_message_function_tool_call import Function
from openai.types.completion_choice import Logprobs
from openai.types.completion_usage import PromptTokensDetails
from openai.types.create_embedding_response import Usage
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from graftlm.errors import GraftError
from graftlm.serving.errors import error_body, internal_error
from graftlm.serving.protocol import Finish, ServingError, ShuttingDownError, TokenOutput
from graftlm.serving.requests import ParsedRequest
from graftlm.serving.tokenization import ServingTokenizer
from graftlm.serving.tools import CallReader, ToolCall

FinishReason = Literal["stop", "length", "tool_calls"]
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

    finish_reason: Literal["stop", "length"] | None  # None in a stream, where the reason comes last
    graftlm: ChoiceExtras | None = None


class TextCompletion(Completion):
    """The response of /v1/completions, and each event of its stream."""

    choices: list[TextChoice]


class ChatChoice(Choice):
    """A message."""

    graftlm: ChoiceExtras | None = None


class Chat(chat.ChatCompletion):
    """The response of /v1/chat/completions."""

    choices: list[ChatChoice]


class ModelCard(Model):
    """A name that requests may use; `graftlm` tells its kind and whether its chats have a template."""

    graftlm: dict[str, str]
    max_model_len: int


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


class TextEmbedding(Embedding):
    """The embedding of one text: numbers, or float32 values in base64."""

    embedding: list[float] | str  # OpenAI's type has no base64


class Embeddings(CreateEmbeddingResponse):
    """The response of /v1/embeddings."""

    data: list[TextEmbedding]

    def joined(self, other: Embeddings) -> Embeddings:
        """This response with the texts of another behind its own."""
        moved = [item.model_copy(update={"index": item.index + len(self.data)}) for item in other.data]
        count = self.usage.prompt_tokens + other.usage.prompt_tokens
        usage = Usage(prompt_tokens=count, total_tokens=count)
        return self.model_copy(update={"data": [*self.data, *moved], "usage": usage})


class ChoiceState:
    """The text, tokens and end of one continuation so far. A token appears together with its text."""

    def __init__(self) -> None:
        self.text, self.outputs, self.end = "", list[TokenOutput](), None
        self._held: list[TokenOutput] = []
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._characters = 0

    def add(self, item: TokenOutput | Finish, tokenizer: ServingTokenizer) -> list[TokenOutput]:
        """The tokens that an item of the stream adds; an end without a usable text is a `ServingError`."""
        new: list[TokenOutput] = []
        if isinstance(item, Finish):
            if item.reason == "cancelled":
                raise ShuttingDownError("The server shut down before the answer was whole: ask again in a moment.")
            if item.reason == "time" and item.completion_tokens == 0:
                message = "The time limit of requests passed before a word was written: try again later."
                raise ServingError(message, status=503, code="timed_out")
            self.end, new = item, _tokens_within(self._held, item, tokenizer)
        else:
            self._held.append(item)
            if item.text:
                new, self._held = self._held, []
        self.text += item.text
        self.outputs += new
        return new

    @property
    def finish_reason(self) -> FinishReason | None:
        """The reason of the end in OpenAI's words."""
        return None if self.end is None else "stop" if self.end.reason == "stop" else "length"

    def offset(self, data: bytes) -> int:
        """The number of characters before a token with these bytes; call it once for each token."""
        start = self._characters
        self._characters += len(self._decoder.decode(data))
        return start


def _tokens_within(held: list[TokenOutput], finish: Finish, tokenizer: ServingTokenizer) -> list[TokenOutput]:
    """The held tokens that belong to the text: those of an end token or a stop string do not."""
    if finish.reason != "stop":
        return held
    sizes = [len(tokenizer.bytes_of(output.token)) for output in held]
    starts, size = accumulate(sizes, initial=0), len(finish.text.encode())
    return [output for output, start in zip(held, starts, strict=False) if start < size]


class ChoicePart(NamedTuple):
    """The text and tokens of one choice in an event; all of them in a whole response."""

    index: int
    text: str = ""
    outputs: Sequence[TokenOutput] = ()
    finish_reason: FinishReason | None = None
    calls: Sequence[ToolCall] = ()


def as_event(value: Any) -> str:
    """A JSON value as a server-sent event."""
    return f"data: {json.dumps(value)}"


class ResponseBuilder(ABC):
    """The response to one request; subclasses define its types and the form of its choices."""

    prefix: str
    response: Callable[..., BaseModel]
    event: Callable[..., BaseModel]
    has_role = False  # whether a choice begins with an event of its own
    end = "data: [DONE]"
    """The last event of a stream; none if it is empty."""
    error = staticmethod(as_event)
    """The last event of a stream that fails, from the body of an error's response."""

    def __init__(self, parsed: ParsedRequest, tokenizer: ServingTokenizer, fingerprint: str) -> None:
        self.parsed, self.tokenizer = parsed, tokenizer
        self.choices = [ChoiceState() for _ in parsed.requests]
        self._readers = [CallReader(parsed.tools) for _ in self.choices] if parsed.tools else []
        self.head: dict[str, Any] = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time())}
        self.head |= {"model": parsed.model, "system_fingerprint": fingerprint}

    async def complete(self, outputs: Outputs) -> BaseModel:
        """The whole response."""
        async for item in outputs:
            self.choices[item.index].add(item, self.tokenizer)
        choices = [
            self.choice(self.read_calls(ChoicePart(index, state.text, state.outputs, state.finish_reason)))
            for index, state in enumerate(self.choices)
        ]
        return self.response(choices=choices, usage=self.usage, **self.head)

    async def events(self, outputs: Outputs) -> AsyncGenerator[str, None]:
        """The events of the stream as server-sent events."""
        started = set[int]()
        async for item in outputs:
            index, state = item.index, self.choices[item.index]
            if self.has_role and index not in started:
                started.add(index)
                yield self._event([self.chunk_choice(ChoicePart(index), role="assistant")])
            new = state.add(item, self.tokenizer)
            part = self.read_calls(ChoicePart(index, item.text, new, state.finish_reason))
            if part.text or part.outputs or part.calls:
                yield self._event([self.chunk_choice(part._replace(finish_reason=None))])
            if isinstance(item, Finish):
                yield self._event([self.chunk_choice(ChoicePart(index, finish_reason=part.finish_reason))])
        if self.parsed.include_usage:
            yield self._event([], usage=self.usage)

    @property
    def usage(self) -> CompletionUsage:
        """The numbers of tokens; a prompt with several continuations counts once."""
        ends = [choice.end for choice in self.choices]
        prompt = sum(end.prompt_tokens for end in ends[:: self.parsed.n] if end is not None)
        completion = sum(end.completion_tokens for end in ends if end is not None)
        cached = sum(end.cached_tokens for end in ends[:: self.parsed.n] if end is not None)
        usage = CompletionUsage(prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion)
        if cached:
            usage.prompt_tokens_details = PromptTokensDetails(cached_tokens=cached)
        return usage

    def _event(self, choices: list[BaseModel], usage: CompletionUsage | None = None) -> str:
        """An event; with `include_usage` OpenAI sets usage to null in all but the last."""
        last = {"usage": usage} if self.parsed.include_usage else {}
        return f"data: {self.event(choices=choices, **last, **self.head).model_dump_json(exclude_unset=True)}"

    def base(self, part: ChoicePart) -> dict[str, Any]:
        """The keys of every choice; `graftlm` is set only if it has content."""
        extras: dict[str, Any] = {}
        if self.parsed.trace and part.outputs:
            texts = [self.tokenizer.text_of(output.token) for output in part.outputs]
            traces = zip(texts, part.outputs, strict=True)
            extras["trace"] = [TokenTrace(token=text, values=output.trace) for text, output in traces]
        end = self.choices[part.index].end
        if part.finish_reason is not None and end is not None and end.reason == "time":
            extras["ended"] = "time"
        graftlm = {"graftlm": ChoiceExtras(**extras)} if extras else {}
        return {"index": part.index, "finish_reason": part.finish_reason, **graftlm}

    def read_calls(self, part: ChoicePart) -> ChoicePart:
        """The next part of a choice with its tool calls taken out of the text."""
        if not self._readers:
            return part
        reader = self._readers[part.index]
        text, calls = reader.add(part.text)
        if part.finish_reason is None:
            return part._replace(text=text, calls=calls)
        called = reader.calls > 0 and part.finish_reason == "stop"
        reason: FinishReason = "tool_calls" if called else part.finish_reason
        return part._replace(text=text + reader.rest(), calls=calls, finish_reason=reason)

    @abstractmethod
    def choice(self, part: ChoicePart) -> BaseModel:
        """A choice of a whole response."""

    def chunk_choice(self, part: ChoicePart, role: Literal["assistant"] | None = None) -> BaseModel:
        """A choice of an event; `role` begins it."""
        return self.choice(part)


class CompletionBuilder(ResponseBuilder):
    """The response of /v1/completions."""

    prefix = "cmpl"
    response = event = staticmethod(partial(TextCompletion, object="text_completion"))

    def choice(self, part: ChoicePart) -> TextChoice:
        logprobs = self._logprobs(part) if self.parsed.logprobs else None
        return TextChoice(text=part.text, logprobs=logprobs, **self.base(part))

    def _logprobs(self, part: ChoicePart) -> Logprobs:
        offset, bytes_of, text_of = self.choices[part.index].offset, self.tokenizer.bytes_of, self.tokenizer.text_of
        pairs = [(output.token, output.logprob or 0.0) for output in part.outputs]
        return Logprobs(
            tokens=[text_of(token) for token, _ in pairs],
            token_logprobs=[logprob for _, logprob in pairs],
            top_logprobs=[  # the most likely tokens, and the sampled token
                {text_of(token): logprob for token, logprob in (*output.top, sampled)}
                for output, sampled in zip(part.outputs, pairs, strict=True)
            ],
            text_offset=[offset(bytes_of(token)) for token, _ in pairs],
        )


class EmbeddingBuilder(ResponseBuilder):
    """The response of /v1/embeddings."""

    prefix = "embd"

    def response(self, choices: list[TextEmbedding], usage: CompletionUsage, **head: Any) -> Embeddings:
        total = Usage(prompt_tokens=usage.prompt_tokens, total_tokens=usage.total_tokens)
        return Embeddings(data=choices, model=self.parsed.model, object="list", usage=total)

    def choice(self, part: ChoicePart) -> TextEmbedding:
        end = self.choices[part.index].end
        assert end is not None
        data = base64.b64encode(array("f", end.embedding)).decode()
        values = data if self.parsed.base64 else list(end.embedding)
        return TextEmbedding(embedding=values, index=part.index, object="embedding")


class ChatBuilder(ResponseBuilder):
    """The response of /v1/chat/completions."""

    prefix = "chatcmpl"
    response = staticmethod(partial(Chat, object="chat.completion"))
    event = staticmethod(partial(chat.ChatCompletionChunk, object="chat.completion.chunk"))
    has_role = True

    def choice(self, part: ChoicePart) -> ChatChoice:
        message = chat.ChatCompletionMessage(role="assistant", content=part.text, refusal=None)
        if part.calls:
            message.tool_calls, message.content = [_as_call(call) for call in part.calls], part.text or None
        logprobs = ChoiceLogprobs(**self._logprobs(part)) if self.parsed.logprobs else None
        return ChatChoice(message=message, logprobs=logprobs, **self.base(part))

    def chunk_choice(self, part: ChoicePart, role: Literal["assistant"] | None = None) -> ChunkChoice:
        delta: dict[str, Any] = {"role": role} if role else {}
        if part.text or (part.finish_reason is None and not part.calls):
            delta["content"] = part.text
        if part.calls:
            first = self._readers[part.index].calls - len(part.calls)
            calls = [(number, _as_call(call)) for number, call in enumerate(part.calls, first)]
            delta["tool_calls"] = [ChoiceDeltaToolCall(index=n, **call.model_dump()) for n, call in calls]
        logprobs = ChunkLogprobs(**self._logprobs(part)) if self.parsed.logprobs and part.outputs else None
        return ChunkChoice(delta=ChoiceDelta(**delta), logprobs=logprobs, **self.base(part))

    def _logprobs(self, part: ChoicePart) -> dict[str, Any]:
        content = [
            self._named(output.token, output.logprob or 0.0)
            | {"top_logprobs": [self._named(token, logprob) for token, logprob in output.top]}
            for output in part.outputs
        ]
        return {"content": content, "refusal": None}

    def _named(self, token: int, logprob: float) -> dict[str, Any]:
        data = list(self.tokenizer.bytes_of(token))
        return {"token": self.tokenizer.text_of(token), "logprob": logprob, "bytes": data}


def _as_call(call: ToolCall) -> chat.ChatCompletionMessageFunctionToolCall:
    function = Function(name=call.name, arguments=call.arguments)
    return chat.ChatCompletionMessageFunctionToolCall(id=call.id, type="function", function=function)


class ClientDisconnectedError(Exception):
    """The client has disconnected."""


async def run_until_disconnect(request: Request, work: Awaitable[_T]) -> _T:
    """The result of `work`, which is cancelled with a `ClientDisconnectedError` when the client disconnects."""
    tasks = task, _ = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnectedError
        return task.result()
    finally:
        for unfinished in tasks:
            unfinished.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """The server-sent events of a response, until it ends or the client disconnects.

    An exception becomes the last event. A client that accepts nothing for `send_seconds` counts as disconnected.
    """

    def __init__(
        self, events: AsyncGenerator[str, None], send_seconds: float, on_end: Callable[[], object], builder: Any = None
    ) -> None:
        super().__init__(self._lines(), headers=_EVENT_HEADERS, media_type="text/event-stream")
        self.events, self.send_seconds, self.on_end = events, send_seconds, on_end
        self.builder = builder or ResponseBuilder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.on_end()
            await self.events.aclose()

    async def stream_response(self, send: Send) -> None:
        async def timed_send(message: Message) -> None:
            async with asyncio.timeout(self.send_seconds):
                await send(message)

        with suppress(OSError):  # the client has disconnected, or accepts nothing (TimeoutError)
            await super().stream_response(timed_send)

    async def _lines(self) -> AsyncGenerator[str, None]:
        last = self.builder.end
        try:
            async for event in self.events:
                yield f"{event}\n\n"
        except Exception as error:
            known = error if isinstance(error, GraftError) else internal_error("a stream", error)
            last = self.builder.error(error_body(known))
        if last:
            yield f"{last}\n\n"
