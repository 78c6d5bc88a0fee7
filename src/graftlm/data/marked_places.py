"""Read the choices and the marked places of rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from graftlm.data.list_cells import looks_like_list, read_list
from graftlm.data.table_files import check_text, type_name
from graftlm.errors import DataError, shorten

FEWEST_CHOICES = 2


class Mark(NamedTuple):
    """A marked place in one of a row's texts.

    Attributes:
        text: the number of the text, 0 or 1.
        start: index of its first character.
        end: index after its last character.
    """

    text: int
    start: int
    end: int


def read_choices(values: Sequence[object], columns: Sequence[str], where: str) -> tuple[str, ...]:
    """Return the choices of a row. Rows of one task may have different numbers of choices.

    Args:
        values: the values of the columns: one list of texts, which may be written as text, or a text for each column.
        columns: the names of the columns, for error messages.
        where: the location of the row, for error messages.

    Raises:
        DataError: the value of a single column is not a list, a choice is empty or not text, or there are fewer than
            two.
    """
    column = columns[0]
    choices: list[object] = list(values)
    if len(columns) == 1:
        (value,) = values
        if isinstance(value, str) and looks_like_list(value):
            value = read_list(value, column, where)
        if not isinstance(value, list):
            raise DataError(
                f"{where} has {type_name(value)} in the column {column!r}, but a list of choices is expected: correct "
                "the row, or name a column for each choice in the task's choices."
            )
        choices = value
    if len(choices) < FEWEST_CHOICES:
        raise DataError(
            f"{where}: the number of choices in the column {column!r} is {len(choices)}, but at least {FEWEST_CHOICES} "
            "are expected: correct the row, or leave it out."
        )
    names = columns if len(columns) > 1 else [column] * len(choices)
    texts = [check_text(choice, name, where) for choice, name in zip(choices, names, strict=True)]
    for text, name in zip(texts, names, strict=True):
        if not text.strip():
            raise DataError(f"{where} has an empty choice in the column {name!r}: fill it in, or leave the row out.")
    return tuple(texts)


def read_marks(
    values: Sequence[object],
    columns: Sequence[str],
    texts: Sequence[str],
    where: str,
) -> tuple[Mark, ...]:
    """Return the marked places of a row: of a pair one in each text, otherwise both in the only text.

    Args:
        values: a place for each column: the list of its first character and the one after its last, which may be
            written as text, or the marked text itself if it occurs once.
        columns: the names of the columns, for error messages.
        texts: the text of the row, or both texts of a pair.
        where: the location of the row, for error messages.

    Raises:
        DataError: a value has another form, a place is empty or outside its text, or a marked text does not occur
            exactly once.
    """
    marks = []
    for number, (value, column) in enumerate(zip(values, columns, strict=True)):
        text_number = min(number, len(texts) - 1)
        start, end = _place(value, texts[text_number], column, where)
        marks.append(Mark(text_number, start, end))
    return tuple(marks)


def _place(value: object, text: str, column: str, where: str) -> tuple[int, int]:
    """Return the characters of a marked place."""
    if isinstance(value, str) and looks_like_list(value) and value not in text:
        value = read_list(value, column, where)
    if isinstance(value, str):
        count = text.count(value) if value.strip() else 0
        if count != 1:
            raise DataError(
                f"{where} marks {shorten(value)!r} in the column {column!r}, which occurs {count} times in its text, "
                "but once is expected: give the list of its first character and the one after its last."
            )
        start = text.index(value)
        return start, start + len(value)
    numbers = [number for number in value if type(number) is int] if isinstance(value, list) else []
    if not isinstance(value, list) or not len(value) == len(numbers) == 2:
        found = repr(value) if isinstance(value, list) else type_name(value)
        raise DataError(
            f"{where} has {shorten(found)} in the column {column!r}, but a marked place is expected: give the list of "
            "its first character and the one after its last."
        )
    start, end = numbers
    check_place(start, end, text, column, where)
    return start, end


def check_place(start: int, end: int, text: str, column: str, where: str) -> None:
    """Raise `DataError` if the characters from `start` to `end` are none, only blanks, or not in a text.

    Args:
        start: index of the first character.
        end: index after the last character.
        text: the text.
        column: the name of the column of the place, for error messages.
        where: the location of the row, for error messages.
    """
    if 0 <= start < end <= len(text) and text[start:end].strip():
        return
    raise DataError(
        f"{where} marks the characters {start} to {end} in the column {column!r}, but a place in the text is expected, "
        f"which has {len(text)} characters: correct the row."
    )
