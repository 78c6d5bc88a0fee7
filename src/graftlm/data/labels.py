"""What a cell says a label is: one form for each value, whatever the file's types are."""

from __future__ import annotations

import json
import math
from typing import Any

from graftlm.errors import DataError


class LabelReader:
    """Labels as text, and a watch over what one column mixes.

    Args:
        column: its name, for messages.
    """

    def __init__(self, column: str) -> None:
        self.column = column
        self._forms: dict[float, tuple[str, str]] = {}  # value -> the text that stands for it, and where it was first
        self._number: tuple[str, str] | None = None
        self._word: tuple[str, str] | None = None

    def read(self, value: Any, where: str) -> str:
        """The text of a label: numbers as their digits, truth values as true and false.

        Raises:
            DataError: there is none, or the column mixes numbers with words, or two forms of one number.
        """
        text = self._text(value, where)
        self._check_form(text, where)
        if isinstance(value, int | float) and not isinstance(value, bool):
            self._number = self._number or (text, where)
        elif _as_number(text) is None:
            self._word = self._word or (text, where)
        if self._number and self._word:
            raise DataError(
                f"{where} has {self._said(text, value)} in the column {self.column!r}, which is sometimes a number "
                f"({self._number[0]} at {self._number[1]}) and sometimes a word ({self._word[0]!r} at "
                f"{self._word[1]}): write all labels as text."
            )
        return text

    def _text(self, value: Any, where: str) -> str:
        if isinstance(value, bool):
            return json.dumps(value)
        if isinstance(value, int | float) and math.isfinite(value):
            return repr(value)
        if isinstance(value, str) and value.strip():
            return value.strip()
        found = "nothing" if value is None or value == "" else f"a value of type {type(value).__name__}"
        if isinstance(value, float) or (isinstance(value, str) and value):
            found = repr(value)
        raise DataError(f"{where} has {found} in the column {self.column!r}, but a label is expected: correct the row.")

    def _check_form(self, text: str, where: str) -> None:
        number = _as_number(text)
        if number is None:
            return
        first, there = self._forms.setdefault(number, (text, where))
        if first != text:
            raise DataError(
                f"{where} has the label {text} in the column {self.column!r}, and {there} has {first}, which is the "
                "same number in another form: write both alike."
            )

    def _said(self, text: str, value: Any) -> str:
        return f"the number {text}" if isinstance(value, int | float) else f"the word {text!r}"


def _as_number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def read_number(value: Any, column: str, where: str) -> float:
    """A number to be predicted.

    Raises:
        DataError: it is none, or not finite.
    """
    try:
        number = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        found = "nothing" if value is None or value == "" else repr(value)
        raise DataError(
            f"{where} has {found} in the column {column!r}, but a finite number is expected: correct the row."
        )
    return number


def read_several(value: Any, reader: LabelReader, separator: str, where: str) -> tuple[str, ...]:
    """The labels of a row, of which there may be none: a list, or a text with a separator between them.

    Raises:
        DataError: it is neither, or a label is none.
    """
    if isinstance(value, str):
        value = [part for part in value.split(separator) if part.strip()]
    if not isinstance(value, list):
        found = "nothing" if value is None else f"a value of type {type(value).__name__}"
        raise DataError(
            f"{where} has {found} in the column {reader.column!r}, but a list of labels, or a text with "
            f"{separator!r} between them, is expected: correct the row."
        )
    return tuple(dict.fromkeys(reader.read(label, where) for label in value))
