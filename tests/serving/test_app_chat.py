"""Conversations become prompts by the tokenizer's template, or by a plain one."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError
from transformers import PreTrainedTokenizerBase

from graftlm.backbone import Backbone
from graftlm.errors import BackboneError
from graftlm.serving.protocol import ServingError
from graftlm.serving.request_parsing import parse_chat, parse_completion
from graftlm.serving.request_schema import ChatRequest, CompletionRequest
from graftlm.serving.tokenization import ServingTokenizer
from serving.web import ScriptedEngine, chat, completion, post, running, web_service
from tiny import tiny_model, tiny_tokenizer

OWN = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hej"},
    {"role": "assistant", "content": "Hej!"},
    {"role": "user", "content": "Godt?"},
]


def prompts(template: str | None = None, own: str | None = None) -> ServingTokenizer:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = own
    return ServingTokenizer(Backbone.wrap(tiny_model("llama"), tokenizer), template)


def text(tokenizer: PreTrainedTokenizerBase, ids: tuple[int, ...]) -> str:
    return str(tokenizer.decode(list(ids)))


def test_the_tokenizer_s_own_template() -> None:
    found = prompts(own=OWN)
    assert (
        text(found.tokenizer, found.encode_chat(TURNS))
        == "<system>Be brief.<user>Hej<assistant>Hej!<user>Godt?<assistant>"
    )
    assert found.chat_stops == ()
    assert not found.plain


def test_another_template_comes_first() -> None:
    found = prompts(template="{{ messages[-1].content }}:", own=OWN)
    assert text(found.tokenizer, found.encode_chat(TURNS)) == "Godt?:"
    assert found.chat_stops == ()


def test_a_template_takes_values_of_the_request() -> None:
    template = "{{ messages[-1].content }}{% if not thinks | default(true) %}!{% endif %}{{ 6 // (by | default(6)) }}"
    engine = ScriptedEngine()
    with running(web_service(engine, settings={"chat_template": template})) as address:
        for values in (None, {"thinks": False}):
            assert post(address, "/v1/chat/completions", chat(chat_template_kwargs=values)).status_code == 200
        for values in ({"by": 0}, {"by": "x"}, {"by": _nested(900)}):
            failed = post(address, "/v1/chat/completions", chat(chat_template_kwargs=values))
            assert failed.status_code == 400
            assert failed.json()["error"]["param"] == "chat_template_kwargs"
    plain, thoughtless = (text(tiny_tokenizer(), request.prompt) for request in engine.requests)
    assert (plain[-1], thoughtless[-2:]) == ("1", "!1")


def _nested(depth: int) -> list[Any]:
    return [_nested(depth - 1)] if depth else []


@pytest.mark.parametrize("name", ["messages", "conversations", "chat_template", "tokenize", "documents", "return_dict"])
def test_a_value_of_the_template_has_no_name_of_the_server_s(name: str) -> None:
    with pytest.raises(ValidationError) as caught:
        ChatRequest.model_validate(chat(chat_template_kwargs={name: True}))
    assert name in str(caught.value)


def test_a_value_of_the_template_is_json() -> None:
    with pytest.raises(ValidationError) as caught:
        ChatRequest.model_validate(chat(chat_template_kwargs={"by": float("inf")}))
    assert caught.value.errors()[0]["loc"] == ("chat_template_kwargs",)


def test_without_a_template_names_and_colons() -> None:
    found = prompts()
    expected = "Be brief.\n\nUser: Hej\nAssistant: Hej!\nUser: Godt?\nAssistant:"
    assert text(found.tokenizer, found.encode_chat(TURNS)) == expected
    assert "\nUser:" in found.chat_stops, "the model would else write the user's next turn as well"


def test_what_a_tokenizer_puts_before_texts_it_puts_before_plain_chats_only() -> None:
    from tokenizers.processors import TemplateProcessing

    for own, expected in ((None, True), (OWN, False)):
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = own
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="<bos> $0", special_tokens=[("<bos>", 2)]
        )
        found = ServingTokenizer(Backbone.wrap(tiny_model("llama"), tokenizer))
        assert (found.encode_chat(TURNS)[0] == 2) is expected
        assert found.encode("Hej")[0] == 2


def test_a_backbone_without_a_tokenizer_is_refused_at_the_start() -> None:
    with pytest.raises(BackboneError):
        ServingTokenizer(Backbone.wrap(tiny_model("llama")))


def test_tokens_have_their_bytes() -> None:
    found = prompts()
    for word in ("the fox", "forêt €", "\n\t 🦊"):
        ids = found.encode(word)
        assert b"".join(found.bytes_of(token) for token in ids).decode() == word
    assert found.text_of(303) == "", "the model has more places than the tokenizer has tokens"
    assert found.text_of(1) == "<eos>"


def test_an_answer_without_a_limit_has_what_room_there_is() -> None:
    service = web_service(ScriptedEngine())
    parsed = parse_chat(service, ChatRequest(**chat()), "me")
    assert parsed.requests[0].max_tokens == service.limits.max_tokens == 100
    long = parse_chat(service, ChatRequest(**chat(messages=[{"role": "user", "content": "x" * 450}])), "me")
    assert len(long.requests[0].prompt) + long.requests[0].max_tokens == service.context == 512
    assert parsed.requests[0].user == "me"


def test_developers_speak_as_the_system_does() -> None:
    service = web_service(ScriptedEngine())
    said = [
        parse_chat(service, ChatRequest(**chat(messages=[{"role": role, "content": "Be brief."}])), "")
        .requests[0]
        .prompt
        for role in ("system", "developer", "user")
    ]
    assert said[0] == said[1] != said[2]


def test_parts_of_a_message_are_one_text() -> None:
    service = web_service(ScriptedEngine())
    parts = [{"type": "text", "text": "the "}, {"type": "text", "text": "fox"}]
    split = parse_chat(service, ChatRequest(**chat(messages=[{"role": "user", "content": parts}])), "")
    assert split.requests == parse_chat(service, ChatRequest(**chat()), "").requests


def test_seeds_of_any_sign_become_seeds() -> None:
    service = web_service(ScriptedEngine())
    parsed = parse_completion(service, CompletionRequest(**completion(seed=-1, n=2)), "")
    assert [request.seed for request in parsed.requests] == [2**63 - 1, 0]
    assert parse_completion(service, CompletionRequest(**completion()), "").requests[0].seed is None


def test_unknown_models_are_told_before_prompts_are_read() -> None:
    service = web_service(ScriptedEngine())
    with pytest.raises(ServingError) as caught:
        parse_completion(service, CompletionRequest(**completion(prompt="")), "")
    assert caught.value.param == "prompt"
