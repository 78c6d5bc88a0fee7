"""reStructuredText reader.

docutils parses the text. Its nodes have raw text and a line number, with which the reader locates them in the source.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from graftlm.pipelines.summarize.document import BlockKind, TextBlock, TextSpan
from graftlm.pipelines.summarize.document_builder import aligned_spans
from graftlm.pipelines.summarize.text import import_extra

_SKIPPED = {
    "comment",
    "image",
    "pending",
    "raw",
    "substitution_definition",
    "system_message",
    "target",
}
_SKIPPED_INLINE = {"footnote_reference", "citation_reference", "image", "raw"}
_KINDS: dict[str, BlockKind] = {
    "table": "table",
    "caption": "caption",
    "rubric": "caption",
    "attribution": "caption",
    "math_block": "formula",
    "literal_block": "code",
    "doctest_block": "code",
    "field_list": "field",
    "docinfo": "field",
    "option_list": "field",
    "line_block": "field",
    "term": "field",
    "footnote": "reference",
    "citation": "reference",
}
_TEXTS = {
    "attribution",
    "caption",
    "doctest_block",
    "line",
    "literal_block",
    "math_block",
    "paragraph",
    "rubric",
    "term",
    "title",
}
# What docutils says of a directive that it does not know, and of one that is disabled.
_UNREAD_DIRECTIVE = re.compile(r'Unknown directive type "([^"]+)"|"([^"]+)" directive disabled')
_ROLE = re.compile(r"(?::[\w:+.-]+:)?`~?(.+?)(?:\s*<[^<>]*>)?`", re.DOTALL)
# Characters at which `str.splitlines` breaks lines, but docutils does not; lines end with \n, \r or \r\n.
_OTHER_BREAKS = str.maketrans(dict.fromkeys("\t\v\f\x1c\x1d\x1e\x85\u2028\u2029\0", " "))
_LINES_AHEAD = 200  # lines in which the reader looks for the text of a node


class _Node(Protocol):
    """The attributes of the nodes of docutils that the reader uses; nodes of text have no raw text."""

    tagname: str
    rawsource: str
    line: int | None
    parent: _Node
    children: Sequence[_Node]

    def astext(self) -> str: ...

    def next_node(self, condition: Callable[[_Node], bool]) -> _Node | None: ...


def rst_blocks(text: str, notes: list[str]) -> Iterator[TextBlock]:
    """Yield paragraphs, list items and headings, and other blocks by their kind. Directives include no files.

    Args:
        text: the document.
        notes: receives the directives that are not read, such as those of Sphinx.

    Raises:
        MissingExtraError: docutils is not installed.
    """
    plain = text.translate(_OTHER_BREAKS)
    document = _parse(plain)
    reader = _RstBlockReader(plain)
    yield from reader.read(document, "prose", 0)
    if reader.unread:
        named = ", ".join(f"{name} {count:,}" for name, count in reader.unread.items())
        notes.append(f"has directives that are not read ({named})")


def _parse(text: str) -> _Node:
    """Return the document node of docutils, parsed without output and without access to files."""
    frontend = import_extra("docutils.frontend", "Reading reStructuredText")
    rst = import_extra("docutils.parsers.rst", "Reading reStructuredText")
    utils = import_extra("docutils.utils", "Reading reStructuredText")
    settings = frontend.get_default_settings(rst.Parser)
    settings.report_level = 5
    settings.halt_level = 6
    settings.file_insertion_enabled = False
    settings.raw_enabled = False
    settings.line_length_limit = len(text) + 1
    document = utils.new_document("", settings)
    rst.Parser(rfc2822=True).parse(text, document)
    return document


class _RstBlockReader:
    """Walks the nodes in order and locates the text of each in the lines of the source."""

    def __init__(self, text: str) -> None:
        self._lines = text.splitlines()
        self._starts = [0]
        for line in text.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        # Position after the last text that was located.
        self._next_line = 0
        self._next_column = 0
        self.unread = Counter[str]()  # directives by name

    def read(self, node: _Node, kind: BlockKind, level: int) -> Iterator[TextBlock]:
        """Yield the blocks of a node.

        Args:
            node: a node of docutils.
            kind: kind of the parent node.
            level: number of sections around the node.
        """
        name = node.tagname
        if name == "system_message":
            self.unread.update(match[1] or match[2] for match in _UNREAD_DIRECTIVE.finditer(node.astext()))
        if name in _SKIPPED or (name == "topic" and any(child.tagname == "pending" for child in node.children)):
            return
        kind = _KINDS.get(name, kind)
        if name == "title" and node.parent.tagname == "topic":
            kind = "caption"
        if name == "section":
            level += 1
        if name in _TEXTS:
            is_heading = name == "title" and kind == "prose"
            heading_level = max(level, 1) if is_heading else 0
            yield from self._text_block(node, heading_level, kind)
        elif name == "field" and node.children[0].astext().lower() == "title":
            title = node.next_node(_is_paragraph)
            if title is not None:
                yield from self._text_block(title, 1, "prose")
        else:
            for child in node.children:
                if child.tagname != "#text":
                    yield from self.read(child, kind, level)

    def _text_block(self, node: _Node, level: int, kind: BlockKind) -> Iterator[TextBlock]:
        """Yield the block of a node with text; nothing if the text is not found in the source."""
        positions = self._locate(node)
        if positions:
            yield TextBlock(tuple(_spans(node, positions)), level, kind=kind)

    def _locate(self, node: _Node) -> list[int]:
        """Return the source position of each character of the raw text; empty if a line is not found."""
        raw = node.rawsource.split("\n")
        first = self._next_line
        if node.tagname in ("paragraph", "title"):
            # Other nodes, such as literal blocks, often have the number of their last line.
            first = max(first, (node.line or 1) - 2)
        end = min(first + _LINES_AHEAD, len(self._lines))
        for start in range(first, end):
            columns = self._find_columns(raw, start)
            if len(columns) == len(raw) and min(columns) >= 0:
                return self._positions(raw, start, columns)
        return []

    def _find_columns(self, raw: Sequence[str], start: int) -> list[int]:
        """Return the column of each line of raw text in the lines from `start`; -1 if a line does not match."""
        lines = self._lines[start : start + len(raw)]
        columns = []
        for index, (part, line) in enumerate(zip(raw, lines, strict=False)):
            is_next = index == 0 and start == self._next_line
            first_column = self._next_column if is_next else 0
            columns.append(line.find(part.strip(), first_column))
        return columns

    def _positions(self, raw: Sequence[str], start: int, columns: Sequence[int]) -> list[int]:
        """Return the source positions of raw text that begins in the line `start`, line breaks included."""
        positions: list[int] = []
        for index, (part, column) in enumerate(zip(raw, columns, strict=True), start):
            indent = len(part) - len(part.lstrip())
            first = self._starts[index] + column - min(indent, column)
            line_break = self._starts[index] + len(self._lines[index])
            positions.extend(range(first, first + len(part)))
            positions.append(line_break)
            self._next_line = index
            self._next_column = column + len(part.strip())
        return positions


def _is_paragraph(node: _Node) -> bool:
    return node.tagname == "paragraph"


def _spans(node: _Node, positions: Sequence[int]) -> Iterator[TextSpan]:
    """Yield the readable spans of a node, without the markup of its raw text.

    Args:
        node: a node of docutils with text.
        positions: source position of each character of the node's raw text.
    """
    raw = node.rawsource
    cursor = 0
    for child in node.children:
        if child.tagname == "target" and not child.children:
            continue  # It belongs to the reference before it.
        outer = child.rawsource if child.tagname != "#text" else ""
        start = raw.find(outer, cursor)
        if start < 0:
            start = cursor
            outer = ""
        end = start + len(outer)
        if child.tagname in _SKIPPED_INLINE:
            cursor = end
            continue
        text, offset = _readable_text(child, start)
        if outer and text not in outer:
            # The text is not in the source: a role such as `:pep:` expands it.
            yield TextSpan(text, positions[start], positions[end - 1] + 1)
            cursor = end
            continue
        offsets = _offsets(text, raw, offset)
        yield from aligned_spans(text[: len(offsets)], [positions[index] for index in offsets])
        if outer:
            cursor = end
        elif offsets:
            cursor = offsets[-1] + 1


def _readable_text(child: _Node, start: int) -> tuple[str, int]:
    """Return the text of a child that begins at `start`, and where to look for it; an unknown role is removed."""
    text = child.astext().replace("\0", "")
    if child.tagname == "problematic":
        role = _ROLE.fullmatch(text)
        if role:
            return role[1], start + role.start(1)
    return text, start


def _offsets(text: str, raw: str, cursor: int) -> list[int]:
    """Return the position in the raw text of each character; there may be backslashes between them."""
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
