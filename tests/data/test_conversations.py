"""Every form of a conversation becomes one form, which training and serving render to the same tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graftlm.backbone import Backbone
from graftlm.backbone.chat_templates import HERMES, render_messages, template_form
from graftlm.data import DataConfig, SourceConfig, build_documents, build_mixture
from graftlm.data.chats import chat_tokens, render_chat, render_question
from graftlm.data.conversations import ChatExample, read_chat, read_messages, read_tools
from graftlm.errors import DataError
from graftlm.serving.request_parsing import chat_prompt
from graftlm.serving.request_schema import ChatRequest
from graftlm.serving.tokenization import ServingTokenizer
from tiny import tiny_model, tiny_tokenizer

SCHEMA = {"type": "object", "properties": {"port": {"type": "string"}}, "required": ["port"]}
TIDE = {"type": "function", "function": {"name": "tide", "description": "Of a port.", "parameters": SCHEMA}}
ARGUMENTS = {"port": "Ålesund", "day": {"of": [1, None]}}
CALL = {"id": "c1", "type": "function", "function": {"name": "tide", "arguments": ARGUMENTS}}
ASKED = {"role": "user", "content": "When is high tide?"}
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "noon", "tool_call_id": "c1"}
TOLD = {"role": "assistant", "content": "At noon."}
LOOP = [ASKED, CALLED, RESULT, TOLD]

_CALLS = "{% for c in m.tool_calls or [] %}"
_TOOLS = "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}"
_HEADER = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
# How templates take calls: each in another form.
TEMPLATES = {
    "nothing of tools": "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}" + _HEADER,
    "objects in tags": _TOOLS
    + "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    + _CALLS
    + '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
    + "{% endfor %}<|end|>{% endfor %}"
    + _HEADER,
    "a thought in the last answer alone": _TOOLS + "{% for m in messages %}<|{{ m.role }}|>"
    "{% if loop.last and m.role == 'assistant' %}<think>\n</think>\n{% endif %}"
    + "{{ m.content }}{% for c in m.tool_calls or [] %}{{ '\n' if m.content or not loop.first }}"
    + '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
    + "{% endfor %}<|end|>{% endfor %}"
    + _HEADER,
    "another form": _TOOLS
    + "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    + _CALLS
    + "[{{ c.function.name }}] {{ c.function.arguments | tojson }};{% endfor %}<|end|>{% endfor %}"
    + _HEADER,
    "arguments as text": _TOOLS
    + "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    + _CALLS
    + "[{{ c.function.name + '] ' + c.function.arguments }};{% endfor %}<|end|>{% endfor %}"
    + _HEADER,
    "arguments that are printed": _TOOLS
    + "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    + _CALLS
    + "[{{ c.function.name }}] {{ c.function.arguments }};{% endfor %}<|end|>{% endfor %}"
    + _HEADER,
    "calls where there is no content": _TOOLS
    + "{% for m in messages %}<|{{ m.role }}|>{% if m.content is defined %}{{ m.content }}{% else %}"
    + _CALLS
    + "[{{ c.function.name }}] {{ c.function.arguments | tojson }};{% endfor %}{% endif %}<|end|>{% endfor %}"
    + _HEADER,
    "contents in parts": "{% for m in messages %}<|{{ m.role }}|>{% for p in m.content %}{% if p.type == 'text' %}"
    "{{ p.text }}{% endif %}{% endfor %}<|end|>{% endfor %}" + _HEADER,
}


def with_template(name: str) -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATES[name]
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|end|>"]})  # type: ignore[arg-type]
    return tokenizer


TOKENIZERS = {name: with_template(name) for name in TEMPLATES}
SERVED = {
    name: ServingTokenizer(Backbone.wrap(tiny_model("llama"), tokenizer)) for name, tokenizer in TOKENIZERS.items()
}


def sent(values: Any) -> Any:
    """As clients send it: arguments are JSON text."""
    values = json.loads(json.dumps(values))
    for message in values:
        for call in message.get("tool_calls", []):
            call["id"] = "c1"
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return values


def served_ids(name: str, messages: Any, tools: Any = None) -> list[int]:
    body = ChatRequest(model="tiny", messages=sent(messages), tools=tools)
    return list(chat_prompt(SERVED[name], body, with_tools=bool(tools)))


def learned_texts(name: str, chat: ChatExample) -> list[str]:
    """The text of each run of learned tokens."""
    tokenizer = TOKENIZERS[name]
    ids, predicted, _ = chat_tokens(tokenizer, chat)
    edges = np.flatnonzero(np.diff(predicted.astype(int), prepend=0, append=0)).reshape(-1, 2)
    return [tokenizer.decode(ids[start:stop].tolist()) for start, stop in edges]


def read_one(path: Path, row: Any, **keys: Any) -> ChatExample:
    """The conversation of a source of one row."""
    path.write_text(json.dumps(row) + "\n", encoding="utf-8")
    (document,) = build_documents([SourceConfig(path=str(path), messages_column="messages", **keys)])
    assert document.chat is not None
    return document.chat


# --- the forms in which rows are written -----------------------------------------------------------------------------


def as_openai(messages: Any) -> Any:
    return [message | {"content": message["content"] or None} for message in sent(messages)]


def as_padded(messages: Any) -> Any:
    """As Arrow returns lists of objects with different keys."""
    keys = {key for message in messages for key in message} | {"weight", "name"}
    return [dict.fromkeys(keys) | message for message in messages]


def as_sharegpt(messages: Any) -> Any:
    names = {"user": "human", "assistant": "gpt", "tool": "observation", "system": "system"}
    rows: list[dict[str, Any]] = []
    for message in messages:
        if message["content"] or "tool_calls" not in message:
            rows.append({"from": names[message["role"]], "value": message["content"]})
        functions = [call["function"] for call in message.get("tool_calls", [])]
        if functions:
            rows.append({"from": "function_call", "value": json.dumps(functions)})
    return rows


def as_bare_calls(messages: Any) -> Any:
    plain = json.loads(json.dumps(messages))
    for message in plain:
        if "tool_calls" in message:
            message["tool_calls"] = [json.dumps(call["function"]) for call in message["tool_calls"]]
    return plain


FORMS: list[Any] = [list, json.dumps, as_openai, as_padded, as_sharegpt, as_bare_calls]
TOOL_FORMS: list[Any] = [list, json.dumps, lambda tools: [tool["function"] for tool in tools]]

words = st.text(alphabet="abc dé東.<", min_size=1, max_size=8).filter(lambda text: text.strip())
calls = st.builds(
    lambda name, arguments: {"type": "function", "function": {"name": name, "arguments": arguments}},
    st.sampled_from(["tide", "wind"]),
    st.dictionaries(st.sampled_from(["port", "day"]), st.one_of(words, st.integers(), st.booleans()), max_size=2),
)


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if draw(st.booleans()):
        messages.append({"role": "system", "content": draw(words)})
    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(words)})
        made = draw(st.lists(calls, max_size=2))
        if made:
            messages.append({"role": "assistant", "content": draw(st.sampled_from(["", "look"])), "tool_calls": made})
            messages += [{"role": "tool", "content": draw(words)} for _ in made]
        messages.append({"role": "assistant", "content": draw(words)})
    return messages


@settings(max_examples=6 * settings.default.max_examples)
@given(data=st.data(), messages=conversations())
def test_training_and_serving_render_the_same_tokens(data: Any, messages: list[dict[str, Any]]) -> None:
    name = data.draw(st.sampled_from(list(TEMPLATES)))
    if name == "calls where there is no content":
        messages = [message | ({"content": ""} if "tool_calls" in message else {}) for message in messages]
    tools = data.draw(st.sampled_from([[], [TIDE]]))
    form = data.draw(st.sampled_from(FORMS))
    tool_form = data.draw(st.sampled_from(TOOL_FORMS))
    chat = read_chat(form(messages), "a test", tool_form(tools), padded=form is as_padded)
    tokenizer = TOKENIZERS[name]
    rendered = render_chat(chat, tokenizer)
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    assert len(rendered.learned) == len(answers)
    for number, (start, _) in zip(answers, rendered.learned, strict=True):
        seen = tokenizer(rendered.text[:start], add_special_tokens=False)["input_ids"]
        assert served_ids(name, messages[:number], tools) == seen
    for message in messages:
        assert message["content"] in rendered.text, "nothing of it is lost"
        for call in message.get("tool_calls", []):
            arguments = call["function"]["arguments"]
            assert json.dumps(arguments, ensure_ascii=False) in rendered.text


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tool_form", TOOL_FORMS)
def test_every_form_is_one(form: Any, tool_form: Any) -> None:
    chat = read_chat(form(LOOP), "a test", tool_form([TIDE]), padded=form is as_padded)
    kept = [{key: value for key, value in message.items() if key != "tool_call_id"} for message in chat.messages]
    for message in kept:
        for call in message.get("tool_calls", []):
            call.pop("id", None)
    called = {"type": "function", "function": CALL["function"]}
    result = {"role": "tool", "content": "noon"}
    assert kept == [ASKED, CALLED | {"tool_calls": [called]}, result, TOLD]
    assert chat.tools == (TIDE,)


def test_what_a_model_learns_of_a_call() -> None:
    for form in FORMS:
        chat = read_chat(form(LOOP), "a test", padded=form is as_padded)
        written = f"[tide] {json.dumps(ARGUMENTS, ensure_ascii=False)};<|end|>"
        for name in ("another form", "arguments as text", "calls where there is no content"):
            assert learned_texts(name, chat) == [written, "At noon.<|end|>"]


# --- nulls of Arrow --------------------------------------------------------------------------------------------------


def called(**arguments: Any) -> list[dict[str, Any]]:
    return [ASKED, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}]


def tool_with(key: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": {"properties": {key: {"type": "string"}}}}}


def test_nulls_that_arrow_adds_are_removed(tmp_path: Path) -> None:
    import datasets
    import pyarrow
    import pyarrow.parquet

    rows = [
        {"messages": called(port="a"), "tools": [tool_with("port")]},
        {"messages": [ASKED, TOLD | {"weight": 1}], "tools": None},
        {"messages": called(day="b"), "tools": [tool_with("day")]},
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    for path in (tmp_path / "rows.parquet", tmp_path / "saved"):
        documents = build_documents([SourceConfig(path=str(path), messages_column="messages")])
        chats = [document.chat for document in documents if document.chat is not None]
        assert chats[0].messages[1]["tool_calls"][0]["function"]["arguments"] == {"port": "a"}
        assert chats[2].messages[1]["tool_calls"][0]["function"]["arguments"] == {"day": "b"}
        assert [chat.tools for chat in chats] == [(tool_with("port"),), (), (tool_with("day"),)]
        assert chats[1].messages == (ASKED, TOLD)


def test_a_null_that_json_has_is_an_argument(tmp_path: Path) -> None:
    chat = read_one(tmp_path / "rows.jsonl", {"messages": called(port=None)})
    assert chat.messages[1]["tool_calls"][0]["function"]["arguments"] == {"port": None}


def test_maps_of_arrow_are_objects() -> None:
    call = {"function": {"name": "f", "arguments": [("port", "a"), ("day", None)]}}
    chat = read_chat([ASKED, {"role": "assistant", "tool_calls": [call]}], "a test", padded=True)
    assert chat.messages[1]["tool_calls"][0]["function"]["arguments"] == {"port": "a", "day": None}, "no padding"
    call["function"]["arguments"] = []
    chat = read_chat([ASKED, {"role": "assistant", "tool_calls": [call]}], "a test", padded=True)
    assert chat.messages[1]["tool_calls"][0]["function"]["arguments"] == {}, "an empty map"


def test_nulls_of_json_text_are_values_wherever_the_text_stands(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    arguments = {"port": None, "days": {"of": None, "in": [None, 1]}}
    tool = {"name": "f", "parameters": {"properties": {"port": {"type": "string", "default": None}}}}
    calls = [{"name": "f", "arguments": arguments}]
    rows = [
        {"messages": json.dumps(called(**arguments)), "tools": json.dumps([tool])},
        {"messages": json.dumps([ASKED, {"from": "function_call", "value": json.dumps(calls)}]), "tools": None},
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "texts.parquet")
    nested = [{"role": "assistant", "tool_calls": json.dumps(calls)}, {"role": "assistant", "tool_calls": None}]
    rows_of_lists = [
        {"messages": [ASKED, nested[0]], "tools": [json.dumps(tool)]},
        {"messages": [ASKED, {"role": "function_call", "content": json.dumps(calls)}], "tools": None},
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows_of_lists), tmp_path / "lists.parquet")
    for name in ("texts", "lists"):
        source = SourceConfig(path=str(tmp_path / f"{name}.parquet"), messages_column="messages")
        chats = [document.chat for document in build_documents([source]) if document.chat is not None]
        for chat in chats:
            assert chat.messages[1]["tool_calls"][0]["function"]["arguments"] == arguments
        assert [chat.tools for chat in chats] == [({"type": "function", "function": tool},), ()]


def test_columns_of_lists_are_messages() -> None:
    columns = {"role": ["user", "assistant"], "content": ["a", "b"]}
    assert read_messages(columns, "a test") == [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


# --- what stands beside the messages ---------------------------------------------------------------------------------


def test_tools_and_system_of_a_row_are_read_without_being_named(tmp_path: Path) -> None:
    row = {"messages": LOOP, "tools": json.dumps([TIDE]), "system": "Be kind."}
    chat = read_one(tmp_path / "rows.jsonl", row)
    assert chat.tools == (TIDE,)
    assert chat.messages[0] == {"role": "system", "content": "Be kind."}
    same = read_one(tmp_path / "rows.jsonl", row | {"messages": list(chat.messages)})
    assert same.messages == chat.messages
    with pytest.raises(DataError, match="functions"):
        read_one(tmp_path / "rows.jsonl", row, tools_column="functions")


@pytest.mark.parametrize("answer", ["At noon.", "42", "[1] At noon.", '"noon"'])
def test_a_question_and_an_answer_as_text_are_a_conversation(answer: str, tmp_path: Path) -> None:
    asked, told = ASKED["content"], {"role": "assistant", "content": answer}
    for question in (asked, json.dumps([ASKED]), [ASKED]):
        chat = read_one(tmp_path / "rows.jsonl", {"asked": question, "messages": answer}, prompt_column="asked")
        assert chat.messages == (ASKED, told)
        assert chat.learned == [1]
    table = tmp_path / "rows.csv"
    quoted = answer.replace('"', '""')
    table.write_text(f'question,answer\n{asked},"{quoted}"\n', encoding="utf-8")
    config = SourceConfig(path=str(table), prompt_column="question", messages_column="answer")
    (document,) = build_documents([config])
    assert document.chat is not None
    assert document.chat.messages == (ASKED, told)


@pytest.mark.parametrize("row", [{"asked": '[{"role": "user"', "messages": "a"}, {"asked": "a", "messages": " "}])
def test_messages_that_are_not_whole_are_never_taken_for_text(row: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(DataError):
        read_one(tmp_path / "rows.jsonl", row, prompt_column="asked")


def test_a_table_of_questions_and_answers_is_refused_with_the_keys_to_set(tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        read_one(tmp_path / "rows.jsonl", {"question": "a", "answer": "b"})
    assert "prompt_column" in str(error.value)
    assert "messages_column" in str(error.value)


def test_messages_of_a_prompt_are_context(tmp_path: Path) -> None:
    row = {"prompt": [ASKED, TOLD, ASKED], "messages": [{"role": "assistant", "content": "At one."}]}
    chat = read_one(tmp_path / "rows.jsonl", row, prompt_column="prompt")
    assert learned_texts("nothing of tools", chat) == ["At one.<|end|>"]


@pytest.mark.parametrize("mark", [{"weight": 0}, {"weight": 0.0}, {"train": False}, {"loss_mask": 0}, {"loss": False}])
def test_a_turn_that_is_marked_as_context_is_seen_and_not_learned(mark: dict[str, Any]) -> None:
    wrong = {"role": "assistant", "content": "At six."} | mark
    chat = read_chat([ASKED | {"weight": None}, wrong, ASKED, TOLD | dict.fromkeys(mark, 1)], "a test")
    assert learned_texts("nothing of tools", chat) == ["At noon.<|end|>"]
    assert "At six." in render_chat(chat, TOKENIZERS["nothing of tools"]).text
    assert chat.answers == "At noon."
    assert not any(mark.keys() & message.keys() for message in chat.messages)


@pytest.mark.parametrize("is_learned", [False, True])
def test_a_call_joins_the_text_before_it_only_if_both_are_learned_or_neither(is_learned: bool) -> None:
    said = {"from": "gpt", "value": "Let me look.", "train": is_learned}
    functions = json.dumps([CALL["function"]])
    rest = [RESULT, TOLD]
    chat = read_chat([ASKED, said, {"from": "function_call", "value": functions, "train": is_learned}, *rest], "a test")
    assert [message["role"] for message in chat.messages] == ["user", "assistant", "tool", "assistant"]
    assert (1 in chat.learned) == is_learned
    call = {"from": "function_call", "value": functions, "train": not is_learned}
    with pytest.raises(DataError):  # an answer does not follow an answer
        read_chat([ASKED, said, call, *rest], "a test")


def test_calls_with_the_keys_of_the_answer_before_them_are_a_part_of_it() -> None:
    messages = read_messages([ASKED, TOLD | {"name": "a"}, CALLED_ALONE | {"name": "a"}], "a test")
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    assert messages == [ASKED, TOLD | {"name": "a", "tool_calls": [call]}]


def test_an_empty_turn_may_be_context() -> None:
    chat = read_chat([ASKED, {"role": "assistant", "content": "", "weight": 0}, ASKED, TOLD], "a test")
    assert learned_texts("nothing of tools", chat) == ["At noon.<|end|>"]


def test_marks_of_parts_that_agree_with_their_message_are_fine() -> None:
    parts = [{"type": "text", "text": "At "}, {"type": "text", "text": "noon.", "train": True}]
    asked = {"role": "user", "content": [{"type": "text", "text": "When?", "train": False}]}
    chat = read_chat([asked, {"role": "assistant", "content": parts}], "a test")
    assert (chat.answers, chat.learned) == ("At noon.", [1])
    context = {"role": "assistant", "content": [part | {"train": False} for part in parts], "weight": 0}
    assert read_chat([asked, context, asked, TOLD], "a test").learned == [3]


# --- results of parallel calls ---------------------------------------------------------------------------------------


def parallel(*results: tuple[str | None, str], ids: Any = ("p", "o")) -> list[dict[str, Any]]:
    """A question, calls of two ports, their results, each with the id of a call, and an answer."""
    made = [{"id": id_, "type": "function", "function": {"name": "tide", "arguments": {}}} for id_ in ids]
    told = [{"role": "tool", "content": content, "tool_call_id": id_} for id_, content in results]
    return [ASKED, {"role": "assistant", "content": "", "tool_calls": made}, *told, TOLD]


@pytest.mark.parametrize(
    ("messages", "contents"),
    [
        (parallel(("o", "at nine"), ("p", "at six")), ["at six", "at nine"]),
        (parallel(("p", "at six"), ("o", "at nine")), ["at six", "at nine"]),
        (parallel(("p", "at six")), ["at six"]),
        (parallel((None, "at nine"), (None, "at six")), ["at nine", "at six"]),
        (parallel(("o", "at nine"), ("p", "at six"), ids=(None, None)), ["at nine", "at six"]),
        (parallel(("c", "third"), ("a", "first"), ("b", "second"), ids=("a", "b", "c")), ["first", "second", "third"]),
    ],
)
def test_results_are_in_the_order_of_the_calls_that_they_name(messages: Any, contents: list[str]) -> None:
    again = [*messages, *messages]
    for found in (list(read_chat(again, "a test").messages), read_messages(again, "a test")):
        assert [message["content"] for message in found if message["role"] == "tool"] == contents * 2
        assert [message["role"] for message in found] == [message["role"] for message in again]
    prompt, answer = messages[:-1], messages[-1:]
    chat = read_chat(answer, "a test", prompt=prompt)
    assert [message["content"] for message in chat.messages if message["role"] == "tool"] == contents


# --- what can't be used ----------------------------------------------------------------------------------------------

PART = {"type": "text", "text": "a"}
OTHER_SYSTEM = [{"role": "system", "content": "a"}, {"role": "system", "content": "b"}, ASKED, TOLD]


def answered(**keys: Any) -> list[Any]:
    return [ASKED, {"role": "assistant", "content": "a"} | keys]


CALLED_ALONE = {"role": "function_call", "content": '{"name": "f", "arguments": {}}'}


@pytest.mark.parametrize(
    ("messages", "found"),
    [
        (answered(tool_calls=[{"function": {"name": "f", "arguments": "[1]"}}]), "message 2, call 1"),
        (answered(tool_calls=[{"function": {"name": "f", "arguments": "{"}}]), "message 2, call 1"),
        (answered(tool_calls=[{"function": {"name": "f", "arguments": 3}}]), "arguments"),
        (answered(tool_calls=[{"function": {"arguments": {}}}]), "no name"),
        (answered(tool_calls=[{"name": "f", "parameters": {"a": 1}}]), "parameters"),
        (answered(tool_calls=[{"type": "custom", "custom": {"name": "f"}}]), "no name"),
        (answered(tool_calls=[{"name": "f", "function": {"name": "f", "arguments": {"a": 1}}}]), "the key function"),
        (answered(tool_calls=["f"]), "JSON"),
        (answered(tool_calls=3), "int"),
        (answered(function_call={"arguments": "{}"}), "no name"),
        ([ASKED, {"from": "function_call", "value": "look"}], "JSON"),
        ([ASKED, TOLD, CALLED_ALONE | {"reasoning_content": "Hm."}], "message 3 has the key reasoning_content"),
        ([ASKED, TOLD | {"name": "a"}, CALLED_ALONE | {"name": "b"}], "message 3 has the key name"),
        ([ASKED | {"tool_calls": [CALL]}, TOLD], "message 1"),
        (answered(weight=0.5), "0.5"),
        (answered(weight=0, train=True), "train"),
        ([ASKED | {"train": True}, TOLD], "train"),
        ([ASKED, TOLD | {"weight": 0}], "context"),
        (answered(train_detail=[{"begin_offset": 0}]), "train_detail"),
        ([ASKED | {"images": ["a.png"]}, TOLD], "images"),
        (answered(value="b"), "content and value"),
        ([{"role": "user", "content": [{"type": "text"}]}, TOLD], "message 1"),
        (OTHER_SYSTEM, "message 2 has the role system"),
        ([ASKED, TOLD, TOLD], "message 3 has the role assistant"),
        ([ASKED, TOLD | {"mask": 1}], "mask"),
        ([ASKED | {"video": "a.mp4"}, TOLD], "video"),
        (answered(refusal="I will not."), "refusal"),
        ([ASKED, {"role": "assistant", "content": None, "refusal": "I will not."}], "refusal"),
        ([ASKED, {"role": "assistant", "content": [PART | {"train": False}, PART | {"train": True}]}], "part 1"),
        ([ASKED, {"role": "assistant", "content": [PART, PART | {"weight": 0}]}], "part 2"),
        ([ASKED, {"role": "assistant", "content": [PART | {"train": True}], "train": False}, ASKED, TOLD], "part 1"),
        ([ASKED, {"role": "assistant", "content": [PART | {"train_detail": []}, PART | {"mask": 0}]}], "part 2"),
        ([{"role": "user", "content": [PART | {"train": True}]}, TOLD], "part 1"),
        (parallel(("x", "a"), ("p", "b")), "'x'"),
        (parallel(("p", "a"), ("p", "b")), "message 3"),
        (parallel(("p", "a"), (None, "b")), "message 4"),
        (parallel(("p", "a"), ("p", "b"), ids=("p", "p")), "several calls"),
        (parallel(("o", "a")), "'p'"),
        ([ASKED, TOLD | {"content": "a\ud83d"}], "message 2"),
        ([ASKED | {"name": "\udc00"}, TOLD], "message 1"),
        (answered(tool_calls=[{"name": "f", "arguments": {"\ud83d": 1}}]), "message 2"),
        (answered(tool_calls=[{"name": "f", "arguments": '{"a": ["\\ud83d"]}'}]), "message 2"),
        (answered(tool_calls=[{"name": "f", "arguments": '{"a": 1e400}'}]), "inf"),
        (answered(tool_calls=[{"name": "f", "arguments": {"a": [float("nan")]}}]), "nan"),
        (answered(tool_calls=[{"name": "f", "arguments": '{"a": 1, "a": 2}'}]), "'a'"),
        ('[{"role": "user", "content": "a", "content": "b"}]', "'content'"),
        ("[", "JSON"),
        ({"role": ["user"], "content": []}, "messages"),
    ],
)
def test_a_conversation_that_can_t_be_used_is_named(messages: Any, found: str) -> None:
    with pytest.raises(DataError, match=r"^rows.jsonl: line 3") as error:
        read_chat(messages, "rows.jsonl: line 3")
    assert found in str(error.value)
    assert str(error.value).count(". ") == 0, "one sentence"


@pytest.mark.parametrize(
    ("tools", "found"),
    [
        ("look", "JSON"),
        ({"name": "f"}, "dict"),
        ([3], "tool 1"),
        ([{"description": "a"}], "no name"),
        ([{"type": "web_search"}], "web_search"),
        ([{"name": "f", "parameters": [1]}], "parameters"),
        ([TIDE, TIDE], "'tide'"),
        ([{"name": "f", "description": "a\ud83d"}], "tool 1"),
        ([{"name": "f", "parameters": '{"default": 1e400}'}], "tool 1"),
        ('[{"name": "f", "name": "g"}]', "'name'"),
    ],
)
def test_tools_that_can_t_be_used_are_named(tools: Any, found: str) -> None:
    with pytest.raises(DataError, match=r"^rows.jsonl: line 3") as error:
        read_tools(tools, "rows.jsonl: line 3")
    assert found in str(error.value)


def test_two_texts_of_the_system_are_named(tmp_path: Path) -> None:
    row = {"messages": [{"role": "system", "content": "a"}, ASKED, TOLD], "system": "b"}
    with pytest.raises(DataError, match="system"):
        read_one(tmp_path / "rows.jsonl", row)


# --- templates -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "messages", "tools", "found"),
    [
        ("{% if tools %}{{ raise_exception('no tools, please') }}{% endif %}", LOOP, [TIDE], "no tools, please"),
        (
            "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}",
            LOOP,
            [TIDE],
            "no system",
        ),
    ],
)
def test_a_template_that_refuses_is_quoted(template: str, messages: Any, tools: Any, found: str) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template + TEMPLATES["nothing of tools"]
    with pytest.raises(DataError, match=found):
        chat_tokens(tokenizer, read_chat(messages, "a test", tools))
    assert len(chat_tokens(tokenizer, read_chat(messages, "a test"))[0])


@pytest.mark.parametrize(
    ("template", "answer"),
    [
        ("calls where there is no content", CALLED | {"content": "look"}),
        ("the first call", CALLED | {"tool_calls": [CALL, CALL | {"id": "c2"}]}),
    ],
)
def test_a_template_that_would_drop_a_part_of_a_message_is_named(template: str, answer: Any) -> None:
    tokenizer = tiny_tokenizer()
    first = TEMPLATES["another form"].replace("m.tool_calls or []", "(m.tool_calls or [])[:1]")
    tokenizer.chat_template = TEMPLATES.get(template, first)
    messages = [ASKED, answer, RESULT, TOLD]
    with pytest.raises(DataError, match="message 2"):
        chat_tokens(tokenizer, read_chat(messages, "a test"))
    with pytest.raises(DataError, match="message 2"):
        render_question([*messages, ASKED], tokenizer)


def test_the_forms_of_templates_are_found() -> None:
    forms = {name: template_form(template) for name, template in TEMPLATES.items()}
    assert {name for name, form in forms.items() if form.calls} == TEMPLATES.keys() - {
        "nothing of tools",
        "contents in parts",
    }
    assert [name for name, form in forms.items() if form.parts] == ["contents in parts"]
    assert [name for name, form in forms.items() if form.text_arguments] == [
        "arguments as text",
        "arguments that are printed",
    ]
    assert [name for name, form in forms.items() if form.no_content] == ["calls where there is no content"]
    assert SERVED["objects in tags"].call_text == SERVED["a thought in the last answer alone"].call_text == HERMES
    assert not SERVED["another form"].call_text.is_object


def test_keys_that_the_template_does_not_read_are_counted(tmp_path: Path) -> None:
    messages = [
        ASKED | {"name": "Ada", "stamp": 3},
        TOLD | {"stamp": 4, "reasoning_content": "Hm."},
        ASKED,
        CALLED,
        RESULT | {"name": "tide", "stamp": 5},
        TOLD,
    ]
    beside = {"images": ["a.png"], "chat_template_kwargs": {}, "weight": 1, "video": None, "id": 3}
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": messages} | beside) + "\n", encoding="utf-8")
    source = {"path": str(tmp_path / "rows.jsonl"), "messages_column": "messages"}
    for streaming in (False, True):
        config = DataConfig.parse({"new": [source | {"streaming": streaming}], "replay_fraction": 0, "length": 128})
        tokenizer = with_template("another form")
        mixture = build_mixture(config, tokenizer, 1)
        mixture.batch(0)
        found = mixture.ignored_keys()
        assert found.keys() == {"name", "stamp", "reasoning_content", "column images"}
        assert found["stamp"] == 3 * found["name"]
        read = "{{ m.name }}{{ m.stamp }}{{ m.thinking }}{{ m.content }}"
        tokenizer.chat_template = tokenizer.chat_template.replace("{{ m.content }}", read)
        assert build_mixture(config, tokenizer, 1).ignored_keys().keys() <= {"column images"}


@pytest.mark.parametrize("answer", ["messages_column", "text_column"])
def test_an_input_beside_the_prompt_is_counted(answer: str, tmp_path: Path) -> None:
    rows = [
        {"instruction": "Add.", "input": "2 and 3", "output": "5"},
        {"instruction": "Greet.", "input": "", "output": "Hello"},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    source = {"path": str(path), "prompt_column": "instruction", answer: "output"}
    config = DataConfig.parse({"new": [source], "replay_fraction": 0, "length": 8})
    assert build_mixture(config, with_template("another form"), 1).ignored_keys() == {"column input": 1}


@pytest.mark.parametrize("answer", ['{"a": 1}', "[1]", '[{"city": "Riga"}]', "[not JSON", '{"from": "Riga"}'])
def test_an_answer_that_is_json_is_an_answer(answer: str) -> None:
    chat = read_chat(answer, "a test", prompt="Which?")
    assert chat.messages[1] == {"role": "assistant", "content": answer}


@pytest.mark.parametrize("answer", ["", None])
def test_a_prompt_without_an_answer_is_refused(answer: str | None) -> None:
    with pytest.raises(DataError, match="a test"):
        read_chat(answer, "a test", prompt="Which?")


@pytest.mark.parametrize("number", [0, 1])
def test_a_content_with_a_mark_between_turns_is_refused(number: int) -> None:
    tokenizer = with_template("another form")
    messages = [dict(ASKED), dict(TOLD)]
    messages[number]["content"] += f" {tokenizer.eos_token} "
    with pytest.raises(DataError, match=f"message {number + 1}.*{tokenizer.eos_token}"):
        chat_tokens(tokenizer, read_chat(messages, "a test"))


def test_a_question_is_read_in_every_form() -> None:
    for name, tokenizer in TOKENIZERS.items():
        text = render_question([*as_openai(LOOP), {"from": "human", "value": "Why?"}], tokenizer)
        assert text == render_messages(tokenizer, [*LOOP, {"role": "user", "content": "Why?"}], header=True), name


@pytest.mark.parametrize(("role", "is_hinted"), [("User", True), (" HUMAN", True), ("chef", False)])
def test_a_role_in_another_case_is_hinted_at(role: str, is_hinted: bool) -> None:
    with pytest.raises(DataError) as error:
        read_chat([{"role": role, "content": "a"}, {"role": "assistant", "content": "b"}], "line 1")
    assert (f"did you mean {role.strip().lower()}" in str(error.value)) is is_hinted
