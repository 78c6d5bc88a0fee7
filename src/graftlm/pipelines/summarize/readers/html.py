"""HTML reader, based on the parser of the standard library, which reports the position of each piece of text."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from html.parser import HTMLParser

from graftlm.pipelines.summarize.document import BlockKind, TextBlock, TextSpan
from graftlm.pipelines.summarize.readers.blocks import (
    BlockCollector,
    ElementRole,
    OpenElement,
    strongest_role,
)
from graftlm.pipelines.summarize.readers.mathml import MathCollector, is_math_tag
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
# What style sheets and frameworks do not show, by convention: texts for screen readers, the second form of a formula,
# and the names of icons.
_CONCEALED_CLASSES = {
    "sr-only",
    "visually-hidden",
    "screen-reader-text",
    "d-none",
    "katex-html",
    "MathJax_Preview",
    "material-icons",
}
_CONCEALED_STYLE = re.compile(r"(?:^|;)\s*(?:display\s*:\s*none|visibility\s*:\s*hidden)\b", re.IGNORECASE)
_NEVER_FURNITURE = ("html", "body", "main", *_HEADINGS)


def html_blocks(text: str, notes: list[str]) -> Iterator[TextBlock]:
    """Yield paragraphs and headings, and other blocks by their kind.

    A block is navigation if its tag, role, class or id marks it as navigation, if it is outside the main element, or if
    it consists of links. Formulas in MathML are part of their sentences.

    What a browser does not show is skipped: scripts, templates, and elements that an attribute, their style or a class
    such as `sr-only` hides; their characters are counted in `notes`. The controls of forms and pronunciations are
    skipped too. The text of `<details>` and of elements with `aria-hidden`, which browsers show, is read. Quotations
    (`<q>`) get their marks.

    Args:
        text: the page.
        notes: receives what was left out.
    """
    parser = _HtmlBlockParser(text)
    parser.feed(text)
    parser.finish()
    collector = parser.collector
    note_concealed(collector.concealed, notes)
    for index, block in enumerate(collector.blocks):
        if collector.main is None or index in collector.main:
            yield block
        else:
            yield replace(block, level=0, kind="furniture")


def note_concealed(count: int, notes: list[str]) -> None:
    """Note the number of hidden characters, if there are any."""
    if count:
        notes.append(f"has hidden text ({count:,} characters), which is not read")


class HtmlFragments:
    """Reads pieces of HTML between other text, where an element may begin in one piece and end in a later one.

    Attributes:
        elements: the elements that are open after the last piece.
        concealed: number of characters that attributes hide.
    """

    def __init__(self) -> None:
        self.elements: list[OpenElement] = []
        self.concealed = 0

    @property
    def _surroundings(self) -> BlockCollector:
        return BlockCollector(elements=self.elements)

    @property
    def heading_level(self) -> int:
        """The level of the headings that are open; 0 outside headings."""
        return self._surroundings.heading_level

    def read(self, text: str) -> list[TextBlock]:
        """Return the blocks of a piece, whose spans refer to it."""
        parser = _HtmlBlockParser(text, self.elements)
        parser.feed(text)
        self.elements = list(parser.collector.elements)
        parser.finish()
        self.concealed += parser.collector.concealed
        return parser.collector.blocks

    def kind(self, own: BlockKind) -> BlockKind | None:
        """Return the kind of a text that stands between the pieces; None if it is not shown.

        Args:
            own: the kind of the text outside elements.
        """
        kind = strongest_role([own, *(element.role for element in self.elements)])
        return None if kind in ("skipped", "hidden") else kind

    def count_concealed(self, text: str) -> None:
        """Count a text that is not shown, if an attribute hides it."""
        if any(element.is_concealed for element in self.elements):
            self.concealed += len(text.strip())


class _HtmlBlockParser(HTMLParser):
    """Passes elements and text with their source positions to a collector.

    Args:
        text: the source.
        elements: the elements that are open at its beginning.
    """

    def __init__(self, text: str, elements: Sequence[OpenElement] = ()) -> None:
        super().__init__(convert_charrefs=False)
        self.collector = BlockCollector(elements=list(elements))
        self._text = text
        self._formula: MathCollector | None = None
        self._formula_start = 0
        self._line_starts = [0]
        self._line_starts.extend(match.end() for match in re.finditer("\n", text))

    def finish(self) -> None:
        """Read what is left, and close the open elements and the open block."""
        self.close()
        if self._formula is not None:
            self._close_formula(len(self._text))
        self.collector.finish()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if self._formula is not None:
            if is_math_tag(tag) or self._formula.allows_markup:
                self._formula.start(tag)
                return
            self._close_formula(self._offset())  # the end tag is missing
        if tag == "math":
            self._open_formula(dict(attrs))
            return
        self._close_sibling(tag)
        if tag == "br":
            start = self._offset()
            length = len(self.get_starttag_text() or "")
            self.collector.add(TextSpan("\n", start, start + length))
        elif tag not in _VOID_TAGS:
            self._open(tag, dict(attrs))
            if tag == "q":
                self._add_quotation_mark("“", len(self.get_starttag_text() or ""))
        elif element_roles("html").get(tag) != "inline":
            self.collector.close_block()

    def _add_quotation_mark(self, mark: str, length: int) -> None:
        start = self._offset()
        self.collector.add(TextSpan(mark, start, start + length))

    def _close_sibling(self, tag: str) -> None:
        """Close the innermost element if the start tag implies its end."""
        for siblings in _SIBLINGS:
            elements = self.collector.elements
            if tag in siblings and elements and elements[-1].tag in siblings:
                self.collector.close(elements[-1].tag)

    def _open_formula(self, attributes: Mapping[str, str | None]) -> None:
        is_displayed = attributes.get("display") == "block"
        self.collector.open("math", "formula" if is_displayed else "inline")
        self._formula = MathCollector()
        self._formula_start = self._offset()

    def _close_formula(self, end: int) -> None:
        """Add the formula, which ends at a position of the source, as one span."""
        assert self._formula is not None, "a formula is open"
        line = self._formula.line()
        self._formula = None
        if line:
            self.collector.add(TextSpan(line, self._formula_start, end, is_formula=True))
        self.collector.close("math")

    def _open(self, tag: str, attributes: Mapping[str, str | None]) -> None:
        role = _role(tag, attributes)
        is_concealed = tag not in ("html", "body") and _is_concealed(tag, attributes)
        if is_concealed:
            role = "hidden" if role in ("inline", "hidden") else "skipped"
        self.collector.open(
            tag,
            role=role,
            level=_HEADINGS.get(tag, 0),
            is_main=tag == "main" or attributes.get("role") == "main",
            is_concealed=is_concealed,
        )

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if self._formula is not None:
            self._formula.start(tag)
            self._formula.end(tag)
        elif tag in _VOID_TAGS:
            self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        if self._formula is None:
            if tag == "q" and any(element.tag == "q" for element in self.collector.elements):
                self._add_quotation_mark("”", len("</q>"))
            self.collector.close(tag)
        elif tag == "math":
            self._close_formula(self._text.find(">", self._offset()) + 1 or len(self._text))
        else:
            self._formula.end(tag)

    def handle_data(self, data: str) -> None:
        if self._formula is not None:
            self._formula.add(data)
            return
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
        if self._formula is not None:
            self._formula.add(html.unescape(self._text[start:end]))
            return
        self.collector.add(TextSpan(html.unescape(self._text[start:end]), start, end))

    def _offset(self) -> int:
        """Return the position of the current element or text in the source."""
        line, column = self.getpos()
        return self._line_starts[line - 1] + column


def _role(tag: str, attributes: Mapping[str, str | None]) -> ElementRole:
    role = element_roles("html").get(tag, "inline" if tag.startswith("mjx-") else "")
    if _is_furniture(tag, attributes):
        return "hidden" if role == "inline" else "furniture"
    return role


def _is_concealed(tag: str, attributes: Mapping[str, str | None]) -> bool:
    """Return whether an attribute hides an element, or a dialog is not open."""
    classes = (attributes.get("class") or "").split()
    return (
        "hidden" in attributes
        or (tag == "dialog" and "open" not in attributes)
        # MathJax prints its own spans, and keeps MathML beside them.
        or (tag == "nobr" and attributes.get("aria-hidden") == "true")
        or not _CONCEALED_CLASSES.isdisjoint(classes)
        or _CONCEALED_STYLE.search(attributes.get("style") or "") is not None
    )


def _is_furniture(tag: str, attributes: Mapping[str, str | None]) -> bool:
    """Return whether the role, class or id of an element marks it as navigation."""
    if attributes.get("role") in _LANDMARKS:
        return True
    if tag in _NEVER_FURNITURE:
        return False
    names = f"{attributes.get('class') or ''} {attributes.get('id') or ''}"
    return _FURNITURE.search(names) is not None
