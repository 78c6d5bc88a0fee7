"""LlamaIndex's client, unchanged; OpenAI's and LangChain's are in test_app_openai.py, forms and responses."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field

from graftlm.backbone import Backbone
from graftlm.serving.protocol import EngineLimits
from graftlm.serving.service import open_service
from serving.web import Script, ScriptedEngine, outputs, running, web_service
from tiny import tiny_model, tiny_tokenizer

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


class Animal(BaseModel):
    """What a random model can write whole."""

    kind: Literal["cat", "dog"]
    legs: int = Field(ge=0, le=99)


@pytest.fixture(scope="module")
def scripted() -> Iterator[tuple[ScriptedEngine, Any]]:
    """An engine that greets, and LlamaIndex's client of its server."""
    engine = ScriptedEngine()
    with running(web_service(engine)) as address:
        yield engine, client_of(address, is_chat_model=True, is_function_calling_model=True)


def client_of(address: str, **options: Any) -> Any:
    common = {"api_base": f"{address}/v1", "api_key": "unused", "max_retries": 0, "timeout": 60}
    openai_like: Any = pytest.importorskip("llama_index.llms.openai_like")  # takes seconds to import
    return openai_like.OpenAILike(model="tiny", context_window=2048, temperature=0, **common, **options)


def user(text: str) -> Any:
    core: Any = pytest.importorskip("llama_index.core")
    return core.llms.ChatMessage(role="user", content=text)


def test_chats_and_texts_whole_and_in_streams(scripted: tuple[ScriptedEngine, Any]) -> None:
    engine, client = scripted
    engine.requests.clear()
    assert client.chat([user("the fox")]).message.content == "Hello world!"
    assert "".join(part.delta or "" for part in client.stream_chat([user("the fox")])) == "Hello world!"
    assert client.complete("the fox").text == "Hello world!"
    assert asyncio.run(client.achat([user("the fox")])).message.content == "Hello world!"
    assert {request.temperature for request in engine.requests} == {0.0}


def test_calls_of_tools(scripted: tuple[ScriptedEngine, Any]) -> None:
    def weather(city: str) -> str:
        """The weather of a city."""
        return f"sunny in {city}"

    engine, client = scripted
    core: Any = pytest.importorskip("llama_index.core")
    tool = core.tools.FunctionTool.from_defaults(fn=weather)
    engine.scripts.append(Script(outputs(CALL)))
    response = client.chat_with_tools([tool], user_msg="the fox")
    (call,) = client.get_tool_calls_from_response(response)
    assert (call.tool_name, call.tool_kwargs) == ("weather", {"city": "Rome"})
    engine.scripts += [Script(outputs(CALL)), Script(outputs("It is sunny."))]
    answer = client.predict_and_call([tool], user_msg="the fox")
    assert "sunny in Rome" in str(answer)


@pytest.mark.slow
def test_structured_outputs_of_a_model() -> None:
    backbone = Backbone.wrap(tiny_model("llama", max_position_embeddings=2048), tiny_tokenizer(), "tiny")
    with running(open_service(backbone, limits=EngineLimits(batch_size=4, max_tokens=400))) as address:
        client = client_of(address, is_chat_model=True, should_use_structured_outputs=True)
        assert isinstance(client.as_structured_llm(Animal).chat([user("the fox")]).raw, Animal)
        called = client_of(
            address, is_chat_model=True, is_function_calling_model=True, should_use_structured_outputs=False
        )
        assert isinstance(called.as_structured_llm(Animal).chat([user("the fox")]).raw, Animal)
