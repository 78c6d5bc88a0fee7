"""The construction of responses from the outputs of a stream, whole or as server-sent events."""

from __future__ import annotations

import base64
import codecs
import time
import uuid
from abc import ABC, abstractmethod
from array import array
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from openai.types import CompletionUsage, chat
from openai.types.chat.chat_completion import ChoiceLogprobs
from openai.types.chat.chat_completion_chunk import Choice as ChunkChoice
from openai.types.chat.chat_completion_chunk import ChoiceDelta, ChoiceDeltaToolCall, ChoiceDeltaToolCallFunction
from openai.types.chat.chat_completion_chunk import ChoiceLogprobs as ChunkLogprobs
from openai.types.chat.chat_completion_message_function_tool_call import Function
from openai.types.chat.chat_completion_token_logprob import ChatCompletionTokenLogprob, TopLogprob
from openai.types.completion_choice import Logprobs
from openai.types.completion_usage import PromptTokensDetails
from openai.types.create_embedding_response import Usage
from pydantic import BaseModel

from graftlm.serving.protocol import Finish, ServingError, ShuttingDownError, TokenOutput
from graftlm.serving.request_parsing import ParsedRequest
from graftlm.serving.response_schema import (
    Chat,
    ChatChoice,
    ChoiceExtras,
    Embeddings,
    TextChoice,
    TextCompletion,
    TextEmbedding,
    TokenTrace,
)
from graftlm.serving.tokenization import ServingTokenizer
from graftlm.serving.tools import CallReader, ToolCall

FinishReason = Literal["stop", "length", "tool_calls"]
Outputs = AsyncGenerator[TokenOutput | Finish, None]
_Response = TypeVar("_Response", bound=BaseModel)


class ChoiceState:
    """The state of one continuation: its text, its tokens, and its end.

    A token whose text is not final yet is held back until the text arrives.

    Attributes:
        text: the text so far.
        outputs: the tokens of this text.
        end: the end; None while the continuation is running.
    """

    def __init__(self) -> None:
        self.text = ""
        self.outputs: list[TokenOutput] = []
        self.end: Finish | None = None
        self._held: list[TokenOutput] = []  # tokens whose text is not final yet
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._characters = 0

    def add(self, item: TokenOutput | Finish, tokenizer: ServingTokenizer) -> list[TokenOutput]:
        """Add an item of the stream.

        Returns:
            The tokens whose text is final now; those of a stop string are omitted.

        Raises:
            ServingError: the continuation was cancelled, or the time limit passed before its first token.
        """
        new: list[TokenOutput] = []
        if isinstance(item, Finish):
            _check_finish(item)
            self.end = item
            new = _tokens_within(self._held, item, tokenizer)
        else:
            self._held.append(item)
            if item.text:
                new = self._held
                self._held = []
        self.text += item.text
        self.outputs += new
        return new

    @property
    def finish_reason(self) -> Literal["stop", "length"] | None:
        """OpenAI's `finish_reason`: `stop`, `length` also for the time limit, and None before the end."""
        if self.end is None:
            return None
        return "stop" if self.end.reason == "stop" else "length"

    def offset(self, data: bytes) -> int:
        """Return the number of characters of the text before a token.

        The bytes are counted: call it once for each token, in the order of the tokens.

        Args:
            data: the bytes of the token.
        """
        start = self._characters
        self._characters += len(self._decoder.decode(data))
        return start


def _check_finish(finish: Finish) -> None:
    if finish.reason == "cancelled":
        raise ShuttingDownError
    if finish.reason == "time" and finish.completion_tokens == 0:
        raise ServingError(
            "The time limit of requests passed before the first token: try again later.",
            status=503,
            code="timed_out",
        )


def _tokens_within(pending: list[TokenOutput], finish: Finish, tokenizer: ServingTokenizer) -> list[TokenOutput]:
    """Return the held-back tokens that belong to the text, without those of a stop string."""
    if finish.reason != "stop":
        return pending
    size = len(finish.text.encode())
    within = []
    start = 0
    for output in pending:
        if start < size:
            within.append(output)
        start += len(tokenizer.bytes_of(output.token))
    return within


class ChoicePart(NamedTuple):
    """New content of one choice: a streamed delta, or the whole choice.

    Attributes:
        index: index of the choice.
        text: its new text outside of tool calls.
        outputs: its new tokens, including those of tool calls.
        finish_reason: the reason of its end; None before its end.
        calls: its new tool calls.
    """

    index: int
    text: str = ""
    outputs: Sequence[TokenOutput] = ()
    finish_reason: FinishReason | None = None
    calls: Sequence[ToolCall] = ()


class ResponseBuilder(ABC, Generic[_Response]):
    """Builds the response to one request.

    Args:
        parsed: the request.
        tokenizer: the tokenizer of the model.
        fingerprint: fingerprint of the backbone.
    """

    prefix: str
    """Prefix of the response's id."""

    def __init__(self, parsed: ParsedRequest, tokenizer: ServingTokenizer, fingerprint: str) -> None:
        self.parsed = parsed
        self.tokenizer = tokenizer
        self.choices = [ChoiceState() for _ in parsed.requests]
        self.head: dict[str, Any] = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": parsed.model,
            "system_fingerprint": fingerprint,
        }

    async def complete(self, outputs: Outputs) -> _Response:
        """Wait for the end of all continuations, and return the whole response.

        Raises:
            ServingError: a continuation failed.
        """
        async for item in outputs:
            self.choices[item.index].add(item, self.tokenizer)
        parts = []
        for index, state in enumerate(self.choices):
            part = ChoicePart(index, state.text, state.outputs, state.finish_reason)
            parts.append(self._read_calls(part))
        return self.response(parts)

    async def events(self, outputs: Outputs) -> AsyncGenerator[str, None]:
        """Yield the server-sent events of the stream, without the last one, which is `data: [DONE]`.

        Raises:
            ServingError: a continuation failed.
        """
        started: set[int] = set()
        async for item in outputs:
            index = item.index
            state = self.choices[index]
            if index not in started:
                started.add(index)
                for choice in self.first_choices(index):
                    yield self._event_of([choice])
            new = state.add(item, self.tokenizer)
            part = self._read_calls(ChoicePart(index, item.text, new, state.finish_reason))
            if part.text or part.outputs or part.calls:
                yield self._event_of([self.chunk_choice(part._replace(finish_reason=None))])
            if isinstance(item, Finish):
                last = ChoicePart(index, finish_reason=part.finish_reason)
                yield self._event_of([self.chunk_choice(last)])
        if self.parsed.include_usage:
            yield self._event_of([], usage=self.usage)

    @property
    def usage(self) -> CompletionUsage:
        """The numbers of tokens of continuations that have ended. A prompt counts once for all of its choices."""
        ends = [choice.end for choice in self.choices]
        first_ends = [end for end in ends[:: self.parsed.n] if end is not None]
        prompt_tokens = sum(end.prompt_tokens for end in first_ends)
        cached_tokens = sum(end.cached_tokens for end in first_ends)
        completion_tokens = sum(end.completion_tokens for end in ends if end is not None)
        usage = CompletionUsage(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
        )
        if cached_tokens:
            usage.prompt_tokens_details = PromptTokensDetails(cached_tokens=cached_tokens)
        return usage

    def _event_of(self, choices: list[BaseModel], usage: CompletionUsage | None = None) -> str:
        """Return an event. With `include_usage`, OpenAI sets usage to null in all events but the last."""
        values = {"choices": choices, **self.head}
        if self.parsed.include_usage:
            values["usage"] = usage
        return f"data: {self.event(values).model_dump_json(exclude_unset=True)}"

    def _base(self, part: ChoicePart) -> dict[str, Any]:
        """Return the common keys of all choices; `graftlm` is set only if it has content."""
        values: dict[str, Any] = {"index": part.index, "finish_reason": part.finish_reason}
        extras: dict[str, Any] = {}
        if self.parsed.trace and part.outputs:
            extras["trace"] = [
                TokenTrace(token=self.tokenizer.text_of(output.token), values=output.trace) for output in part.outputs
            ]
            if self.parsed.weights:
                extras["weights"] = dict(self.parsed.weights)
        end = self.choices[part.index].end
        if part.finish_reason is not None and end is not None and end.reason == "time":
            extras["ended"] = "time"
        if extras:
            values["graftlm"] = ChoiceExtras(**extras)
        return values

    def _read_calls(self, part: ChoicePart) -> ChoicePart:
        """Return a part with tool calls moved from its text to its calls; by default it has none."""
        return part

    @abstractmethod
    def response(self, parts: list[ChoicePart]) -> _Response:
        """Return the whole response.

        Args:
            parts: the whole choices, in the order of their indices.
        """

    def first_choices(self, index: int) -> list[BaseModel]:
        """Return the choices that are sent before the first text of choice `index`, each as one event."""
        return []

    @abstractmethod
    def chunk_choice(self, part: ChoicePart) -> BaseModel:
        """Return the choice of an event, with only the new content of `part`."""

    @abstractmethod
    def event(self, values: dict[str, Any]) -> BaseModel:
        """Return the object of a server-sent event.

        Args:
            values: `choices`, the keys of `head` and, if requested, `usage`.
        """


class CompletionBuilder(ResponseBuilder[TextCompletion]):
    """Builds the response of /v1/completions."""

    prefix = "cmpl"

    def response(self, parts: list[ChoicePart]) -> TextCompletion:
        """Return the whole response with the continuations `parts`."""
        return TextCompletion(
            object="text_completion",
            choices=[self.chunk_choice(part) for part in parts],
            usage=self.usage,
            **self.head,
        )

    def event(self, values: dict[str, Any]) -> TextCompletion:
        """Return the object of an event, which has the form of a whole response."""
        return TextCompletion(object="text_completion", **values)

    def chunk_choice(self, part: ChoicePart) -> TextChoice:
        """Return a choice of a whole response or of an event; both have the same form."""
        return TextChoice(
            text=part.text,
            logprobs=self._logprobs(part) if self.parsed.logprobs else None,
            **self._base(part),
        )

    def _logprobs(self, part: ChoicePart) -> Logprobs:
        state = self.choices[part.index]
        tokens = []
        logprobs = []
        top_logprobs = []
        offsets = []
        for output in part.outputs:
            text = self.tokenizer.text_of(output.token)
            logprob = output.logprob or 0.0
            # The sampled token is added to the most likely ones.
            top = {self.tokenizer.text_of(token): value for token, value in output.top}
            top[text] = logprob
            tokens.append(text)
            logprobs.append(logprob)
            top_logprobs.append(top)
            offsets.append(state.offset(self.tokenizer.bytes_of(output.token)))
        return Logprobs(
            tokens=tokens,
            token_logprobs=logprobs,
            top_logprobs=top_logprobs,
            text_offset=offsets,
        )


class EmbeddingBuilder(ResponseBuilder[Embeddings]):
    """Builds the response of /v1/embeddings, which is never streamed."""

    prefix = "embd"

    def response(self, parts: list[ChoicePart]) -> Embeddings:
        """Return the whole response with the embeddings of all texts."""
        usage = self.usage
        return Embeddings(
            object="list",
            data=[self.chunk_choice(part) for part in parts],
            model=self.parsed.model,
            usage=Usage(prompt_tokens=usage.prompt_tokens, total_tokens=usage.total_tokens),
        )

    def event(self, values: dict[str, Any]) -> Embeddings:
        """Raise `NotImplementedError`, because embeddings are not streamed."""
        raise NotImplementedError("embeddings are not streamed")

    def chunk_choice(self, part: ChoicePart) -> TextEmbedding:
        """Return the embedding of one text, as numbers or as float32 values in base64."""
        end = self.choices[part.index].end
        assert end is not None
        embedding: list[float] | str = list(end.embedding)
        if self.parsed.base64:
            embedding = base64.b64encode(array("f", end.embedding)).decode()
        return TextEmbedding(object="embedding", index=part.index, embedding=embedding)


class ChatBuilder(ResponseBuilder[Chat]):
    """Builds the response of /v1/chat/completions.

    Args:
        parsed: the request.
        tokenizer: the tokenizer of the model.
        fingerprint: fingerprint of the backbone.
    """

    prefix = "chatcmpl"

    def __init__(self, parsed: ParsedRequest, tokenizer: ServingTokenizer, fingerprint: str) -> None:
        super().__init__(parsed, tokenizer, fingerprint)
        self._readers = [CallReader(parsed.tools, parsed.call_text) for _ in self.choices]

    def response(self, parts: list[ChoicePart]) -> Chat:
        """Return the whole response with the messages `parts`."""
        return Chat(
            object="chat.completion",
            choices=[self._choice(part) for part in parts],
            usage=self.usage,
            **self.head,
        )

    def event(self, values: dict[str, Any]) -> chat.ChatCompletionChunk:
        """Return the object of an event, which OpenAI calls a chunk."""
        return chat.ChatCompletionChunk(object="chat.completion.chunk", **values)

    def first_choices(self, index: int) -> list[BaseModel]:
        """Return a choice with the role of the message and without text."""
        part = ChoicePart(index)
        delta = ChoiceDelta(role="assistant", content="")
        return [ChunkChoice(delta=delta, logprobs=None, **self._base(part))]

    def chunk_choice(self, part: ChoicePart) -> ChunkChoice:
        """Return the choice of an event, whose delta has only the new text and the new tool calls."""
        delta: dict[str, Any] = {}
        if part.text or (part.finish_reason is None and not part.calls):
            delta["content"] = part.text
        if part.calls:
            first = self._readers[part.index].calls - len(part.calls)
            delta["tool_calls"] = [_as_delta_call(number, call) for number, call in enumerate(part.calls, first)]
        logprobs = None
        if self.parsed.logprobs and part.outputs:
            logprobs = ChunkLogprobs(content=self._token_logprobs(part), refusal=None)
        return ChunkChoice(delta=ChoiceDelta(**delta), logprobs=logprobs, **self._base(part))

    def _choice(self, part: ChoicePart) -> ChatChoice:
        message = chat.ChatCompletionMessage(role="assistant", content=part.text, refusal=None)
        if part.calls:
            message.tool_calls = [_as_message_call(call) for call in part.calls]
            message.content = part.text or None
        logprobs = None
        if self.parsed.logprobs:
            logprobs = ChoiceLogprobs(content=self._token_logprobs(part), refusal=None)
        return ChatChoice(message=message, logprobs=logprobs, **self._base(part))

    def _read_calls(self, part: ChoicePart) -> ChoicePart:
        if not self.parsed.tools:
            return part
        reader = self._readers[part.index]
        text, calls = reader.add(part.text)
        reason = part.finish_reason
        if reason is not None:
            text += reader.rest()
            if reason == "stop" and reader.calls > 0:
                reason = "tool_calls"
        return part._replace(text=text, calls=calls, finish_reason=reason)

    def _token_logprobs(self, part: ChoicePart) -> list[ChatCompletionTokenLogprob]:
        logprobs = []
        for output in part.outputs:
            top = [TopLogprob(**self._token(token, logprob)) for token, logprob in output.top]
            sampled = self._token(output.token, output.logprob or 0.0)
            logprobs.append(ChatCompletionTokenLogprob(top_logprobs=top, **sampled))
        return logprobs

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self.tokenizer.text_of(token),
            "logprob": logprob,
            "bytes": list(self.tokenizer.bytes_of(token)),
        }


def _as_message_call(call: ToolCall) -> chat.ChatCompletionMessageFunctionToolCall:
    return chat.ChatCompletionMessageFunctionToolCall(
        id=call.id,
        type="function",
        function=Function(name=call.name, arguments=call.arguments),
    )


def _as_delta_call(index: int, call: ToolCall) -> ChoiceDeltaToolCall:
    return ChoiceDeltaToolCall(
        index=index,
        id=call.id,
        type="function",
        function=ChoiceDeltaToolCallFunction(name=call.name, arguments=call.arguments),
    )
