"""A real corpus that every machine has: the English and the code of the Python installation itself."""

from __future__ import annotations

import ast
import io
import json
import sysconfig
import tokenize
import warnings
from collections.abc import Iterable, Sequence
from importlib import import_module
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

from graftlm.errors import DataError

# Tests repeat themselves, and tables of characters are no language.
_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "lib2to3"}
_LEFT_OUT |= {"__pycache__", "pydoc_data"}
_LEAST_ENGLISH, _LEAST_CODE = 200, 400


class Texts(NamedTuple):
    """Documents of both domains, each kind in a fixed order."""

    english: list[str]
    code: list[str]


def read_installation(limit: int) -> Texts:
    """Docstrings, comments and reference topics as English; source without either, `limit` characters of it, as code.

    Raises DataError if the installation has no readable standard library.
    """
    english, code, size = _topics(), list[str](), 0
    for words, program in filter(None, (split_source(path.read_bytes()) for path in source_files())):
        if len(words) >= _LEAST_ENGLISH:
            english.append(words)
        if len(program) >= _LEAST_CODE:
            code.append(program)
            size += len(program)
        if size >= limit:
            break
    if not code:
        raise DataError("This Python installation has no standard library source to learn from: run it on another.")
    return Texts(english, code)


def source_files() -> list[Path]:
    """The standard library's modules in a fixed order that mixes packages."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [path for path in root.rglob("*.py") if not _LEFT_OUT & set(path.relative_to(root).parts)]
    return sorted(files, key=lambda path: (path.name[::-1], str(path)))


def split_source(source: bytes) -> tuple[str, str] | None:
    """The English (docstrings and comments) and the code of one file; None when it can't be parsed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old modules have old escapes
            tree = ast.parse(source)
        comments = _comments(source)
    except (SyntaxError, ValueError, tokenize.TokenError, RecursionError):
        return None
    docstrings = [text for node in ast.walk(tree) if (text := _take_docstring(node))]
    return "\n\n".join([*docstrings, *comments]), ast.unparse(tree)


def write_documents(path: Path, documents: Iterable[str]) -> None:
    """One JSON object with a `text` a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents), encoding="utf-8")


def deal(documents: Sequence[str], shares: dict[str, int]) -> dict[str, list[str]]:
    """Deal documents out in turn, `shares` of each hand to each name."""
    hands: dict[str, list[str]] = {name: [] for name in shares}
    turns = cycle(hands[name] for name, count in shares.items() for _ in range(count))
    for hand, document in zip(turns, documents, strict=False):
        hand.append(document)
    return hands


def _topics() -> list[str]:
    try:
        topics: dict[str, str] = import_module("pydoc_data.topics").topics
    except (ImportError, AttributeError):
        return []
    return [topics[name] for name in sorted(topics)]


def _take_docstring(node: ast.AST) -> str | None:
    """A definition's docstring, taken out of the tree."""
    if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    text = ast.get_docstring(node)
    if text is not None:
        node.body = node.body[1:] or [ast.Pass()]
    return text


def _comments(source: bytes) -> list[str]:
    """Runs of comment lines that read like sentences."""
    runs: list[list[str]] = []
    last = -2
    for token in tokenize.tokenize(io.BytesIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        if token.start[0] != last + 1:
            runs.append([])
        runs[-1].append(token.string.lstrip("#").strip())
        last = token.start[0]
    texts = (" ".join(line for line in run if line) for run in runs)
    return [text for text in texts if len(text) > 60 and text.count(" ") > 8]
