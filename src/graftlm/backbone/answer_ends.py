"""The tokens that end an answer in a conversation, and stop strings.

Base models often have a chat template, but an EOS that ends documents rather than turns. An answer therefore ends with
the special tokens that the template puts behind a turn of the assistant, beside the tokens that end a text.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from graftlm.backbone.chat_templates import Message, Tool, common_ending, render_messages
from graftlm.backbone.text_parts import common_length
from graftlm.backbone.tokens import end_ids
from graftlm.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Contents of trial turns. Two of them with different first and last letters show where a content begins and ends.
_QUESTIONS = ("one", "two")
_ANSWERS = ("yes", "no")
_SYSTEM: Message = {"role": "system", "content": "three"}
_TOOL: Tool = {
    "type": "function",
    "function": {
        "name": "four",
        "description": "-",
        "parameters": {"type": "object", "properties": {}, "required": []},
    },
}
# System messages and tools with which trial turns are rendered, since some templates demand them.
_SURROUNDINGS: tuple[tuple[tuple[Message, ...], tuple[Tool, ...]], ...] = (
    ((), ()),
    ((_SYSTEM,), ()),
    ((), (_TOOL,)),
    ((_SYSTEM,), (_TOOL,)),
)


def answer_end_ids(
    model: object, tokenizer: PreTrainedTokenizerBase, *, chat_template: str | None = None
) -> frozenset[int]:
    """Return the ids that end an answer of a chat model.

    Args:
        model: the model, whose generation config may name EOS tokens.
        tokenizer: its tokenizer.
        chat_template: a template that replaces the tokenizer's own.

    Returns:
        The ids that end a text (`end_ids`), and those that end a turn of the assistant (`turn_end_ids`).
    """
    return frozenset(turn_end_ids(tokenizer, chat_template=chat_template)) | end_ids(model, tokenizer)


def turn_end_ids(tokenizer: PreTrainedTokenizerBase, *, chat_template: str | None = None) -> tuple[int, ...]:
    """Return the special tokens that a chat template puts behind a turn of the assistant.

    Of a template that goes on with text, such as the header of another answer, the first one counts. If there is none
    behind the last turn, the special token with which the next turn begins counts.

    Args:
        tokenizer: the tokenizer.
        chat_template: a template that replaces the tokenizer's own.

    Returns:
        Token ids, in the order of the template. There are none without a template, and, with a warning, if it can't
        render a question with its answer.
    """
    template = chat_template or tokenizer.chat_template
    if not template:
        return ()
    # Of several templates by name, transformers selects one.
    return _turn_end_ids(tokenizer, template if isinstance(template, str) else None, len(tokenizer))


@lru_cache(maxsize=4)
def _turn_end_ids(tokenizer: PreTrainedTokenizerBase, template: str | None, size: int) -> tuple[int, ...]:
    """Return `turn_end_ids` of a template. `size` is the number of tokens, which may grow."""
    answered, other = (_render(tokenizer, template, _QUESTIONS[0], answer) for answer in _ANSWERS)
    if answered == other:
        _warn_of_unknown_end(answered)
        return ()
    ending = common_ending(answered, other)
    ids = marker_ids(tokenizer, ending)
    if _has_other_text(tokenizer, ending, ids):
        ids = ids[:1]
    if not ids:
        ids = marker_ids(tokenizer, _text_between_turns(tokenizer, template))[:1]
    return tuple(dict.fromkeys(ids))


def _warn_of_unknown_end(rendered: str) -> None:
    found = "does not write the answer to a short question" if rendered else "can't render a short question and answer"
    warnings.warn(
        f"The chat template {found}, so the tokens with which it ends an answer are unknown: generation ends answers "
        "with the model's own EOS tokens alone, and may go on behind the end that training teaches. Set another "
        "chat_template.",
        stacklevel=4,
    )


def marker_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the ids of the visible added tokens in a text, such as `<|im_end|>`, in order.

    Some tokenizers also add blanks and line breaks, which mark nothing. Tokenizers do not agree on which markers are
    flagged as special, so that the flag does not count.
    """
    if not text:
        return []
    added = tokenizer.added_tokens_decoder
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return [token for token in ids if token in added and str(added[token]).strip()]


def _has_other_text(tokenizer: PreTrainedTokenizerBase, text: str, markers: Sequence[int]) -> bool:
    """Return whether a text has more than markers and white space."""
    for marker in tokenizer.convert_ids_to_tokens(list(markers)):
        text = text.replace(marker, "", 1)
    return bool(text.strip())


def _text_between_turns(tokenizer: PreTrainedTokenizerBase, template: str | None) -> str:
    """Return what the template renders between an answer and the next question; empty if it can't render them."""
    question, next_question = _QUESTIONS
    answer, other_answer = _ANSWERS
    turns = _render(tokenizer, template, question, answer, question)
    start = len(turns) - len(common_ending(turns, _render(tokenizer, template, question, other_answer, question)))
    stop = common_length(turns, _render(tokenizer, template, question, answer, next_question))
    return turns[start:stop]


def _render(tokenizer: PreTrainedTokenizerBase, template: str | None, *contents: str) -> str:
    """Return turns of user and assistant as training renders them; empty if the template can't render them."""
    turns: list[Message] = []
    for number, content in enumerate(contents):
        turns.append({"role": "assistant" if number % 2 else "user", "content": content})
    for before, tools in _SURROUNDINGS:
        with suppress(Exception):  # A template is a program of the checkpoint, and may raise anything.
            return render_messages(tokenizer, [*before, *turns], tools, template=template)
    return ""


@dataclass(frozen=True)
class Stops:
    """What ends a continuation beside the model's own end tokens.

    Attributes:
        strings: stop strings; the text ends before the first one that it would contain.
        ids: tokens that end it.
    """

    strings: tuple[str, ...] = ()
    ids: frozenset[int] = frozenset()


def read_stops(tokenizer: PreTrainedTokenizerBase, stops: Iterable[str]) -> Stops:
    """Sort stop strings into special tokens, which never appear in a decoded text, and strings to search for.

    Args:
        tokenizer: the tokenizer of the model.
        stops: the stop strings. White space around a special token is ignored, and so is white space that the
            vocabulary can't write, such as the line break of a tokenizer of words.

    Raises:
        DataError: a stop string is empty, or the tokenizer never decodes to it: it has characters that the vocabulary
            lacks or that the tokenizer changes, or has text beside a special token.
    """
    special = {str(token): number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    strings = []
    ids = set()
    for stop in stops:
        if not stop:
            raise DataError("A stop string is empty, and would end every answer before it begins: leave it out.")
        if stop.strip() in special:
            ids.add(special[stop.strip()])
        elif _can_match(tokenizer, stop):
            strings.append(stop)
        elif stop.strip():
            raise DataError(
                f"The stop string {stop!r} can't match, since the tokenizer never decodes to it: use a special token "
                "alone, or text in the tokenizer's own spelling."
            )
    return Stops(tuple(strings), frozenset(ids))


def _can_match(tokenizer: PreTrainedTokenizerBase, stop: str) -> bool:
    """Return whether a decoded text can contain a string, by itself or next to a letter."""
    for text in (stop, f"a{stop}", f"{stop}a", f"a{stop}a"):
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        decoded = str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
        if stop in decoded:
            return True
    return False
