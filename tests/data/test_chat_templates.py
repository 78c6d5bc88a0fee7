"""Nothing of a conversation is lost in a chat template, or it is counted."""

from __future__ import annotations

from typing import Any

import pytest

from graftlm.backbone import Backbone
from graftlm.backbone.chat_templates import THOUGHT_IN_CONTENT, as_plain_text, ignored_keys, render_messages
from graftlm.data.chats import render_chat
from graftlm.data.conversations import read_chat
from graftlm.serving.tokenization import ServingTokenizer
from tiny import tiny_model, tiny_tokenizer

SYSTEM = {"role": "system", "content": "Be brief."}
ASKED = {"role": "user", "content": "When is high tide?"}
TOLD = {"role": "assistant", "content": "At noon."}
CALLED = {"role": "assistant", "tool_calls": [{"name": "tide", "arguments": {}}]}
RESULT = {"role": "tool", "content": "noon"}
TIDE = {"type": "function", "function": {"name": "tide", "parameters": {"type": "object", "properties": {}}}}
HEADER = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
WITHOUT_SYSTEM = (
    "{% for m in messages %}{% if m.role != 'system' %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    + HEADER
)
WITHOUT_LATER_SYSTEM = WITHOUT_SYSTEM.replace("m.role != 'system'", "m.role != 'system' or loop.first")


def with_template(template: str, *special: str) -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|end|>", *special]})  # type: ignore[arg-type]
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("tools", [[], [TIDE]])
@pytest.mark.parametrize("in_parts", [False, True])
def test_a_system_message_that_the_template_skips_begins_the_question(tools: Any, in_parts: bool) -> None:
    content = "{% for part in m.content %}{{ part.text }}{% endfor %}" if in_parts else "{{ m.content }}"
    tokenizer = with_template(WITHOUT_SYSTEM.replace("{{ m.content }}", content))
    rendered = render_chat(read_chat([SYSTEM, ASKED, TOLD], "a test", tools), tokenizer)
    assert rendered.text.startswith("<|user|>Be brief.\n\n")
    assert rendered.text.endswith("\n\nWhen is high tide?<|end|><|assistant|>At noon.<|end|>")
    assert ('"name": "tide"' in rendered.text) == bool(tools)
    ((start, stop),) = rendered.learned
    assert rendered.text[start:stop] == "At noon.<|end|>"
    serving = ServingTokenizer(Backbone.wrap(tiny_model("llama"), tokenizer))
    served = serving.encode_chat([SYSTEM, ASKED], tools)
    assert list(served) == tokenizer(rendered.text[:start], add_special_tokens=False)["input_ids"]


def test_later_system_messages_are_written_too() -> None:
    messages = [SYSTEM, ASKED, TOLD, SYSTEM | {"content": "In French."}, SYSTEM | {"content": "In verse."}, ASKED]
    text = render_messages(with_template(WITHOUT_LATER_SYSTEM), messages)
    assert text.startswith("<|system|>Be brief.<|end|><|user|>When is high tide?<|end|>")
    assert text.endswith("<|user|>In French.\n\nIn verse.\n\nWhen is high tide?<|end|>")
    text = render_messages(with_template(WITHOUT_SYSTEM), [SYSTEM, TOLD, SYSTEM])
    assert text == "<|user|>Be brief.<|end|><|assistant|>At noon.<|end|><|user|>Be brief.<|end|>"


def test_reasoning_that_only_the_last_answer_shows_is_counted() -> None:
    thought = "{% if loop.last %}{{ m.reasoning_content }}{% endif %}{{ m.content }}"
    tokenizer = with_template(WITHOUT_SYSTEM.replace("{{ m.content }}", thought))
    thinking = TOLD | {"reasoning_content": "Hm."}
    assert list(ignored_keys(tokenizer, [ASKED, thinking, ASKED, thinking])) == ["reasoning_content"]
    assert list(ignored_keys(tokenizer, [ASKED, TOLD, ASKED, thinking])) == []


def test_reasoning_that_is_cut_from_earlier_answers_is_counted() -> None:
    cut = "{{ m.content if loop.last else m.content.split('</think>')[-1].lstrip() }}"
    tokenizer = with_template(WITHOUT_SYSTEM.replace("{{ m.content }}", cut))
    thinking = {"role": "assistant", "content": "<think>Hm.</think>\nAt noon."}
    assert list(ignored_keys(tokenizer, [ASKED, thinking, ASKED, thinking])) == [THOUGHT_IN_CONTENT]
    assert list(ignored_keys(with_template(WITHOUT_SYSTEM), [ASKED, thinking, ASKED, thinking])) == []


def test_a_question_behind_a_result_continues_the_message_of_the_result() -> None:
    alternates = "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('not in turn') }}{% endif %}"
    tokenizer = with_template(
        "{% for m in messages %}" + alternates + WITHOUT_SYSTEM.removeprefix("{% for m in messages %}")
    )
    messages = [ASKED, CALLED, RESULT, RESULT, ASKED | {"name": "Ada"}, TOLD]
    chat = read_chat(messages, "a test")
    text = render_chat(chat, tokenizer).text
    answers = "<tool_response>\nnoon\n</tool_response>\n" * 2
    assert f"<|end|><|user|>{answers}When is high tide?<|end|><|assistant|>At noon.<|end|>" in text
    assert as_plain_text(chat.messages)[2]["name"] == "Ada", "its other keys are kept"
