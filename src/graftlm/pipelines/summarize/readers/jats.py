"""JATS XML reader, based on expat, which reports the position of each piece of text."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Mapping
from xml.parsers import expat

import numpy as np
from numpy.typing import NDArray

from graftlm.errors import DataError
from graftlm.pipelines.summarize.document import TextBlock, TextSpan
from graftlm.pipelines.summarize.readers.blocks import BlockCollector
from graftlm.pipelines.summarize.readers.mathml import MathCollector, local_name
from graftlm.pipelines.summarize.readers.roles import element_roles

_ROOTS = ("article", "pmc-articleset", "articles")
_FORMULAS = ("inline-formula", "disp-formula", "math")
_INSIDE_PARAGRAPHS = ("fn", "fig", "table-wrap", "media", "supplementary-material")
# What TeX needs around a formula that stands alone in a file.
_TEX_DOCUMENT = re.compile(r"^.*\\begin\{document\}|\\end\{document\}.*$", re.DOTALL)
_NO_FORMULA = "[formula]"
_TITLED = ("sec", "ref-list", "app", "ack")  # elements whose title is a heading


def jats_blocks(text: str, notes: list[str], name: str = "The text") -> Iterator[TextBlock]:
    """Yield headings, paragraphs, tables and captions of an article in JATS XML.

    The abstract gets the heading "Abstract". Formulas are read from MathML, else from plain characters, else from TeX;
    a picture of a formula becomes "[formula]". Footnotes, figures and tables do not end the paragraph around them.
    Labels, other abstracts, reviews and responses are skipped.

    Args:
        text: the XML.
        notes: receives what was left out.
        name: name of the text in error messages.

    Raises:
        DataError: the text is not well-formed XML, or not JATS.
    """
    parser = _JatsBlockParser(text, name)
    blocks = parser.parse()
    if parser.pictures:
        notes.append(f"has formulas as pictures ({parser.pictures:,} in all), which are read as {_NO_FORMULA}")
    if parser.entities:
        notes.append(f"has unknown entities such as &{parser.entities[0]}; ({len(parser.entities):,} in all)")
    return iter(blocks)


class _Formula:
    """A formula whose end was not read yet: its MathML, and its characters and TeX outside MathML."""

    def __init__(self, tag: str, start: int) -> None:
        self.tag = tag
        self.start = start
        self.math = MathCollector()
        self.plain = ""
        self.tex = ""
        self._skipped: list[str] = []  # open elements around the text that is added
        if local_name(tag) == "math":
            self.math.start(tag)

    def open(self, tag: str) -> None:
        """Open an element inside the formula."""
        if self.math.depth or local_name(tag) == "math":
            self.math.start(tag)
        else:
            self._skipped.append(tag)

    def close(self, tag: str) -> None:
        """Close the innermost element inside the formula."""
        if self.math.depth:
            self.math.end(tag)
        elif self._skipped:
            self._skipped.pop()

    def add(self, text: str) -> None:
        """Add text, as that of the innermost element."""
        if self.math.depth:
            self.math.add(text)
        elif "tex-math" in self._skipped:
            self.tex += text
        elif not {"label", "alt-text", "long-desc"} & set(self._skipped):
            self.plain += text

    def line(self) -> str:
        """Return the formula on one line; an empty text if there is none."""
        tex = " ".join(_TEX_DOCUMENT.sub("", self.tex).split())
        return self.math.line() or " ".join(self.plain.split()) or tex


class _JatsBlockParser:
    """Passes elements and text with their source positions to a collector."""

    def __init__(self, text: str, name: str) -> None:
        self._text = text
        self._name = name
        self._source = text.encode()
        self._characters = _character_positions(text, self._source)
        self._collector = BlockCollector()
        self._formula: _Formula | None = None
        self.pictures = 0
        self.entities: list[str] = []
        # The text is decoded already: UTF-8 replaces the encoding of the XML declaration.
        parser = expat.ParserCreate("utf-8")
        # The DTD is not read, so that its entities reach the handler of skipped ones.
        parser.UseForeignDTD(True)
        parser.StartElementHandler = self._start_element
        parser.EndElementHandler = self._end_element
        parser.CharacterDataHandler = self._add_text
        parser.SkippedEntityHandler = self._add_entity
        self._parser = parser

    def parse(self) -> list[TextBlock]:
        """Parse the text and return its blocks."""
        try:
            self._parser.Parse(self._source, True)
        except expat.ExpatError as error:
            raise DataError(f"{self._name} is not well-formed XML ({error}): save or fetch it again.") from None
        return self._collector.blocks

    def _position(self) -> int:
        """Return the position of the current element or text in characters."""
        index = self._parser.CurrentByteIndex
        return index if self._characters is None else int(self._characters[index])

    def _start_element(self, tag: str, attributes: Mapping[str, str]) -> None:
        """Open an element with its role, or as a heading with its level."""
        collector = self._collector
        if self._formula is not None:
            self._formula.open(tag)
            return
        if not collector.elements and tag not in _ROOTS:
            raise DataError(
                f"{self._name} is XML with the root <{tag}>, but a JATS <article> is expected: save it as HTML or text."
            )
        parents = [element.tag for element in collector.elements]
        if tag == "abstract" and "abstract-type" not in attributes:
            self._start_abstract()
        elif tag == "title" and parents[-1] in _TITLED:
            collector.open(tag, "", level=_title_level(parents))
        elif tag == "abstract" or (tag == "title" and parents[-1] == "abstract"):
            collector.open(tag, "skipped")
        elif local_name(tag) in _FORMULAS:
            collector.open(tag, "formula" if tag == "disp-formula" else "inline")
            self._formula = _Formula(tag, self._position())
        else:
            interrupts = tag in _INSIDE_PARAGRAPHS and "p" in parents
            collector.open(tag, element_roles("jats").get(tag, ""), interrupts=interrupts)

    def _end_element(self, tag: str) -> None:
        formula = self._formula
        if formula is not None and (tag != formula.tag or formula.math.depth > 1):
            formula.close(tag)
            return
        if formula is not None:
            line = formula.line()
            self.pictures += not line
            end = self._text.find(">", self._position()) + 1
            self._collector.add(TextSpan(line or _NO_FORMULA, formula.start, end, is_formula=True))
            self._formula = None
        self._collector.close(tag)

    def _start_abstract(self) -> None:
        """Open the abstract as prose, although the metadata around it are fields, and add its heading."""
        self._collector.open("abstract", "prose")
        position = self._position()
        span = TextSpan("Abstract", position, position)
        self._collector.blocks.append(TextBlock((span,), 1))

    def _add_text(self, data: str) -> None:
        """Add text with its range in the source, where it may be an entity or a line break of two characters."""
        if self._formula is not None:
            self._formula.add(data)
            return
        text = self._text
        first = self._position()
        last = first + len(data)
        if text[first:last] != data:
            is_reference = text[first] == "&"
            # Otherwise it is a line break of two characters.
            last = text.find(";", first) + 1 if is_reference else first + 2
        self._collector.add(TextSpan(data, first, last))

    def _add_entity(self, name: str, is_parameter: bool) -> None:
        """Add an entity of the DTD, which is not read: the character of this name in HTML, if there is one."""
        if is_parameter:
            return
        reference = f"&{name};"
        character = html.unescape(reference)
        if character == reference:
            self.entities.append(name)
        if self._formula is not None:
            self._formula.add(character)
            return
        start = self._position()
        self._collector.add(TextSpan(character, start, start + len(reference)))


def _character_positions(text: str, source: bytes) -> NDArray[np.int64] | None:
    """Return the index of the character of each byte; None for ASCII text, where they are the same."""
    if len(source) == len(text):
        return None
    values = np.frombuffer(source, dtype=np.uint8)
    is_start = (values & 0xC0) != 0x80
    return np.cumsum(is_start) - 1


def _title_level(parents: list[str]) -> int:
    """Return the level of a title: the number of sections around it, with the abstract as one."""
    level = parents.count("sec")
    if "abstract" in parents:
        level += 1
    return level or 1
