"""/v1/responses: its requests, which become those of a chat, and its responses, whole or as events."""

from __future__ import annotations

import itertools
import json
import re
import uuid
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from openai.types.responses import Response
from pydantic import BeforeValidator, Field

from graftlm.serving import requests
from graftlm.serving.errors import UnsupportedValueError
from graftlm.serving.protocol import Finish, TokenOutput
from graftlm.serving.responses import ChoicePart, Outputs, ResponseBuilder
from graftlm.serving.service import Service
from graftlm.serving.tools import ToolCall

_OWN_KEYS = {
    r"(input\.\d+)\.(tool_calls\.\d+\.id|tool_call_id)\b": r"\1.call_id",
    r"(input\.\d+)\.tool_calls\.\d+(\.function)?": r"\1",
    r"(text\.format)\.json_schema": r"\1",
    r"(tools\.\d+|tool_choice)\.function is missing": r"\1.name is missing",
    r"(tools\.\d+|tool_choice)\.function": r"\1",
    r" \(did you mean json_schema\?\)": "",
    "json_schema is expected where": "name and schema are expected where",
}
_AS_IN_CHATS = ("model", "temperature", "top_p", "stream", "tools", "tool_choice", "parallel_tool_calls")


def _as_message(item: Any) -> Any:
    """An item of the input as a message of a chat."""
    if not isinstance(item, dict):
        return item
    kind = _checked_type(item, "message", "message", "function_call", "function_call_output")
    values = {key: value for key, value in item.items() if key not in ("type", "id", "status")}
    if kind != "message" and not values.get("call_id"):
        raise ValueError("the call_id of a call is expected")
    if kind == "function_call":
        return {"role": "assistant", "tool_calls": [{"id": values.pop("call_id"), "function": values}]}
    if kind == "function_call_output":
        names = {"call_id": "tool_call_id", "output": "content"}
        return {"role": "tool"} | {names.get(key, key): value for key, value in values.items()}
    return values


def _checked_type(values: dict[str, Any], default: str | None, *known: str) -> str:
    kind = values.get("type", default)
    if kind not in known:
        why = f"the type {' or '.join(known)} is expected, and not {str(kind)[:50]!r}: leave it out"
        raise UnsupportedValueError(why)
    return str(kind)


def _under(key: str, *types: str) -> BeforeValidator:
    """Puts what is written beside `type` under a key, as chats have it; the type is one of these."""

    def nest(values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        rest = {name: value for name, value in values.items() if name != "type"}
        return {"type": _checked_type(values, None, *types)} | ({key: rest} if rest else {})

    return BeforeValidator(nest, json_schema_input_type=dict[str, Any])


_Format = Annotated[requests.ResponseFormat, _under("json_schema", "text", "json_object", "json_schema")]
_Tool = Annotated[requests.Tool, _under("function", "function")]
_NamedTool = Annotated[requests.NamedTool, _under("function", "function")]


@requests.accepts_neutral_keys
class TextOptions(requests.StrictBody):
    """What is asked of the answer's text."""

    format: _Format | None = None


@requests.accepts_neutral_keys
class ResponsesRequest(requests.RequestBody):
    """The body of /v1/responses."""

    model: str = Field(min_length=1)
    input: Annotated[
        list[Annotated[requests.ChatMessage, BeforeValidator(_as_message, json_schema_input_type=dict[str, Any])]],
        requests.NotEmpty,
        BeforeValidator(
            lambda value: [{"role": "user", "content": value}] if isinstance(value, str) else value,
            json_schema_input_type=str | Annotated[list[dict[str, Any]], requests.NotEmpty],
        ),
    ]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(1.0, ge=0, le=2)
    top_p: float | None = Field(1.0, ge=0, le=1)
    stream: bool | None = False
    text: TextOptions | None = None
    tools: list[_Tool] | None = Field(None, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | _NamedTool | None = None
    parallel_tool_calls: bool | None = True
    metadata: dict[str, str] | None = None

    @staticmethod
    def own_keys(text: str, body: Any) -> str:
        """An error's text or path with the keys that the client sent in place of those of a chat."""
        for pattern, key in _OWN_KEYS.items():
            text = re.sub(pattern, key, text)
        items = enumerate(body["input"] if isinstance(body.get("input"), list) else ())
        for number in (number for number, item in items if isinstance(item, dict) and "output" in item):
            text = text.replace(f"input.{number}.content", f"input.{number}.output")
        return text


class _ChatOfResponse(requests.ChatRequest):
    """The chat that a request means; errors name the request's own keys."""

    prompt_key: ClassVar[str] = "input"
    form_key: ClassVar[str] = "text.format"


def parse_responses(service: Service, body: ResponsesRequest, user: str) -> requests.ParsedRequest:
    """Convert the body of /v1/responses to that of a chat."""
    first: list[Any] = [{"role": "system", "content": body.instructions}] if body.instructions else []
    options: dict[str, Any] = {key: getattr(body, key) for key in _AS_IN_CHATS}
    options |= {"response_format": body.text and body.text.format, "max_tokens": body.max_output_tokens}
    parsed = requests.parse_chat(service, _ChatOfResponse(messages=[*first, *_joined(body.input)], **options), user)
    return replace(parsed, repeated=_repeated(body))


def _joined(messages: Sequence[requests.ChatMessage]) -> list[requests.ChatMessage]:
    """The conversation with each call as a part of the assistant's message before it."""
    joined: list[requests.ChatMessage] = []
    for message in messages:
        if joined and joined[-1].role == message.role == "assistant" and message.content is None:
            calls = [*(joined[-1].tool_calls or ()), *(message.tool_calls or ())]
            message = joined.pop().model_copy(update={"tool_calls": calls})
        joined.append(message)
    return joined


def _repeated(body: ResponsesRequest) -> dict[str, Any]:
    """What the response repeats of the request, with OpenAI's defaults."""
    choice, form = body.tool_choice or "auto", body.text and body.text.format
    values: dict[str, Any] = {key: getattr(body, key) for key in ("instructions", "max_output_tokens", "metadata")}
    values |= {"temperature": 1.0 if body.temperature is None else body.temperature}
    values |= {"top_p": 1.0 if body.top_p is None else body.top_p}
    values |= {"tool_choice": choice if isinstance(choice, str) else {"type": "function", **choice.function}}
    tools = [tool.function.model_dump(exclude={"strict"}) for tool in body.tools or ()]
    values |= {"tools": [{"type": "function", "strict": True} | tool for tool in tools]}
    named = {"name": form.json_schema.name, "schema": form.json_schema.json_schema} if form and form.json_schema else {}
    values |= {"text": {"format": {"type": form.type if form else "text"} | named}}
    return values | {"parallel_tool_calls": body.parallel_tool_calls is not False}


class ResponsesBuilder(ResponseBuilder):
    """The response of /v1/responses: messages and calls in the order in which the model wrote them."""

    prefix, end = "resp", ""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._output: list[dict[str, Any]] = []
        self._is_open = False  # whether text may follow the last of the output
        self._numbers = itertools.count()

    async def complete(self, outputs: Outputs) -> Response:
        async for _ in self.events(outputs):
            pass
        return Response.model_validate(self._response(self._status))

    async def events(self, outputs: Outputs) -> AsyncGenerator[str, None]:
        for kind in ("created", "in_progress"):
            yield self._event_of(kind, response=self._response("in_progress"))
        async for item in outputs:
            for event in self._advance(item):
                yield event
        yield self._event_of(self._status, response=self._response(self._status))

    def error(self, body: dict[str, Any]) -> str:
        names = {key: body["error"][key] for key in ("code", "message", "param")}
        # Clients look for the key error.
        event = {"type": "error", "sequence_number": next(self._numbers)} | names | body
        return f"event: error\ndata: {json.dumps(event)}"

    def _advance(self, item: TokenOutput | Finish) -> Iterator[str]:
        """The events of one item of the stream."""
        state = self.choices[0]
        new = state.add(item, self.tokenizer)
        part = self.read_calls(ChoicePart(0, item.text, new, state.finish_reason))
        if part.text:
            yield from self._write(part.text)
        for call in part.calls:
            yield from self._close("completed")
            yield from self._call(call)
        if isinstance(item, Finish):
            yield from self._write("") if not self._output else ()
            yield from self._close(self._status)

    def _write(self, text: str) -> Iterator[str]:
        """Add text to the open message, or to a new one."""
        if not self._is_open:
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            yield self._add("msg", type="message", role="assistant", content=[])
            self._output[-1]["content"].append(part)
            yield self._event_of("content_part.added", **self._at, content_index=0, part=part)
            self._is_open = True
        if text:
            self._output[-1]["content"][0]["text"] += text
            yield self._event_of("output_text.delta", **self._at, content_index=0, delta=text, logprobs=[])

    def _close(self, status: str) -> Iterator[str]:
        """Complete the open message, if there is one."""
        if self._is_open:
            (part,), self._is_open = self._output[-1]["content"], False
            yield self._event_of("output_text.done", **self._at, content_index=0, text=part["text"], logprobs=[])
            yield self._event_of("content_part.done", **self._at, content_index=0, part=part)
            yield self._item("done", status)

    def _call(self, call: ToolCall) -> Iterator[str]:
        """A call, whose arguments come as a whole."""
        yield self._add("fc", type="function_call", call_id=call.id, name=call.name, arguments="")
        yield self._event_of("function_call_arguments.delta", **self._at, delta=call.arguments)
        yield self._event_of("function_call_arguments.done", **self._at, name=call.name, arguments=call.arguments)
        self._output[-1]["arguments"] = call.arguments
        yield self._item("done", "completed")

    def _add(self, prefix: str, **values: Any) -> str:
        self._output.append({"id": f"{prefix}_{uuid.uuid4().hex}"} | values)
        return self._item("added", "in_progress")

    def _item(self, what: str, status: str) -> str:
        self._output[-1]["status"] = status
        return self._event_of(f"output_item.{what}", output_index=len(self._output) - 1, item=self._output[-1])

    @property
    def _at(self) -> dict[str, Any]:
        return {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}

    def _event_of(self, kind: str, **values: Any) -> str:
        event = {"type": f"response.{kind}", "sequence_number": next(self._numbers)} | values
        return f"event: response.{kind}\ndata: {json.dumps(event)}"

    @property
    def _status(self) -> Literal["completed", "incomplete"]:
        return "completed" if self.choices[0].finish_reason == "stop" else "incomplete"

    def _response(self, status: Literal["in_progress", "completed", "incomplete"]) -> dict[str, Any]:
        """The response as it is now; its output and its usage come with its end."""
        values = {"id": self.head["id"], "object": "response", "created_at": self.head["created"], "status": status}
        values |= {"model": self.parsed.model, "error": None, "incomplete_details": None, "output": [], "usage": None}
        values |= self.parsed.repeated
        if (end := self.choices[0].end) is None:
            return values
        if status == "incomplete":
            values["incomplete_details"] = {"reason": "max_output_tokens"}
        if end.reason == "time":
            values["graftlm"] = {"ended": "time"}
        details = {"input_tokens_details": {"cached_tokens": end.cached_tokens, "cache_write_tokens": 0}}
        details |= {"output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": self.usage.total_tokens}
        counts = {"input_tokens": end.prompt_tokens, "output_tokens": end.completion_tokens}
        return values | {"output": self._output, "usage": counts | details}

    def choice(self, part: ChoicePart) -> Any:
        raise NotImplementedError("a response has items, and no choices")
