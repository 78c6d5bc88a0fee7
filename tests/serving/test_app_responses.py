"""/v1/responses as OpenAI's client asks for it: events, items, tools and the form of the text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import openai
import pytest
from langchain_openai import ChatOpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, Field, TypeAdapter

from graftlm.backbone import Backbone
from graftlm.serving.protocol import EngineError, EngineLimits
from graftlm.serving.service import open_service
from serving.web import HELLO, Script, ScriptedEngine, outputs, running, web_service
from tiny import tiny_model, tiny_tokenizer

EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 6}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
TEXT_EVENTS = [
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
]
CALL_EVENTS = [
    "response.output_item.added",
    "response.function_call_arguments.delta",
    "response.function_call_arguments.done",
    "response.output_item.done",
]


class Animal(BaseModel):
    """What a random model can write whole."""

    kind: Literal["cat", "dog"]
    legs: int = Field(ge=0, le=99)


@pytest.fixture(scope="module")
def real() -> Iterator[openai.OpenAI]:
    """The client of a random model."""
    backbone = Backbone.wrap(tiny_model("llama", max_position_embeddings=2048), tiny_tokenizer(), "tiny")
    with running(open_service(backbone, limits=EngineLimits(batch_size=4, max_tokens=400))) as address:
        yield openai.OpenAI(base_url=f"{address}/v1", api_key="unused", max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def scripted() -> Iterator[tuple[ScriptedEngine, str]]:
    engine = ScriptedEngine()
    with running(web_service(engine)) as address:
        yield engine, address


@pytest.fixture
def engine(scripted: tuple[ScriptedEngine, str]) -> ScriptedEngine:
    scripted[0].requests.clear()
    scripted[0].scripts.clear()
    return scripted[0]


@pytest.fixture
def client(scripted: tuple[ScriptedEngine, str], engine: ScriptedEngine) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{scripted[1]}/v1", api_key="unused", max_retries=0, timeout=20)


def sent(client: openai.OpenAI, **body: Any) -> list[Any]:
    """The events of a stream as they are sent, each checked against OpenAI's type of its name."""
    raw = httpx.post(f"{client.base_url}responses", json={"model": "tiny", "input": "a", "stream": True} | body).text
    events = []
    for number, block in enumerate(raw.strip().split("\n\n")):
        name, data = block.split("\n")
        event = EVENTS.validate_json(data.removeprefix("data: "))
        assert (name, event.sequence_number) == (f"event: {event.type}", number)
        assert type(event).model_validate_json(data.removeprefix("data: ")), "with all keys of the type"
        events.append(event)
    return events


def test_the_events_of_a_text(client: openai.OpenAI) -> None:
    events = sent(client, instructions="Be brief.", metadata={"a": "b"}, max_output_tokens=9)
    kinds = [event.type for event in events]
    first, last = ["response.created", "response.in_progress"], ["response.completed"]
    assert kinds == [*first, *TEXT_EVENTS[:2], *["response.output_text.delta"] * 5, *TEXT_EVENTS[3:], *last]
    assert [event.delta for event in events[4:9]] == list(HELLO)
    assert events[9].text == events[10].part.text == "Hello world!"
    whole = events[-1].response
    assert (events[0].response.status, events[0].response.output, events[0].response.usage) == ("in_progress", [], None)
    assert (whole.status, whole.instructions, whole.metadata) == ("completed", "Be brief.", {"a": "b"})
    assert (whole.output_text, whole.usage.total_tokens, whole.max_output_tokens) == ("Hello world!", 8, 9)
    assert {event.item_id for event in events[3:11]} == {events[2].item.id} == {whole.output[0].id}


def test_a_stream_ends_as_the_whole_response(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    """For text, calls, text after a call, an answer that was cut, and one of nothing."""
    for pieces, reason in [
        (HELLO, "stop"),
        (("Let me", f" see. {CALL[:9]}", CALL[9:]), "stop"),
        ((CALL, "\n", CALL), "stop"),
        ((CALL, "\nThis is it."), "stop"),
        (("He", "llo"), "length"),
        (("Let me see. ", CALL[:30]), "length"),
        ((), "stop"),
    ]:
        engine.scripts += [Script(outputs(*pieces, reason=reason)) for _ in range(2)]
        asked: Any = {"model": "tiny", "input": "a", "tools": [WEATHER]}
        events = sent(client, tools=[WEATHER])
        whole = client.responses.create(**asked)
        assert timeless(events[-1].response) == timeless(whole)
        assert events[-1].type == ("response.completed" if reason == "stop" else "response.incomplete")
        assert whole.incomplete_details is None or whole.incomplete_details.reason == "max_output_tokens"
        done = [event.item for event in events if event.type == "response.output_item.done"]
        assert [item.id for item in done] == [item.id for item in events[-1].response.output]


def timeless(response: Response) -> Any:
    values = response.model_dump(exclude={"id", "created_at"})
    for item in values["output"]:
        assert item.pop("id")
        item.pop("call_id", None)
    return values


def test_the_events_of_calls(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.scripts.append(Script(outputs(f"Let me see. {CALL}", f"\n{CALL}")))
    events = sent(client, tools=[WEATHER])
    assert [event.type for event in events[2:-1]] == [*TEXT_EVENTS, *CALL_EVENTS, *CALL_EVENTS]
    message, first, second = events[-1].response.output
    assert message.content[0].text == "Let me see."
    assert json.loads(first.arguments) == json.loads(second.arguments) == {"city": "Rome"}
    assert len({first.call_id, second.call_id, first.id, second.id}) == 4
    assert [event.output_index for event in events[2:-1]] == [0] * 6 + [1] * 4 + [2] * 4


def test_openai_s_helper_for_streams(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.scripts.append(Script(outputs("Let me", " see. ", CALL)))
    with client.responses.stream(model="tiny", input="a", tools=[WEATHER]) as stream:
        snapshots = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert snapshots[-1] == "Let me see."
    assert final.output[1].type == "function_call"


def test_calls_and_their_outputs_are_a_part_of_the_conversation(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    """What the model reads is what it reads of the same chat."""
    engine.scripts.append(Script(outputs(f"Let me see. {CALL}\n{CALL}")))
    talk: list[Any] = [{"role": "user", "content": "the fox"}]
    answer = client.responses.create(model="tiny", input=talk, tools=[WEATHER])
    calls = [item for item in answer.output if item.type == "function_call"]
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"} for call in calls]
    talk += [*answer.output, *results]
    client.responses.create(model="tiny", input=talk, tools=[WEATHER], tool_choice="none")
    made: Any = [{"id": "c", "type": "function", "function": {"name": "weather", "arguments": calls[0].arguments}}]
    chat: Any = [talk[0], {"role": "assistant", "content": "Let me see.", "tool_calls": made * 2}]
    chat += [{"role": "tool", "tool_call_id": "c", "content": "sunny"}] * 2
    client.chat.completions.create(model="tiny", messages=chat)
    assert engine.requests[-1].prompt == engine.requests[-2].prompt


def test_an_error_on_the_way_is_the_last_event(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    broken = [*outputs("He", "llo")[:-1], EngineError("A gate broke.")]
    engine.scripts += [Script(list(broken)) for _ in range(2)]
    *before, last = sent(client)
    assert (last.type, last.message, last.code) == ("error", "A gate broke.", "engine_failed")
    assert "response.completed" not in [event.type for event in before]
    with pytest.raises(openai.APIError, match="A gate broke"):
        list(client.responses.create(model="tiny", input="a", stream=True))


def test_time_that_was_over(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.scripts.append(Script(outputs("He", reason="time")))
    answer: Any = client.responses.create(model="tiny", input="a")
    assert (answer.status, answer.graftlm) == ("incomplete", {"ended": "time"})


def test_structured_outputs_and_required_calls(real: openai.OpenAI) -> None:
    parsed = real.responses.parse(model="tiny", input="the fox", text_format=Animal)
    assert isinstance(parsed.output_parsed, Animal)
    for choice in ("required", {"type": "function", "name": "weather"}):
        options: Any = {"tool_choice": choice, "tools": [WEATHER], "parallel_tool_calls": False}
        answer = real.responses.create(model="tiny", input="a", **options)
        (call,) = answer.output
        assert call.type == "function_call"
        assert json.loads(call.arguments).keys() == {"city"}
        assert answer.model_dump()["tool_choice"] == choice
        assert [tool.type for tool in answer.tools] == ["function"]


def test_langchain_s_client(real: openai.OpenAI) -> None:
    model: Any = {"model": "tiny", "base_url": str(real.base_url), "api_key": "unused", "use_responses_api": True}
    chat = ChatOpenAI(**model, temperature=0)
    assert isinstance(chat.with_structured_output(Animal, method="json_schema").invoke("the fox"), Animal)
    chunks = list(chat.bind(max_output_tokens=9).stream("the fox"))
    assert "".join(chunk.text for chunk in chunks) == chat.bind(max_output_tokens=9).invoke("the fox").text
    (call,) = chat.bind_tools([WEATHER], tool_choice="weather").invoke("a").tool_calls  # type: ignore[attr-defined]
    assert (call["name"], call["args"].keys()) == ("weather", {"city"})


@pytest.mark.parametrize(
    ("body", "param", "sentence"),
    [
        (
            {"tools": [{"type": "web_search"}]},
            "tools.0",
            "tools.0: the type function is expected, and not 'web_search'",
        ),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input.0", "input.0: the type message or function_call or"),
        (
            {"input": [{"type": "function_call_output", "output": "sunny"}]},
            "input.0",
            "input.0: the call_id of a call is expected",
        ),
        ({"input": []}, "input", "input: List should have at least 1 item"),
        ({"input": [{"role": "critic", "content": "a"}]}, "input.0.role", "input.0.role: the value should be 'system'"),
        (
            {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "[1]"}]},
            "input.0.arguments",
            "input.0.arguments: a JSON object is expected",
        ),
        (
            {"input": [{"type": "function_call", "call_id": 1, "name": "f", "arguments": "{}"}]},
            "input.0.call_id",
            "input.0.call_id: the value should be a valid string",
        ),
        (
            {"input": [{"type": "function_call", "call_id": "c", "arguments": "{}"}]},
            "input.0.name",
            "the key input.0.name is missing",
        ),
        (
            {
                "input": [
                    {"role": "user", "content": "a"},
                    {"type": "function_call_output", "call_id": "c", "output": 1},
                ]
            },
            "input.1.output",
            "input.1.output: the value should be a valid list",
        ),
        (
            {"input": [{"type": "function_call_output", "call_id": 1, "output": "a"}]},
            "input.0.call_id",
            "input.0.call_id: the value should be a valid string",
        ),
        ({"input": [{"role": "user", "content": 1}]}, "input.0.content", "input.0.content: the value should be"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format", "name and schema are expected where type is"),
        (
            {"text": {"format": {"type": "json_schema", "schema": {}}}},
            "text.format.name",
            "the key text.format.name is missing",
        ),
        (
            {"tools": [{"type": "function", "name": "a b"}]},
            "tools.0.name",
            "tools.0.name: String should match pattern",
        ),
        (
            {"tools": [{"type": "function", "name": "f", "paramters": {}}]},
            "tools.0.paramters",
            "key tools.0.paramters (",
        ),
        ({"tool_choice": {"type": "function", "name": ""}}, "tool_choice.name", "tool_choice.name: String should have"),
        (
            {"text": {"format": {"type": "xml"}}},
            "text.format",
            "text.format: the type text or json_object or json_schema",
        ),
        (
            {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "text"}}}},
            "text.format",
            "text.format can't be followed (Invalid type: text): change it.",
        ),
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens: the value should be greater than or equal"),
        ({"max_output_tokens": 401}, None, "401 new tokens are too many, as this server writes 400 at most: ask for"),
        ({"max_tokens": 5}, "max_tokens", "unknown key max_tokens (did you mean max_output_tokens?)"),
        ({"tool_choice": "required"}, "tool_choice", "tool_choice is 'required', and tools has none: give one."),
    ],
)
def test_what_does_not_fit_is_named(
    real: openai.OpenAI, body: dict[str, Any], param: str | None, sentence: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        real.post("/responses", body={"model": "tiny", "input": "a"} | body, cast_to=object)
    assert sentence in str(caught.value)
    assert caught.value.param == param


def test_no_error_names_a_key_of_chats(scripted: tuple[ScriptedEngine, str]) -> None:
    """What the chat says of its messages or its form is said of `input` and of `text.format`."""
    template = "{{ raise_exception('Roles must alternate.') }}"
    with running(web_service(ScriptedEngine(), settings={"chat_template": template})) as strict:
        refused = httpx.post(f"{strict}/v1/responses", json={"model": "tiny", "input": "a"}).json()["error"]
    assert refused["param"] == "input"
    assert refused["message"].startswith("The model's chat template refuses input (Roles must alternate): change it")
    both = {"tools": [WEATHER], "text": {"format": {"type": "json_object"}}}
    refused = httpx.post(f"{scripted[1]}/v1/responses", json={"model": "tiny", "input": "a"} | both).json()["error"]
    assert refused["param"] == "text.format"
    assert refused["message"] == "tools and text.format both say what the answer may be: leave one out."
