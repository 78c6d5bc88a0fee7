"""Markdown reader. The tokens of markdown-it-py hold the readable text; their line maps lead to the source."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from graftlm.pipelines.summarize.document import BlockKind, TextBlock, TextSpan, aligned_spans
from graftlm.pipelines.summarize.text import import_extra

_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n|$)")
_FRONT_MATTER = re.compile(r"\A ?---[ \t]*\r?\n.*?^(?:---|\.\.\.)[ \t]*\r?$", re.DOTALL | re.MULTILINE)
_TITLE = re.compile(r"^title:[ \t]*[\"']?(.+?)[\"']?[ \t]*\r?$", re.MULTILINE)
_LINK_END = re.compile(r"\](?:\((?:[^()\\]|\\.|\((?:[^()\\]|\\.)*\))*\)|\[[^\]]*\])?")


def markdown_blocks(text: str) -> Iterator[TextBlock]:
    """Yield paragraphs, list items and headings, and other blocks by their kind. Raw HTML is skipped.

    Front matter and boxes to tick are fields; an item that is a link to a heading is furniture.
    """
    markdown: Any = import_extra("markdown_it", "Reading Markdown")
    parser = markdown.MarkdownIt("commonmark").enable(["table", "strikethrough"]).disable("text_join")
    front_matter = _FRONT_MATTER.match(text)
    skipped = front_matter.end() if front_matter else 0
    if skipped:
        yield TextBlock((TextSpan(text[:skipped], 0, skipped),), kind="field")
        if title := _TITLE.search(text, 0, skipped):
            yield TextBlock((TextSpan(title[1], *title.span(1)),), 1)
    lines = [(match.start() + skipped, match.group().rstrip("\r\n")) for match in _LINE.finditer(text[skipped:])]
    level, in_table = 0, False
    for token in parser.parse(text[skipped:]):
        if token.type in ("table_open", "table_close"):
            in_table = token.type == "table_open"
        elif token.type == "heading_open":
            level = int(token.tag[1])
        elif token.type in ("fence", "code_block"):
            first, last = (lines[min(index, len(lines) - 1)][0] for index in token.map)
            yield TextBlock((TextSpan(text[first:last], first, last),), kind="code")
        elif token.type == "inline":
            kind = "table" if in_table else _inline_kind(token)
            yield TextBlock(tuple(_spans(token, lines[token.map[0] :])), level, kind=kind)
            level = 0


def _inline_kind(token: Any) -> BlockKind:
    if re.match(r"\[[ xX]\]\s", token.content):
        return "field"
    if token.content.startswith("$$"):
        return "formula"
    return "furniture" if re.fullmatch(r"\[[^\]]*\]\(#[^)]*\)", token.content.strip()) else "prose"


def _spans(token: Any, lines: list[tuple[int, str]]) -> Iterator[TextSpan]:
    """Yield the readable spans of an inline token whose content begins in the first of `lines`."""
    content, offsets = token.content, _source_offsets(token.content, lines)
    parts = list(_readable_parts(token.children, content.replace("\n", " ")))
    if any(start < 0 for _, start, _ in parts):  # unexpected markup: keep the content as it is
        parts = [(content, 0, len(content))]
    for text, start, end in parts:
        if "\n" in content[start:end]:
            yield from aligned_spans(text, offsets[start:end])
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
