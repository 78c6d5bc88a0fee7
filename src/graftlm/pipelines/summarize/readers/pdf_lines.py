"""The lines of PDF pages, without the numbers that manuscripts have at the margin of their lines."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, zip_longest

_FIRST_NUMBER = re.compile(r"\s*(\d{1,5})(?:[ \t]+|\s*$)")
_LAST_NUMBER = re.compile(r"(?:\s+|^)(\d{1,5})\s*$")
_MARGIN = 0.25  # share of a page's width in which the numbers of one side begin or end
_STEPS = (1, 2, 5, 10)  # between the numbers, where not every line has one
_MIN_NUMBERS = 4  # in one margin of a page
_MIN_REGULAR = 0.6  # share of the numbers that follow the number before at the same step
_MIN_NUMBERED = 0.5  # share of the lines that the numbers count


@dataclass(frozen=True, slots=True)
class PdfLine:
    """A line of a page.

    Attributes:
        text: the text with its line break.
        start: position of the text in the text of the page.
        box: index of its box of text on the page.
        height: vertical position of its center: 0 at the bottom of the page, 1 at the top.
        left: horizontal position of its left end: 0 at the left of the page, 1 at the right.
        right: that of its right end.
        font: the most frequent font.
        size: the most frequent font size in points.
    """

    text: str
    start: int
    box: int
    height: float
    left: float
    right: float
    font: str
    size: float


@dataclass(frozen=True)
class _Number:
    """A number at one end of a line: the line's index on its page, the value, and the range in the line's text."""

    line: int
    value: int
    start: int
    end: int


def without_line_numbers(page: Sequence[PdfLine]) -> tuple[list[PdfLine], int]:
    """Return the lines of a page without line numbers, and how many were removed.

    Numbers count lines if, from the top of a margin to its bottom, they rise at one step and there are enough for the
    lines of the page. They may be lines of their own or the first or last word of a line.
    """
    lines = list(page)
    removed = 0
    for is_left in (True, False):
        numbers = _line_numbers(lines, is_left=is_left)
        removed += len(numbers)
        for number in numbers:
            line = lines[number.line]
            text = line.text[number.end :] if is_left else line.text[: number.start] + "\n"
            start = line.start + number.end if is_left else line.start
            lines[number.line] = replace(line, text=text, start=start)
        lines = [line for line in lines if line.text.strip()]
    return lines, removed


def _line_numbers(lines: Sequence[PdfLine], *, is_left: bool) -> list[_Number]:
    """Return the numbers that count the lines of a page in one margin; none if it has no such numbers."""
    numbers = list(_margin_numbers(lines, is_left=is_left))
    differences = [second.value - first.value for first, second in pairwise(numbers)]
    if len(numbers) < _MIN_NUMBERS:
        return []
    step, count = Counter(differences).most_common(1)[0]
    other_lines = sum(not line.text.strip().isdecimal() and _in_margin(line, is_left=is_left) for line in lines)
    if step not in _STEPS or count < _MIN_REGULAR * len(differences) or count * step < _MIN_NUMBERED * other_lines:
        return []
    return list(_in_progression(numbers, step))


def _in_progression(numbers: Sequence[_Number], step: int) -> Iterator[_Number]:
    """Yield the numbers that rise at a step, of which a few may be missing, and a 1 before them, as in 1, 5, 10."""
    last: int | None = None
    for number, following in zip_longest(numbers, numbers[1:]):
        if last is None:
            begins = following is not None and following.value - number.value == step
            last = number.value if begins else None
            is_counted = begins or (number is numbers[0] and number.value == 1)
        else:
            is_counted = number.value - last in (step, 2 * step, 3 * step)
            last = number.value if is_counted else last
        if is_counted:
            yield number


def _margin_numbers(lines: Sequence[PdfLine], *, is_left: bool) -> Iterator[_Number]:
    """Yield the numbers at one end of the lines that reach into a margin, from the top of the page."""
    for index, line in sorted(enumerate(lines), key=lambda item: -item[1].height):
        if not _in_margin(line, is_left=is_left):
            continue
        match = _FIRST_NUMBER.match(line.text) if is_left else _LAST_NUMBER.search(line.text)
        if match:
            yield _Number(index, int(match[1]), match.start(), match.end())


def _in_margin(line: PdfLine, *, is_left: bool) -> bool:
    return line.left < _MARGIN if is_left else line.right > 1 - _MARGIN
