"""JATS XML reader, based on expat, which reports the position of each piece of text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from xml.parsers import expat

import numpy as np
from numpy.typing import NDArray

from graftlm.errors import DataError
from graftlm.pipelines.summarize.document import TextBlock, TextSpan
from graftlm.pipelines.summarize.readers.blocks import BlockCollector
from graftlm.pipelines.summarize.readers.roles import element_roles

_ROOTS = ("article", "pmc-articleset", "articles")
_TITLED = ("sec", "ref-list", "app", "ack")  # elements whose title is a heading


def jats_blocks(text: str, name: str = "The text") -> Iterator[TextBlock]:
    """Yield headings, paragraphs, tables and captions of an article in JATS XML.

    The abstract gets the heading "Abstract".

    Args:
        text: the XML.
        name: name of the text in error messages.

    Raises:
        DataError: the text is not well-formed XML, or not JATS.
    """
    parser = _JatsBlockParser(text, name)
    return iter(parser.parse())


class _JatsBlockParser:
    """Passes elements and text with their source positions to a collector."""

    def __init__(self, text: str, name: str) -> None:
        self._text = text
        self._name = name
        self._source = text.encode()
        self._characters = _character_positions(text, self._source)
        self._collector = BlockCollector()
        # The text is decoded already: UTF-8 replaces the encoding of the XML declaration.
        parser = expat.ParserCreate("utf-8")
        # Entities of a DTD are skipped, because the DTD is not read.
        parser.UseForeignDTD(True)
        parser.StartElementHandler = self._start_element
        parser.EndElementHandler = self._collector.close
        parser.CharacterDataHandler = self._add_text
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
        else:
            collector.open(tag, element_roles("jats").get(tag, ""))

    def _start_abstract(self) -> None:
        """Open the abstract as prose, although the metadata around it are fields, and add its heading."""
        self._collector.open("abstract", "prose")
        position = self._position()
        span = TextSpan("Abstract", position, position)
        self._collector.blocks.append(TextBlock((span,), 1))

    def _add_text(self, data: str) -> None:
        """Add text with its range in the source, where it may be an entity or a line break of two characters."""
        text = self._text
        first = self._position()
        last = first + len(data)
        if text[first:last] != data:
            is_reference = text[first] == "&"
            # Otherwise it is a line break of two characters.
            last = text.find(";", first) + 1 if is_reference else first + 2
        self._collector.add(TextSpan(data, first, last))


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
