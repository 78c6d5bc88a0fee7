"""Answers of a given form and tool calls, as the clients of OpenAI and LangChain ask for them."""

from __future__ import annotations

import functools
import json
import random
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal

import httpx
import jsonschema_rs
import openai
import pytest
from llguidance import LLMatcher
from pydantic import BaseModel, Field

from graftlm.backbone import Backbone
from graftlm.backbone.chat_templates import CallText
from graftlm.errors import RecipeError
from graftlm.serving import grammars
from graftlm.serving.protocol import EngineLimits, ServingError
from graftlm.serving.request_schema import FunctionCall
from graftlm.serving.service import Service, open_service
from graftlm.serving.tokenization import ServingTokenizer
from graftlm.serving.tools import CallReader, ToolCall, tool_grammar
from serving.schemas import generated_schemas
from serving.web import Script, ScriptedEngine, outputs, running, web_service
from tiny import tiny_model, tiny_tokenizer

USER: Any = [{"role": "user", "content": "the fox"}]
CITY = {"type": "object", "properties": {"city": {"$ref": "#/$defs/Name"}}, "required": ["city"]} | {
    "additionalProperties": False,
    "$defs": {"Name": {"type": "string", "maxLength": 6}},
}
WEATHER: Any = {"type": "function", "function": {"name": "weather", "description": "Of a city.", "parameters": CITY}}
NOW: Any = {"type": "function", "function": {"name": "now"}}
JSON_TYPE = {"Content-Type": "application/json"}
ENDS = {str(token): 5 for token in tiny_tokenizer().convert_tokens_to_ids(['"', "}", "]"])}
"""Tokens that end what a random model writes, more likely, as it is cut else."""
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


class Animal(BaseModel):
    """What a random model can write whole."""

    kind: Literal["cat", "dog"]
    legs: int = Field(ge=0, le=99)
    tame: bool


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A server of a random model."""
    backbone = Backbone.wrap(tiny_model("llama", max_position_embeddings=2048), tiny_tokenizer(), "tiny")
    with running(open_service(backbone, limits=EngineLimits(batch_size=4, max_tokens=400))) as address:
        yield address


@pytest.fixture
def client(address: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{address}/v1", api_key="unused", max_retries=0, timeout=60)


def test_openai_s_client_parses_a_model_of_pydantic(client: openai.OpenAI) -> None:
    for seed in range(4):
        answer = client.chat.completions.parse(model="tiny", messages=USER, response_format=Animal, seed=seed)
        assert isinstance(answer.choices[0].message.parsed, Animal)
        assert answer.choices[0].finish_reason == "stop"


def test_langchain_s_client_writes_structured_output_and_calls(address: str) -> None:
    from langchain_openai import ChatOpenAI  # takes seconds to import

    chat = ChatOpenAI(model="tiny", base_url=f"{address}/v1", api_key="unused", seed=1)  # type: ignore[arg-type]
    assert isinstance(chat.with_structured_output(Animal).invoke("the fox"), Animal)
    called = chat.bind_tools([WEATHER], tool_choice="weather").invoke("the fox")
    (call,) = called.tool_calls  # type: ignore[union-attr]
    assert (call["name"], call["args"].keys()) == ("weather", {"city"})


def test_other_forms(client: openai.OpenAI) -> None:
    def text(**form: Any) -> str:
        body: dict[str, Any] = {"structured_outputs": form}
        return client.completions.create(model="tiny", prompt="a", max_tokens=80, extra_body=body).choices[0].text

    assert re.fullmatch("[a-e]{2,5}", text(regex="[a-e]{2,5}"))
    assert text(choice=["yes", 'no "x" é\n']) in ("yes", 'no "x" é\n')
    closed = Animal.model_json_schema() | {"additionalProperties": False}
    assert json.loads(text(json=closed)).keys() == {"kind", "legs", "tame"}
    assert re.fullmatch("(ab){1,3}c", text(grammar='start: ("ab"){1,3} "c"'))


def test_rows_of_a_batch_have_their_own_forms(client: openai.OpenAI) -> None:
    """Several choices of one request, beside free text."""
    forms: list[Any] = [{"regex": "[a-e]{9,}"}, {"choice": ["yes", "no"]}, {"json": CITY}, None]
    with ThreadPoolExecutor(4) as pool:
        bodies = [{"structured_outputs": form} if form else {} for form in forms]
        create = functools.partial(client.completions.create, model="tiny", prompt="a", max_tokens=40, seed=5)
        mixed = list(pool.map(lambda body: create(extra_body=body).choices[0].text, bodies))
        alone = [create(extra_body=body).choices[0].text for body in bodies]
    assert mixed == alone
    assert re.fullmatch("[a-e]{9,}", mixed[0])
    assert mixed[1] in ("yes", "no")
    answer = client.chat.completions.create(
        model="tiny", messages=USER, n=4, response_format={"type": "json_object"}, max_tokens=30, seed=5
    )
    assert all(choice.message.content and choice.message.content.startswith("{") for choice in answer.choices)
    assert len({choice.message.content for choice in answer.choices}) > 1


def answers(client: openai.OpenAI, schemas: list[dict[str, Any]]) -> list[tuple[dict[str, Any], Any]]:
    """The schemas whose answer was whole, each with its answer; any other error than a cut fails the test."""

    def ask(number: int) -> Any:
        form: Any = {"type": "json_schema", "json_schema": {"name": "any", "schema": schemas[number]}}
        options: Any = {"model": "tiny", "messages": USER, "response_format": form, "seed": number, "logit_bias": ENDS}
        return client.chat.completions.create(**options).choices[0]

    with ThreadPoolExecutor(4) as pool:
        choices = list(pool.map(ask, range(len(schemas))))
    whole = [
        (schema, choice) for schema, choice in zip(schemas, choices, strict=True) if choice.finish_reason == "stop"
    ]
    return [(schema, json.loads(choice.message.content)) for schema, choice in whole]


@pytest.mark.slow
@pytest.mark.parametrize("count", [24, pytest.param(500, marks=pytest.mark.slow)])
def test_every_answer_is_what_its_schema_says(
    client: openai.OpenAI, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against another implementation of JSON Schema. A random model may be cut before the end of a text."""
    trials = SimpleNamespace(run=lambda *_, **__: SimpleNamespace(returncode=0), PIPE=None)
    monkeypatch.setattr(grammars, "subprocess", trials)  # a process for each schema would take most of the time
    whole = answers(client, generated_schemas(count))
    assert len(whole) >= 0.95 * count
    for schema, answer in whole:
        problems = list(jsonschema_rs.validator_for(schema, validate_formats=True).iter_errors(answer))
        assert not problems, (schema, answer, problems)


_O, _A, _S, _I = ({"type": kind} for kind in ("object", "array", "string", "integer"))
FOLLOWED: list[
    tuple[dict[str, Any], Any, Any]
] = [  # a schema, a value that it allows, and one that its keyword forbids
    (_I, 5, "a"),
    ({"type": ["integer", "null"], "maximum": 9}, None, "a"),
    ({"enum": [1, "a"]}, "a", "b"),
    ({"const": {"a": [1]}}, {"a": [1]}, {"a": [2]}),
    (_I | {"minimum": 3, "maximum": 99}, 3, 2),
    (_I | {"minimum": 3, "maximum": 99}, 99, 100),
    (_I | {"exclusiveMinimum": 3, "maximum": 99}, 4, 3),
    (_I | {"minimum": 3, "exclusiveMaximum": 99}, 98, 99),
    (_I | {"multipleOf": 5, "minimum": 0, "maximum": 90}, 10, 11),
    (_S | {"minLength": 2, "maxLength": 5}, "ab", "a"),
    (_S | {"maxLength": 2}, "ab", "abc"),
    (_S | {"pattern": "^[ab]+c$"}, "abc", "abd"),
    (_S | {"format": "date"}, "2026-01-31", "2026-01-32"),
    (_A | {"items": {"const": 1}, "maxItems": 4}, [1, 1], [1, 2]),
    (_A | {"items": {"const": 1}, "minItems": 2, "maxItems": 4}, [1, 1], [1]),
    (_A | {"items": {"const": 1}, "maxItems": 2}, [1, 1], [1, 1, 1]),
    (_A | {"prefixItems": [{"const": 1}], "items": False}, [1], [2]),
    (_A | {"items": [{"const": 1}], "additionalItems": False}, [1], [1, 2]),
    (_O | {"properties": {"a": {"const": 1}}, "additionalProperties": False}, {"a": 1}, {"a": 2}),
    (_O | {"properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}, {"a": 1}, {}),
    (_O | {"additionalProperties": {"const": 1}, "maxProperties": 1}, {"a": 1}, {"a": 2}),
    (_O | {"additionalProperties": {"const": 1}, "maxProperties": 1}, {"a": 1}, {"a": 1, "b": 1}),
    (_O | {"additionalProperties": {"const": 1}, "minProperties": 1, "maxProperties": 2}, {"a": 1}, {}),
    (_O | {"patternProperties": {"^x$": {"const": 1}}, "additionalProperties": False}, {"x": 1}, {"x": 2}),
    ({"anyOf": [{"const": 1}, {"const": 2}]}, 2, 3),
    ({"allOf": [_I | {"minimum": 0}, {"maximum": 9}]}, 9, 10),
    ({"oneOf": [{"const": "a"}, {"const": None}]}, "a", "b"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"const": 1}}}, 1, 2),
    ({"$ref": "#/definitions/a", "definitions": {"a": {"const": 1}}}, 1, 2),
    ({"$ref": "#x", "$defs": {"a": {"$anchor": "x", "const": 1}}}, 1, 2),
    (_I | {"title": "a", "description": "b", "default": 1, "examples": [1], "x-own": 1, "maximum": 9}, 1, "a"),
    (_I | {"nullable": True, "maximum": 9}, 1, "a"),
    ({"enum": ["YQ=="], "contentEncoding": "base64", "contentMediaType": "text/plain"}, "YQ==", 1),
    ({"$ref": "#/components/schemas/s", "components": {"schemas": {"s": {"const": 1}}}}, 1, 2),
]
REFUSED: dict[str, dict[str, Any]] = {  # a schema by the keyword that is refused
    "uniqueItems": _A | {"uniqueItems": True},
    "contains": _A | {"contains": {"const": 1}},
    "minContains": _A | {"contains": {"const": 1}, "minContains": 2},
    "maxContains": _A | {"contains": {"const": 1}, "maxContains": 2},
    "unevaluatedItems": _A | {"unevaluatedItems": False},
    "unevaluatedProperties": _O | {"unevaluatedProperties": False},
    "propertyNames": _O | {"propertyNames": {"pattern": "^x"}},
    "dependentRequired": _O | {"dependentRequired": {"a": ["b"]}},
    "dependentSchemas": _O | {"dependentSchemas": {"a": {"required": ["b"]}}},
    "dependencies": _O | {"dependencies": {"a": ["b"]}},
    "not": {"not": {"const": 1}},
    "if": {"if": {"const": 1}, "then": {"const": 1}},
    "else": {"if": {"const": 1}, "else": {"const": 1}},
    "$dynamicRef": {"$dynamicRef": "#a", "$defs": {"a": {"$dynamicAnchor": "a"}}},
    "$recursiveRef": {"$recursiveRef": "#"},
    "format: idn-email": _S | {"format": "idn-email"},
    "divisibleBy": _I | {"divisibleBy": 2},
    "disallow": _I | {"disallow": "integer"},
    "extends": _I | {"extends": {"minimum": 5}},
    "'minimun' (did you mean minimum?)": _O | {"properties": {"a": {"anyOf": [_I | {"minimun": 5}]}}},
    "oneOf": {"oneOf": [_I, {"type": "number"}]},
}


@pytest.fixture(scope="module")
def form() -> Form:
    """Grammars without their trial in a process of its own, which the servers of this file make."""
    service = web_service(ScriptedEngine())
    grammars_of = service.grammars
    grammars_of._cached_matcher = functools.cache(  # type: ignore[assignment]
        lambda grammar: LLMatcher(grammars_of._tokenizer_of_llguidance(), grammar, log_level=0)
    )
    return Form(service)


class Form:
    """What a model may write under a schema."""

    def __init__(self, service: Service) -> None:
        self.compile = functools.partial(service.grammars.json, param="schema")
        self.encode = functools.partial(service.tokenizer.encode, special=False)
        self.special = set(service.tokenizer.tokenizer.all_special_ids)
        self.bytes = [service.tokenizer.bytes_of(token) for token in range(service.tokenizer.vocabulary)]

    def allows(self, schema: dict[str, Any], value: Any) -> bool:
        matcher = self.compile(schema).deep_copy()
        tokens = self.encode(json.dumps(value))
        return matcher.try_consume_tokens(list(tokens)) == len(tokens) and matcher.is_accepting()

    def sample(self, schema: dict[str, Any], seed: int) -> Any:
        """A value of random tokens, of which those that end something are drawn more often; None if it has no end."""
        matcher, draw, text = self.compile(schema).deep_copy(), random.Random(seed), b""
        while not matcher.is_stopped() and len(text) < 300:
            if matcher.is_accepting() and draw.random() < 0.5:
                return json.loads(text)
            allowed = [
                token for token, bias in enumerate(matcher.compute_logit_bias()) if bias and token not in self.special
            ]
            ending = [token for token in allowed if self.bytes[token] in (b'"', b"}", b"]")]
            token = draw.choice(ending if ending and draw.random() < 0.4 else allowed)
            matcher.consume_token(token)
            text += self.bytes[token]
        return json.loads(text) if matcher.is_accepting() else None


@pytest.mark.parametrize(("schema", "allowed", "forbidden"), FOLLOWED, ids=lambda value: json.dumps(value)[:40])
def test_keywords_that_are_followed(form: Form, schema: dict[str, Any], allowed: Any, forbidden: Any) -> None:
    draft = jsonschema_rs.Draft7Validator if "additionalItems" in schema else jsonschema_rs.Draft202012Validator
    validator = draft(schema, validate_formats=True)
    assert (validator.is_valid(allowed), form.allows(schema, allowed)) == (True, True)
    assert (validator.is_valid(forbidden), form.allows(schema, forbidden)) == (False, False)
    values = [value for seed in range(8) if (value := form.sample(schema, seed)) is not None]
    assert values or allowed is None
    assert all(validator.is_valid(value) for value in values), values


@pytest.mark.parametrize("name", REFUSED)
def test_keywords_that_are_refused_by_name(form: Form, name: str) -> None:
    keyword = name.removeprefix("format: ")
    for schema in (REFUSED[name], _O | {"properties": {"a": REFUSED[name]}}):
        with pytest.raises(ServingError) as caught:
            form.compile(schema)
        assert keyword in str(caught.value)


def test_names_and_values_are_no_keywords(form: Form) -> None:
    closed = {"required": ["minimun"], "additionalProperties": False}
    schema = _O | {"properties": {"minimun": {"const": {"nullable": 1}}}, "default": {"extends": 1}} | closed
    assert form.allows(schema, {"minimun": {"nullable": 1}})


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = Field(ge=0, le=9)


class Dog(BaseModel):
    kind: Literal["dog"]
    tame: bool


class Owner(BaseModel):
    """A union that pydantic writes as `oneOf` with a discriminator."""

    pet: Annotated[Cat | Dog, Field(discriminator="kind")]


def test_a_union_with_a_discriminator(client: openai.OpenAI) -> None:
    """As OpenAI's client sends it, as the form of an answer and as a tool."""
    kinds = set()
    for seed in range(6):
        answer = client.chat.completions.parse(model="tiny", messages=USER, response_format=Owner, seed=seed)
        assert answer.choices[0].message.parsed is not None
        kinds.add(answer.choices[0].message.parsed.pet.kind)
    assert kinds == {"cat", "dog"}
    tool: Any = openai.pydantic_function_tool(Owner)
    called = client.chat.completions.parse(model="tiny", messages=USER, tools=[tool], tool_choice="required", seed=1)
    (call,) = called.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Owner)


def test_branches_that_may_hold_at_once_are_refused_with_what_to_use(form: Form) -> None:
    kind = {"properties": {"kind": {"const": "a"}}, "required": ["kind"]}
    for branches in (
        [_O | kind, _O | kind],
        [_O | kind, _O | {"properties": {"other": {"const": "b"}}, "required": ["other"]}],
        [_O | {"properties": {"kind": {"const": name}}} for name in ("a", "b")],
        [{"enum": [1, 2]}, {"enum": [2.0, 3]}],
        [_I | {"minimum": 0}, _I | {"maximum": 5}],
    ):
        with pytest.raises(ServingError) as caught:
            form.compile({"oneOf": branches})
        assert caught.value.param == "schema"
        assert "oneOf" in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schema", "as_tool"),
    [
        ({"allOf": [{"type": "integer", "multipleOf": 9973}, {"multipleOf": 9967}]}, True),
        ({"type": "object", "properties": {f"p{number}": {"type": "integer"} for number in range(9000)}}, False),
    ],
    ids=["common multiple", "properties"],
)
def test_a_schema_that_takes_hours_is_refused(address: str, schema: dict[str, Any], as_tool: bool) -> None:
    wrapped = {"type": "object", "properties": {"x": schema}}
    form = {"type": "json_schema", "json_schema": {"name": "any", "schema": schema}}
    tool = {"type": "function", "function": {"name": "f", "parameters": wrapped}}
    body = {"messages": USER} | ({"tools": [tool, NOW]} if as_tool else {"response_format": form})
    error = refused(address, "v1/chat/completions", **body)
    assert error["code"] == "grammar_too_complex"
    assert error["param"] == ("tools" if as_tool else "response_format")


@pytest.mark.slow
def test_slow_schemas_hold_nobody_else_up(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "_TRIAL_SECONDS", 1)
    primes = (9999991, 9999973, 9999971, 9999943, 9999937, 9999931, 9999929, 9999907)

    def refuse(prime: int) -> str:
        form = {"json": {"type": "integer", "multipleOf": prime}}
        return refused(address, "v1/completions", prompt="a", structured_outputs=form)["code"]

    with ThreadPoolExecutor(8) as pool:
        refusals = [pool.submit(refuse, prime) for prime in primes]
        for _ in range(3):
            free = httpx.post(f"{address}/v1/completions", json={"model": "tiny", "prompt": "a"}, timeout=60)
            assert free.status_code == 200
        assert not all(refusal.done() for refusal in refusals), "the free requests came first"
        assert {refusal.result() for refusal in refusals} == {"grammar_too_complex"}


@pytest.mark.parametrize(
    "compile_grammar",
    [
        lambda grammars_of: grammars_of.json({"type": "integer", "multipleOf": 9999991}, "form"),  # fails in Rust
        lambda grammars_of: grammars_of.choice(["x" * 20_000_000], "form"),  # fails in Python
    ],
    ids=["rust", "python"],
)
def test_a_grammar_that_needs_too_much_memory(
    compile_grammar: Callable[[Any], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "_TRIAL_BYTES", 50_000_000)
    with pytest.raises(ServingError) as caught:
        compile_grammar(web_service(ScriptedEngine()).grammars)
    assert (caught.value.code, caught.value.param) == ("grammar_too_complex", "form")


def test_a_trial_that_fails_otherwise_is_the_server_s_mistake_and_tried_again(
    address: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    body = {"model": "tiny", "prompt": "a", "structured_outputs": {"regex": "[x-z]{3}"}}
    failing = tmp_path / "failing.py"
    failing.write_text("raise OSError('no device')")
    with monkeypatch.context() as patch:
        patch.setattr(grammars, "_TRIAL", failing)
        answer = httpx.post(f"{address}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 500
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("engine_failed", "structured_outputs.regex")
    assert "no device" in error["message"]
    assert httpx.post(f"{address}/v1/completions", json=body, timeout=60).status_code == 200


def test_a_cut_answer_says_so(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=USER, response_format={"type": "json_object"}, max_tokens=1
    )
    assert answer.choices[0].finish_reason == "length"


def test_a_call_that_is_required(client: openai.OpenAI) -> None:
    for seed in range(3):
        answer = client.chat.completions.create(
            model="tiny",
            messages=USER,
            tools=[WEATHER, NOW],
            tool_choice="required",
            parallel_tool_calls=False,
            seed=seed,
        )
        (choice,) = answer.choices
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        (call,) = choice.message.tool_calls or []
        assert call.type == "function"
        arguments = json.loads(call.function.arguments)
        assert (call.function.name, arguments) == ("now", {}) or arguments.keys() == {"city"}


@pytest.fixture(scope="module")
def scripted() -> Iterator[tuple[ScriptedEngine, str]]:
    engine = ScriptedEngine()
    with running(web_service(engine)) as address:
        yield engine, address


@pytest.mark.parametrize("pieces", [(f"Let me see. {CALL}",), ("Let me", " see. <tool", *CALL[5:].partition("wea"))])
@pytest.mark.parametrize("stream", [False, True])
def test_text_and_calls_are_told_apart(
    scripted: tuple[ScriptedEngine, str], pieces: tuple[str, ...], stream: bool
) -> None:
    engine, address = scripted
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="unused", max_retries=0, timeout=20)
    engine.scripts.append(Script(outputs(*pieces)))
    asked: dict[str, Any] = {"model": "tiny", "messages": USER, "tools": [WEATHER]}
    call: Any
    if stream:
        chunks = list(client.chat.completions.create(**asked, stream=True))
        deltas = [chunk.choices[0].delta for chunk in chunks]
        content = "".join(delta.content or "" for delta in deltas)
        (call,) = [call for delta in deltas for call in delta.tool_calls or []]
        assert call.index == 0
        reason = chunks[-1].choices[0].finish_reason
    else:
        choice = client.chat.completions.create(**asked).choices[0]
        content, reason = choice.message.content or "", choice.finish_reason
        (call,) = choice.message.tool_calls or []
    assert (content, reason) == ("Let me see.", "tool_calls")
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Rome"})


@pytest.mark.parametrize(
    "text",
    [
        "a <b> or <tool",
        '<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>',
        "<tool_call>\n{x}\n</tool_call>",
    ],
)
def test_what_is_no_call_is_text(text: str) -> None:
    for size in (1, 3, len(text)):
        reader = CallReader(["weather"])
        parts = [reader.add(text[start : start + size]) for start in range(0, len(text), size)]
        assert "".join(part for part, _ in parts) + reader.rest() == text
        assert not any(calls for _, calls in parts)


TOOL_TEMPLATE = (
    "{% for tool in tools %}[{{ tool.function.name }}]{% endfor %}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for call in m.tool_calls %}<tool_call>{{ call.function.name ~ ' ' ~ call.function.arguments | tojson }}"
    "{% endfor %}{% endfor %}"
)
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "Hej"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}],
    },
    {"role": "tool", "content": "sunny"},
]


def test_tools_of_a_template_whose_calls_answers_do_not_show_are_described() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["[CALLS]"]})  # type: ignore[arg-type]
    own = TOOL_TEMPLATE.replace("<tool_call>", "[CALLS]")
    for template, described in ((own, True), (TOOL_TEMPLATE, False), (TOOL_TEMPLATE.replace("tojson", "count"), True)):
        tokenizer.chat_template = template
        served = ServingTokenizer(Backbone.wrap(tiny_model("llama"), tokenizer))
        assert served.describes_tools == described


def test_templates_with_and_without_a_place_for_tools() -> None:
    def written(template: str | None) -> str:
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = template
        found = ServingTokenizer(Backbone.wrap(tiny_model("llama"), tokenizer))
        return str(found.tokenizer.decode(list(found.encode_chat(TALK, [WEATHER]))))

    assert written(TOOL_TEMPLATE) == """[weather]<user>Hej<assistant><tool_call>weather {"city": "Rome"}<tool>sunny"""
    plain = written("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    assert plain.startswith("<system>These functions are available")
    assert '"name": "weather"' in plain
    assert f"<user>Hej<assistant>{CALL}<user><tool_response>\nsunny\n</tool_response>" in plain


@pytest.mark.parametrize("required", [True, False])
@pytest.mark.parametrize("parallel", [True, False])
def test_the_grammar_of_calls(required: bool, parallel: bool) -> None:
    service = web_service(ScriptedEngine())
    grammar = tool_grammar(service.grammars, {"weather": CITY, "now": None}, required=required, parallel=parallel)

    def follows(text: str) -> bool:
        """Whether the grammar lets the text be an answer."""
        matcher = grammar.deep_copy()
        for token in service.tokenizer.encode(text, special=False):
            if not matcher.compute_logit_bias()[token]:
                return False
            matcher.consume_token(token)
        return bool(matcher.compute_logit_bias()[1])

    wrong = CALL.replace("city", "town")
    assert follows(CALL)
    assert follows('<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>')
    assert not follows(wrong)
    assert not follows(f"Hello {wrong}")
    assert follows(f"{CALL}\n{CALL}") == parallel
    assert follows("Hello <there>") == follows(f"Hello {CALL}") == (not required)


def refused(address: str, path: str, **body: Any) -> dict[str, Any]:
    """The error of a request that gets a 400."""
    data = json.dumps({"model": "tiny"} | body)
    answer = httpx.post(f"{address}/{path}", content=data, headers=JSON_TYPE, timeout=120)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


def test_what_breaks_a_grammar_is_the_client_s_mistake(address: str) -> None:
    def tools(parameters: Any) -> Any:
        return [{"type": "function", "function": {"name": "f", "parameters": parameters, "description": "d"}}]

    error = refused(address, "v1/chat/completions", messages=USER, tools=tools({"type": "integer"}))
    assert error["param"] == "tools"
    lenient = {"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}
    form = {"type": "json_schema", "json_schema": {"name": "any", "schema": lenient}}
    error = refused(address, "v1/chat/completions", messages=USER, response_format=form)
    assert "x-guidance" in error["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("v1/chat/completions", {"messages": [{"role": "user", "content": "\ud800"}]}),
        ("v1/completions", {"prompt": "a", "structured_outputs": {"json": {"const": "\ud800"}}}),
        ("v1/embeddings", {"input": "\ud800"}),
    ],
)
def test_half_a_character_is_refused_everywhere(address: str, path: str, body: dict[str, Any]) -> None:
    assert "surrogate" in refused(address, path, **body)["message"]


def in_pieces(reader: CallReader, answer: str, size: int) -> tuple[str, list[ToolCall]]:
    """The text and the calls of an answer that arrives in pieces of a size."""
    text = ""
    calls = []
    for start in range(0, len(answer), size):
        new_text, new_calls = reader.add(answer[start : start + size])
        text += new_text
        calls += new_calls
    return text + reader.rest(), calls


def test_arguments_that_are_nested_too_deeply_are_refused() -> None:
    with pytest.raises(RecipeError) as error:
        FunctionCall(name="weather", arguments="[" * 100_000)
    assert "arguments" in str(error.value)


def test_a_call_may_contain_its_own_end() -> None:
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "a}</tool_call>"}}\n</tool_call>'
    for size in (1, 7, len(call)):
        text, (found,) = in_pieces(CallReader(["weather"]), call, size)
        assert json.loads(found.arguments) == {"city": "a}</tool_call>"}
        assert text == ""


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_an_unfinished_call_is_text(size: int) -> None:
    for end in range(len("<tool_call>"), len(CALL)):
        answer = f"Let me see. {CALL[:end]}"
        assert in_pieces(CallReader(["weather"]), answer, size) == (answer, [])
    for end in range(1, len(CALL)):
        text, calls = in_pieces(CallReader(["weather"]), f"{CALL}\n{CALL[:end]}", size)
        assert len(calls) == 1
        assert text == CALL[:end]
    digits = '<tool_call>\n{"name": "weather", "arguments": {"city": ' + "1" * 5000 + "}}\n</tool_call>"
    assert in_pieces(CallReader(["weather"]), digits, 1000) == (digits, [])


OWN = CallText(before="[", between="] ", after=";")
OWN_CALL = '[weather] {"city": "Rome"};'


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_calls_in_a_form_of_the_template(size: int) -> None:
    def read(answer: str) -> tuple[str, list[ToolCall]]:
        return in_pieces(CallReader(["now", "weather"], OWN), answer, size)

    text, calls = read(f"Let me see. {OWN_CALL} {OWN_CALL}")
    assert text == "Let me see."
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [("weather", {"city": "Rome"})] * 2
    for other in ("[other] {};", "[weather] 3;", "[weather] {}.", "[weather] {x};", "see [1] and [2]", OWN_CALL[:-1]):
        assert read(other) == (other, [])
    assert len(in_pieces(CallReader(["weather"], replace(OWN, after="")), OWN_CALL[:-1], size)[1]) == 1


def test_the_grammar_of_calls_in_a_form_of_the_template() -> None:
    service = web_service(ScriptedEngine())
    tools = {"weather": CITY, "now": None}
    grammar = tool_grammar(service.grammars, tools, required=True, parallel=False, call_text=OWN)
    for text, is_call in (
        (OWN_CALL, True),
        (OWN_CALL.replace("city", "town"), False),
        ("[now] {};", True),
        ("a", False),
    ):
        matcher = grammar.deep_copy()
        tokens = service.tokenizer.encode(text, special=False)
        followed = all(_consumes(matcher, token) for token in tokens)
        assert (followed and bool(matcher.compute_logit_bias()[1])) == is_call, text


def _consumes(matcher: Any, token: int) -> bool:
    """Whether a token may follow; it is consumed then."""
    return bool(matcher.compute_logit_bias()[token]) and bool(matcher.consume_token(token))


def test_a_call_in_the_form_of_the_template_is_a_call_of_the_response() -> None:
    template = (
        "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
        "{% for c in m.tool_calls or [] %}[{{ c.function.name }}] {{ c.function.arguments | tojson }};{% endfor %}"
        "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    engine = ScriptedEngine()
    engine.scripts.append(Script(outputs("Let me see. [wea", "ther] ", '{"city": "Rome"};')))
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    service = web_service(engine, backbone=Backbone.wrap(tiny_model("llama"), tokenizer, "tiny"))
    with running(service) as address:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="unused", max_retries=0, timeout=20)
        answer = client.chat.completions.create(model="tiny", messages=USER, tools=[WEATHER]).choices[0].message
    (call,) = answer.tool_calls or []
    assert (answer.content, call.function.name) == ("Let me see.", "weather")  # type: ignore[union-attr]


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_is_cut_in_a_call_keeps_its_text(scripted: tuple[ScriptedEngine, str], stream: bool) -> None:
    engine, address = scripted
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="unused", max_retries=0, timeout=20)
    unfinished = CALL[:40]
    engine.scripts.append(Script(outputs(f"Let me see. {CALL}\n", *unfinished.partition("wea"), reason="length")))
    asked: dict[str, Any] = {"model": "tiny", "messages": USER, "tools": [WEATHER]}
    if stream:
        chunks = list(client.chat.completions.create(**asked, stream=True))
        deltas = [chunk.choices[0].delta for chunk in chunks]
        content = "".join(delta.content or "" for delta in deltas)
        calls = [call for delta in deltas for call in delta.tool_calls or []]
        reason = chunks[-1].choices[0].finish_reason
    else:
        choice = client.chat.completions.create(**asked).choices[0]
        content = choice.message.content or ""
        calls = choice.message.tool_calls or []
        reason = choice.finish_reason
    assert (content, len(calls), reason) == (f"Let me see.{unfinished}", 1, "length")


def test_more_texts_than_the_queue_takes_are_embedded(client: openai.OpenAI, address: str) -> None:
    answer = client.embeddings.create(model="tiny", input=[[5, 6 + n % 90] for n in range(100)])
    assert [item.index for item in answer.data] == list(range(100))
    assert answer.data[0].embedding == pytest.approx(answer.data[90].embedding, abs=1e-5)
    assert answer.usage.prompt_tokens == 200
