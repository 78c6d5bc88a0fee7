"""reStructuredText reader. docutils parses; the raw text and the line of its nodes lead to the source."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from graftlm.pipelines.summarize.document import BlockKind, TextBlock, TextSpan, aligned_spans
from graftlm.pipelines.summarize.text import import_extra

_SKIPPED = {"system_message", "comment", "substitution_definition", "target", "topic", "pending", "raw", "image"}
_UNREAD = {"footnote_reference", "citation_reference", "image", "raw"}  # inside paragraphs
_KINDS: dict[str, BlockKind] = {
    "table": "table", "caption": "caption", "math_block": "formula", "literal_block": "code", "doctest_block": "code",
    "field_list": "field", "docinfo": "field", "option_list": "field", "line_block": "field", "term": "field",
    "footnote": "reference", "citation": "reference", "rubric": "caption", "attribution": "caption",
}  # fmt: skip
_TEXTS = {"paragraph", "title", "line", "term", "caption", "rubric", "attribution"} | {
    "literal_block", "doctest_block", "math_block",
}  # fmt: skip
_ROLE = re.compile(r"(?::[\w:+.-]+:)?`~?(.+?)(?:\s*<[^<>]*>)?`", re.DOTALL)
_OTHER_BREAKS = str.maketrans(dict.fromkeys("\t\v\f\x1c\x1d\x1e\x85\u2028\u2029\0", " "))  # lines are \n, \r and \r\n
_LINES_AHEAD = 200  # lines in which a node's text is looked for


def rst_blocks(text: str) -> Iterator[TextBlock]:
    """Yield paragraphs, list items and headings, and other blocks by their kind. No file is included."""
    frontend: Any = import_extra("docutils.frontend", "Reading reStructuredText")
    rst: Any = import_extra("docutils.parsers.rst", "Reading reStructuredText")
    utils: Any = import_extra("docutils.utils", "Reading reStructuredText")
    settings = frontend.get_default_settings(rst.Parser)
    quiet = {"report_level": 5, "halt_level": 6, "file_insertion_enabled": False, "raw_enabled": False}
    vars(settings).update(quiet, line_length_limit=len(text) + 1)
    plain = text.translate(_OTHER_BREAKS)
    document = utils.new_document("", settings)
    rst.Parser(rfc2822=True).parse(plain, document)
    return _RstBlockReader(plain).read(document, "prose", 0)


class _RstBlockReader:
    """Walks the nodes in order and looks for the lines of each in the lines of the source."""

    def __init__(self, text: str) -> None:
        self._lines = text.splitlines()
        self._starts = [0]
        for line in text.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._next = 0, 0  # line and column after the last located line

    def read(self, node: Any, kind: BlockKind, level: int) -> Iterator[TextBlock]:
        """Yield the blocks of a node; `kind` is that of its parent."""
        name = node.tagname
        if name in _SKIPPED:
            return
        kind, level = _KINDS.get(name, kind), level + (name == "section")
        if name in _TEXTS:
            if positions := self._locate(node):
                is_heading = name == "title" and kind == "prose"
                yield TextBlock(tuple(self._spans(node, positions)), max(level, 1) if is_heading else 0, kind=kind)
            return
        if name == "field" and node.children[0].astext().lower() == "title":
            title = node.next_node(lambda inner: inner.tagname == "paragraph")
            if title is not None and (positions := self._locate(title)):
                yield TextBlock(tuple(self._spans(title, positions)), 1)
            return
        for child in node.children:
            if child.tagname != "#text":
                yield from self.read(child, kind, level)

    def _locate(self, node: Any) -> list[int]:
        """Return the source position of each character of the raw text; empty if a line is not there."""
        raw = node.rawsource.split("\n")
        first, column = self._next
        if node.tagname in ("paragraph", "title"):  # the line of a literal block is often its last
            first = max(first, (node.line or 1) - 2)
        for start in range(first, min(first + _LINES_AHEAD, len(self._lines))):
            columns = [
                line.find(part.strip(), column if (start, index) == (self._next[0], 0) else 0)
                for index, (part, line) in enumerate(zip(raw, self._lines[start : start + len(raw)], strict=False))
            ]
            if len(columns) == len(raw) and min(columns) >= 0:
                return self._positions(raw, start, columns)
        return []

    def _positions(self, raw: Sequence[str], start: int, columns: Sequence[int]) -> list[int]:
        positions: list[int] = []
        for index, (part, column) in enumerate(zip(raw, columns, strict=True), start):
            indent = len(part) - len(part.lstrip())
            first = self._starts[index] + column - min(indent, column)
            positions += range(first, first + len(part))
            positions.append(self._starts[index] + len(self._lines[index]))  # the line break
            self._next = index, column + len(part.strip())
        return positions

    def _spans(self, node: Any, positions: list[int]) -> Iterator[TextSpan]:
        """Yield the readable spans of a node, without the markup of its raw text."""
        raw, cursor = node.rawsource, 0
        for child in node.children:
            if child.tagname == "target" and not child.children:
                continue  # of the reference before it
            outer = child.rawsource if child.tagname != "#text" else ""
            start = raw.find(outer, cursor)
            if start < 0:
                start, outer = cursor, ""
            if child.tagname in _UNREAD:
                cursor = start + len(outer)
                continue
            text, offset = child.astext().replace("\0", ""), start
            if child.tagname == "problematic" and (role := _ROLE.fullmatch(text)):
                text, offset = role[1], start + role.start(1)
            if outer and text not in outer:  # `:pep:` is written out
                yield TextSpan(text, positions[start], positions[start + len(outer) - 1] + 1)
                cursor = start + len(outer)
                continue
            offsets = _offsets(text, raw, offset)
            yield from aligned_spans(text[: len(offsets)], [positions[index] for index in offsets])
            cursor = start + len(outer) if outer else (offsets or [cursor - 1])[-1] + 1


def _offsets(text: str, raw: str, cursor: int) -> list[int]:
    """Return the position in the raw text of each character, which may have backslashes between."""
    start = raw.find(text, cursor)
    if start >= 0:
        return list(range(start, start + len(text)))
    offsets: list[int] = []
    for character in text:
        cursor = raw.find(character, cursor)
        if cursor < 0:
            break
        offsets.append(cursor)
        cursor += 1
    return offsets
