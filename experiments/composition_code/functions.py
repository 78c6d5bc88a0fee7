"""Functions and their docstrings, from the source of whole modules."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterable, Iterator
from typing import NamedTuple

SHORTEST_DOC, LONGEST_DOC = 24, 160
SHORTEST_CODE, LONGEST_CODE = 60, 420


class Function(NamedTuple):
    """A function without its docstring, and the docstring's first paragraph on one line."""

    code: str
    doc: str


def functions(sources: Iterable[str]) -> list[Function]:
    """The functions and methods of some modules with a docstring, of a middling size, each docstring once."""
    by_docstring: dict[str, Function] = {}
    for source in sources:
        for function in _of_module(source):
            by_docstring.setdefault(function.doc, function)
    return list(by_docstring.values())


def docstring_of(function: Function) -> tuple[str, str]:
    """Code to text: (prompt, answer)."""
    return f"{function.code}\n\n# What it does:", f" {function.doc}\n"


def code_of(function: Function) -> tuple[str, str]:
    """Text to code: (prompt, answer); the name and the arguments are part of the prompt."""
    head, _, body = function.code.partition("\n")
    return f"# {function.doc}\n{head}\n", f"{body}\n"


def _of_module(source: str) -> Iterator[Function]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old modules have old escapes
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and (text := ast.get_docstring(node)):
            doc = " ".join(text.partition("\n\n")[0].split())
            node.body = node.body[1:]
            node.decorator_list = []
            code = ast.unparse(node) if node.body else ""
            if SHORTEST_DOC <= len(doc) <= LONGEST_DOC and SHORTEST_CODE <= len(code) <= LONGEST_CODE:
                yield Function(code, doc)
