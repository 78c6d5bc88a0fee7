"""Conversations in one form, whatever wrote them: messages and tools for chat templates.

Rows of OpenAI, TRL, Axolotl, ShareGPT and ms-swift are read, with JSON text in place of lists and objects, and with the
nulls that Arrow puts where another row has a key. What can't be used is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from graftlm.backbone.chat_templates import Message, Tool
from graftlm.data.call_results import result_order
from graftlm.data.json_values import check_writable, parsed, unpadded
from graftlm.data.table_files import type_name
from graftlm.errors import DataError

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "ipython": "tool",
    "tool_response": "tool",
}
_CALL_ROLES = ("function_call", "tool_call")  # roles of messages whose content is a call, or a list of calls
_PLAIN_ROLES = _ROLES.keys() - set(_CALL_ROLES)
# Roles that may precede a role. The empty one is the beginning of a conversation.
_ALLOWED_BEFORE = {
    "system": ("",),
    "user": ("", "system", "assistant", "tool"),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool"),
}
_MARKS = ("weight", "train", "trainable", "loss", "loss_mask")  # keys that say whether a turn is learned
BESIDE = ("functions", "image", "images", "audio", "audios", "video", "videos", "chat_template_kwargs", "mask", *_MARKS)
"""Columns beside the messages that change what other programs learn from a row."""
BESIDE_PROMPTS = ("input", "context")
"""Columns beside a prompt that other programs put into it."""
_REFUSED_KEYS = (
    "train_detail",
    "training_detail",
    "mask",
    "image",
    "images",
    "audio",
    "audios",
    "video",
    "videos",
)
_IS_MESSAGES = re.compile(rf"\s*\[?\s*\{{.*\"(role|from)\"\s*:\s*\[?\s*\"({'|'.join(_ROLES)})\"", re.DOTALL)
"""JSON text of messages, which is told from an answer that is JSON by the role of a message."""
_CALL_KEYS = {"id", "type", "function", "index"}


@dataclass(frozen=True, slots=True)
class ChatExample:
    """A conversation.

    Attributes:
        messages: the messages, with role (system, user, assistant or tool), content, and other keys that the template
            uses.
        tools: the tools that the model may call, as JSON schemas.
        where: its location, for error messages.
        unlearned: the numbers of the messages, from 0, that are marked as context, so that they are not predicted.
    """

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    where: str = "in memory"
    unlearned: frozenset[int] = frozenset()

    @property
    def answers(self) -> str:
        """The contents of the assistant's turns that are learned, one per line."""
        return "\n".join(self.messages[number]["content"] for number in self.learned)

    @property
    def learned(self) -> list[int]:
        """The numbers of the messages, from 0, that are predicted."""
        numbers = range(len(self.messages))
        return [n for n in numbers if self.messages[n]["role"] == "assistant" and n not in self.unlearned]


class _Turn(NamedTuple):
    """A message, whether a mark lets it be learned, and whether its role is that of calls."""

    message: Message
    is_learned: bool
    is_call: bool


def read_chat(
    value: object,
    where: str,
    tools: object = None,
    *,
    system: object = None,
    prompt: object = None,
    padded: bool = False,
) -> ChatExample:
    """Read a conversation to learn from.

    Args:
        value: its messages; see `read_messages`. The keys `weight`, `train`, `trainable`, `loss` and `loss_mask` of an
            assistant's message say by 0 or false that it is context, and by 1 or true that it is learned.
        where: the location of the conversation, for error messages.
        tools: the tools that the model may call; see `read_tools`.
        system: text of a system message before all others, as ShareGPT's rows have it beside the messages.
        prompt: messages before it, none of which is learned. Plain text is a message of the user, and a `value` of
            plain text is then its answer. JSON text is read as messages if one of them has a known role.
        padded: whether the values come from Arrow, which pads objects with nulls.

    Returns:
        The conversation in the form of chat templates.

    Raises:
        DataError: the messages or tools can't be read (see `read_messages` and `read_tools`); there are two different
            system messages; a mark is neither 0 nor
            1, contradicts another, is that of a part alone or asks for a message that is not the assistant's; a role is
            out of order; an answer that is learned is empty; or no answer is learned.
    """
    turns: list[_Turn] = []
    if prompt is not None:
        before = _read_turns(_one_message(prompt, "user"), f"{where}, prompt", padded=padded)
        turns += [turn._replace(is_learned=False) for turn in before]
        if value is None or value == "":
            raise DataError(f"{where} has a prompt without an answer: enter one, or leave the row out.")
        value = _one_message(value, "assistant")
    turns += _read_turns(value, where, padded=padded)
    if system is not None and system != "":
        turns = _with_system(turns, system, where)
    turns = _finished(turns, where)
    chat = ChatExample(
        messages=tuple(turn.message for turn in turns),
        tools=read_tools(tools, where, padded=padded),
        where=where,
        unlearned=frozenset(number for number, turn in enumerate(turns) if not turn.is_learned),
    )
    _check_chat(chat)
    return chat


def read_messages(value: object, where: str, *, padded: bool = False) -> list[Message]:
    """Read messages in any order of roles, such as those that an assistant's answer shall continue.

    Args:
        value: a list of objects with `role` and `content`, or with `from` and `value`; an object of two lists; or JSON
            text of one of them. A content may be a list of text parts. Calls of tools are in `tool_calls`, in
            `function_call`, or the content of a message with the role function_call or tool_call; their arguments are
            an object or JSON text. Keys whose value is None are left out.
        where: the location of the messages, for error messages.
        padded: whether the values come from Arrow, which pads objects with nulls.

    Returns:
        The messages in the form of chat templates, with the roles system, user, assistant and tool. Calls have `id` if
        one is given, `type`, and `function` with `name` and `arguments`, an object. Results are in the order of the
        calls that their ids name.

    Raises:
        DataError: there are no messages; a message is not an object, its role is unknown, its content is not text, or
            it has keys that can't be used; a call has no name, or arguments that are no object; results can't be
            ordered by their ids (see `result_order`); or a value has a lone surrogate or an infinite number.
    """
    return [turn.message for turn in _finished(_read_turns(value, where, padded=padded), where)]


def read_tools(value: object, where: str, *, padded: bool = False) -> tuple[Tool, ...]:
    """Read the tools that a model may call.

    Args:
        value: a list of JSON schemas of functions, with or without `type` and `function` around each; or JSON text of
            it. None and empty text mean no tools.
        where: the location of the tools, for error messages.
        padded: whether the values come from Arrow, which pads objects with nulls.

    Raises:
        DataError: the tools are not a list of objects, one has no name or is no function, its parameters are no object,
            a value has a lone surrogate or an infinite number, or two have the same name.
    """
    found = parsed(value, f"{where} has tools")
    if found is None or found == "":
        return ()
    if not isinstance(found, Sequence) or isinstance(found, str):
        raise DataError(
            f"{where} has {type_name(found)} for tools, but a list of JSON schemas is expected: convert the tools."
        )
    padded = padded and not isinstance(value, str)
    tools = [_read_tool(tool, f"{where}, tool {n}", padded=padded) for n, tool in enumerate(found, start=1)]
    names = [tool["function"]["name"] for tool in tools]
    for name in names:
        if names.count(name) > 1:
            raise DataError(f"{where} has two tools with the name {name!r}: rename one.")
    return tuple(tools)


def read_arguments(value: object, where: str) -> dict[str, object]:
    """Return the arguments of a call as an object.

    Args:
        value: an object, or JSON text of one. None and empty text mean no arguments.
        where: the location of the call, for error messages.

    Raises:
        DataError: the arguments are no object.
    """
    arguments = parsed(value, f"{where} has arguments")
    if arguments is None or arguments == "":
        return {}
    if not isinstance(arguments, dict):
        raise DataError(f"{where} has {type_name(arguments)} for arguments, but an object is expected: correct them.")
    return arguments


def _read_turns(value: object, where: str, *, padded: bool) -> list[_Turn]:
    padded = padded and not isinstance(value, str)
    turns: list[_Turn] = []
    for number, message in enumerate(_as_list(value, where), start=1):
        turn = _read_turn(message, f"{where}, message {number}", padded=padded)
        if turn.is_call and turns and _is_joined(turns[-1], turn):
            _check_joined_keys(turns[-1].message, turn.message, f"{where}, message {number}")
            calls = [*turns[-1].message.get("tool_calls", ()), *turn.message["tool_calls"]]
            turns[-1].message["tool_calls"] = calls
        else:
            turns.append(turn)
    return turns


def _finished(turns: Sequence[_Turn], where: str) -> list[_Turn]:
    """Return the turns with results in the order of their calls, after a check of all values."""
    for number, turn in enumerate(turns, start=1):
        check_writable(turn.message, f"{where}, message {number}")
    return [turns[position] for position in result_order([turn.message for turn in turns], where)]


def _one_message(value: object, role: str) -> object:
    """Return plain text as one message of a role, and messages as they are."""
    if not isinstance(value, str) or _IS_MESSAGES.match(value):
        return value
    return [{"role": role, "content": value}]


def _with_system(turns: list[_Turn], system: object, where: str) -> list[_Turn]:
    """Return the turns after a system message, which they may have already."""
    if not isinstance(system, str):
        raise DataError(f"{where} has {type_name(system)} as system, but text is expected: correct it.")
    first = turns[0].message
    if first["role"] != "system":
        return [_Turn({"role": "system", "content": system}, is_learned=True, is_call=False), *turns]
    if first["content"] != system:
        raise DataError(
            f"{where} has one text as system and another one as its first message, which has the role system: leave "
            "one out."
        )
    return turns


def _is_joined(before: _Turn, turn: _Turn) -> bool:
    """Return whether the calls of a turn belong to the answer before it."""
    return before.message["role"] == "assistant" and before.is_learned == turn.is_learned


def _check_joined_keys(before: Message, calls: Message, where: str) -> None:
    """Raise `DataError` if a message of calls has keys that the answer before it, which takes the calls, has not."""
    for key in sorted(calls.keys() - {"role", "content", "tool_calls"}):
        if key not in before or before[key] != calls[key]:
            raise DataError(
                f"{where} has the key {key}, but its calls become a part of the assistant's message before it, which "
                "has no such value: move the key to that message, or leave it out."
            )


def _as_list(value: object, where: str) -> Sequence[object]:
    """Return the messages of a conversation, at least one."""
    remedy = "correct it, or, if it is an answer, set prompt_column to the column of its question"
    found = parsed(value, f"{where} has messages", remedy)
    if isinstance(found, Mapping):
        found = _rows_of_columns(found)
    if not isinstance(found, Sequence) or (isinstance(found, str) and found):
        raise DataError(
            f"{where} has {type_name(found)} for messages, but a list of messages is expected: correct the "
            "conversation."
        )
    if not found:
        raise DataError(f"{where} has no messages, but at least one is expected: leave the conversation out.")
    return found


def _rows_of_columns(columns: Mapping[object, object]) -> object:
    """Return the rows of an object of equally long lists, which older versions of datasets make of lists of objects."""
    lists = [value for value in columns.values() if isinstance(value, list)]
    if len(lists) < len(columns) or len({len(values) for values in lists}) != 1:
        return columns
    return [dict(zip(columns, row, strict=True)) for row in zip(*lists, strict=True)]


def _read_turn(message: object, where: str, *, padded: bool) -> _Turn:
    """Return a message with the keys role, content, tool_calls if it has calls, and its other keys."""
    if not isinstance(message, Mapping):
        raise DataError(
            f"{where} is of type {type(message).__name__}, but an object with role and content is expected: correct "
            "the message."
        )
    given = message.get("role")
    content = message.get("content")
    if len(message) == 2 and isinstance(content, str) and isinstance(given, str) and given in _PLAIN_ROLES:
        return _Turn({"role": _ROLES[given], "content": content}, is_learned=True, is_call=False)
    values = {str(key): value for key, value in message.items() if value is not None}
    given = _pop_one(values, "role", "from", where)
    if not isinstance(given, str) or given not in _ROLES:
        found = "no role" if given is None else f"the role {given!r}"
        meant = given.strip().lower() if isinstance(given, str) else ""
        hint = f" (did you mean {meant}?)" if meant in _ROLES else ""
        raise DataError(f"{where} has {found}{hint}, but one of {', '.join(_ROLES)} is expected: correct the message.")
    role = _ROLES[given]
    content = _pop_one(values, "content", "value", where)
    is_call = given in _CALL_ROLES
    calls = _pop_calls(values, where, padded=padded)
    if is_call:
        calls += _read_calls(content, where, padded=padded)
        content = None
        if not calls:
            raise DataError(f"{where} has the role {given}, but no call: leave it out.")
    if calls and role != "assistant":
        raise DataError(
            f"{where} has the role {role} and tool calls, but only the assistant calls tools: move the calls to a "
            "message of the assistant."
        )
    is_learned = _pop_marks(values, role, where)
    _check_parts(content, role, where, is_learned=is_learned)
    _check_keys(values, where)
    turn: Message = {"role": role, "content": _as_text(content, where, is_optional=bool(calls))}
    if calls:
        turn["tool_calls"] = calls
    turn.update(values)
    return _Turn(message=turn, is_learned=is_learned, is_call=is_call)


def _pop_one(values: Message, name: str, other: str, where: str) -> object:
    """Remove both keys in place, and return the value that they have; None if there is neither."""
    if other not in values:
        return values.pop(name, None)
    value = values.pop(other)
    if name in values and values.pop(name) != value:
        raise DataError(f"{where} has different values for {name} and {other}: leave one out.")
    return value


def _as_text(content: object, where: str, *, is_optional: bool) -> str:
    if isinstance(content, str):
        return content
    if content is None and is_optional:
        return ""
    if isinstance(content, list) and all(_is_text_part(part) for part in content):
        return "".join(part["text"] for part in content)
    found = "no content" if content is None else f"content of type {type(content).__name__}"
    if isinstance(content, list):
        found = "content with other parts than text"
    raise DataError(f"{where} has {found}, but text is expected: correct the message.")


def _is_text_part(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _check_parts(content: object, role: str, where: str, *, is_learned: bool) -> None:
    """Raise `DataError` if a part of a content has keys that can't be used, or is not learned like its message."""
    parts = content if isinstance(content, list) else []
    for number, part in enumerate(parts, start=1):
        if not isinstance(part, Mapping):
            continue
        place = f"{where}, part {number}"
        values = {str(key): value for key, value in part.items() if value is not None}
        has_mark = any(key in values for key in _MARKS)
        is_learned_part = _pop_marks(values, role, place)
        _check_keys(values, place)
        if role == "assistant" and has_mark and is_learned_part != is_learned:
            state = "learned" if is_learned_part else "not learned"
            raise DataError(
                f"{place} is marked as {state}, unlike its message, but a message is learned as a whole: mark the "
                "message, or leave the marks of its parts out."
            )


def _check_keys(values: Message, where: str) -> None:
    """Remove empty lists in place, and raise `DataError` for keys that can't be used."""
    for key in [key for key, value in values.items() if value == []]:
        del values[key]
    for key in _REFUSED_KEYS:
        if key in values:
            raise DataError(f"{where} has the key {key}, which can't be used here: leave the key out.")
    if values.get("refusal", "") == "":
        values.pop("refusal", None)
    else:
        raise DataError(f"{where} has a refusal beside its content: move its text to the content.")


def _pop_marks(values: Message, role: str, where: str) -> bool:
    """Remove the marks of a turn in place, and return whether they let it be learned."""
    marks = {}
    for key in _MARKS:
        if key in values:
            value = values.pop(key)
            if value not in (0, 1):
                raise DataError(
                    f"{where} has {value!r} for {key}, but 0 or 1, or false or true, is expected: correct it."
                )
            marks[key] = bool(value)
    if len(set(marks.values())) > 1:
        raise DataError(f"{where} has contradicting values for {' and '.join(marks)}: leave one out.")
    if role != "assistant" and any(marks.values()):
        (key, *_) = marks
        raise DataError(
            f"{where} has the role {role} and is marked by {key} as learned, but only the assistant's messages are "
            "learned: leave the key out."
        )
    return all(marks.values())


def _pop_calls(values: Message, where: str, *, padded: bool) -> list[Message]:
    """Remove the calls of a message in place, and return them in the form of chat templates."""
    calls: list[Message] = []
    if "tool_calls" in values:
        calls += _read_calls(values.pop("tool_calls"), where, padded=padded)
    if "function_call" in values:
        calls += _read_calls(values.pop("function_call"), where, padded=padded)
    return calls


def _read_calls(value: object, where: str, *, padded: bool) -> list[Message]:
    found = parsed(value, f"{where} has calls of tools")
    if isinstance(found, Mapping):
        found = [found]
    if found is None or found == "":
        return []
    if not isinstance(found, list):
        raise DataError(f"{where} has {type_name(found)} for calls of tools, but a list is expected: correct it.")
    padded = padded and not isinstance(value, str)
    return [_read_call(call, f"{where}, call {number}", padded=padded) for number, call in enumerate(found, start=1)]


def _read_call(value: object, where: str, *, padded: bool) -> Message:
    """Return a call with `id` if it has one, `type` and `function`."""
    padded = padded and not isinstance(value, str)
    call = parsed(value, f"{where} is given")
    if not isinstance(call, Mapping):
        raise DataError(f"{where} is {type_name(call)}, but an object with name and arguments is expected: correct it.")
    values = {str(key): value for key, value in call.items() if value is not None}
    function = values if "name" in values else values.get("function")
    if not isinstance(function, Mapping):
        raise DataError(f"{where} has no name: name the tool that it calls.")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise DataError(f"{where} has no name: name the tool that it calls.")
    known = (_CALL_KEYS - {"function"}) | {"name", "arguments"} if function is values else _CALL_KEYS
    unknown = sorted(values.keys() - known)
    if function is not values:
        unknown += sorted(str(key) for key in function if key not in ("name", "arguments"))
    if unknown or values.get("type", "function") != "function":
        found = f"the key {unknown[0]}" if unknown else f"the type {values['type']!r}"
        raise DataError(f"{where} has {found}, but a function's name and arguments are expected: convert the call.")
    given = function.get("arguments")
    if padded:
        given = {} if given == [] else unpadded(given)  # an empty map of Arrow is an empty list
    arguments = read_arguments(given, where)
    form: Message = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"id": values["id"], **form} if "id" in values else form


def _read_tool(value: object, where: str, *, padded: bool) -> Tool:
    """Return a tool with its keys in a fixed order, since templates write tools as JSON."""
    tool = parsed(unpadded(value) if padded else value, f"{where} is given")
    if not isinstance(tool, Mapping):
        raise DataError(f"{where} is {type_name(tool)}, but an object with a name is expected: convert it.")
    wrapped = tool.get("function")
    if tool.get("type", "function") != "function" and "name" not in tool:
        raise DataError(f"{where} has the type {tool['type']!r}, but a function is expected: leave it out.")
    function = parsed(wrapped, f"{where} has a function") if wrapped is not None else tool
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise DataError(f"{where} has no name: name the function.")
    schema = parsed(function.get("parameters"), f"{where} has parameters")
    if schema is not None and not isinstance(schema, Mapping):
        raise DataError(f"{where} has {type_name(schema)} for parameters, but a JSON schema is expected: correct it.")
    form = {"name": function["name"], "description": function.get("description"), "parameters": schema}
    rest = {key: item for key, item in function.items() if key not in {"type", *form}}
    form = {key: item for key, item in (form | rest).items() if item is not None}
    around = {} if wrapped is None else {key: item for key, item in tool.items() if key not in ("type", "function")}
    around = {key: item for key, item in around.items() if item is not None}
    check_writable([form, around], where)
    return {"type": "function", "function": form, **around}


def _check_chat(chat: ChatExample) -> None:
    """Raise `DataError` if roles are out of order, an answer is empty, or nothing is learned."""
    role_before = ""
    for number, message in enumerate(chat.messages):
        _check_turn(message, role_before, f"{chat.where}, message {number + 1}")
        role_before = message["role"]
    learned = chat.learned
    for number in learned:
        message = chat.messages[number]
        if not message["content"].strip() and "tool_calls" not in message:
            raise DataError(
                f"{chat.where}, message {number + 1} is an empty answer, which would train the model not to answer: "
                "leave it out."
            )
    if learned:
        return
    if any(message["role"] == "assistant" for message in chat.messages):
        raise DataError(
            f"{chat.where} has no message of the assistant that is learned, since all are marked as context: leave the "
            "conversation out, or change the marks."
        )
    raise DataError(
        f"{chat.where} has no message of the assistant, so there is nothing to predict: leave the conversation out."
    )


def _check_turn(message: Message, role_before: str, where: str) -> None:
    """Raise `DataError` if a message must not follow one with the role `role_before`."""
    role = message["role"]
    if role_before not in _ALLOWED_BEFORE[role]:
        position = f"follows one with the role {role_before}" if role_before else "is the first message"
        raise DataError(
            f"{where} has the role {role} and {position}, but the roles are expected in the order system, then user "
            "and assistant in turn, with tool after assistant: correct the conversation."
        )
