"""A document as the pipeline sees it: sections and sentences, each of which knows its characters in the source.

Readers give blocks of pieces; a piece is readable text and the span of the source that it stands for. Sentences are
found in the readable text of a block and carried back to the source, so markup may stand inside a sentence's span.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from graftlm.errors import DataError
from graftlm.pipelines.summarize.text import detect_language, split_sentences

_NUMBERING = re.compile(
    r"^\s*(?:(?:chapter|section|appendix)\s+)?(?:[\dA-Z]{1,2}(?:\.\d+)*|[IVXLC]+)?[.):\s]*", re.IGNORECASE
)
_INTRODUCTIONS = ("introduction", "einleitung", "introducción", "introduzione", "introdução", "inleiding", "indledning")
_OPENINGS = ("motivation", "overview", "background")
_SOURCES = ("references", "bibliography", "works cited", "literature cited")
_LETTER = re.compile(r"[^\W\d_]")
_IDEOGRAPHS = "\u2e80-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff00-\uff65"
_BROKEN = re.compile(rf"(?<=[{_IDEOGRAPHS}])[ \t]*[\r\n]\s*(?=[{_IDEOGRAPHS}])")
_LIGATURES = str.maketrans(
    {"ﬀ": "ff", "ﬁ": "fi", "ﬂ": "fl", "ﬃ": "ffi", "ﬄ": "ffl", "ﬅ": "st", "ﬆ": "st", "\u00ad": None}
)


@dataclass(frozen=True, slots=True)
class TextSpan:
    """Readable text and the span of the source that it stands for.

    Text as long as its span stands for it character by character; other text stands for the span as a whole.
    """

    text: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class TextBlock:
    """A paragraph, or with a `level` of 1 and more a heading; `page` counts from 1 where there are pages."""

    pieces: tuple[TextSpan, ...]
    level: int = 0
    page: int | None = None

    @property
    def text(self) -> str:
        """Its readable text, line breaks and all."""
        return "".join(piece.text for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class Sentence:
    """One sentence, and where it stands.

    Attributes:
        text: as it reads: without markup, ligatures such as ﬁ and soft hyphens, white space as single spaces, and none
            where a line breaks within Chinese or Japanese.
        source: its characters in the source, as they are there.
        start: of `source`, counted in characters of the source file's text; in a PDF, of the page's text.
        end: one behind the last of them.
        section: index of its section.
        page: in a PDF, counted from 1.
    """

    text: str
    source: str
    start: int
    end: int
    section: int
    page: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Text and place; `page` only where there are pages."""
        place = {"start": self.start, "end": self.end} | ({} if self.page is None else {"page": self.page})
        return {"text": self.text, "source": self.source, **place}


@dataclass(frozen=True, slots=True)
class Section:
    """A heading and the sentences below it, up to the next heading of any level: `first` to one before `end`."""

    title: str
    level: int
    first: int
    end: int


@dataclass(frozen=True)
class SourceDocument:
    """A text that was read.

    Attributes:
        where: the file, or what else it is known by.
        pages: the source's text: one string, or in a PDF one for each page.
        sections: the text before the first heading is a section without a title.
        sentences: all of them, in order.
        language: the code that its sentences were split by.
    """

    where: str
    pages: tuple[str, ...]
    sections: tuple[Section, ...]
    sentences: tuple[Sentence, ...]
    language: str

    @property
    def introduction(self) -> range | None:
        """The sentences of its introduction, subsections included; None where no heading says that there is one."""
        for names in (_INTRODUCTIONS, _OPENINGS):
            for index, section in enumerate(self.sections):
                if plain_title(section.title) in names and section.level:
                    found = range(section.first, self._end_of(index))
                    if found:
                        return found
        return None

    def _end_of(self, index: int) -> int:
        """One behind the last sentence of a section and all below it."""
        level = self.sections[index].level
        for section in self.sections[index + 1 :]:
            if section.level <= level:
                return section.first
        return len(self.sentences)

    @property
    def selectable(self) -> list[int]:
        """Indices of sentences that a summary may take: those with a letter, outside the list of references."""
        closed = {index for index, section in enumerate(self.sections) if plain_title(section.title) in _SOURCES}
        return [
            index
            for index, sentence in enumerate(self.sentences)
            if sentence.section not in closed and _LETTER.search(sentence.text)
        ]


def plain_title(title: str) -> str:
    """A heading in lower case without its number: `2.1 Background:` gives `background`."""
    words = title.strip().rstrip(".: ").casefold()
    return words if words in (*_INTRODUCTIONS, *_OPENINGS, *_SOURCES) else _NUMBERING.sub("", words, count=1)


def build_document(
    where: str, pages: Sequence[str], blocks: Iterable[TextBlock], language: str | None = None
) -> SourceDocument:
    """Split blocks into sentences and sections.

    Args:
        where: for messages.
        pages: the source's text, which the spans of blocks point into.
        blocks: in order; those of pages name them.
        language: a code such as de; None tells it by the script, and takes Latin script for English.

    Raises:
        DataError: there is no sentence, or nothing marks sentences in the text's script.
    """
    found = [block for block in blocks if block.text.strip()]
    language = language or detect_language((block.text for block in found), where)
    sentences: list[Sentence] = []
    heads: list[tuple[str, int, int]] = []
    for block in found:
        if block.level:
            heads.append((_in_one_line(block.text), block.level, len(sentences)))
        else:
            if not heads:
                heads.append(("", 0, 0))
            sentences.extend(_sentences(block, pages, language, len(heads) - 1))
    if not sentences:
        raise DataError(f"{where} has no sentence to summarise: a text with words is expected.")
    ends = [first for _, _, first in heads[1:]] + [len(sentences)]
    sections = (Section(*head, end) for head, end in zip(heads, ends, strict=True))
    return SourceDocument(where, tuple(pages), tuple(sections), tuple(sentences), language)


def _sentences(block: TextBlock, pages: Sequence[str], language: str, section: int) -> Iterable[Sentence]:
    text, locate = block.text, _Locator(block.pieces)
    source = pages[(block.page or 1) - 1]
    for first, last in split_sentences(text, language):
        start, end = locate.start(first), locate.end(last - 1)
        yield Sentence(_in_one_line(text[first:last]), source[start:end], start, end, section, block.page)


def _in_one_line(text: str) -> str:
    return " ".join(_BROKEN.sub("", text.translate(_LIGATURES)).split())


class _Locator:
    """Places in a block's readable text -> places in the source."""

    def __init__(self, pieces: Sequence[TextSpan]) -> None:
        self._pieces = [piece for piece in pieces if piece.text]
        self._firsts: list[int] = []
        length = 0
        for piece in self._pieces:
            self._firsts.append(length)
            length += len(piece.text)

    def start(self, place: int) -> int:
        piece, inside = self._at(place)
        return piece.start + inside if _is_literal(piece) else piece.start

    def end(self, place: int) -> int:
        """One behind the character at `place`."""
        piece, inside = self._at(place)
        return piece.start + inside + 1 if _is_literal(piece) else piece.end

    def _at(self, place: int) -> tuple[TextSpan, int]:
        index = bisect.bisect_right(self._firsts, place) - 1
        return self._pieces[index], place - self._firsts[index]


def _is_literal(piece: TextSpan) -> bool:
    return len(piece.text) == piece.end - piece.start
