"""Conversations: messages, rendered by the tokenizer's chat template, of which the assistant's turns are predicted.

An assistant's turn in the rendered text begins where the template's rendering of all messages before it, with the
header of an answer, ends. It ends with the rendering of all messages up to and with it; white space behind its last
character is not predicted. Where that rendering is no prefix of the whole, as with templates that drop the reasoning
of earlier turns, the turn ends with its content and what the template puts behind the last turn.

The whole conversation is tokenised at once, as the template's text is in generation. A token is predicted where it
begins inside an assistant's turn.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from graftlm.errors import DataError, first_line

Message = dict[str, Any]

_ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation"), "tool"),
}
_CONTENT = "the-content-of-the-turn"  # a stand-in, behind which the template ends a turn
_GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True, slots=True)
class ChatExample:
    """A conversation: its messages (role, content, and keys of the template), and the tools that it may call."""

    messages: tuple[Message, ...]
    tools: tuple[Any, ...] = ()
    where: str = "in memory"

    @property
    def answers(self) -> str:
        """The contents of the assistant's turns, one below the other."""
        return "\n".join(message["content"] for message in self.messages if message["role"] == "assistant")


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A conversation as text, and the (start, stop) characters of each assistant's turn."""

    text: str
    turns: list[tuple[int, int]]


def read_chat(value: Any, where: str, tools: Any = None) -> ChatExample:
    """A conversation from a list of messages: `role` and `content`, or ShareGPT's `from` and `value`.

    Raises DataError if the list has another form, no assistant's turn, or its roles are out of order.
    """
    if isinstance(value, Sequence) and not value:
        raise DataError(f"{where} has no messages: leave the conversation out.")
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise DataError(f"{where} has {type(value).__name__} for messages, but a list of messages is expected.")
    messages = tuple(_read_message(message, f"{where}, message {n}") for n, message in enumerate(value, start=1))
    if not any(message["role"] == "assistant" for message in messages):
        raise DataError(f"{where} has no assistant's turn, and nothing else is predicted: leave the conversation out.")
    before = ""
    for number, message in enumerate(messages, start=1):
        role = message["role"]
        misplaced = {
            "system": number > 1,
            "user": before == "user",
            "assistant": before not in ("user", "tool"),
            "tool": before not in ("assistant", "tool"),
        }[role]
        if misplaced:
            behind = f"behind one of the role {before}" if before else "first"
            raise DataError(
                f"{where}, message {number} of the role {role} stands {behind}: roles are expected in the order "
                "system, then user and assistant in turn, with tool behind assistant."
            )
        if role == "assistant" and not (message["content"].strip() or message.get("tool_calls")):
            raise DataError(f"{where}, message {number} is an empty answer, which teaches silence: leave it out.")
        before = role
    return ChatExample(messages, tuple(tools or ()), where)


def _read_message(message: Any, where: str) -> Message:
    if not isinstance(message, Mapping):
        raise DataError(f"{where} is {type(message).__name__}, but an object with role and content is expected.")
    values = {str(key): value for key, value in message.items() if value is not None}
    names = (("role", "from"), ("content", "value"))
    role, content = (values.pop(name, values.pop(other, None)) for name, other in names)
    if role not in _ROLES:
        raise DataError(f"{where} has the role {role!r}, but one of {', '.join(_ROLES)} is expected.")
    if isinstance(content, list) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
        content = "".join(str(part.get("text", "")) for part in content)
    if content is None and values.get("tool_calls"):
        content = ""
    if not isinstance(content, str):
        raise DataError(f"{where} has content of the type {type(content).__name__}, but text is expected.")
    return {"role": _ROLES[role], "content": content, **values}


def render_chat(chat: ChatExample, tokenizer: Any) -> RenderedChat:
    """A conversation in a tokenizer's template.

    Raises DataError if the tokenizer has no template, the template can't be filled, or it renders a conversation's
    beginning in another way than the conversation.
    """
    if not tokenizer.chat_template:
        raise DataError(f"{chat.where} is a conversation, but the tokenizer has no chat template: name a chat model.")
    whole = _render(chat, tokenizer, len(chat.messages))
    turns = []
    for number, message in enumerate(chat.messages):
        if message["role"] == "assistant":
            before = _render(chat, tokenizer, number, header=True)
            if not whole.startswith(before):
                raise _no_prefix(chat, number)
            until = _render(chat, tokenizer, number + 1)
            stop = len(until) if whole.startswith(until) else _end_of_turn(chat, number, whole, len(before), tokenizer)
            stop = len(before) + len(whole[len(before) : stop].rstrip())
            if stop > len(before):
                turns.append((len(before), stop))
    return RenderedChat(whole, turns)


def render_question(messages: Sequence[Message], tokenizer: Any) -> str:
    """Messages in a tokenizer's template, with the header of the answer that follows.

    Raises DataError if the tokenizer has no template, or the messages don't fit it.
    """
    if not tokenizer.chat_template:
        raise DataError("The tokenizer has no chat template, so there is no conversation: name a chat model.")
    return _render(ChatExample(tuple(messages), where="The conversation"), tokenizer, len(messages), header=True)


def _render(chat: ChatExample, tokenizer: Any, count: int, *, header: bool = False) -> str:
    options: dict[str, Any] = {"tools": list(chat.tools)} if chat.tools else {}
    messages = list(chat.messages[:count])
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=header, **options))
    except Exception as error:  # of jinja, or raised by the template
        raise DataError(
            f"{chat.where} does not fit the tokenizer's chat template ({first_line(error)}): correct or leave out the "
            "conversation."
        ) from None


def _end_of_turn(chat: ChatExample, number: int, whole: str, start: int, tokenizer: Any) -> int:
    """Where a turn ends that the template renders in another way in the middle of a conversation than at its end."""
    turn = chat.messages[number]
    marked = replace(chat, messages=(*chat.messages[:number], {**turn, "content": _CONTENT}))
    ending = _render(marked, tokenizer, number + 1).partition(_CONTENT)[2]
    for content in (turn["content"], turn["content"].strip()):  # some templates trim it
        at = whole.find(content + ending, start)
        if content and ending and at >= 0 and not whole[start:at].strip():
            return at + len(content) + len(ending)
    raise _no_prefix(chat, number)


def _no_prefix(chat: ChatExample, number: int) -> DataError:
    return DataError(
        f"{chat.where}: the tokenizer's chat template renders the messages up to message {number + 1} in another way "
        "than the whole conversation, so the assistant's turn can't be found: split the conversation there, or set "
        "another chat_template."
    )


def chat_tokens(tokenizer: Any, chat: ChatExample) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The ids (n,) of a conversation, which of them are predicted, and the character (n,) at which each ends.

    Raises DataError if the tokenizer is slow, the conversation can't be rendered, no token is predicted, or the
    template's own `{% generation %}` blocks mark other text.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise DataError("Conversations need a fast tokenizer, which knows where tokens are: put tokenizer.json there.")
    rendered = render_chat(chat, tokenizer)
    encoded = tokenizer(rendered.text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids = np.asarray(encoded["input_ids"], dtype=np.int64)
    offsets = np.asarray(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)
    first = _first_visible(rendered.text, offsets)
    predicted = np.zeros(len(ids), dtype=bool)
    for start, stop in rendered.turns:
        predicted |= (start <= first) & (first < stop)
    if not predicted.any():
        raise DataError(f"{chat.where} has no token to predict: its assistant's turns are empty in the chat template.")
    _check_own_mask(tokenizer, chat, ids, predicted)
    return ids, predicted, offsets[:, 1]


def _first_visible(text: str, offsets: np.ndarray) -> np.ndarray:
    """The first character (n,) of each token that is no white space; its first character where all of it is."""
    firsts = []
    for start, stop in offsets.tolist():
        part = text[start:stop]
        firsts.append(start + (len(part) - len(part.lstrip())) if part.strip() else start)
    return np.array(firsts, dtype=np.int64)


def _check_own_mask(tokenizer: Any, chat: ChatExample, ids: np.ndarray, predicted: np.ndarray) -> None:
    """Compare with the template's own mask, where it has one; white space and special tokens don't count."""
    template = tokenizer.chat_template
    if not isinstance(template, str) or not _GENERATION_BLOCK.search(template):
        return
    options: dict[str, Any] = {"tools": list(chat.tools)} if chat.tools else {}
    own = tokenizer.apply_chat_template(
        list(chat.messages), tokenize=True, return_dict=True, return_assistant_tokens_mask=True, **options
    )
    mask = np.asarray(own["assistant_masks"], dtype=bool).reshape(-1)
    differs = predicted != mask if len(mask) == len(ids) else np.ones(len(ids), dtype=bool)
    for at in np.flatnonzero(differs):
        token = int(ids[at])
        if token not in tokenizer.added_tokens_decoder and tokenizer.decode([token]).strip():
            raise DataError(
                f"{chat.where}: the chat template marks other text as the assistant's ({{% generation %}}) than its "
                f"rendering shows, from {tokenizer.decode([token])!r} on: correct the template."
            )
