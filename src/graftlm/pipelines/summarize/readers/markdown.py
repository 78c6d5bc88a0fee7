"""Markdown reader. The tokens of markdown-it-py hold the readable text; their line maps lead to the source."""

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
    """Yield paragraphs, list items and headings. Front matter, code, tables and raw HTML are skipped."""
    markdown: Any = import_extra("markdown_it", "Reading Markdown")
    parser = markdown.MarkdownIt("commonmark").enable(["table", "strikethrough"]).disable("text_join")
    front_matter = _FRONT_MATTER.match(text)
    skipped = front_matter.end() if front_matter else 0
    lines = [(match.start() + skipped, match.group().rstrip("\r\n")) for match in _LINE.finditer(text[skipped:])]
    level, in_table = 0, False
    for token in parser.parse(text[skipped:]):
        if token.type in ("table_open", "table_close"):
            in_table = token.type == "table_open"
        elif token.type == "heading_open":
            level = int(token.tag[1])
        elif token.type == "inline" and not in_table:
            yield TextBlock(tuple(_spans(token, lines[token.map[0] :])), level)
            level = 0


def _spans(token: Any, lines: list[tuple[int, str]]) -> Iterator[TextSpan]:
    """Yield the readable spans of an inline token whose content begins in the first of `lines`."""
    content, offsets = token.content, _source_offsets(token.content, lines)
    parts = list(_readable_parts(token.children, content.replace("\n", " ")))
    if any(start < 0 for _, start, _ in parts):  # unexpected markup: keep the content as it is
        parts = [(content, 0, len(content))]
    for text, start, end in parts:
        if "\n" in content[start:end]:
            yield from (TextSpan(text[i], offsets[start + i], offsets[start + i] + 1) for i in range(len(text)))
        elif end > start:
            yield TextSpan(text, offsets[start], offsets[end - 1] + 1)


def _source_offsets(content: str, lines: list[tuple[int, str]]) -> list[int]:
    """Return the source position of each character of a token's content; a line break maps to the end of its line."""
    offsets: list[int] = []
    for part, (start, line) in zip(content.split("\n"), lines, strict=False):
        first = start + max(line.rstrip().rfind(part.rstrip()), 0)
        offsets.extend(range(first, first + len(part) + 1))
    return offsets


def _readable_parts(children: list[Any], content: str) -> Iterator[tuple[str, int, int]]:
    """Yield readable text with its start and end in `content`; a start of −1 means that the text was not located."""
    cursor = 0
    for child in children:
        literal = child.markup if child.type == "text_special" else child.content
        if child.type in ("text", "text_special", "code_inline"):
            start = content.find(literal, cursor) if literal else cursor
            cursor = start + len(literal)
            yield child.content, start, cursor
            if start < 0:
                return
        elif child.type in ("softbreak", "hardbreak"):
            start = content.find(" ", cursor) if child.type == "softbreak" else _hard_break(content, cursor)
            cursor = start + 1
            yield " ", start, cursor
        elif child.type == "image":
            cursor = _link_end(content, content.find("![", cursor) + 2 + len(child.content))
        elif child.type == "html_inline":
            cursor = content.find(child.content.replace("\n", " "), cursor) + len(child.content)
        elif child.type == "link_close" and child.markup != "autolink":
            cursor = _link_end(content, cursor)


def _hard_break(content: str, cursor: int) -> int:
    """Return the position of the line break after two spaces or a backslash."""
    spaces = re.compile(r"\\? +").match(content, cursor)
    return spaces.end() - 1 if spaces else -1


def _link_end(content: str, cursor: int) -> int:
    """Return the position after the destination of the link or image whose label ends near `cursor`."""
    link = _LINK_END.search(content, cursor)
    return link.end() if link else cursor
