"""HTML reader, based on the parser of the standard library, which reports the position of each piece of text."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from html.parser import HTMLParser

from graftlm.pipelines.summarize.document import TextBlock, TextSpan
from graftlm.pipelines.summarize.readers.blocks import BlockCollector, ElementRole
from graftlm.pipelines.summarize.readers.roles import element_roles

_HEADINGS = {"h1": 1, "h2": 2, "h3": 3, "h4": 4, "h5": 5, "h6": 6}
# A start tag closes an open element of the same set, whose end tag may be omitted.
_SIBLINGS = ({"p"}, {"li"}, {"dt", "dd"}, {"td", "th"}, {"tr"}, {"option"})
_VOID_TAGS = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}
_LANDMARKS = {"navigation", "banner", "contentinfo", "complementary", "search", "menu", "directory"}
_FURNITURE = re.compile(
    r"(?:^|[\s_-])(?:nav|navbar|navigation|menu|sidebar|breadcrumbs?|toc|table-of-contents|footer|pager|pagination|"
    r"related|headerlink|cookies?|skip-link)(?:$|[\s_-])",
    re.IGNORECASE,
)
_NEVER_FURNITURE = ("html", "body", "main", *_HEADINGS)


def html_blocks(text: str) -> Iterator[TextBlock]:
    """Yield paragraphs and headings, and other blocks by their kind. Scripts and forms are skipped.

    A block is navigation if its tag, role, class or id marks it as navigation, if it is outside the main element, or if
    it consists of links.
    """
    parser = _HtmlBlockParser(text)
    parser.feed(text)
    parser.close()
    collector = parser.collector
    collector.close_block()
    for index, block in enumerate(collector.blocks):
        if collector.main is None or index in collector.main:
            yield block
        else:
            yield replace(block, level=0, kind="furniture")


class _HtmlBlockParser(HTMLParser):
    """Passes elements and text with their source positions to a collector."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=False)
        self.collector = BlockCollector()
        self._text = text
        self._line_starts = [0]
        self._line_starts.extend(match.end() for match in re.finditer("\n", text))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._close_sibling(tag)
        if tag == "br":
            start = self._offset()
            length = len(self.get_starttag_text() or "")
            self.collector.add(TextSpan("\n", start, start + length))
        elif tag not in _VOID_TAGS:
            self._open(tag, dict(attrs))
        elif element_roles("html").get(tag) != "inline":
            self.collector.close_block()

    def _close_sibling(self, tag: str) -> None:
        """Close the innermost element if the start tag implies its end."""
        for siblings in _SIBLINGS:
            elements = self.collector.elements
            if tag in siblings and elements and elements[-1].tag in siblings:
                self.collector.close(elements[-1].tag)

    def _open(self, tag: str, attributes: Mapping[str, str | None]) -> None:
        self.collector.open(
            tag,
            role=_role(tag, attributes),
            level=_HEADINGS.get(tag, 0),
            is_main=tag == "main" or attributes.get("role") == "main",
        )

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in _VOID_TAGS:
            self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        self.collector.close(tag)

    def handle_data(self, data: str) -> None:
        start = self._offset()
        self.collector.add(TextSpan(data, start, start + len(data)))

    def handle_entityref(self, name: str) -> None:
        self._add_reference(f"&{name}")

    def handle_charref(self, name: str) -> None:
        self._add_reference(f"&#{name}")

    def _add_reference(self, reference: str) -> None:
        """Add a character reference, whose final semicolon may be missing."""
        start = self._offset()
        end = start + len(reference)
        if self._text[end : end + 1] == ";":
            end += 1
        self.collector.add(TextSpan(html.unescape(self._text[start:end]), start, end))

    def _offset(self) -> int:
        """Return the position of the current element or text in the source."""
        line, column = self.getpos()
        return self._line_starts[line - 1] + column


def _role(tag: str, attributes: Mapping[str, str | None]) -> ElementRole:
    role = element_roles("html").get(tag, "")
    if _is_furniture(tag, attributes):
        return "skipped" if role == "inline" else "furniture"
    return role


def _is_furniture(tag: str, attributes: Mapping[str, str | None]) -> bool:
    """Return whether the role, class or id of an element marks it as navigation."""
    if attributes.get("role") in _LANDMARKS:
        return True
    if tag in _NEVER_FURNITURE:
        return False
    names = f"{attributes.get('class') or ''} {attributes.get('id') or ''}"
    return _FURNITURE.search(names) is not None
