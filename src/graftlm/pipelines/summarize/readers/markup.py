"""HTML and JATS XML readers, on the standard library's parsers: they report the position of each piece of text."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser
from typing import Any, Literal
from xml.parsers import expat

import numpy as np

from graftlm.errors import DataError
from graftlm.pipelines.summarize.document import BlockKind, TextBlock, TextSpan
from graftlm.pipelines.summarize.text import element_roles

ElementRole = BlockKind | Literal["inline", "skipped", ""]  # an element of the role "" ends blocks
_STRONGEST: tuple[BlockKind | Literal["skipped"], ...] = (
    "skipped", "furniture", "reference", "caption", "table", "formula", "code", "prose", "field",
)  # fmt: skip
_MIN_LINK_SHARE = 0.6  # of a block's characters, from which it is navigation

_HEADINGS = {f"h{level}": level for level in range(1, 7)}
_SIBLINGS = ({"p"}, {"li"}, {"dt", "dd"}, {"td", "th"}, {"tr"}, {"option"})  # each closes an open sibling
_VOID_TAGS = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}
_LANDMARKS = {"navigation", "banner", "contentinfo", "complementary", "search", "menu", "directory"}
_FURNITURE = re.compile(
    r"(?:^|[\s_-])(?:nav|navbar|navigation|menu|sidebar|breadcrumbs?|toc|table-of-contents|footer|pager|pagination|"
    r"related|headerlink|cookies?|skip-link)(?:$|[\s_-])",
    re.IGNORECASE,
)


@dataclass
class _OpenElement:
    tag: str
    role: ElementRole  # of its text
    level: int = 0  # of a heading
    first_block: int | None = None  # of the main element


@dataclass
class _BlockCollector:
    """Collects text spans and closes a block at each tag that is not inline."""

    blocks: list[TextBlock] = field(default_factory=list)
    elements: list[_OpenElement] = field(default_factory=list)
    spans: list[TextSpan] = field(default_factory=list)
    linked: int = 0  # characters of `spans` that are in links
    main: range | None = None  # the blocks of the main element

    @property
    def kind(self) -> BlockKind | Literal["skipped"]:
        """The strongest role of the open elements."""
        roles = {element.role for element in self.elements}
        strongest: list[BlockKind | Literal["skipped"]] = [role for role in _STRONGEST if role in roles]
        return strongest[0] if strongest else "prose"

    def open(self, tag: str, role: ElementRole, level: int = 0, *, is_main: bool = False) -> None:
        """Open an element; `level` is that of a heading."""
        if role != "inline":
            self.close_block()
        self.elements.append(_OpenElement(tag, role, level, len(self.blocks) if is_main else None))

    def close(self, tag: str) -> None:
        """Close the innermost element with the tag, and what is open in it; ignore a tag without one."""
        if any(element.tag == tag for element in self.elements):
            while True:
                if self.elements[-1].role != "inline":
                    self.close_block()
                element = self.elements.pop()
                if element.first_block is not None:
                    self.main = range(element.first_block, len(self.blocks))
                if element.tag == tag:
                    return

    def add(self, span: TextSpan) -> None:
        """Add text of the open elements."""
        if self.kind != "skipped":
            self.spans.append(span)
            self.linked += len(span.text.strip()) * any(element.tag == "a" for element in self.elements)

    def close_block(self) -> None:
        """Close the block. Navigation is mostly links."""
        if self.spans:
            kind = self.kind
            levels = [element.level for element in self.elements] if kind in ("prose", "reference") else []
            level = max(levels, default=0)
            length = sum(len(span.text.strip()) for span in self.spans)
            is_open = "".join(span.text for span in self.spans).rstrip()[-1:] not in (".", "!", "?")
            if kind == "prose" and not level and is_open and self.linked > _MIN_LINK_SHARE * length:
                kind = "furniture"
            self.blocks.append(TextBlock(tuple(self.spans), level, kind=kind))  # type: ignore[arg-type]  # none is skipped
        self.spans, self.linked = [], 0


class _HtmlBlockParser(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=False)
        self._text = text
        self._line_starts = [0] + [match.end() for match in re.finditer("\n", text)]
        self.collector = _BlockCollector()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for siblings in _SIBLINGS:
            if tag in siblings and self.collector.elements and self.collector.elements[-1].tag in siblings:
                self.collector.close(self.collector.elements[-1].tag)
        if tag == "br":
            start = self._offset()
            self.collector.add(TextSpan("\n", start, start + len(self.get_starttag_text() or "")))
        elif tag not in _VOID_TAGS:
            attributes = dict(attrs)
            is_main = tag == "main" or attributes.get("role") == "main"
            self.collector.open(tag, _html_role(tag, attributes), _HEADINGS.get(tag, 0), is_main=is_main)
        elif element_roles("html").get(tag) != "inline":
            self.collector.close_block()

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in _VOID_TAGS:
            self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        self.collector.close(tag)

    def handle_data(self, data: str) -> None:
        self.collector.add(TextSpan(data, self._offset(), self._offset() + len(data)))

    def handle_entityref(self, name: str) -> None:
        self._add_reference(f"&{name}")

    def handle_charref(self, name: str) -> None:
        self._add_reference(f"&#{name}")

    def _add_reference(self, reference: str) -> None:
        start = self._offset()
        end = start + len(reference)
        end += self._text[end : end + 1] == ";"
        self.collector.add(TextSpan(html.unescape(self._text[start:end]), start, end))

    def _offset(self) -> int:
        line, column = self.getpos()
        return self._line_starts[line - 1] + column


def html_blocks(text: str) -> Iterator[TextBlock]:
    """Yield paragraphs and headings, and other blocks by their kind. Scripts and forms are skipped.

    Navigation is what its tag, role, class or id calls so, what is outside the main element, and lines of links.
    """
    parser = _HtmlBlockParser(text)
    parser.feed(text)
    parser.close()
    parser.collector.close_block()
    main = parser.collector.main
    for index, block in enumerate(parser.collector.blocks):
        yield block if main is None or index in main else replace(block, level=0, kind="furniture")


def _html_role(tag: str, attributes: Mapping[str, str | None]) -> ElementRole:
    marks = f"{attributes.get('class') or ''} {attributes.get('id') or ''}"
    is_named = tag not in ("html", "body", "main", *_HEADINGS) and _FURNITURE.search(marks)
    if attributes.get("role") in _LANDMARKS or is_named:
        return "skipped" if element_roles("html").get(tag) == "inline" else "furniture"
    return element_roles("html").get(tag, "")


def jats_blocks(text: str, name: str = "The text") -> Iterator[TextBlock]:
    """Yield headings, paragraphs, tables and captions of an article in JATS XML; the abstract has a heading of its own.

    Raises DataError if the text is no XML, or XML of another kind.
    """
    source = text.encode()
    starts = (np.frombuffer(source, dtype=np.uint8) & 0xC0) != 0x80
    characters = np.cumsum(starts) - 1 if len(source) > len(text) else None
    collector = _BlockCollector()
    parser: Any = expat.ParserCreate("utf-8")  # whatever the declaration says: the text is decoded already
    parser.UseForeignDTD(True)  # entities of a DTD that is not read are skipped

    def position() -> int:
        index = parser.CurrentByteIndex
        return index if characters is None else int(characters[index])

    def start(tag: str, attributes: Mapping[str, str]) -> None:
        if not collector.elements and tag not in ("article", "pmc-articleset", "articles"):
            raise DataError(
                f"{name} is XML with the root <{tag}>, but a JATS <article> is expected: save it as HTML or text."
            )
        parents = [element.tag for element in collector.elements]
        if tag == "abstract" and "abstract-type" not in attributes:
            collector.open(tag, "prose")  # though the metadata around it are fields
            collector.blocks.append(TextBlock((TextSpan("Abstract", position(), position()),), 1))
        elif tag == "title" and parents[-1] in ("sec", "ref-list", "app", "ack"):
            collector.open(tag, "", parents.count("sec") + ("abstract" in parents) or 1)
        elif tag == "abstract" or (tag == "title" and parents[-1] == "abstract"):
            collector.open(tag, "skipped")
        else:
            collector.open(tag, element_roles("jats").get(tag, ""))

    def characters_of(data: str) -> None:
        first = position()
        last = first + len(data)
        if text[first:last] != data:  # a reference, or a line break of two characters
            last = text.find(";", first) + 1 if text[first] == "&" else first + 2
        collector.add(TextSpan(data, first, last))

    parser.StartElementHandler, parser.EndElementHandler = start, collector.close
    parser.CharacterDataHandler = characters_of
    try:
        parser.Parse(source, True)
    except expat.ExpatError as error:
        raise DataError(f"{name} is no whole XML ({error}): save or fetch it again.") from None
    return iter(collector.blocks)
