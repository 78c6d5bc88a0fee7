"""Conversations: exactly the assistant's turns are predicted, in every template, and what can't be is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graftlm.data import DataConfig, SourceConfig, build_documents, build_mixture
from graftlm.data.chats import chat_tokens, render_chat
from graftlm.data.chunks import mark_chat, split_documents
from graftlm.data.conversations import ChatExample, read_chat
from graftlm.data.marked_ids import IGNORED, unmark
from graftlm.data.rows import collate
from graftlm.errors import DataError, GraftError
from graftlm.evaluation.windows import cut_windows
from tiny import tiny_tokenizer

SYSTEM, USER, ASSISTANT, TOOL = "system", "user", "assistant", "tool"
# The forms of six families, each with what ends an answer: written after their published formats.
TEMPLATES: dict[str, tuple[str, str]] = {
    "chatml": (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        "<|im_end|>",
    ),
    "llama3": (
        "{{ '<|begin|>' }}{% for m in messages %}{{ '<|header|>' + m['role'] + '<|/header|>\n\n' + m['content'] | trim "
        "+ '<|eot|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|header|>assistant<|/header|>\n\n' }}{% endif %}",
        "<|eot|>",
    ),
    "mistral": (
        "{{ '<s>' }}{% set ns = namespace(system='') %}{% for m in messages %}{% if m['role'] == 'system' %}"
        "{% set ns.system = m['content'] + '\n\n' %}{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'] | trim + "
        "'</s>' }}{% else %}{{ '[INST] ' + (ns.system if loop.index0 < 2 else '') + m['content'] + ' [/INST]' }}"
        "{% endif %}{% endfor %}",
        "</s>",
    ),
    "gemma": (
        "{{ '<bos>' }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
        "{% endif %}{% for m in messages %}{{ '<start_of_turn>' + ('model' if m['role'] == "
        "'assistant' else m['role']) + '\n' + m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}",
        "<end_of_turn>",
    ),
    "qwen3": (  # an empty thought stands in the last answer alone
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' and loop.last %}"
        "{{ '<think>\n\n</think>\n\n' }}{% endif %}{{ m['content'] + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        "<|im_end|>",
    ),
    "phi": (
        "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}",
        "<|end|>",
    ),
}
TRIMS = {"llama3", "mistral", "gemma"}
MARKED = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' }}{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] + '<|end|>' }}{% endgeneration %}{% else %}{{ m['content'] + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
words = st.text(alphabet="abc dé東.\n<", min_size=1, max_size=12).filter(lambda text: text.strip())


def with_template(template: str, *special: str) -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})  # type: ignore[arg-type]
    return tokenizer


TOKENIZERS = {name: with_template(template, end) for name, (template, end) in TEMPLATES.items()}


def chat_of(contents: list[str], system: str | None = None) -> ChatExample:
    turns = [{"role": (USER, ASSISTANT)[i % 2], "content": content} for i, content in enumerate(contents)]
    return read_chat([*([{"role": SYSTEM, "content": system}] if system else []), *turns], "a test")


def predicted_texts(tokenizer: Any, chat: ChatExample) -> list[str]:
    """The text of each run of predicted tokens."""
    ids, predicted, _ = chat_tokens(tokenizer, chat)
    edges = np.flatnonzero(np.diff(predicted.astype(int), prepend=0, append=0)).reshape(-1, 2)
    return [tokenizer.decode(ids[start:stop].tolist()) for start, stop in edges]


@pytest.mark.parametrize("name", TEMPLATES)
@given(
    contents=st.lists(words, min_size=2, max_size=7),
    system=st.one_of(st.none(), words),
)
def test_exactly_the_answers_with_their_ends_are_predicted(name: str, contents: list[str], system: str | None) -> None:
    tokenizer = TOKENIZERS[name]
    _, end = TEMPLATES[name]
    chat = chat_of(contents, None if name == "gemma" else system)
    answers = [message["content"] for message in chat.messages if message["role"] == ASSISTANT]
    texts = predicted_texts(tokenizer, chat)
    if name == "qwen3" and len(contents) % 2 == 0:
        answers[-1] = "<think>\n\n</think>\n\n" + answers[-1]
    if name in TRIMS:
        texts = [text.strip() for text in texts]
        answers = [answer.strip() for answer in answers]
    assert texts == [answer + end for answer in answers]
    ids, _, _ = chat_tokens(tokenizer, chat)
    whole = tokenizer.apply_chat_template(list(chat.messages), tokenize=False)
    assert tokenizer.decode(ids.tolist()) == whole, "the whole conversation is there, and nothing else"


def test_what_is_not_predicted_is_what_the_model_sees() -> None:
    tokenizer = TOKENIZERS["chatml"]
    rendered = render_chat(chat_of(["where?", "here", "why?", "because"], "be kind"), tokenizer)
    assert [rendered.text[start:stop] for start, stop in rendered.turns] == ["here<|im_end|>", "because<|im_end|>"]
    for start, _ in rendered.turns:
        assert rendered.text[:start].endswith("<|im_start|>assistant\n")


def test_a_template_s_own_mask_agrees_or_is_named() -> None:
    tokenizer = with_template(MARKED, "<|end|>")
    chat = chat_of(["where?", "here", "why?", "because"])
    assert predicted_texts(tokenizer, chat) == ["here<|end|>", "because<|end|>"]
    wrong = MARKED.replace("m['role'] == 'assistant'", "m['role'] == 'user'")
    everything = MARKED.replace("m['role'] == 'assistant'", "true")
    for template in (wrong, everything):
        with pytest.raises(DataError, match="generation"):
            chat_tokens(with_template(template, "<|end|>"), chat)


def test_the_template_gets_the_tools_in_every_rendering() -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    template = "{% for tool in tools or [] %}{{ '<' + tool.function.name + '>\n' }}{% endfor %}" + MARKED
    tokenizer = with_template(template, "<|end|>")
    chat = read_chat([{"role": USER, "content": "2 and 3?"}, {"role": ASSISTANT, "content": "5"}], "a test", tools)
    assert render_chat(chat, tokenizer).text == "<add>\n<|user|>2 and 3?<|end|><|assistant|>5<|end|>"
    assert predicted_texts(tokenizer, chat) == ["5<|end|>"], "its own mask has seen them too"
    assert render_chat(chat_of(["2 and 3?", "5"]), tokenizer).text.startswith("<|user|>")


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_answers_around_a_tool_s_are_predicted(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    _, end = TEMPLATES[name]
    turns = [(USER, "add 2 and 3"), (ASSISTANT, "sum(2, 3)"), (TOOL, "5"), (TOOL, "done"), (ASSISTANT, "it is 5")]
    turns += [(USER, "why?"), (ASSISTANT, "so it is")]
    chat = read_chat([{"role": role, "content": content} for role, content in turns], "a test")
    texts = [text.strip().removeprefix("<think>\n\n</think>\n\n") for text in predicted_texts(tokenizer, chat)]
    assert texts == ["sum(2, 3)" + end, "it is 5" + end, "so it is" + end]


def test_reasoning_that_the_template_cuts_from_earlier_answers_is_not_learned() -> None:
    cuts = TEMPLATES["qwen3"][0].replace(
        "m['content'] +", "(m['content'] if loop.last else m['content'].split('</think>')[-1]) +"
    )
    tokenizer = with_template(cuts, "<|im_end|>")
    empty = "<think>\n\n</think>\n\n"
    thinking = chat_of(["where?", "<think>hm</think>here", "why?", "<think>so</think>because"])
    assert predicted_texts(tokenizer, thinking) == [
        "here<|im_end|>",
        empty + "<think>so</think>because<|im_end|>",
    ]
    with pytest.raises(DataError, match="message 2"):
        predicted_texts(tokenizer, chat_of(["where?", "<think>here</think>", "why?", "because"]))


def test_another_marker_behind_earlier_answers_is_not_learned() -> None:
    template = (
        "{% for m in messages %}{{ '<|start|>' + m.role + ('<|channel|>final' if m.role == 'assistant' else '') + "
        "'<|message|>' + m.content + ('<|return|>' if loop.last and m.role == 'assistant' else '<|end|>') }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
    )
    tokenizer = with_template(template, "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>")
    chat = chat_of(["q", "yes", "no", "yes", "why", "no"], "yes")
    assert predicted_texts(tokenizer, chat) == [
        "<|channel|>final<|message|>yes",
        "<|channel|>final<|message|>yes",
        "<|channel|>final<|message|>no<|return|>",
    ]
    assert render_chat(chat, tokenizer).text.count("<|end|>") == 6


def test_a_token_that_takes_the_header_s_last_blank_with_it_is_predicted() -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<|end|>"])
    core.train_from_iterator(["A: here", "U: where"] * 9, trainer)
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'][0] | upper + ': ' + m['content'] + '<|end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'A: ' }}{% endif %}"
    )
    assert " here" in [tokenizer.decode([token]) for token in tokenizer("A: here")["input_ids"]]
    assert predicted_texts(tokenizer, chat_of(["where", "here"])) == [" here<|end|>"]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "no chat template"),
        ("{{ nothing.at.all }}", "chat template"),
        ("{{ raise_exception('only two turns') }}", "(only two turns)"),
        (
            "{{ messages | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}",
            "message 2",
        ),
        (  # what stands in the last turn of the user alone
            "{% for m in messages %}{{ m['content'] + ('!' if loop.last and m['role'] == 'user' else '') }}"
            "{% endfor %}",
            "message 2",
        ),
        (
            "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}{% endif %}{% endfor %}",
            "no token to predict",
        ),
    ],
)
def test_templates_that_do_not_fit_are_named(template: str | None, message: str) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(DataError) as error:
        chat_tokens(tokenizer, chat_of(["where?", "here"]))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hello", "not JSON"),
        ('"hello"', "str"),
        ([], "no messages"),
        (None, "nothing"),
        (["hello"], "message 1 is of type str"),
        ([{"role": "bot", "content": "a"}], "'bot'"),
        ([{"role": [USER], "content": "a"}], "message 1 has the role"),
        ([{"content": "a"}], "message 1 has no role"),
        ([{"role": USER, "content": "a"}], "assistant"),
        ([{"role": USER, "content": 7}, {"role": ASSISTANT, "content": "b"}], "message 1 has content of type int"),
        ([{"role": USER, "content": "a"}, {"role": ASSISTANT, "content": " "}], "message 2 is an empty answer"),
        ([{"role": ASSISTANT, "content": "b"}], "message 1 has the role assistant"),
        (
            [{"role": USER, "content": "a"}, {"role": ASSISTANT, "content": None}],
            "message 2 has no content",
        ),
        (
            [{"role": USER, "content": "a"}, {"role": SYSTEM, "content": "s"}, {"role": ASSISTANT, "content": "b"}],
            "message 2 has the role system",
        ),
        (
            [{"role": USER, "content": "a"}, {"role": USER, "content": "a"}, {"role": ASSISTANT, "content": "b"}],
            "message 2 has the role user",
        ),
        ([{"role": USER, "content": [{"type": "image"}]}, {"role": ASSISTANT, "content": "b"}], "other parts"),
    ],
)
def test_messages_of_another_form_are_named(messages: Any, message: str) -> None:
    with pytest.raises(DataError) as error:
        read_chat(messages, "chats.jsonl: line 3")
    assert str(error.value).startswith("chats.jsonl: line 3")
    assert message in str(error.value)


@pytest.mark.parametrize("tools", ['{"name": "f"}', {"name": "f"}, 3])
def test_tools_of_another_form_are_named(tools: Any) -> None:
    messages = chat_of(["a", "b"]).messages
    with pytest.raises(DataError) as error:
        read_chat(messages, "chats.jsonl: line 3", tools)
    assert "line 3" in str(error.value)
    assert "tools" in str(error.value)


def test_a_conversation_that_only_calls_a_tool_is_read(tmp_path: Path) -> None:
    call = {"role": ASSISTANT, "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    path = write(tmp_path / "chats.jsonl", [{"messages": [{"role": USER, "content": "a"}, call]}])
    (document,) = build_documents([SourceConfig(path=path, messages_column="messages")])
    assert [chunk.chat for chunk in split_documents([document])] == [document.chat]


def test_other_forms_of_messages_are_read() -> None:
    sharegpt = read_chat([{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "x")
    assert sharegpt.messages == chat_of(["a", "b"]).messages
    parts = read_chat(
        [{"role": USER, "content": [{"type": "text", "text": "a"}]}, {"role": ASSISTANT, "content": "b"}], "x"
    )
    assert parts.messages == sharegpt.messages
    call = {"role": ASSISTANT, "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    tools = read_chat(
        [{"role": USER, "content": "a"}, call, {"role": TOOL, "content": "7"}, {"role": ASSISTANT, "content": "b"}], "x"
    )
    assert tools.messages[1]["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": {}}}]
    assert tools.answers == "\nb"


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_rows_of_training_predict_the_answers_alone_and_keep_conversations_whole(tmp_path: Path) -> None:
    tokenizer = TOKENIZERS["chatml"]
    chats = [chat_of(["where?", "here", "why?", "because"]), chat_of(["who?", "she"])]
    path = write(tmp_path / "chats.jsonl", [{"messages": list(chat.messages)} for chat in chats])
    source = {"path": path, "messages_column": "messages"}
    size = max(len(mark_chat(tokenizer, chat)) for chat in chats) + 3
    config = DataConfig.parse({"new": [source], "replay_fraction": 0, "length": size, "boundaries": "whole"})
    batch = build_mixture(config, tokenizer, 2).batch(0)
    labels = batch.labels.numpy()
    texts = sorted(tokenizer.decode(row[row != IGNORED].tolist()) for row in labels)
    assert texts == ["here<|im_end|>because<|im_end|>", "she<|im_end|>"]
    assert batch.prompt is not None
    for row, prompt in zip(batch.input_ids, batch.prompt, strict=True):
        shown = tokenizer.decode(row[prompt].tolist())
        assert shown.endswith("<|im_start|>assistant\n")
        assert shown.count("assistant") == 1, "a later turn is no prompt: whoever reads prompts whole would look ahead"
    config = DataConfig.parse({"new": [source], "replay_fraction": 0, "length": size - 8, "boundaries": "whole"})
    with pytest.raises(DataError, match=r"chats.jsonl: line 1"):
        build_mixture(config, tokenizer, 2)


def test_marked_conversations_unmark_to_their_ids() -> None:
    tokenizer = TOKENIZERS["llama3"]
    chat = chat_of(["where?", "here", "why?", "because"], "be kind")
    ids, predicted, _ = chat_tokens(tokenizer, chat)
    marked = mark_chat(tokenizer, chat)
    assert unmark(marked, 0).tolist() == ids.tolist()
    batch = collate(marked[None], np.array([1]), boundaries="separate", pad_id=0)
    assert (batch.labels[0].numpy() != IGNORED).tolist() == predicted.tolist()


def test_tests_score_the_answers_behind_what_precedes_them() -> None:
    tokenizer = TOKENIZERS["chatml"]
    chat = chat_of(["where is it, élan?", "hère", "why?", "because of all that was said " * 3])
    (document,) = [type("Document", (), {"chat": chat, "text": chat.answers, "prompt": ""})()]
    ids, predicted, _ = chat_tokens(tokenizer, chat)
    windows = list(cut_windows(tokenizer, [document], 30))
    scored = [int(token) for window in windows for token in window.ids[window.first :]]
    assert scored == ids[predicted].tolist()
    assert [len(window.ids) for window in windows] == [30] * len(windows), "as much of what precedes as fits"
    texts = [tokenizer.decode(window.ids[window.first :].tolist()) for window in windows]
    assert sum(int(window.bytes.sum()) for window in windows) == len("".join(texts).encode())
    position = 0
    for window in windows:  # the context is what stands before
        start = window.ids.tolist()
        at = next(i for i in range(position, len(ids)) if ids[i : i + len(start)].tolist() == start)
        assert at + window.first in np.flatnonzero(predicted)
        position = at


def test_columns_are_read_from_tables_of_every_form(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    rows: list[Any] = [{"messages": [{"role": USER, "content": "a"}, {"role": ASSISTANT, "content": "b"}], "tools": []}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"messages": rows[0]["messages"]}]), tmp_path / "a.parquet")
    paths = [write(tmp_path / "a.jsonl", rows), str(tmp_path / "a.parquet")]
    for path in paths:
        (document,) = build_documents([SourceConfig(path=path, messages_column="messages")])
        assert document.chat is not None
        assert document.chat.messages == chat_of(["a", "b"]).messages
        assert document.text == "b"
    (document,) = build_documents([SourceConfig(path=paths[0], messages_column="messages", tools_column="tools")])
    with pytest.raises(DataError) as error:
        build_documents([SourceConfig(path=paths[0], messages_column="talks")])
    assert "'talks'" in str(error.value)
    assert "messages_column" in str(error.value)
    (tmp_path / "plain.txt").write_text("hello")
    with pytest.raises(DataError) as error:
        build_documents([SourceConfig(path=str(tmp_path / "plain.txt"), messages_column="messages")])
    assert "messages_column" in str(error.value)


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"tools_column": "a"}, "messages_column"),
        ({"messages_column": "a", "limit_characters": 5}, "limit_characters"),
    ],
)
def test_settings_that_contradict_are_named(values: dict[str, Any], key: str) -> None:
    with pytest.raises(GraftError) as error:
        SourceConfig.parse({"path": "x.jsonl"} | values)
    assert key in str(error.value)
