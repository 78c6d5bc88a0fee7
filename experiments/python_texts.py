"""Texts that every installation has: the English and the code of Python itself."""

from __future__ import annotations

import ast
import io
import json
import sysconfig
import tokenize
import warnings
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from pathlib import Path

# Tests repeat the same lines, and tables of characters are not language.
_LEFT_OUT = {
    "test",
    "tests",
    "idle_test",
    "site-packages",
    "dist-packages",
    "encodings",
    "lib2to3",
    "__pycache__",
    "pydoc_data",
}
_MIN_COMMENT = 60  # characters of a comment
_MIN_SPACES = 8  # of a comment


def source_files() -> list[Path]:
    """Return the modules of the standard library, in a fixed order that mixes packages."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [path for path in root.rglob("*.py") if _LEFT_OUT.isdisjoint(path.relative_to(root).parts)]
    return sorted(files, key=lambda path: (path.name[::-1], str(path)))


def split_source(source: bytes) -> tuple[str, str] | None:
    """Split a file into its English, which is its docstrings and comments, and its code.

    Returns:
        English and code, or None if the file can't be parsed.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old modules have invalid escape sequences
            tree = ast.parse(source)
        comments = _comments(source)
    except (SyntaxError, ValueError, tokenize.TokenError, RecursionError):
        return None
    docstrings = []
    for node in ast.walk(tree):
        docstring = _take_docstring(node)
        if docstring:
            docstrings.append(docstring)
    return "\n\n".join([*docstrings, *comments]), ast.unparse(tree)


def write_documents(path: Path, documents: Iterable[str]) -> None:
    """Write a file of JSON lines, with one object with the key `text` per document."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"text": document}) + "\n" for document in documents]
    path.write_text("".join(lines), encoding="utf-8")


def deal(documents: Sequence[str], shares: Mapping[str, int]) -> dict[str, list[str]]:
    """Deal documents out to names, in turn.

    Args:
        documents: The documents.
        shares: Number of documents per round, by name.
    """
    hands: dict[str, list[str]] = {name: [] for name in shares}
    turns = [hands[name] for name, count in shares.items() for _ in range(count)]
    for hand, document in zip(cycle(turns), documents, strict=False):
        hand.append(document)
    return hands


def _take_docstring(node: ast.AST) -> str | None:
    """Remove the docstring of a definition from the tree, and return it."""
    if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    docstring = ast.get_docstring(node)
    if docstring is not None:
        node.body = node.body[1:] or [ast.Pass()]
    return docstring


def _comments(source: bytes) -> list[str]:
    """Return the comments that read like sentences; consecutive lines form one comment."""
    blocks: list[list[str]] = []
    last_line = -2
    for token in tokenize.tokenize(io.BytesIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        line, _ = token.start
        if line != last_line + 1:
            blocks.append([])
        blocks[-1].append(token.string.lstrip("#").strip())
        last_line = line
    comments = [" ".join(line for line in block if line) for block in blocks]
    return [text for text in comments if len(text) > _MIN_COMMENT and text.count(" ") > _MIN_SPACES]
