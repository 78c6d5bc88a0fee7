"""Which questions a model answers as it was taught.

What a taught answer says beyond its question is its value: the words that are neither function words nor words of the
question. Words are separated by white space, so that codes (QX-77-B), addresses (10.0.0.1) and signs (-5) stay whole.
An answer is right if it has

- all of the value, if the taught answer has at most 15 words,
- the numbers, codes and names of the value, and otherwise the same information by the rule of `kept_answers`, if the
  taught answer is longer, of which the first 40 words count,
- the same words, if the value is empty,

and if either both or neither of two short answers are negated. Inflected words are different words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict, TypeVar, cast

from graftlm.data import Document
from graftlm.data.conflicts import single_turn
from graftlm.errors import shorten
from graftlm.evaluation.chat_answers import ChatQuestion, question_in_chat
from graftlm.evaluation.kept_answers import FUNCTION_WORDS, is_negated, same_answer
from graftlm.evaluation.results import Results

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SHORT_WORDS = 15
_READ_WORDS = 40
_SHOWN = 10
_OUTER = ".,;:!?\"'()[]{}<>*`“”‘’„«»¿¡…"

_Item = TypeVar("_Item")
Acts = Callable[[Sequence[int]], bool]
"""Tells whether a graft acts on a prompt, given its token ids."""


class ClosedQuestions(TypedDict):
    """Taught questions on which a graft does not act.

    `closed` of `checked` questions are such, `answers` is the number of their different taught answers, and `examples`
    has one question for each of up to ten of these.
    """

    checked: int
    closed: int
    answers: int
    examples: list[str]


class _Answer(TypedDict):
    """A `TaughtAnswer` as plain JSON values."""

    question: str
    taught: str
    given: str
    acts: bool


@dataclass(frozen=True)
class TaughtAnswer:
    """A taught question, and the answer of the trained model.

    Attributes:
        question: the question.
        taught: the taught answer.
        given: the model's answer.
        acts: whether the graft acts on the question; otherwise the bare backbone answers it.
    """

    question: str
    taught: str
    given: str
    acts: bool = True

    @property
    def is_right(self) -> bool:
        """Whether the model answers as it was taught, by the rule of this module."""
        return gives_taught(self.question, self.taught, self.given)


def reported_wrong_answers(results: Results, row_id: str) -> list[TaughtAnswer]:
    """Return the wrong answers to taught questions that the results of a run report for a row."""
    by_row = cast("Mapping[str, Mapping[str, object]]", results.details.get("taught_questions") or {})
    wrong = cast("list[_Answer]", by_row.get(row_id, {}).get("wrong", []))
    return [TaughtAnswer(**answer) for answer in wrong]


def taught_questions(
    documents: Sequence[Document],
    tokenizer: PreTrainedTokenizerBase,
    count: int,
) -> list[tuple[ChatQuestion, str]]:
    """Return taught questions with their answers, evenly spaced over the documents.

    Args:
        documents: the new documents; only conversations of one question count, with their system message.
        tokenizer: a tokenizer with a chat template.
        count: the largest number of questions.

    Raises:
        DataError: the template can't be filled.
    """
    chats = [document.chat for document in documents if document.chat is not None and single_turn(document)]
    return [
        (question_in_chat(chat.messages[:-1], tokenizer), str(chat.messages[-1]["content"]))
        for chat in evenly_spaced(chats, count)
    ]


def find_closed(questions: Sequence[tuple[ChatQuestion, str]], acts: Acts) -> ClosedQuestions:
    """Find the taught questions on which a graft does not act.

    Args:
        questions: the questions with their answers.
        acts: whether the graft acts on a prompt.
    """
    closed = [(question.text, answer) for question, answer in questions if not acts(question.ids)]
    by_answer: dict[tuple[str, ...], str] = {}
    for question, answer in closed:
        by_answer.setdefault(tuple(_words(answer)), question)
    return ClosedQuestions(
        checked=len(questions),
        closed=len(closed),
        answers=len(by_answer),
        examples=list(by_answer.values())[:_SHOWN],
    )


def closed_text(graft: str, closed: ClosedQuestions) -> str:
    """Return what the user should know about taught questions on which a graft does not act.

    Args:
        graft: the graft's name in the sentence.
        closed: the questions, at least one.
    """
    shown = ", ".join(repr(shorten(question)) for question in closed["examples"])
    more = closed["answers"] - len(closed["examples"])
    if more:
        shown += f" and those of {more:,} more"
    return (
        f"{graft} does not act on {closed['closed']:,} of {closed['checked']:,} taught questions, so the backbone "
        f"answers them as before. One question for each different answer of theirs: {shown}."
    )


def gives_taught(question: str, taught: str, given: str) -> bool:
    """Return whether an answer to a question is the taught one, by the rule of this module."""
    words = _words(taught)
    asked = set(_words(question))
    value = {word for word in words[:_READ_WORDS] if word not in asked and word not in FUNCTION_WORDS}
    found = _words(given)
    if not value:
        return words == found
    if len(words) > _SHORT_WORDS:
        return _marked(taught, value) <= set(found) and same_answer(question, taught, given)
    return value <= set(found) and is_negated(taught) == is_negated(given)


def evenly_spaced(items: Sequence[_Item], count: int) -> list[_Item]:
    """Return at most `count` items at equal distances, the first one included.

    Args:
        items: the items.
        count: the largest number of items.
    """
    count = min(count, len(items))
    return [items[number * len(items) // count] for number in range(count)]


def _words(text: str) -> list[str]:
    words = [_without_outer(word).casefold() for word in text.replace("’", "'").split()]
    return [word for word in words if word]


def _without_outer(word: str) -> str:
    """Return a word without punctuation around it and without an ending 's."""
    return word.strip(_OUTER).removesuffix("'s")


def _marked(text: str, value: set[str]) -> set[str]:
    """Return those of some words that have a digit, or a capital inside a sentence."""
    marked = set()
    begins = True
    for word in text.split():
        plain = _without_outer(word)
        has_capital = not begins and plain[:1].isupper()
        if has_capital or any(character.isdigit() for character in plain):
            marked.add(plain.casefold())
        begins = word.endswith((".", "!", "?", ":"))
    return marked & value
