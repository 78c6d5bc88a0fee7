"""A conversation with the project's own server, over HTTP, in front of a tiny model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clarify.test_chain_templates import own_template
from cli.tools import invoke
from graftlm.backbone import Backbone
from graftlm.pipelines.clarify import Chain, Conversation, Endpoint, EndpointConfig, LocalModel, RecordedUser
from tiny import tiny_model, tiny_tokenizer

pytest.importorskip("fastapi", reason="the extra serve is not installed")

from graftlm.serving.service import open_service
from graftlm.serving.settings import ServerSettings
from serving.web import running

CHAT = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT
    return Backbone.wrap(tiny_model("llama", max_position_embeddings=4096), tokenizer, "tiny")


@pytest.fixture(scope="module")
def address(backbone: Backbone) -> Iterator[str]:
    with running(open_service(backbone, settings=ServerSettings(port=0, reload_seconds=0))) as found:
        yield found


@pytest.fixture
def asked(tmp_path: Path) -> Conversation:
    return Conversation.start("Are you sure?", own_template(tmp_path))


def test_the_server_and_a_local_model_agree(backbone: Backbone, address: str, asked: Conversation) -> None:
    parts: list[str] = []
    there = Endpoint(EndpointConfig(url=f"{address}/v1", model="tiny", max_new_tokens=6))
    here = LocalModel(backbone.model, backbone.need_tokenizer(), name="tiny", max_new_tokens=6)
    found, same = (Chain(writer, RecordedUser(["a"]), on_text=parts.append).run(asked) for writer in (there, here))
    assert found.written is not None
    assert found.written.output
    assert found.model_dump(exclude={"turns": {"__all__": {"cost"}}}) == same.model_dump(
        exclude={"turns": {"__all__": {"cost"}}}
    )
    assert found.cost.prompt_tokens == same.cost.prompt_tokens
    assert 1 < found.cost.new_tokens <= 12


def test_a_terminal_conversation_resumes(address: str, asked: Conversation, tmp_path: Path) -> None:
    path = str(tmp_path / "c.json")
    server: tuple[Any, ...] = ("--endpoint", f"{address}/v1", "--model", "tiny", "--max-new-tokens", "5")
    first = invoke("clarify", asked.text, "--template", asked.template, "--resume", path, "--json", *server)
    step = json.loads(first.out)["step"]
    assert step in {"answer", "done"}
    done = invoke("clarify", "--resume", path, *(["--answer", "a"] if step == "answer" else []), *server)
    written = Conversation.load(path).written
    assert written is not None
    assert (done.code, done.out) == (0, f"{written.output}\n")


def test_server_errors_are_one_sentence(address: str, asked: Conversation) -> None:
    found = invoke(
        "clarify", asked.text, "--template", asked.template, "--endpoint", f"{address}/v1", "--model", "tinny"
    )
    assert found.code == 2
    assert "has no model 'tinny', or nothing at that path" in found.err
