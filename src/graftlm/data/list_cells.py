"""Read lists that are written as the text of a cell, as in CSV files: JSON, Python, or numpy without commas."""

from __future__ import annotations

import ast
import json
import re

from graftlm.errors import DataError, shorten

_STRING = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""
_ELEMENT = re.compile(rf"\s*({_STRING}|[-+]?\.?\w[\w.+-]*)", re.DOTALL)
_COMMA = re.compile(r"\s*,")
_BLANK = re.compile(r"\s+")
# What a list begins with: a quote, a number, another list, or its end.
_OPENING = re.compile(r"""\[\s*(?:['"\]\[{]|[-+]?\.?\d)|\(\s*['"]""")
_UNFINISHED = re.compile(r"""[\[(]['"]""")
_BARE_LIST = re.compile(r"\[[^\[\]]*,[^\[\]]*\]")


def looks_like_list(text: str) -> bool:
    """Return whether a text is written as a list, whether or not it is a valid one.

    `['a', 'b']`, `["a"]`, `[0 1]`, `('a',)`, `[a, b]` and the unfinished `['a', 'b` are; `[CLS] a [SEP]` is not.
    """
    stripped = text.strip()
    if _BARE_LIST.fullmatch(stripped) or _UNFINISHED.match(stripped):
        return True
    return stripped[-1:] in ("]", ")") and _OPENING.match(stripped) is not None


def read_list(text: str, column: str, where: str) -> list[object]:
    """Return the elements of a list that is written as text.

    Args:
        text: a list of JSON, of Python, or of numpy, which writes blanks in place of commas.
        column: the name of its column, for error messages.
        where: the location of its row, for error messages.

    Raises:
        DataError: the list is not valid, or is cut.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = _flat_list(text.strip())
    if not isinstance(value, list):
        raise DataError(
            f"{where} has {shorten(text)!r} in the column {column!r}, which looks like a list but is not a valid one: "
            'correct it, for example to ["one", "two"].'
        )
    return value


def _flat_list(text: str) -> list[object] | None:
    """Return the elements of a flat list of Python or numpy; None if it is not valid.

    `ast.literal_eval` alone would join the texts of `['a' 'b']`, as Python does.
    """
    if text[:1] + text[-1:] not in ("[]", "()"):
        return None
    end = len(text) - 1
    position = 1
    separators: set[str] = set()
    elements: list[object] = []
    while text[position:end].strip():
        element = _ELEMENT.match(text, position, end)
        if element is None:
            return None
        try:
            elements.append(ast.literal_eval(element[1]))
        except (ValueError, SyntaxError):
            return None
        position = element.end()
        separator = _COMMA.match(text, position, end) or _BLANK.match(text, position, end)
        if separator is None:
            continue
        position = separator.end()
        if text[position:end].strip():
            separators.add(separator.group().strip())
    return elements if len(separators) < 2 else None
