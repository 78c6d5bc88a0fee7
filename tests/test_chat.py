"""A conversation in the terminal: the model sees all of it, and answers in its template."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch

from graftlm.backbone import compiled_decoding
from graftlm.errors import DataError
from graftlm.generation import generate as chat_module
from graftlm.generation.generate import ChatSession, Decoding, generate_text, talk
from tiny import EOS, tiny_model, tiny_tokenizer

TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = tiny_model("llama")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    model.generation_config.eos_token_id = EOS
    return model.eval(), tokenizer


def expected(model: Any, tokenizer: Any, messages: list[dict[str, str]], new: int) -> str:
    """The answer by transformers alone."""
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False)
    return tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)


def test_an_answer_is_that_of_the_template(pair: tuple[Any, Any]) -> None:
    model, tokenizer = pair
    messages = [{"role": "user", "content": "where is it?"}]
    shown: list[str] = []
    result = generate_text(model, tokenizer, messages, Decoding(max_new_tokens=8), on_text=shown.append)
    assert result.text == expected(model, tokenizer, messages, 8)
    assert "".join(shown) == result.text, "the question is not shown again"
    assert result.prompt.endswith("<|assistant|>")


def test_the_model_sees_what_was_said_before(pair: tuple[Any, Any]) -> None:
    model, tokenizer = pair
    session = ChatSession(model, tokenizer, Decoding(max_new_tokens=6), system="be kind")
    first = session.reply("where?")
    second = session.reply("why?")
    said = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "where?"}]
    assert first == expected(model, tokenizer, said, 6)
    said += [{"role": "assistant", "content": first}, {"role": "user", "content": "why?"}]
    assert second == expected(model, tokenizer, said, 6)
    session.reset()
    assert session.messages == said[:1]
    assert session.reply("where?") == first


def test_compiled_answers_are_the_same_and_are_compiled_once_for_several_turns(
    pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = pair
    graphs: list[Any] = []

    def backend(module: torch.fx.GraphModule, _inputs: Any) -> Any:
        graphs.append(module)
        return module.forward

    def with_backend(*arguments: Any, **options: Any) -> dict[str, Any]:
        compiled: dict[str, Any] = compiled_decoding(*arguments, **options)
        if compiled:
            compiled["compile_config"].backend = backend
            compiled["compile_config"].mode = None
        return compiled

    monkeypatch.setattr(chat_module, "compiled_decoding", with_backend)
    replies = {}
    for is_compiled in (False, True):
        session = ChatSession(model, tokenizer, Decoding(max_new_tokens=6, compile=is_compiled))
        replies[is_compiled] = [session.reply(text) for text in ("where?", "why is it there?", "when?")]
    torch.compiler.reset()
    assert replies[True] == replies[False]
    assert len(graphs) == 1


def test_an_interrupt_leaves_the_history_as_it_was(pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = pair
    session = ChatSession(model, tokenizer, Decoding(max_new_tokens=4))
    session.reply("where?")
    before = list(session.messages)

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(chat_module, "generate_text", interrupted)
    monkeypatch.setattr("sys.stdin", io.StringIO("why?\n"))
    written: list[str] = []
    talk(session, written.append)
    assert "(stopped)" in "".join(written)
    assert session.messages == before


def test_commands(pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = pair
    session = ChatSession(model, tokenizer, Decoding(max_new_tokens=3))
    lines = "where?\n\n/reset\n/system be short\nwhy?\n/nope\n/help\n" + "long " * 600 + "\n/exit\nnever\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    written: list[str] = []
    talk(session, written.append)
    text = "".join(written)
    assert [message["content"] for message in session.messages[:2]] == ["be short", "why?"]
    assert len(session.messages) == 3
    assert "There is no command /nope." in text
    assert "the model has" in text
    assert "never" not in text


def test_a_model_without_a_template_is_named() -> None:
    with pytest.raises(DataError) as error:
        ChatSession(tiny_model("llama"), tiny_tokenizer())
    assert "chat template" in str(error.value)
