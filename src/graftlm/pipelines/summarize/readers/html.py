"""HTML, by the standard library's parser, which alone tells the place of every piece of text."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from html.parser import HTMLParser

from graftlm.pipelines.summarize.document import TextBlock, TextSpan

_SKIPPED = {
    "script", "style", "head", "nav", "header", "footer", "aside", "table", "pre", "code-block", "svg", "math", "form",
    "button", "select", "textarea", "noscript", "template", "figure", "iframe",
}  # fmt: skip
_HEADINGS = {f"h{level}": level for level in range(1, 7)}
_INLINE = {
    "a", "abbr", "b", "bdi", "bdo", "cite", "code", "data", "del", "dfn", "em", "font", "i", "ins", "kbd", "mark", "q",
    "s", "samp", "small", "span", "strong", "sub", "sup", "time", "tt", "u", "var", "wbr", "img", "label",
}  # fmt: skip
_VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}


def html_blocks(text: str) -> Iterator[TextBlock]:
    """Paragraphs and headings; scripts, navigation, tables and code are left out."""
    reader = _Reader(text)
    reader.feed(text)
    reader.close()
    return iter(reader.blocks())


class _Reader(HTMLParser):
    """Collects pieces of text, and closes a block at each tag that is not within a line."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=False)
        self._text = text
        self._lines = [0] + [match.end() for match in re.finditer("\n", text)]
        self._blocks: list[TextBlock] = []
        self._pieces: list[TextSpan] = []
        self._level = 0
        self._hidden: list[str] = []

    def blocks(self) -> list[TextBlock]:
        """All blocks, the open one too."""
        self._close()
        return self._blocks

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in _SKIPPED:
            self._close()
            self._hidden.append(tag)
        elif tag == "br":
            place = self._place()
            self._add(TextSpan("\n", place, place + len(self.get_starttag_text() or "")))
        elif tag not in _INLINE:
            self._close()
            self._level = _HEADINGS.get(tag, 0)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in _VOID:
            self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        if tag in self._hidden:
            while self._hidden.pop() != tag:
                pass
        elif tag not in _INLINE and tag not in _VOID:
            self._close()

    def handle_data(self, data: str) -> None:
        self._add(TextSpan(data, self._place(), self._place() + len(data)))

    def handle_entityref(self, name: str) -> None:
        self._reference(f"&{name}")

    def handle_charref(self, name: str) -> None:
        self._reference(f"&#{name}")

    def _reference(self, written: str) -> None:
        start = self._place()
        end = start + len(written)
        end += self._text[end : end + 1] == ";"
        self._add(TextSpan(html.unescape(self._text[start:end]), start, end))

    def _add(self, piece: TextSpan) -> None:
        if not self._hidden:
            self._pieces.append(piece)

    def _close(self) -> None:
        if self._pieces:
            self._blocks.append(TextBlock(tuple(self._pieces), self._level))
        self._pieces, self._level = [], 0

    def _place(self) -> int:
        line, column = self.getpos()
        return self._lines[line - 1] + column
