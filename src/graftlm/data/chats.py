"""Conversations: messages that the tokenizer's chat template renders, of which the assistant's turns are predicted.

In the rendered text, a turn of the assistant begins where the rendering of all earlier messages with the header of an
answer ends. It ends with the rendering of all messages up to and including it, without trailing white space. If that
rendering is not a prefix of the whole text, as with templates that remove the reasoning of earlier turns, the turn ends
with its content and the text that the template puts after the content of a last turn, or the first markers of it.
A marker that ends answers (`turn_end_ids`) and follows a turn belongs to the turn.

The whole conversation is tokenized at once, as in generation. A token is predicted if it begins inside a turn of the
assistant. If the template ends the last turn with text alone, an end token is added, so that each conversation teaches
the model to stop.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from graftlm.data.answer_endings import behind_marker, endings, with_end
from graftlm.data.table_files import type_name
from graftlm.errors import DataError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
# Roles that may precede a role. The empty one is the beginning of a conversation.
_ALLOWED_BEFORE = {
    "system": ("",),
    "user": ("", "system", "assistant", "tool"),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool"),
}
_CONTENT = "the-content-of-the-turn"  # a placeholder that shows what the template puts after the content of a turn
_GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True, slots=True)
class ChatExample:
    """A conversation.

    Attributes:
        messages: the messages, with role (system, user, assistant or tool), content, and other keys that the template
            uses.
        tools: the tools that the model may call, as JSON schemas.
        where: its location, for error messages.
    """

    messages: tuple[Message, ...]
    tools: tuple[object, ...] = ()
    where: str = "in memory"

    @property
    def answers(self) -> str:
        """The contents of the assistant's turns, one per line."""
        return "\n".join(message["content"] for message in self.messages if message["role"] == "assistant")


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A conversation as text.

    Attributes:
        text: the rendered text.
        turns: (start, stop) in characters of each turn of the assistant.
    """

    text: str
    turns: list[tuple[int, int]]


def read_chat(value: object, where: str, tools: Sequence[object] | None = None) -> ChatExample:
    """Read a conversation from a list of messages.

    Args:
        value: a list of messages with `role` and `content`, or with ShareGPT's `from` and `value`. A content may be a
            list of text parts. Keys whose value is None are left out.
        where: the location of the conversation, for error messages.
        tools: the tools that the model may call, as JSON schemas.

    Returns:
        The conversation, with the roles system, user, assistant and tool; their synonyms, such as human, are replaced.

    Raises:
        DataError: the messages or the tools are not a list; there are no messages, or none of the assistant; a message
            is not a mapping, its role is unknown or out of order, or its content is not text; or a message of the
            assistant has neither text nor calls of tools.
    """
    if not isinstance(value, Sequence) or (isinstance(value, str) and value):
        raise DataError(
            f"{where} has {type_name(value)} for messages, but a list of messages is expected: correct the "
            "conversation."
        )
    if not value:
        raise DataError(f"{where} has no messages, but at least one is expected: leave the conversation out.")
    if tools is not None and (not isinstance(tools, Sequence) or isinstance(tools, str)):
        raise DataError(
            f"{where} has {type_name(tools)} for tools, but a list of JSON schemas is expected: convert the tools."
        )
    messages = [_read_message(message, f"{where}, message {n}") for n, message in enumerate(value, start=1)]
    if not any(message["role"] == "assistant" for message in messages):
        raise DataError(
            f"{where} has no message of the assistant, so there is nothing to predict: leave the conversation out."
        )
    role_before = ""
    for number, message in enumerate(messages, start=1):
        _check_turn(message, role_before, f"{where}, message {number}")
        role_before = message["role"]
    return ChatExample(tuple(messages), tuple(tools or ()), where)


def _read_message(message: object, where: str) -> Message:
    """Return a message with the keys role and content, and with its other keys."""
    if not isinstance(message, Mapping):
        raise DataError(
            f"{where} is of type {type(message).__name__}, but an object with role and content is expected: correct "
            "the message."
        )
    values = {str(key): value for key, value in message.items() if value is not None}
    role = _pop_either(values, "role", "from")
    content = _pop_either(values, "content", "value")
    if not isinstance(role, str) or role not in _ROLES:
        found = "no role" if role is None else f"the role {role!r}"
        raise DataError(f"{where} has {found}, but one of {', '.join(_ROLES)} is expected: correct the message.")
    if isinstance(content, list) and all(_is_text_part(part) for part in content):
        content = "".join(str(part.get("text", "")) for part in content)
    if content is None and values.get("tool_calls"):
        content = ""
    if not isinstance(content, str):
        found = "no content" if content is None else f"content of type {type(content).__name__}"
        raise DataError(f"{where} has {found}, but text is expected: correct the message.")
    return {"role": _ROLES[role], "content": content, **values}


def _pop_either(values: Message, name: str, other: str) -> Any:
    """Remove both keys in place, and return the value of `name` if it was there, else that of `other` or None."""
    value = values.pop(other, None)
    return values.pop(name, value)


def _is_text_part(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text"


def _check_turn(message: Message, role_before: str, where: str) -> None:
    """Raise `DataError` if a message must not follow one with the role `role_before`, or is an empty answer."""
    role = message["role"]
    if role_before not in _ALLOWED_BEFORE[role]:
        position = f"after one with the role {role_before}" if role_before else "the first message"
        raise DataError(
            f"{where} has the role {role} and is {position}, but the roles are expected in the order system, then user "
            "and assistant in turn, with tool after assistant: correct the conversation."
        )
    is_empty = not message["content"].strip() and not message.get("tool_calls")
    if role == "assistant" and is_empty:
        raise DataError(f"{where} is an empty answer, which would train the model not to answer: leave it out.")


def render_chat(chat: ChatExample, tokenizer: PreTrainedTokenizerBase) -> RenderedChat:
    """Render a conversation with a tokenizer's chat template.

    Turns of the assistant that have no text in the rendering are left out of `RenderedChat.turns`.

    Raises:
        DataError: the tokenizer has no template, the template can't render the conversation, or it renders the
            messages before an answer differently than in the whole conversation.
    """
    if not tokenizer.chat_template:
        raise DataError(f"{chat.where} is a conversation, but the tokenizer has no chat template: name a chat model.")
    text = _render(chat, tokenizer, len(chat.messages))
    turns = []
    for number, message in enumerate(chat.messages):
        if message["role"] == "assistant":
            start, stop = _turn_bounds(chat, number, text, tokenizer)
            if stop > start:
                turns.append((start, behind_marker(tokenizer, text, stop)))
    return RenderedChat(text, turns)


def _turn_bounds(chat: ChatExample, number: int, text: str, tokenizer: PreTrainedTokenizerBase) -> tuple[int, int]:
    """Return (start, stop) of the assistant's turn in message `number` of a rendered conversation."""
    before = _render(chat, tokenizer, number, header=True)
    if not text.startswith(before):
        raise _prefix_error(chat, number)
    start = len(before)
    until = _render(chat, tokenizer, number + 1)
    if text.startswith(until):
        stop = len(until)
    else:
        stop = _end_of_turn(chat, number, text, start, tokenizer)
    turn = text[start:stop].rstrip()
    return start, start + len(turn)


def _end_of_turn(chat: ChatExample, number: int, text: str, start: int, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the end of a turn that the template renders differently inside a conversation than at its end."""
    turn = chat.messages[number]
    placeholder = {**turn, "content": _CONTENT}
    marked = replace(chat, messages=(*chat.messages[:number], placeholder))
    _, _, ending = _render(marked, tokenizer, number + 1).partition(_CONTENT)
    # Some templates strip the content, and some put further markers only behind the last turn.
    for content in (turn["content"], turn["content"].strip()):
        for end in endings(tokenizer, ending):
            position = text.find(content + end, start)
            if content and position >= 0 and not text[start:position].strip():
                return position + len(content) + len(end)
    raise _prefix_error(chat, number)


def _prefix_error(chat: ChatExample, number: int) -> DataError:
    return DataError(
        f"{chat.where}: the tokenizer's chat template renders the messages up to message {number + 1} differently than "
        "the whole conversation, so the assistant's turn can't be found: split the conversation there, or set another "
        "chat_template."
    )


def render_question(messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase) -> str:
    """Render messages with the chat template, ending with its generation prompt.

    Args:
        messages: the messages, of which the last is usually one of the user.
        tokenizer: the tokenizer with the chat template.

    Raises:
        DataError: the tokenizer has no template, or the template can't render the messages.
    """
    if not tokenizer.chat_template:
        raise DataError("The tokenizer has no chat template for conversations: name a chat model.")
    chat = ChatExample(tuple(messages), where="The conversation")
    return _render(chat, tokenizer, len(messages), header=True)


def _render(chat: ChatExample, tokenizer: PreTrainedTokenizerBase, count: int, *, header: bool = False) -> str:
    """Render the first `count` messages; `header` adds the template's generation prompt."""
    try:
        text = tokenizer.apply_chat_template(
            list(chat.messages[:count]),
            tokenize=False,
            add_generation_prompt=header,
            **_tool_options(chat),
        )
    except Exception as error:  # Errors come from jinja, or are raised by the template.
        raise DataError(
            f"{chat.where} can't be rendered with the tokenizer's chat template ({first_line(error)}): correct the "
            "conversation, or set another chat_template."
        ) from None
    return str(text)


def _tool_options(chat: ChatExample) -> dict[str, Any]:
    return {"tools": list(chat.tools)} if chat.tools else {}


def chat_tokens(tokenizer: PreTrainedTokenizerBase, chat: ChatExample) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokenize a conversation of n tokens.

    Returns:
        The token ids, int64, (n,), with an end token if the template puts none behind the last turn; which of them are
        predicted, bool, (n,); and the character of the rendered text at which each token ends, int64, (n,).

    Raises:
        DataError: the tokenizer is not a fast one, the conversation can't be rendered (see `render_chat`), no token is
            predicted, or the template's own `{% generation %}` blocks mark other text.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise DataError(
            f"{chat.where} is a conversation, but the tokenizer {type(tokenizer).__name__} does not return the "
            "positions of tokens: use a backbone with a tokenizer.json."
        )
    rendered = render_chat(chat, tokenizer)
    encoded = tokenizer(rendered.text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids = np.asarray(encoded["input_ids"], dtype=np.int64)
    offsets = np.asarray(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)
    begins = _first_visible(rendered.text, offsets)
    predicted = np.zeros(len(ids), dtype=bool)
    for start, stop in rendered.turns:
        predicted |= (start <= begins) & (begins < stop)
    if not predicted.any():
        raise DataError(
            f"{chat.where} has no token to predict, since the chat template renders no text of the assistant: leave "
            "the conversation out, or set another chat_template."
        )
    _check_own_mask(tokenizer, chat, ids, predicted)
    return with_end(tokenizer, rendered.text, ids, predicted, offsets[:, 1])


def _first_visible(text: str, offsets: np.ndarray) -> np.ndarray:
    """Return the position of each token's first visible character, or of its first one if none is visible: (n,)."""
    positions = []
    for start, stop in offsets.tolist():
        token = text[start:stop]
        visible = token.lstrip()
        blanks = len(token) - len(visible) if visible else 0
        positions.append(start + blanks)
    return np.array(positions, dtype=np.int64)


def _check_own_mask(tokenizer: Any, chat: ChatExample, ids: np.ndarray, predicted: np.ndarray) -> None:
    """Raise `DataError` if the template marks the assistant's tokens itself, and they are not the predicted ones.

    White space and special tokens may differ.
    """
    template = tokenizer.chat_template
    if not isinstance(template, str) or not _GENERATION_BLOCK.search(template):
        return
    own = tokenizer.apply_chat_template(
        list(chat.messages),
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
        **_tool_options(chat),
    )
    mask = np.asarray(own["assistant_masks"], dtype=bool).reshape(-1)
    differs = predicted != mask if len(mask) == len(ids) else np.ones(len(ids), dtype=bool)
    for position in np.flatnonzero(differs):
        token = int(ids[position])
        text = tokenizer.decode([token])
        if token not in tokenizer.added_tokens_decoder and text.strip():
            raise DataError(
                f"{chat.where}: from {text!r} on, the {{% generation %}} blocks of the chat template mark other text "
                "as the assistant's than its rendering shows: correct the template."
            )
