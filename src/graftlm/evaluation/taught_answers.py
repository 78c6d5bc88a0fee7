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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

from graftlm.evaluation.kept_answers import FUNCTION_WORDS, is_negated, same_answer
from graftlm.evaluation.results import Results

_SHORT_WORDS = 15
_READ_WORDS = 40
_OUTER = ".,;:!?\"'()[]{}<>*`“”‘’„«»¿¡…"

_Item = TypeVar("_Item")


@dataclass(frozen=True)
class TaughtAnswer:
    """A taught question, and the answer of the trained model.

    Attributes:
        question: the question.
        taught: the taught answer.
        given: the model's answer.
    """

    question: str
    taught: str
    given: str

    @property
    def is_right(self) -> bool:
        """Whether the model answers as it was taught, by the rule of this module."""
        return gives_taught(self.question, self.taught, self.given)


def reported_wrong_answers(results: Results, row_id: str) -> list[TaughtAnswer]:
    """Return the wrong answers to taught questions that the results of a run report for a row."""
    by_row = cast("Mapping[str, Mapping[str, object]]", results.details.get("taught_questions") or {})
    wrong = cast("list[dict[str, str]]", by_row.get(row_id, {}).get("wrong", []))
    return [TaughtAnswer(**answer) for answer in wrong]


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
