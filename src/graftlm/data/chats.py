"""Conversations: messages that the tokenizer's chat template renders, of which the assistant's turns are predicted.

In the rendered text, a turn of the assistant begins where the rendering of all earlier messages with the header of an
answer ends. It ends with the rendering of all messages up to and including it, without trailing white space. If that
rendering is not a prefix of the whole text, as with templates that remove the reasoning of earlier turns, the turn ends
with its content and the text that the template puts after the content of a last turn, or the first markers of it. If
the template puts other text there, as those that write one marker behind the last turn and another behind earlier ones,
the turn ends with its content.
A marker that ends answers (`turn_end_ids`) and follows a turn belongs to the turn.

The whole conversation is tokenized at once, as in generation. A token is predicted if it begins inside a turn of the
assistant that is not marked as context. If the template ends the last turn with text alone, an end token is added, so
that each conversation teaches the model to stop.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from graftlm.backbone.chat_templates import Message, common_ending, render_messages, template_inputs
from graftlm.data.answer_endings import behind_marker, endings, with_end
from graftlm.data.conversations import ChatExample, read_messages
from graftlm.errors import DataError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CONTENTS = ("yes", "no")  # placeholders that show what the template puts after the content of a turn
_GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A conversation as text.

    Attributes:
        text: the rendered text.
        turns: (start, stop) in characters of each turn of the assistant.
        learned: those of the turns that are predicted.
    """

    text: str
    turns: list[tuple[int, int]]
    learned: list[tuple[int, int]]


def render_chat(chat: ChatExample, tokenizer: PreTrainedTokenizerBase) -> RenderedChat:
    """Render a conversation with a tokenizer's chat template.

    Turns that are marked as context and have no text in the rendering are left out of `RenderedChat.turns`.

    Raises:
        DataError: the tokenizer has no template; the template can't render the conversation, renders nothing of a
            turn that is predicted, or renders the messages before an answer differently than in the whole conversation.
    """
    if not tokenizer.chat_template:
        raise DataError(f"{chat.where} is a conversation, but the tokenizer has no chat template: name a chat model.")
    text = _render(chat, tokenizer, len(chat.messages))
    turns = []
    learned = []
    for number, message in enumerate(chat.messages):
        if message["role"] == "assistant":
            start, stop = _turn_bounds(chat, number, text, tokenizer)
            if stop > start:
                turns.append((start, behind_marker(tokenizer, text, stop)))
                if number not in chat.unlearned:
                    learned.append(turns[-1])
            elif number not in chat.unlearned:
                raise _no_token_error(f"{chat.where}, message {number + 1}")
    return RenderedChat(text, turns, learned)


def _no_token_error(where: str) -> DataError:
    return DataError(
        f"{where} has no token to predict, since the chat template renders no text of the assistant: leave the "
        "conversation out, or set another chat_template."
    )


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
    ending = common_ending(*_with_placeholders(chat, number, tokenizer, number + 1))
    if "tool_calls" in chat.messages[number]:
        return _end_of_calls(chat, number, text, start, tokenizer, ending)
    whole = _with_placeholders(chat, number, tokenizer, len(chat.messages))
    rest = common_ending(*whole)
    stop = len(text) - len(rest)
    is_content_last = all(
        rendered.removesuffix(rest).casefold().endswith(content)
        for rendered, content in zip(whole, _CONTENTS, strict=True)
    )
    if not is_content_last or not text.endswith(rest) or not text[start:stop].strip():
        raise _prefix_error(chat, number)
    # What the template puts behind earlier turns alone ends no answer in generation, and is not learned.
    found = [end for end in endings(tokenizer, ending) if rest.startswith(end)]
    return stop + (len(found[0]) if found else 0)


def _end_of_calls(
    chat: ChatExample, number: int, text: str, start: int, tokenizer: PreTrainedTokenizerBase, ending: str
) -> int:
    """Return the end of a turn with calls, which stand in the ending of its content."""
    turn = chat.messages[number]
    last_call = ending.rfind(turn["tool_calls"][-1]["function"]["name"])  # which the end must not cut off
    found = [end for end in endings(tokenizer, ending) if len(end) > last_call]
    # Some templates strip the content, and those that write calls without any content write no blank before them.
    found += [end.lstrip() for end in found]
    for content, end in product((turn["content"], turn["content"].strip()), found):
        position = text.find(content + end, start)
        if position >= 0 and not text[start:position].strip():
            return position + len(content) + len(end)
    raise _prefix_error(chat, number)


def _with_placeholders(
    chat: ChatExample, number: int, tokenizer: PreTrainedTokenizerBase, count: int
) -> tuple[str, str]:
    """Render the first `count` messages twice, with another content of message `number` each time."""
    first, second = (replace(chat, messages=_with_content(chat.messages, number, content)) for content in _CONTENTS)
    try:
        return _render(first, tokenizer, count), _render(second, tokenizer, count)
    except DataError:  # the template may not write text beside calls
        raise _prefix_error(chat, number) from None


def _with_content(messages: Sequence[Message], number: int, content: str) -> tuple[Message, ...]:
    return (*messages[:number], {**messages[number], "content": content}, *messages[number + 1 :])


def _prefix_error(chat: ChatExample, number: int) -> DataError:
    return DataError(
        f"{chat.where}: the tokenizer's chat template renders the messages up to message {number + 1} differently than "
        "the whole conversation, so the assistant's turn can't be found: split the conversation there, or set another "
        "chat_template."
    )


def render_question(messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase) -> str:
    """Render messages with the chat template, ending with its generation prompt.

    Args:
        messages: the messages in any form that `read_messages` reads; the last is usually one of the user.
        tokenizer: the tokenizer with the chat template.

    Raises:
        DataError: the tokenizer has no template, the messages can't be read (see `read_messages`), or the template
            can't render them.
    """
    if not tokenizer.chat_template:
        raise DataError("The tokenizer has no chat template for conversations: name a chat model.")
    chat = ChatExample(tuple(read_messages(messages, "The conversation")), where="The conversation")
    return _render(chat, tokenizer, len(chat.messages), header=True)


def _render(chat: ChatExample, tokenizer: PreTrainedTokenizerBase, count: int, *, header: bool = False) -> str:
    """Render the first `count` messages; `header` adds the template's generation prompt."""
    try:
        return render_messages(tokenizer, chat.messages[:count], chat.tools, header=header)
    except Exception as error:  # Errors come from jinja, or are raised by the template.
        raise DataError(
            f"{chat.where} can't be rendered with the tokenizer's chat template ({first_line(error)}): correct the "
            "conversation, or set another chat_template."
        ) from None


def chat_tokens(tokenizer: PreTrainedTokenizerBase, chat: ChatExample) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokenize a conversation of n tokens.

    Returns:
        The token ids, int64, (n,), with an end token if the template puts none behind the last turn; which of them are
        predicted, bool, (n,); and the character of the rendered text at which each token ends, int64, (n,).

    Raises:
        DataError: the tokenizer is not a fast one, a content has a special token, the conversation can't be rendered
            (see `render_chat`), no token is predicted, or the template's own `{% generation %}` blocks mark other text.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise DataError(
            f"{chat.where} is a conversation, but the tokenizer {type(tokenizer).__name__} does not return the "
            "positions of tokens: use a backbone with a tokenizer.json."
        )
    _check_contents(tokenizer, chat)
    rendered = render_chat(chat, tokenizer)
    encoded = tokenizer(rendered.text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids = np.asarray(encoded["input_ids"], dtype=np.int64)
    offsets = np.asarray(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)
    begins = _first_visible(rendered.text, offsets)
    predicted = _inside(begins, rendered.learned)
    if not predicted.any():
        raise _no_token_error(chat.where)
    _check_own_mask(tokenizer, chat, ids, _inside(begins, rendered.turns))
    return with_end(tokenizer, rendered.text, ids, predicted, offsets[:, 1])


def _check_contents(tokenizer: PreTrainedTokenizerBase, chat: ChatExample) -> None:
    """Raise `DataError` if a content has a special token, such as the mark between turns."""
    for number, message in enumerate(chat.messages, start=1):
        for token in tokenizer.all_special_tokens:
            if token in message["content"]:
                raise DataError(
                    f"{chat.where}, message {number}, has the special token {token} in its content, where the model "
                    "would read a mark of the template: remove it from the text."
                )


def _inside(positions: np.ndarray, turns: Sequence[tuple[int, int]]) -> np.ndarray:
    """Return which positions (n,) are inside one of the turns, bool, (n,)."""
    inside = np.zeros(len(positions), dtype=bool)
    for start, stop in turns:
        inside |= (start <= positions) & (positions < stop)
    return inside


def _first_visible(text: str, offsets: np.ndarray) -> np.ndarray:
    """Return the position of each token's first visible character, or of its first one if none is visible: (n,)."""
    positions = []
    for start, stop in offsets.tolist():
        token = text[start:stop]
        visible = token.lstrip()
        blanks = len(token) - len(visible) if visible else 0
        positions.append(start + blanks)
    return np.array(positions, dtype=np.int64)


def _check_own_mask(tokenizer: Any, chat: ChatExample, ids: np.ndarray, answered: np.ndarray) -> None:
    """Raise `DataError` if the template marks the assistant's tokens itself, and they are not those of its turns.

    White space and special tokens may differ.
    """
    template = tokenizer.chat_template
    if not isinstance(template, str) or not _GENERATION_BLOCK.search(template):
        return
    messages, tools = template_inputs(tokenizer, chat.messages, chat.tools)
    own = tokenizer.apply_chat_template(
        messages,
        tools=[*tools] or None,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    mask = np.asarray(own["assistant_masks"], dtype=bool).reshape(-1)
    differs = answered != mask if len(mask) == len(ids) else np.ones(len(ids), dtype=bool)
    for position in np.flatnonzero(differs):
        token = int(ids[position])
        text = tokenizer.decode([token])
        if token not in tokenizer.added_tokens_decoder and text.strip():
            raise DataError(
                f"{chat.where}: from {text!r} on, the {{% generation %}} blocks of the chat template mark other text "
                "as the assistant's than its rendering shows: correct the template."
            )
