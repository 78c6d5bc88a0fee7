"""Bad input gets its status and one sentence, which docs/serving.md lists."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from serving.web import ScriptedEngine, chat, completion, post, running, web_service

DOCS = Path(__file__).parents[2] / "docs" / "serving.md"
IMAGE = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}


class Case(NamedTuple):
    """A request, and what comes back."""

    path: str
    body: Any
    status: int
    code: str | None
    param: str | None
    sentence: str


UNIQUE = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}


def completions(code: str | None, param: str | None, sentence: str, status: int = 400, **changes: Any) -> Case:
    return Case("/v1/completions", completion(**changes), status, code, param, sentence)


def chats(code: str | None, param: str | None, sentence: str, status: int = 400, **changes: Any) -> Case:
    return Case("/v1/chat/completions", chat(**changes), status, code, param, sentence)


def turn(role: str, content: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content}]}


CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f"}}
LEAVE = "this server does not implement it: leave it out"
EITHER = "a text, a list of texts, a list of token ids or a list of such lists is expected"
CASES = {
    "no model": Case(
        "/v1/completions",
        {"prompt": "a"},
        400,
        None,
        "model",
        "The request: the key model is missing, and it has no default.",
    ),
    "an unknown model": completions(
        "model_not_found",
        None,
        "There is no model 'dansk' here: use one of tiny, danish, french, or grafts joined by +.",
        404,
        model="dansk",
    ),
    "a path as a model": completions(
        "model_not_found",
        None,
        "There is no model '../../etc/passwd' here: use one of tiny, danish, french, or grafts joined by +.",
        404,
        model="../../etc/passwd",
    ),
    "a key that nobody knows": completions(
        None, "temprature", "The request: unknown key temprature (did you mean temperature?).", temprature=1
    ),
    "a key of ours that nobody knows": completions(
        None,
        "graftlm.traces",
        "The request: unknown key graftlm.traces (did you mean trace?).",
        graftlm={"traces": True},
    ),
    "a number as text": completions(
        None,
        "temperature",
        "The request: temperature: the value should be a valid number, but found '1'.",
        temperature="1",
    ),
    "a number out of range": completions(
        None,
        "temperature",
        "The request: temperature: the value should be less than or equal to 2, but found 3.",
        temperature=3,
    ),
    "no tokens wanted": completions(
        None,
        "max_tokens",
        "The request: max_tokens: the value should be greater than or equal to 1, but found 0.",
        max_tokens=0,
    ),
    "a penalty": completions(
        None,
        "frequency_penalty",
        "The request: frequency_penalty: the value should be less than or equal to 2, but found 2.5.",
        frequency_penalty=2.5,
    ),
    "the prompt once more": completions(
        "unsupported_parameter", "echo", f"The request: echo: {LEAVE}, or set it to False, but found True.", echo=True
    ),
    "a prompt of nothing": completions(
        None, "prompt", f"The request: prompt: {EITHER}, but found nothing.", prompt=None
    ),
    "an empty list of prompts": completions(None, "prompt", f"The request: prompt: {EITHER}.", prompt=[]),
    "text among ids": completions(None, "prompt", f"The request: prompt: {EITHER}.", prompt=[[1, "a"]]),
    "a prompt without tokens": completions(None, "prompt", "prompt has no tokens: give at least one word.", prompt=""),
    "an id of no token": completions(
        None,
        "prompt",
        "prompt holds the token id 5000, and the model has 304 tokens, from 0 on: encode it with the model's own "
        "tokenizer.",
        prompt=[5, 5000],
    ),
    "half a character": Case(
        "/v1/completions",
        rb'{"model": "tiny", "prompt": "\ud800"}',
        400,
        None,
        "prompt",
        "The request: prompt: half of a surrogate pair stands alone, and Unicode text is expected, but found "
        "'\\ud800'.",
    ),
    "an empty stop string": completions(
        None, "stop.0", "The request: stop.0: String should have at least 1 character, but found ''.", stop=""
    ),
    "five stop strings": completions(
        None,
        "stop",
        "The request: stop: List should have at most 4 items after validation, not 5, but found a list.",
        stop=list("abcde"),
    ),
    "too many choices": completions(
        None, "n", "The request: n: the value should be less than or equal to 16, but found 99.", n=99
    ),
    "too many continuations": completions(
        None,
        "n",
        "The request asks for 9 continuations at once, and this server takes 8 at most: send several requests.",
        prompt=["a", "b", "c"],
        n=3,
    ),
    "options of a stream that is none": completions(
        None,
        "stream_options",
        "stream_options is set without stream: set stream to true, or leave it out.",
        stream_options={"include_usage": True},
    ),
    "no messages": chats(
        None,
        "messages",
        "The request: messages: List should have at least 1 item after validation, not 0, but found a list.",
        messages=[],
    ),
    "an image": chats(
        "unsupported_parameter",
        "messages.0.content.0",
        "The request: messages.0.content.0: this server reads text alone, and a part of the type 'image_url' was "
        "found: leave it out.",
        **turn("user", [IMAGE]),
    ),
    "another role": chats(
        None,
        "messages.0.role",
        "The request: messages.0.role: the value should be 'system', 'developer', 'user', 'assistant' or 'tool', but "
        "found 'critic'.",
        **turn("critic", "a"),
    ),
    "a message of nothing": chats(
        None, "messages.0", "The request: messages.0: content is expected.", **turn("user", None)
    ),
    "a call by the user": chats(
        None,
        "messages.0",
        "The request: messages.0: tool_calls are expected in messages of the assistant alone.",
        messages=[{"role": "user", "content": "a", "tool_calls": [CALL]}],
    ),
    "arguments that are no JSON": chats(
        None,
        "messages.0.tool_calls.0.function.arguments",
        "The request: messages.0.tool_calls.0.function.arguments: a JSON object is expected, but found '[1]'.",
        messages=[{"role": "assistant", "tool_calls": [CALL | {"function": {"name": "f", "arguments": "[1]"}}]}],
    ),
    "two tools of one name": chats(None, "tools", "Two tools have the same name: rename one.", tools=[TOOL, TOOL]),
    "a tool that must be called and is not there": chats(
        None,
        "tool_choice",
        "tool_choice names 'g', which is none of tools.",
        tools=[TOOL],
        tool_choice={"type": "function", "function": {"name": "g"}},
    ),
    "a call without tools": chats(
        None, "tool_choice", "tool_choice is 'required', and tools has none: give one.", tool_choice="required"
    ),
    "a schema with an unknown type": chats(
        None,
        "response_format",
        "response_format can't be followed (Invalid type: text): change it.",
        response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "text"}}},
    ),
    "a schema that is not supported": chats(
        None,
        "tools",
        'tools can\'t be followed (Unimplemented keys: ["uniqueItems"]): change it.',
        tools=[{"type": "function", "function": {"name": "f", "parameters": UNIQUE}}],
    ),
    "JSON by a schema that is not there": chats(
        None,
        "response_format",
        "The request: response_format: json_schema is expected where type is 'json_schema', and nowhere else.",
        response_format={"type": "json_schema"},
    ),
    "two forms of an answer": chats(
        None,
        "response_format",
        "tools and response_format both say what the answer may be: leave one out.",
        tools=[TOOL],
        response_format={"type": "json_object"},
    ),
    "two kinds of structured outputs": completions(
        None,
        "structured_outputs",
        "The request: structured_outputs: one of json, regex, choice and grammar is expected.",
        structured_outputs={"regex": "a", "choice": ["b"]},
    ),
    "a bias of a word": completions(
        None,
        "logit_bias",
        "The request: logit_bias: token ids are expected as keys, and 'fox' is none.",
        logit_bias={"fox": 1},
    ),
    "a bias of a token that is not there": completions(
        None,
        "logit_bias",
        "logit_bias holds the token id 900, and the model has 304 tokens, from 0 on: encode it with the model's own "
        "tokenizer.",
        logit_bias={"900": 1},
    ),
    "an end token that is not there": completions(
        None,
        "stop_token_ids",
        "stop_token_ids holds the token id 900, and the model has 304 tokens, from 0 on: encode it with the model's "
        "own tokenizer.",
        stop_token_ids=[5, 900],
    ),
    "an answer that is to be longer than it may": completions(
        None,
        "min_tokens",
        "min_tokens is 17, and the answer has at most 16 tokens: ask for fewer.",
        min_tokens=17,
    ),
    "a shortest length of a form": completions(
        None,
        "min_tokens",
        "structured_outputs says where the answer ends, and min_tokens says so too: leave one out.",
        min_tokens=2,
        structured_outputs={"choice": ["yes", "no"]},
    ),
    "end tokens to be ignored beside tools": chats(
        None,
        "ignore_eos",
        "tools says where the answer ends, and ignore_eos says so too: leave one out.",
        ignore_eos=True,
        tools=[TOOL],
    ),
    "values of the template that are too long": chats(
        None,
        "chat_template_kwargs",
        "The request: chat_template_kwargs: JSON of 10,000 characters at most is expected.",
        chat_template_kwargs={"a": "b" * 10_000},
    ),
    "a value of the template that is the server's": chats(
        None,
        "chat_template_kwargs",
        "The request: chat_template_kwargs: tools is set by the server: leave it out.",
        chat_template_kwargs={"tools": []},
    ),
    "top_logprobs alone": chats(
        None,
        "top_logprobs",
        "top_logprobs is set, and logprobs is not: set logprobs to true as well.",
        top_logprobs=2,
    ),
    "two limits": chats(
        None,
        "max_tokens",
        "max_tokens and max_completion_tokens are the same: give one of them.",
        max_tokens=2,
        max_completion_tokens=3,
    ),
    "no JSON": Case(
        "/v1/completions",
        b'{"model": ',
        400,
        "invalid_json",
        None,
        "The body is not JSON (Expecting value at character 10): send a JSON object.",
    ),
    "no object": Case(
        "/v1/completions", b"[1]", 400, None, None, "The request has no JSON object in its body: send one."
    ),
    "no body": Case("/v1/completions", b"", 400, None, None, "The request has no JSON object in its body: send one."),
    "JSON that is nested too deeply": Case(
        "/v1/completions",
        b"[" * 100_000,
        400,
        "invalid_json",
        None,
        "The body can't be read as JSON (too deep, too large a number, or no UTF-8): send an object.",
    ),
    "bytes that are no text": Case(
        "/v1/completions",
        b'{"model": "\xff"}',
        400,
        "invalid_json",
        None,
        "The body can't be read as JSON (too deep, too large a number, or no UTF-8): send an object.",
    ),
    "no number": Case(
        "/v1/completions",
        b'{"model": "tiny", "prompt": "a", "temperature": NaN}',
        400,
        None,
        "temperature",
        "The request: temperature: the value should be a finite number, but found nan.",
    ),
    "another path": Case(
        "/v1/moderations",
        {},
        404,
        "unknown_url",
        None,
        "Nothing answers at /v1/moderations: see /openapi.json for what there is.",
    ),
    "another method": Case(
        "/v1/models", {}, 405, "method_not_allowed", None, "/v1/models does not answer POST: use GET."
    ),
    "a body that is too large": completions(
        "request_too_large",
        None,
        "The request is larger than 200,000 bytes, which is the most: send less text.",
        413,
        prompt="a" * 200_000,
    ),
}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with running(web_service(ScriptedEngine(), settings={"body_bytes": 200_000})) as found:
        yield found


@pytest.mark.parametrize("name", CASES)
def test_bad_input_gets_its_sentence(address: str, name: str) -> None:
    case = CASES[name]
    if isinstance(case.body, bytes):
        json = {"Content-Type": "application/json"}
        answer = httpx.post(f"{address}{case.path}", content=case.body, headers=json, timeout=20)
    else:
        answer = post(address, case.path, case.body)
    error = answer.json()["error"]
    assert error["message"] == case.sentence
    assert (answer.status_code, error["code"], error["param"]) == (case.status, case.code, case.param)
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("name", CASES)
def test_the_docs_list_the_sentence(name: str) -> None:
    case = CASES[name]
    rows = [
        re.split(r" *(?<!\\)\| *", line)[1:4] for line in DOCS.read_text(encoding="utf-8").splitlines() if "|" in line
    ]
    listed = {(row[1], row[2].replace("\\|", "|").replace("`", "")) for row in rows if len(row) == 3}
    assert (str(case.status), case.sentence.replace("`", "")) in listed


def test_a_body_that_is_said_to_be_something_else(address: str) -> None:
    answer = httpx.post(f"{address}/v1/completions", data={"model": "tiny"})
    assert answer.status_code == 415
    assert answer.json()["error"]["message"] == (
        "The body is said to be application/x-www-form-urlencoded: send JSON as Content-Type: application/json."
    )


def test_a_template_that_refuses(address: str) -> None:
    template = "{{ raise_exception('Roles must alternate.') }}"
    with running(web_service(ScriptedEngine(), settings={"chat_template": template})) as strict:
        answer = post(strict, "/v1/chat/completions", chat())
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == (
        "The model's chat template refuses messages (Roles must alternate): change it, or use /v1/completions."
    )
