"""Read the labels of a task's column: classes, numbers, several labels, tags and answers.

Classes and tags are always text. A number in a file becomes the text of its digits.
"""

from __future__ import annotations

import ast
import contextlib
import json
import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from graftlm.data.list_cells import is_enclosed, looks_like_list, read_list
from graftlm.data.table_files import type_name
from graftlm.errors import DataError, shorten
from graftlm.grafts.heads import TaskType


class AnswerSpan(NamedTuple):
    """An answer in a context.

    Attributes:
        start: index of its first character in the context.
        end: index after its last character.
        answers: all texts that count as correct; the first one is at `start`.
        others: first character and the one after the last of further places of an answer, as far as the row gives them.
    """

    start: int
    end: int
    answers: tuple[str, ...]
    others: tuple[tuple[int, int], ...] = ()


_MAPPING = re.compile(r"""\s*\{\s*['"]""")
_DIGITS = re.compile(r"[0-9]{1,6}")
_BLANKS = re.compile(r"[ \t\r\n]+")

Target = str | float | int | tuple[str, ...] | AnswerSpan | None
"""A label, a number, the number of a choice, several labels, a tag for each word, or an answer; None without labels."""


class _Seen(NamedTuple):
    """The first label of some form, and the location of its row."""

    text: str
    where: str


class LabelReader:
    """Read the labels of a column, and reject a column that mixes numbers and words, or 1 and 1.0.

    Each column needs its own reader, which remembers the labels of earlier rows.

    Args:
        task_type: the type of the task.
        column: the name of the column, for error messages.
        separator: the separator of several labels in a text; only multi-label tasks use it.
    """

    def __init__(self, task_type: TaskType, column: str, separator: str = ",") -> None:
        self.type: TaskType = task_type
        self.column = column
        self.separator = separator
        self._numbers: dict[float, _Seen] = {}
        self._first_number: _Seen | None = None
        self._first_word: _Seen | None = None

    def target(self, value: object, texts: Sequence[str], where: str) -> Target:
        """Return the target of a row. Its labels are kept for the checks of later rows.

        Args:
            value: the value of the column.
            texts: the texts of the row: of a span task question and context, of a tagging task the words, of a choice
                task the choices.
            where: the location of the row, for error messages.

        Raises:
            DataError: the value does not fit the type of the task, the texts, or the labels of earlier rows.
        """
        if self.type == "regression":
            return self._number(value, where)
        if self.type in ("classification", "marked"):
            return self._label(value, where)
        if self.type == "choice":
            return choice_number(value, len(texts), self.column, where)
        if self.type == "span":
            _, context = texts
            return answer_span(value, context, self.column, where)
        if self.type == "multi-label":
            labels = [self._label(label, where) for label in self._split(value, where)]
            return tuple(dict.fromkeys(labels))
        tags = tuple(self._label(tag, where) for tag in split_blanks(value, self.column, where))
        if not texts:
            raise DataError(f"{where} has no words, but at least one is expected: leave the row out.")
        if len(tags) != len(texts):
            raise DataError(
                f"{where}: the number of words is {len(texts)} and that of tags {len(tags)}, but a tag for each word "
                "is expected: correct the row."
            )
        return tags

    def _number(self, value: object, where: str) -> float:
        """Return the target of a regression task, a number or the text of one."""
        number = _finite(value)
        if number is None:
            found = "nothing" if value is None or value == "" else repr(value)
            raise DataError(
                f"{where} has {found} in the column {self.column!r}, but a finite number is expected: correct the row."
            )
        return number

    def _split(self, value: object, where: str) -> list[object]:
        """Return the labels of a list, or of a text that is a list, a set or has separators. There may be none."""
        if isinstance(value, str) and (looks_like_list(value) or is_enclosed(value)):
            return read_list(value, self.column, where, ordered=False)
        if isinstance(value, str):
            return [part for part in value.split(self.separator) if part.strip()]
        if not isinstance(value, list):
            raise DataError(
                f"{where} has {type_name(value)} in the column {self.column!r}, but a list of labels, or a text with "
                f"{self.separator!r} between them, is expected: correct the row."
            )
        return value

    def _label(self, value: object, where: str) -> str:
        """Return a label as text, after checking it against the labels of earlier rows."""
        label = _Seen(self._text(value, where), where)
        number = _finite(label.text)
        if number is not None:
            self._check_form(label, number)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        # A text of digits is neither: it fits both kinds of columns.
        if is_number:
            self._first_number = self._first_number or label
        elif number is None:
            self._first_word = self._first_word or label
        if self._first_number is not None and self._first_word is not None:
            found = f"the number {label.text}" if is_number else f"the word {label.text!r}"
            raise DataError(
                f"{where} has {found} in the column {self.column!r}, which is sometimes a number "
                f"({self._first_number.text} at {self._first_number.where}) and sometimes a word "
                f"({self._first_word.text!r} at {self._first_word.where}): write all labels as text."
            )
        return label.text

    def _check_form(self, label: _Seen, number: float) -> None:
        """Raise `DataError` if an earlier row has the same number in another form, such as 1 and 1.0."""
        first = self._numbers.setdefault(number, label)
        if first.text != label.text:
            raise DataError(
                f"{label.where} has the label {label.text} in the column {self.column!r}, and {first.where} has "
                f"{first.text}, which is the same number in another form: write both alike."
            )

    def _text(self, value: object, where: str) -> str:
        """Return the text of a label: the digits of a number, true or false of a boolean."""
        if isinstance(value, bool):
            return json.dumps(value)
        if isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)):
            return repr(value)
        if isinstance(value, str) and value.strip() and not looks_like_list(value):
            return value.strip()
        if value == "":
            found = "nothing"
        elif isinstance(value, float | str):
            found = repr(value)
        else:
            found = type_name(value)
        raise DataError(f"{where} has {found} in the column {self.column!r}, but a label is expected: correct the row.")


def choice_number(value: object, choices: int, column: str, where: str) -> int:
    """Return the number of a row's correct choice.

    Args:
        value: a whole number from 0, or the text of one.
        choices: the number of choices of the row.
        column: the name of the label's column, for error messages.
        where: the location of the row, for error messages.

    Raises:
        DataError: the value is not the number of one of the choices.
    """
    number = value
    if isinstance(value, str) and _DIGITS.fullmatch(value.strip()):
        number = int(value)
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < choices:
        found = "nothing" if value is None or value == "" else shorten(repr(value))
        raise DataError(
            f"{where} has {found} in the column {column!r}, but the number of a choice, from 0 to {choices - 1}, is "
            "expected: correct the row."
        )
    return number


def _finite(value: object) -> float | None:
    """Return a value as a finite number, or None if it is not one."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def split_blanks(value: object, column: str, where: str) -> list[Any]:
    """Return a list unchanged, read one that is written as text, or split another text at blanks.

    Words may contain no-break and other blanks of Unicode, which do not separate them.

    Args:
        value: a list, whose elements are not checked, or a text.
        column: the name of its column, for error messages.
        where: the location of its row, for error messages.

    Raises:
        DataError: the value is neither a list nor a text, or is the text of a list that is not valid.
    """
    if isinstance(value, str) and looks_like_list(value):
        return read_list(value, column, where)
    if isinstance(value, str):
        return [part for part in _BLANKS.split(value) if part]
    if not isinstance(value, list):
        raise DataError(
            f"{where} has {type_name(value)} in the column {column!r}, but a list, or a text with white space between "
            "its words or tags, is expected: correct the row."
        )
    return value


def answer_span(value: object, context: str, column: str, where: str) -> AnswerSpan:
    """Return the span of an answer in its context.

    The span is that of the first of several answers, at its start if there is one, and otherwise at its first
    occurrence in the context.

    Args:
        value: a text of the context, a list of such texts, or SQuAD's mapping with `text`, which is one of these, and
            `answer_start`, a character or a list of characters. Unless it occurs in the context, the text of a list or
            a mapping, as in CSV files, is read as such. A span is returned as it is.
        context: the context.
        column: the name of the answer's column, for error messages.
        where: the location of its row, for error messages.

    Raises:
        DataError: there is no answer, an answer is empty or not text, or the first one does not occur in the context or
            at its start.
    """
    if isinstance(value, AnswerSpan):
        return value
    if isinstance(value, str) and value not in context:
        value = _written_answers(value, column, where)
    found = value
    starts: list[object] = []
    if isinstance(value, dict):
        found = value.get("text")
        starts = _as_list(value.get("answer_start"))
    answers = _as_list(found)
    if not answers:
        raise DataError(
            f"{where} has no answer in the column {column!r}: enter a text of the context, or leave the row out."
        )
    for answer in answers:
        if not isinstance(answer, str) or not answer.strip():
            problem = "an empty answer" if isinstance(answer, str) else type_name(answer)
            raise DataError(
                f"{where} has {problem} in the column {column!r}, but a text of the context, or a list of such texts, "
                "is expected: correct the row."
            )
    first = answers[0]
    start = starts[0] if starts else context.find(first)
    if not isinstance(start, int) or start < 0 or context[start : start + len(first)] != first:
        position = f"at character {start} of its context" if starts else "in its context"
        raise DataError(f"{where} has the answer {shorten(first)!r}, which does not occur {position}: correct the row.")
    others = _other_places(answers, starts, context)
    return AnswerSpan(start, start + len(first), tuple(answers), others)


def _other_places(answers: Sequence[str], starts: Sequence[object], context: str) -> tuple[tuple[int, int], ...]:
    """Return the places of the answers after the first whose given starts are right."""
    places = []
    for answer, start in zip(answers[1:], starts[1:], strict=False):
        if isinstance(start, int) and start >= 0 and context.startswith(answer, start):
            places.append((start, start + len(answer)))
    return tuple(dict.fromkeys(places))


def _written_answers(text: str, column: str, where: str) -> object:
    """Return the list or mapping that is written as a text; the text itself if it looks like neither."""
    if looks_like_list(text):
        return read_list(text, column, where)
    if not _MAPPING.match(text):
        return text
    for read in (json.loads, ast.literal_eval):
        with contextlib.suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            return read(text.strip())
    raise DataError(
        f"{where} has {shorten(text)!r} in the column {column!r}, which looks like a mapping but is not a valid one: "
        'correct it, for example to {"text": ["one"], "answer_start": [0]}.'
    )


def _as_list(value: Any) -> list[Any]:
    """Return a list unchanged, no elements for None, and any other value as the only element."""
    if value is None:
        return []
    return value if isinstance(value, list) else [value]
