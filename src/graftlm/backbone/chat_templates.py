"""Render conversations with chat templates.

Training, audits and chats render tools as this module does. A server describes tools as text also where the template
writes calls with special tokens, which its answers do not show.

Templates differ in the form that they take: contents as text or as a list of parts, arguments of calls as an object or
as text, an empty content or none beside a call. Short trial conversations show which form a template writes out. Tools,
calls and results that a template does not write are written as text instead, in the form of Hermes and Qwen: JSON
between `<tool_call>` and `</tool_call>`. A system message that it does not write begins the next message of the user.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING, Any

from graftlm.backbone.text_parts import common_length
from graftlm.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]
"""A message in the form of chat templates: `role`, `content` (text), `tool_calls` if there are any, and other keys."""
Tool = Message
"""A tool in the form of chat templates: `type` and `function`, which has a name, and mostly a JSON schema."""

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
THOUGHT_IN_CONTENT = "<think> in content"
_WRITTEN_KEYS = {"role", "content", "tool_calls"}
_LINKS = ("name", "tool_call_id")
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")  # transformers gives templates all of them
_SPECIAL_TOKENS = "{% set bos_token, eos_token, unk_token, pad_token = '<s>', '</s>', '<unk>', '<pad>' %}"
_TEXT, _RESULT, _TOOL, _SECOND = "sometext", "someresult", "trial_tool", "trial_second"
_KEY, _VALUE = "trial_key", "trial_value"
_ARGUMENTS = re.compile(rf'\{{\s*"{_KEY}"\s*:\s*"{_VALUE}"\s*\}}')
_THOUGHT = re.compile(r"<think>.*?</think>", re.DOTALL)
_SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "description": "-"}}, "required": ["a"]}
_TRIAL_TOOL: Tool = {
    "type": "function",
    "function": {"name": _TOOL, "description": "-", "parameters": _SCHEMA},
}
_OTHER_TOOL: Tool = {"type": "function", "function": {"name": "other", "description": "-", "parameters": _SCHEMA}}
_QUESTION: Message = {"role": "user", "content": "trial question"}
_SYSTEM: Message = {"role": "system", "content": "trial instructions"}
_RESULT_MESSAGE: Message = {"role": "tool", "content": _RESULT, "name": _TOOL, "tool_call_id": "trial0000"}


@dataclass(frozen=True, slots=True)
class CallText:
    """How a template writes a call.

    Attributes:
        before: the text before the name.
        between: the text between the name and the arguments.
        after: the text after the arguments.
    """

    before: str
    between: str
    after: str

    @property
    def is_object(self) -> bool:
        """Whether it is an object with name and arguments between `<tool_call>` and `</tool_call>`."""
        if not (self.before.startswith(OPEN) and self.after.endswith(CLOSE)):
            return False
        body = self.before.removeprefix(OPEN) + _TOOL + self.between + "{}" + self.after.removesuffix(CLOSE)
        try:
            return bool(json.loads(body) == {"name": _TOOL, "arguments": {}})
        except ValueError:
            return False


HERMES = CallText(before=f'{OPEN}\n{{"name": "', between='", "arguments": ', after=f"}}\n{CLOSE}")


@dataclass(frozen=True, slots=True)
class TemplateForm:
    """The form of conversations that a chat template writes out.

    Attributes:
        parts: whether it takes a content as a list of parts rather than as text.
        tools: whether it writes tools.
        refuses_tools: whether it raises an error where there are tools.
        system: whether it writes a system message that begins a conversation, or refuses it itself.
        later_system: whether it writes a system message inside a conversation, or refuses it itself.
        calls: whether it writes calls and their results.
        text_arguments: whether it takes the arguments of a call as JSON text rather than as an object.
        no_content: whether it takes calls without a content rather than with an empty one.
        text_beside_calls: whether it writes both the text and the calls of a message.
        several_calls: whether it writes all calls of a message, or refuses several with its own message.
        call_text: how it writes a call; None if that has no fixed form.
    """

    parts: bool
    tools: bool
    refuses_tools: bool
    system: bool
    later_system: bool
    calls: bool = False
    text_arguments: bool = False
    no_content: bool = False
    text_beside_calls: bool = False
    several_calls: bool = False
    call_text: CallText | None = None


def render_messages(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Sequence[Tool] = (),
    *,
    header: bool = False,
    template: str | None = None,
    values: Mapping[str, Any] | None = None,
) -> str:
    """Return a conversation in a tokenizer's chat template.

    Args:
        tokenizer: the tokenizer.
        messages: the messages, with a role, a content that is text, and other keys.
        tools: the tools that the model may call, in the same form.
        header: end with the beginning of an answer of the assistant.
        template: replaces the tokenizer's own template.
        values: further values for the template.

    Raises:
        DataError: the template does not write all of a message.
        Exception: the template can't be rendered. Jinja and the template itself may raise anything.
    """
    messages, tools = template_inputs(tokenizer, messages, tools, template)
    text = tokenizer.apply_chat_template(
        messages,
        tools=[*tools] or None,
        chat_template=template,
        add_generation_prompt=header,
        tokenize=False,
        **(values or {}),
    )
    return str(text)


def template_inputs(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Sequence[Tool] = (),
    template: str | None = None,
) -> tuple[list[Message], list[Tool]]:
    """Return messages and tools as a tokenizer's chat template takes them; see `render_messages`.

    Raises:
        DataError: the template does not write all of a message.
    """
    form = tokenizer_form(tokenizer, tools, template)
    messages = list(messages)
    if tools and not form.tools and not form.refuses_tools:
        messages = as_plain_text(messages, tools)
        tools = ()
    elif not form.calls and any(message["role"] == "tool" or "tool_calls" in message for message in messages):
        messages = as_plain_text(messages)
    messages = _with_written_system(messages, form)
    calls_changed = [_for_template(message, number, form) for number, message in enumerate(messages, start=1)]
    if form.parts:
        return [_with_parts(message) for message in calls_changed], list(tools)
    return calls_changed, list(tools)


def common_ending(first: str, second: str) -> str:
    """Return what a chat template puts behind a content, from renderings of two contents with different last letters.

    It is found even if the template changes the case, the blanks or the length of contents, and is empty if it writes
    no content.
    """
    if first == second:
        return ""
    return first[len(first) - common_length(first[::-1], second[::-1]) :]


def ignored_keys(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> Iterator[str]:
    """Yield each key of a message that a tokenizer's chat template does not read, once for each message.

    Keys that link results to calls are left out, since the order of the messages shows that, too. Reasoning that the
    template cuts from the content of an answer before the last question is yielded as `THOUGHT_IN_CONTENT`.
    """
    template = tokenizer.get_chat_template(None)
    last_question = max((n for n, message in enumerate(messages) if message["role"] == "user"), default=-1)
    for number, message in enumerate(messages):
        role = message["role"]
        links = _LINKS if role == "tool" else ()
        for key in message.keys() - _WRITTEN_KEYS - set(links):
            if not _reads_key(template, role, key, is_earlier=number < last_question):
                yield key
        has_thought = role == "assistant" and _THOUGHT.search(message["content"])
        if has_thought and number < last_question and _cuts_thoughts(template):
            yield THOUGHT_IN_CONTENT


@lru_cache(maxsize=1024)
def _reads_key(template: str, role: str, key: str, *, is_earlier: bool) -> bool:
    """Return whether the value of a key of messages with a role makes a difference to a chat template.

    Many templates leave the reasoning of answers out that are `is_earlier` than the last question.
    """
    names = _REASONING_KEYS if key in _REASONING_KEYS else (key,)
    if not any(name in template for name in names):
        return False
    if role == "tool":  # which follows a call, in a form that depends on the template
        return True
    message: Message = {"role": role, "content": _TEXT}
    before = [_QUESTION] if role == "assistant" else []
    after = [_QUESTION] if role == "system" or (role == "assistant" and is_earlier) else []
    without = _render(template, [*before, message, *after])
    return _render(template, [*before, {**message, key: _VALUE}, *after]) != without


@lru_cache(maxsize=64)
def _cuts_thoughts(template: str) -> bool:
    """Return whether a template cuts the reasoning from the content of answers before the last question."""
    messages: list[Message] = [
        _QUESTION,
        {"role": "assistant", "content": f"<think>\n{_VALUE}\n</think>\n\n{_TEXT}"},
        _QUESTION,
    ]
    if _takes_parts(template):
        messages = [_with_parts(message) for message in messages]
    written = _render(template, messages)
    return _has(written, _TEXT) and not _has(written, _VALUE)


def tokenizer_form(
    tokenizer: PreTrainedTokenizerBase,
    tools: Sequence[Tool] = (),
    template: str | None = None,
) -> TemplateForm:
    """Return the form of a tokenizer's template, or of `template`; some tokenizers have another one for tools."""
    chosen = tokenizer.get_chat_template(template, tools=list(tools) or None)
    return template_form(chosen)


def _with_written_system(messages: Sequence[Message], form: TemplateForm) -> list[Message]:
    """Return messages in which system messages that the template does not write begin the user's next message."""
    changed: list[Message] = []
    held: list[str] = []
    for number, message in enumerate(messages):
        is_written = form.later_system if number else form.system
        if message["role"] == "system" and not is_written:
            held.append(message["content"])
            continue
        if held and message["role"] == "user":
            changed.append({**message, "content": "\n\n".join([*held, message["content"]])})
        else:
            changed += [{"role": "user", "content": text} for text in held]
            changed.append(message)
        held = []
    return changed + [{"role": "user", "content": text} for text in held]


def _for_template(message: Message, number: int, form: TemplateForm) -> Message:
    calls = message.get("tool_calls")
    if calls is None:
        return message
    if message["content"].strip() and not form.text_beside_calls:
        raise DataError(f"message {number} has text and calls of tools, but the template writes only one of them")
    if len(calls) > 1 and not form.several_calls:
        raise DataError(f"message {number} has several calls of tools, but the template does not write all of them")
    changed = dict(message)
    if form.no_content and not message["content"]:
        del changed["content"]
    if form.text_arguments:
        changed["tool_calls"] = [_with_text_arguments(call) for call in calls]
    return changed


def _with_parts(message: Message) -> Message:
    if not message.get("content"):
        return message
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def _with_text_arguments(call: Message) -> Message:
    function = call["function"]
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


@lru_cache(maxsize=64)
def template_form(template: str) -> TemplateForm:
    """Return the form of conversations that a chat template writes out, by rendering short ones.

    Args:
        template: the Jinja text.
    """
    with_tools = _render(template, [_QUESTION], [_TRIAL_TOOL])
    plain = TemplateForm(
        parts=_takes_parts(template),
        tools=with_tools is not None and _TOOL in with_tools,
        refuses_tools=with_tools is None and _render(template, [_QUESTION]) is not None,
        system=True,
        later_system=True,
    )
    plain = replace(
        plain,
        system=_writes_system(template, plain),
        later_system=_writes_system(template, plain, _QUESTION, {"role": "assistant", "content": _TEXT}),
    )
    # Most templates take an object, and an empty content.
    for text_arguments, no_content in product((False, True), repeat=2):
        form = replace(plain, calls=True, text_arguments=text_arguments, no_content=no_content)
        call = _answer(form, "", _TOOL)
        written = _render_question(template, call)
        if written is None or not all(part in written for part in (_TOOL, _KEY, _VALUE)):
            continue
        if f"'{_KEY}'" in written:  # an object of Python instead of JSON
            continue
        written = _render_question(template, call, _RESULT_MESSAGE)
        if not _has(written, _RESULT):
            continue
        return replace(
            form,
            text_beside_calls=_writes(template, _answer(form, _TEXT, _TOOL), _TEXT, _TOOL),
            several_calls=_writes(template, _answer(form, "", _TOOL, _SECOND), _TOOL, _SECOND),
            call_text=_call_text(template, form),
        )
    return plain


def _takes_parts(template: str) -> bool:
    """Return whether a template writes contents that are lists of parts, and not those that are text."""
    answer: Message = {"role": "assistant", "content": _TEXT}
    if _has(_render(template, [_QUESTION, answer]), _TEXT):
        return False
    return _has(_render(template, [_with_parts(_QUESTION), _with_parts(answer)]), _TEXT)


def _writes_system(template: str, form: TemplateForm, *before: Message) -> bool:
    """Return whether a template writes a system message behind others, or refuses it itself."""
    messages = [*before, {"role": "system", "content": _RESULT}, _QUESTION]
    if form.parts:
        messages = [_with_parts(message) for message in messages]
    surroundings: list[list[Tool]] = [[], [_OTHER_TOOL]] if form.tools else [[]]
    written = [_render(template, messages, tools) for tools in surroundings]
    return all(text is None or _has(text, _RESULT) for text in written)


def _has(written: str | None, content: str) -> bool:
    """Return whether a rendering has a content, whose case the template may change."""
    return written is not None and content in written.casefold()


def _writes(template: str, answer: Message, *parts: str) -> bool:
    """Return whether a template writes all parts of an answer, or refuses it itself."""
    written = _render_question(template, answer)
    return written is None or all(_has(written, part) for part in parts)


def _answer(form: TemplateForm, text: str, *names: str) -> Message:
    """Return an answer with calls, in one of the forms that templates take."""
    calls = []
    for number, name in enumerate(names):
        call: Message = {
            "id": f"trial000{number}",  # nine letters and digits, as templates of Mistral expect
            "type": "function",
            "function": {"name": name, "arguments": {_KEY: _VALUE}},
        }
        calls.append(_with_text_arguments(call) if form.text_arguments else call)
    answer: Message = {"role": "assistant", "content": text, "tool_calls": calls}
    if form.no_content and not text:
        del answer["content"]
    return _with_parts(answer) if form.parts else answer


def _answer_of(form: TemplateForm, text: str) -> Message:
    """Return an answer without calls, in the form of the template."""
    answer: Message = {"role": "assistant", "content": text}
    return _with_parts(answer) if form.parts else answer


def _call_text(template: str, form: TemplateForm) -> CallText | None:
    """Return how a template writes a call, or None if it does not write name and JSON arguments in this order."""
    header = _render_question(template, header=True)
    called = _render_question(template, _answer(form, "", _TOOL))
    answered = _render_question(template, _answer_of(form, "yes"))
    other = _render_question(template, _answer_of(form, "no"))
    if header is None or called is None or answered is None or other is None or not called.startswith(header):
        return None
    written = called[len(header) :].removesuffix(common_ending(answered, other))
    before, name, rest = written.partition(_TOOL)
    arguments = _ARGUMENTS.search(rest)
    if not name or arguments is None:
        return None
    return CallText(
        before=_THOUGHT.sub("", before).lstrip(),
        between=rest[: arguments.start()],
        after=rest[arguments.end() :].rstrip(),
    )


def _render_question(template: str, *messages: Message, header: bool = False) -> str | None:
    """Return a rendered question with what follows; with a tool, if the template does not render it without tools."""
    asked = [_QUESTION, *messages]
    written = _render(template, asked, header=header)
    return written if written is not None else _render(template, asked, [_OTHER_TOOL], header=header)


def _render(
    template: str,
    messages: Sequence[Message],
    tools: Sequence[Tool] = (),
    *,
    header: bool = False,
) -> str | None:
    """Return a rendered trial conversation, or None if the template raises an error.

    If it raises an error without a system message, it is rendered with one.
    """
    written = _render_as_given(template, messages, tools, header=header)
    if written is not None or messages[0]["role"] == "system":
        return written
    in_parts = isinstance(messages[0]["content"], list)
    system = _with_parts(_SYSTEM) if in_parts else _SYSTEM
    return _render_as_given(template, [system, *messages], tools, header=header)


def _render_as_given(template: str, messages: Sequence[Message], tools: Sequence[Tool], *, header: bool) -> str | None:
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        rendered, _ = render_jinja_template(
            conversations=[list(messages)],
            tools=list(tools) or None,
            chat_template=_SPECIAL_TOKENS + template,
            add_generation_prompt=header,
        )
    except Exception:  # Jinja and the template itself may raise anything.
        return None
    return str(rendered[0])


def as_plain_text(messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[Message]:
    """Return a conversation for a chat template that writes neither tools nor calls.

    The tools are described in the system message, calls become text of the assistant, and results become messages of
    the user, together with a message of the user that follows them.

    Args:
        messages: at least one message.
        tools: the tools; without any, the system message stays the same.
    """
    chat: list[Message] = []
    for message in messages:
        plain = _as_plain_message(message) | {"is_result": message["role"] == "tool"}
        follows_result = plain["role"] == "user" and chat and chat[-1]["is_result"]
        if follows_result:
            chat[-1] |= plain | {"content": f"{chat[-1]['content']}\n{plain['content']}"}
        else:
            chat.append(plain)
    for message in chat:
        del message["is_result"]
    if not tools:
        return chat
    instructions = _instructions(tools)
    if chat[0]["role"] == "system":
        system = chat.pop(0)
        instructions = f"{system['content']}\n\n{instructions}"
    return [{"role": "system", "content": instructions}, *chat]


def _as_plain_message(message: Message) -> Message:
    text = message["content"]
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{text}\n</tool_response>"}
    parts = [text] if text else []
    for call in message.get("tool_calls", ()):
        function = json.dumps(call["function"], ensure_ascii=False)
        parts.append(f"{OPEN}\n{function}\n{CLOSE}")
    others = {key: value for key, value in message.items() if key != "tool_calls"}
    return others | {"content": "\n".join(parts)}


def _instructions(tools: Sequence[Tool]) -> str:
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    return (
        f"These functions are available, one a line as JSON:\n{lines}\n"
        f'To call one, write {OPEN}\n{{"name": "its name", "arguments": {{}}}}\n{CLOSE} with arguments that its '
        "parameters describe. The result follows in the next message."
    )
