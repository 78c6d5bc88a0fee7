"""Read lists that are written as the text of a cell, as in CSV files: JSON, Python, or numpy without commas."""

from __future__ import annotations

import ast
import json
import re

from graftlm.errors import DataError, shorten

_STRING = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""
_SCALAR = rf"{_STRING}|[-+]?\.?\w[\w.+-]*"
# A scalar, or one that numpy writes with its type, such as np.str_('a').
_ELEMENT = re.compile(rf"\s*(?:(?:np|numpy)\.\w+\(\s*({_SCALAR})\s*\)|({_SCALAR}))", re.DOTALL)
_COMMA = re.compile(r"\s*,")
_BLANK = re.compile(r"\s+")
# What a list begins with: a quote, a number, another list, or its end.
_OPENING = re.compile(r"""\[\s*(?:['"\]\[{]|(?:np|numpy)\.|[-+]?\.?\d)|\(\s*['"]""")
_UNFINISHED = re.compile(r"""[\[(]['"]""")
_BARE_LIST = re.compile(r"\[[^\[\]]*,[^\[\]]*\]")
_SET = re.compile(rf"\{{\s*(?:{_STRING}|[-+]?\.?\d[\w.]*)\s*[,}}]", re.DOTALL)  # unlike a mapping
_ENCLOSED = re.compile(r"\[[^\[\]]*\]|\{.*", re.DOTALL)
_SET_BEGINNING = re.compile(r"\{|(?:frozen)?set\(")
_CALL = re.compile(r"[A-Za-z_][\w.]*\(\s*[\[{(].*\)|(?:frozen)?set\(\)", re.DOTALL)
_READ_CALL = re.compile(
    r"(?:(?:np|numpy)\.)?(?:array|set|frozenset)\(\s*([\[{].*[\]}]|)\s*(?:,\s*dtype=[^\[\](){}]*)?\)", re.DOTALL
)


def looks_like_list(text: str) -> bool:
    """Return whether a text is written as a list or a set, whether or not it is a valid one.

    `['a', 'b']`, `["a"]`, `[0 1]`, `('a',)`, `[a, b]`, `{'a', 'b'}`, `array(['a'])` and the unfinished `['a', 'b` are;
    `[CLS] a [SEP]`, `{a}` and `{'a': 1}` are not.
    """
    stripped = text.strip()
    if _BARE_LIST.fullmatch(stripped) or _UNFINISHED.match(stripped):
        return True
    if _SET.match(stripped) or _CALL.fullmatch(stripped):
        return True
    return stripped[-1:] in ("]", ")") and _OPENING.match(stripped) is not None


def is_enclosed(text: str) -> bool:
    """Return whether a text is in brackets or begins with a brace, as `[a]` and `{a, b}`; `[a] b [c]` is not."""
    return _ENCLOSED.fullmatch(text.strip()) is not None


def read_list(text: str, column: str, where: str, *, ordered: bool = True) -> list[object]:
    """Return the elements of a list that is written as text.

    Args:
        text: a list of JSON, of Python, or of numpy, which writes blanks in place of commas.
        column: the name of its column, for error messages.
        where: the location of its row, for error messages.
        ordered: whether the order of the elements counts, so that a set is refused.

    Raises:
        DataError: the list is not valid, or is cut.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = _flat_list(text.strip(), ordered=ordered)
    if not isinstance(value, list):
        raise DataError(
            f"{where} has {shorten(text)!r} in the column {column!r}, which looks like a list but is not a valid one: "
            'correct it, for example to ["one", "two"].'
        )
    return value


def _flat_list(text: str, *, ordered: bool) -> list[object] | None:
    """Return the elements of a flat list of Python or numpy, or of a set; None if it is not valid.

    `ast.literal_eval` alone would join the texts of `['a' 'b']`, as Python does.
    """
    is_set = _SET_BEGINNING.match(text) is not None
    call = _READ_CALL.fullmatch(text)
    if call is not None:
        text = call[1] or "[]"
    if text[:1] + text[-1:] not in ("[]", "()", "{}") or (is_set and ordered):
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
            elements.append(ast.literal_eval(element[1] or element[2]))
        except (ValueError, SyntaxError):
            return None
        position = element.end()
        separator = _COMMA.match(text, position, end) or _BLANK.match(text, position, end)
        if separator is None and position < end:
            return None
        if separator is not None:
            position = separator.end()
            if text[position:end].strip():
                separators.add(separator.group().strip())
    is_separated = separators <= {","} if text.startswith("{") else len(separators) < 2
    return elements if is_separated else None
