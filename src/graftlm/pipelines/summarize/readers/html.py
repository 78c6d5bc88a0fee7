"""HTML reader. The standard library's parser is used because it reports the position of each piece of text."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from html.parser import HTMLParser

from graftlm.pipelines.summarize.document import TextBlock, TextSpan

_SKIPPED_TAGS = {
    "script", "style", "head", "nav", "header", "footer", "aside", "table", "pre", "code-block", "svg", "math", "form",
    "button", "select", "textarea", "noscript", "template", "figure", "iframe",
}  # fmt: skip
_HEADING_LEVELS = {f"h{level}": level for level in range(1, 7)}
_INLINE_TAGS = {
    "a", "abbr", "b", "bdi", "bdo", "cite", "code", "data", "del", "dfn", "em", "font", "i", "ins", "kbd", "mark", "q",
    "s", "samp", "small", "span", "strong", "sub", "sup", "time", "tt", "u", "var", "wbr", "img", "label",
}  # fmt: skip
_VOID_TAGS = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}


def html_blocks(text: str) -> Iterator[TextBlock]:
    """Yield paragraphs and headings. Scripts, navigation, tables and code are skipped."""
    parser = _HtmlBlockParser(text)
    parser.feed(text)
    parser.close()
    return iter(parser.finish())


class _HtmlBlockParser(HTMLParser):
    """Collects text spans and closes a block at each tag that is not inline."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=False)
        self._text = text
        self._line_starts = [0] + [match.end() for match in re.finditer("\n", text)]
        self._blocks: list[TextBlock] = []
        self._spans: list[TextSpan] = []
        self._level = 0
        self._open_skipped_tags: list[str] = []

    def finish(self) -> list[TextBlock]:
        self._close_block()
        return self._blocks

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in _SKIPPED_TAGS:
            self._close_block()
            self._open_skipped_tags.append(tag)
        elif tag == "br":
            start = self._offset()
            self._add(TextSpan("\n", start, start + len(self.get_starttag_text() or "")))
        elif tag not in _INLINE_TAGS:
            self._close_block()
            self._level = _HEADING_LEVELS.get(tag, 0)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in _VOID_TAGS:
            self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        if tag in self._open_skipped_tags:
            while self._open_skipped_tags.pop() != tag:
                pass
        elif tag not in _INLINE_TAGS and tag not in _VOID_TAGS:
            self._close_block()

    def handle_data(self, data: str) -> None:
        self._add(TextSpan(data, self._offset(), self._offset() + len(data)))

    def handle_entityref(self, name: str) -> None:
        self._add_reference(f"&{name}")

    def handle_charref(self, name: str) -> None:
        self._add_reference(f"&#{name}")

    def _add_reference(self, reference: str) -> None:
        start = self._offset()
        end = start + len(reference)
        end += self._text[end : end + 1] == ";"
        self._add(TextSpan(html.unescape(self._text[start:end]), start, end))

    def _add(self, span: TextSpan) -> None:
        if not self._open_skipped_tags:
            self._spans.append(span)

    def _close_block(self) -> None:
        if self._spans:
            self._blocks.append(TextBlock(tuple(self._spans), self._level))
        self._spans, self._level = [], 0

    def _offset(self) -> int:
        line, column = self.getpos()
        return self._line_starts[line - 1] + column
