"""Markdown, by markdown-it-py: its tokens say what reads as text, and their lines where that is in the source."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from graftlm.pipelines.summarize.document import TextBlock, TextSpan
from graftlm.pipelines.summarize.text import import_extra

_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n|$)")
_FRONT_MATTER = re.compile(r"\A ?---[ \t]*\r?\n.*?^(?:---|\.\.\.)[ \t]*\r?$", re.DOTALL | re.MULTILINE)
_LINK_END = re.compile(r"\](?:\((?:[^()\\]|\\.|\((?:[^()\\]|\\.)*\))*\)|\[[^\]]*\])?")


def markdown_blocks(text: str) -> Iterator[TextBlock]:
    """Paragraphs, items and headings; front matter, code, tables and raw HTML are left out."""
    markdown: Any = import_extra("markdown_it", "Reading Markdown")
    parser = markdown.MarkdownIt("commonmark").enable(["table", "strikethrough"]).disable("text_join")
    front = _FRONT_MATTER.match(text)
    skipped = front.end() if front else 0
    lines = [(match.start() + skipped, match.group().rstrip("\r\n")) for match in _LINE.finditer(text[skipped:])]
    level, table = 0, False
    for token in parser.parse(text[skipped:]):
        if token.type in ("table_open", "table_close"):
            table = token.type == "table_open"
        elif token.type == "heading_open":
            level = int(token.tag[1])
        elif token.type == "inline" and not table:
            yield TextBlock(tuple(_pieces(token, lines[token.map[0] :])), level)
            level = 0


def _pieces(token: Any, lines: list[tuple[int, str]]) -> Iterator[TextSpan]:
    """The readable pieces of an inline token, whose content's lines are ends of `lines`."""
    content, places = token.content, _places(token.content, lines)
    found = list(_inside(token.children, content.replace("\n", " ")))
    if any(start < 0 for _, start, _ in found):  # markup that does not stand where it is looked for: keep it
        found = [(content, 0, len(content))]
    for text, start, end in found:
        if "\n" in content[start:end]:
            yield from (TextSpan(text[at], places[start + at], places[start + at] + 1) for at in range(len(text)))
        elif end > start:
            yield TextSpan(text, places[start], places[end - 1] + 1)


def _places(content: str, lines: list[tuple[int, str]]) -> list[int]:
    """For each character of an inline token's content its place in the source; a line break's is the line's end."""
    places: list[int] = []
    for part, (start, line) in zip(content.split("\n"), lines, strict=False):
        at = line.rstrip().rfind(part.rstrip())
        first = start + max(at, 0)
        places.extend(range(first, first + len(part) + 1))
    return places


def _inside(children: list[Any], flat: str) -> Iterator[tuple[str, int, int]]:
    """Text, start and end of what reads as text; a start of −1 says that it was not found."""
    cursor = 0
    for child in children:
        written = child.markup if child.type == "text_special" else child.content
        if child.type in ("text", "text_special", "code_inline"):
            start = flat.find(written, cursor) if written else cursor
            cursor = start + len(written)
            yield child.content, start, cursor
            if start < 0:
                return
        elif child.type in ("softbreak", "hardbreak"):
            start = flat.find(" ", cursor) if child.type == "softbreak" else _hard_break(flat, cursor)
            cursor = start + 1
            yield " ", start, cursor
        elif child.type == "image":
            cursor = _link_end(flat, flat.find("![", cursor) + 2 + len(child.content))
        elif child.type == "html_inline":
            cursor = flat.find(child.content.replace("\n", " "), cursor) + len(child.content)
        elif child.type == "link_close" and child.markup != "autolink":
            cursor = _link_end(flat, cursor)


def _hard_break(flat: str, cursor: int) -> int:
    """The line break behind two spaces or a backslash."""
    spaces = re.compile(r"\\? +").match(flat, cursor)
    return spaces.end() - 1 if spaces else -1


def _link_end(flat: str, cursor: int) -> int:
    """Behind the destination of a link or an image whose label ends at or soon behind `cursor`."""
    found = _LINK_END.search(flat, cursor)
    return found.end() if found else cursor
