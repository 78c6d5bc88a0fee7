"""Markdown reader.

markdown-it-py yields tokens with their readable text and their lines. The text is located in those lines to find its
source positions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from graftlm.pipelines.summarize.document import BlockKind, TextBlock, TextSpan
from graftlm.pipelines.summarize.document_builder import aligned_spans
from graftlm.pipelines.summarize.readers.html import HtmlFragments, note_concealed
from graftlm.pipelines.summarize.text import import_extra

_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n|$)")
_FRONT_MATTER = re.compile(r"\A ?---[ \t]*\r?\n.*?^(?:---|\.\.\.)[ \t]*\r?$", re.DOTALL | re.MULTILINE)
_TITLE = re.compile(r"^title:[ \t]*[\"']?(.+?)[\"']?[ \t]*\r?$", re.MULTILINE)
_LINK_END = re.compile(r"\](?:\((?:[^()\\]|\\.|\((?:[^()\\]|\\.)*\))*\)|\[[^\]]*\])?")
_HEADING_LINK = re.compile(r"\[[^\]]*\]\(#[^)]*\)")


class _Token(Protocol):
    """The attributes of the tokens of markdown-it-py that the reader uses. `map` has the first line, and the end."""

    type: str
    tag: str
    content: str
    markup: str
    map: tuple[int, int]
    children: Sequence[_Token]


class _Line(NamedTuple):
    """A line without its line break, and its position in the source."""

    start: int
    text: str


class _Part(NamedTuple):
    """Readable text and its range in the content of a token; `start` is -1 if the text was not found there."""

    text: str
    start: int
    end: int


def markdown_blocks(text: str, notes: list[str]) -> Iterator[TextBlock]:
    """Yield the blocks of a document in order.

    The blocks are paragraphs, list items, headings, code blocks, formulas (`$$`), and each cell of a table. Blocks of
    HTML are read as HTML, and what an element hides in a browser is skipped, in later blocks and inside a paragraph as
    well. Front matter is a `field`, followed by its title as a heading. Outside tables, a block that consists of a link
    to a heading is `furniture`.

    Args:
        text: the document.
        notes: receives what was left out.

    Raises:
        MissingExtraError: markdown-it-py is not installed.
    """
    front_matter = _FRONT_MATTER.match(text)
    skipped = front_matter.end() if front_matter else 0
    if skipped:
        yield from _front_matter_blocks(text, skipped)
    lines = _source_lines(text, skipped)
    level = 0
    in_table = False
    fragments = HtmlFragments()
    for token in _parser().parse(text[skipped:]):
        if token.type == "table_open":
            in_table = True
        elif token.type == "table_close":
            in_table = False
        elif token.type == "heading_open":
            level = int(token.tag[1])
        elif token.type in ("fence", "code_block"):
            start, end = _token_range(token, lines)
            yield from _shown_block([TextSpan(text[start:end], start, end)], 0, "code", fragments)
        elif token.type == "html_block":
            start, end = _token_range(token, lines)
            for block in fragments.read(text[start:end]):
                spans = [replace(span, start=span.start + start, end=span.end + start) for span in block.spans]
                yield replace(block, spans=tuple(spans))
        elif token.type == "inline":
            kind = "table" if in_table else _inline_kind(token.content)
            around = fragments.elements
            spans = list(_spans(token, lines[token.map[0] :], fragments))
            fragments.elements = [element for element in fragments.elements if element in around]
            yield from _shown_block(spans, level, kind, fragments)
            level = 0
    note_concealed(fragments.concealed, notes)


def _shown_block(
    spans: Sequence[TextSpan],
    level: int,
    kind: BlockKind,
    fragments: HtmlFragments,
) -> Iterator[TextBlock]:
    """Yield the block of the spans with the kind that the HTML around it gives it, unless it is not shown."""
    shown = fragments.kind(kind)
    if shown is None:
        fragments.count_concealed("".join(span.text for span in spans))
        return
    level = level or fragments.heading_level
    yield TextBlock(tuple(spans), level if shown in (kind, "reference") else 0, kind=shown)


def _parser() -> Any:
    markdown = import_extra("markdown_it", "Reading Markdown")
    parser = markdown.MarkdownIt("commonmark")
    return parser.enable(["table", "strikethrough"]).disable("text_join")


def _front_matter_blocks(text: str, end: int) -> Iterator[TextBlock]:
    """Yield the front matter, which ends at `end`, as a field, and its title as a heading."""
    yield TextBlock((TextSpan(text[:end], 0, end),), kind="field")
    title = _TITLE.search(text, 0, end)
    if title:
        start, end = title.span(1)
        yield TextBlock((TextSpan(title[1], start, end),), 1)


def _source_lines(text: str, skipped: int) -> list[_Line]:
    """Return the lines after the front matter."""
    lines = []
    for match in _LINE.finditer(text[skipped:]):
        line = _Line(match.start() + skipped, match.group().rstrip("\r\n"))
        lines.append(line)
    return lines


def _token_range(token: _Token, lines: Sequence[_Line]) -> tuple[int, int]:
    """Return the source range of the lines of a token."""
    first_line, end_line = token.map
    last = len(lines) - 1
    return lines[min(first_line, last)].start, lines[min(end_line, last)].start


def _inline_kind(content: str) -> BlockKind:
    if content.startswith("$$"):
        return "formula"
    if _HEADING_LINK.fullmatch(content.strip()):
        return "furniture"
    return "prose"


def _spans(token: _Token, lines: Sequence[_Line], fragments: HtmlFragments) -> Iterator[TextSpan]:
    """Yield the readable spans of an inline token whose content begins in the first of `lines`."""
    content = token.content
    offsets = _source_offsets(content, lines)
    parts = list(_readable_parts(token.children, content.replace("\n", " "), fragments))
    if any(part.start < 0 for part in parts):
        # The markup is unexpected: keep the content with its markup.
        parts = [_Part(content, 0, len(content))]
    for text, start, end in parts:
        if "\n" in content[start:end]:
            yield from aligned_spans(text, offsets[start:end])
        elif end > start:
            yield TextSpan(text, offsets[start], offsets[end - 1] + 1)


def _source_offsets(content: str, lines: Sequence[_Line]) -> list[int]:
    """Return the source position of each character of a token's content; a line break maps to the end of its line."""
    offsets: list[int] = []
    for part, line in zip(content.split("\n"), lines, strict=False):
        column = line.text.rstrip().rfind(part.rstrip())
        first = line.start + max(column, 0)
        offsets.extend(range(first, first + len(part) + 1))
    return offsets


def _readable_parts(children: Sequence[_Token], content: str, fragments: HtmlFragments) -> Iterator[_Part]:
    """Yield the readable text of the children of a token, up to the first that is not found in `content`."""
    cursor = 0
    for child in children:
        if child.type in ("text", "text_special", "code_inline"):
            part = _text_part(child, content, cursor)
            if part.start < 0:
                yield part
                return
            if fragments.kind("prose") is None:
                fragments.count_concealed(part.text)
            else:
                yield part
            cursor = part.end
        elif child.type == "html_inline":
            start = cursor
            cursor = _end_of_markup(child, content, cursor)
            printed = "".join(block.text for block in fragments.read(child.content))
            if printed:  # as quotation marks
                yield _Part(printed.replace("\n", " "), start, cursor)
        elif child.type in ("softbreak", "hardbreak"):
            start = _line_break(child, content, cursor)
            cursor = start + 1
            yield _Part(" ", start, cursor)
        else:
            cursor = _end_of_markup(child, content, cursor)


def _text_part(child: _Token, content: str, cursor: int) -> _Part:
    """Return the text of a child with its first range in `content` from `cursor` on."""
    literal = child.markup if child.type == "text_special" else child.content
    start = content.find(literal, cursor) if literal else cursor
    return _Part(child.content, start, start + len(literal))


def _line_break(child: _Token, content: str, cursor: int) -> int:
    """Return the position of a line break; a hard break follows two spaces or a backslash."""
    if child.type == "softbreak":
        return content.find(" ", cursor)
    spaces = re.compile(r"\\? +").match(content, cursor)
    return spaces.end() - 1 if spaces else -1


def _end_of_markup(child: _Token, content: str, cursor: int) -> int:
    """Return the position after a child without readable text."""
    if child.type == "image":
        label = content.find("![", cursor) + 2
        return _link_end(content, label + len(child.content))
    if child.type == "html_inline":
        literal = child.content.replace("\n", " ")
        return content.find(literal, cursor) + len(child.content)
    if child.type == "link_close" and child.markup != "autolink":
        return _link_end(content, cursor)
    return cursor


def _link_end(content: str, cursor: int) -> int:
    """Return the position after the destination of the link or image whose label ends near `cursor`."""
    link = _LINK_END.search(content, cursor)
    return link.end() if link else cursor
