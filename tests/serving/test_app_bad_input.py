"""Bad input gets its status, its code, and the key that is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import httpx
import pytest

from serving.web import ScriptedEngine, chat, completion, post, running, web_service

IMAGE = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}


class Case(NamedTuple):
    """A request, and what comes back."""

    path: str
    body: Any
    status: int
    code: str | None
    param: str | None


UNIQUE = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}


def completions(code: str | None, param: str | None, status: int = 400, **changes: Any) -> Case:
    return Case("/v1/completions", completion(**changes), status, code, param)


def chats(code: str | None, param: str | None, status: int = 400, **changes: Any) -> Case:
    return Case("/v1/chat/completions", chat(**changes), status, code, param)


def turn(role: str, content: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content}]}


CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f"}}
CASES = {
    "no model": Case("/v1/completions", {"prompt": "a"}, 400, None, "model"),
    "an unknown model": completions("model_not_found", None, 404, model="dansk"),
    "a path as a model": completions("model_not_found", None, 404, model="../../etc/passwd"),
    "a key that nobody knows": completions(None, "temprature", temprature=1),
    "a key of ours that nobody knows": completions(None, "graftlm.traces", graftlm={"traces": True}),
    "a number as text": completions(None, "temperature", temperature="1"),
    "a number out of range": completions(None, "temperature", temperature=3),
    "no tokens wanted": completions(None, "max_tokens", max_tokens=0),
    "a penalty": completions(None, "frequency_penalty", frequency_penalty=2.5),
    "the prompt once more": completions(None, "echo", echo=True),
    "a key that is not implemented, without an effect": completions(None, "echo", echo=False),
    "a refusal that is sent back": chats(
        None, "messages.0.refusal", messages=[{"role": "assistant", "content": "a", "refusal": "No."}]
    ),
    "a prompt of nothing": completions(None, "prompt", prompt=None),
    "an empty list of prompts": completions(None, "prompt", prompt=[]),
    "text among ids": completions(None, "prompt", prompt=[[1, "a"]]),
    "a prompt without tokens": completions(None, "prompt", prompt=""),
    "an id of no token": completions(None, "prompt", prompt=[5, 5000]),
    "half a character": Case("/v1/completions", b'{"model": "tiny", "prompt": "\\ud800"}', 400, None, "prompt"),
    "an empty stop string": completions(None, "stop.0", stop=""),
    "five stop strings": completions(None, "stop", stop=list("abcde")),
    "too many choices": completions(None, "n", n=99),
    "too many continuations": completions(None, "n", prompt=["a", "b", "c"], n=3),
    "options of a stream that is none": completions(None, "stream_options", stream_options={"include_usage": True}),
    "no messages": chats(None, "messages", messages=[]),
    "an image": chats(None, "messages.0.content.0.image_url", **turn("user", [IMAGE])),
    "another role": chats(None, "messages.0.role", **turn("critic", "a")),
    "a message of nothing": chats(None, "messages.0", **turn("user", None)),
    "a call by the user": chats(None, "messages.0", messages=[{"role": "user", "content": "a", "tool_calls": [CALL]}]),
    "arguments that are no JSON": chats(
        None,
        "messages.0.tool_calls.0.function.arguments",
        messages=[{"role": "assistant", "tool_calls": [CALL | {"function": {"name": "f", "arguments": "[1]"}}]}],
    ),
    "two tools of one name": chats(None, "tools", tools=[TOOL, TOOL]),
    "a tool that must be called and is not there": chats(
        None, "tool_choice", tools=[TOOL], tool_choice={"type": "function", "function": {"name": "g"}}
    ),
    "a call without tools": chats(None, "tool_choice", tool_choice="required"),
    "a schema with an unknown type": chats(
        None,
        "response_format",
        response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "text"}}},
    ),
    "a schema that is not supported": chats(
        None, "tools", tools=[{"type": "function", "function": {"name": "f", "parameters": UNIQUE}}]
    ),
    "JSON by a schema that is not there": chats(None, "response_format", response_format={"type": "json_schema"}),
    "two forms of an answer": chats(None, "response_format", tools=[TOOL], response_format={"type": "json_object"}),
    "two kinds of structured outputs": completions(
        None, "structured_outputs", structured_outputs={"regex": "a", "choice": ["b"]}
    ),
    "a bias of a word": completions(None, "logit_bias", logit_bias={"fox": 1}),
    "a bias of a token that is not there": completions(None, "logit_bias", logit_bias={"900": 1}),
    "end tokens to be ignored beside tools": chats(None, "ignore_eos", ignore_eos=True, tools=[TOOL]),
    "values of the template that are too long": chats(
        None, "chat_template_kwargs", chat_template_kwargs={"a": "b" * 10000}
    ),
    "a value of the template that is the server's": chats(
        None, "chat_template_kwargs", chat_template_kwargs={"tools": []}
    ),
    "top_logprobs alone": chats(None, "top_logprobs", top_logprobs=2),
    "two limits": chats(None, "max_tokens", max_tokens=2, max_completion_tokens=3),
    "no JSON": Case("/v1/completions", b'{"model": ', 400, "invalid_json", None),
    "no object": Case("/v1/completions", b"[1]", 400, None, None),
    "no body": Case("/v1/completions", b"", 400, None, None),
    "JSON that is nested too deeply": Case("/v1/completions", b"[" * 100000, 400, "invalid_json", None),
    "bytes that are no text": Case("/v1/completions", b'{"model": "\xff"}', 400, "invalid_json", None),
    "no number": Case(
        "/v1/completions", b'{"model": "tiny", "prompt": "a", "temperature": NaN}', 400, None, "temperature"
    ),
    "another path": Case("/v1/moderations", {}, 404, "unknown_url", None),
    "another method": Case("/v1/models", {}, 405, "method_not_allowed", None),
    "a body that is too large": completions("request_too_large", None, 413, prompt="a" * 200000),
}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with running(web_service(ScriptedEngine(), settings={"body_bytes": 200_000})) as found:
        yield found


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_located(address: str, name: str) -> None:
    case = CASES[name]
    if isinstance(case.body, bytes):
        json = {"Content-Type": "application/json"}
        answer = httpx.post(f"{address}{case.path}", content=case.body, headers=json, timeout=20)
    else:
        answer = post(address, case.path, case.body)
    error = answer.json()["error"]
    assert error["message"]
    assert (answer.status_code, error["code"], error["param"]) == (case.status, case.code, case.param)
    assert error["type"] == "invalid_request_error"


def test_a_body_that_is_said_to_be_something_else(address: str) -> None:
    answer = httpx.post(f"{address}/v1/completions", data={"model": "tiny"})
    assert answer.status_code == 415
    assert answer.json()["error"]["code"] == "unsupported_media_type"


@pytest.mark.filterwarnings("ignore:The chat template can't render")
def test_a_template_that_refuses(address: str) -> None:
    template = "{{ raise_exception('Roles must alternate.') }}"
    with running(web_service(ScriptedEngine(), settings={"chat_template": template})) as strict:
        answer = post(strict, "/v1/chat/completions", chat())
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages"
    assert "Roles must alternate" in answer.json()["error"]["message"], "the reason of the template"
