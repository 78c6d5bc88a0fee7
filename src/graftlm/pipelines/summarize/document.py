"""Documents of the pipeline: sections and sentences, each with its character span in the source.

A reader yields blocks. A block is a list of text spans: readable text and the characters of the source that it stands
for. Sentences are split in the readable text and mapped back to the source, so a span may contain markup.
"""

from __future__ import annotations

import bisect
import itertools
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
_INTRODUCTION_FALLBACKS = ("motivation", "overview", "background")
_REFERENCES = ("references", "bibliography", "works cited", "literature cited")
_LETTER = re.compile(r"[^\W\d_]")
_CJK = "\u2e80-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff00-\uff65"
_CJK_LINE_BREAK = re.compile(rf"(?<=[{_CJK}])[ \t]*[\r\n]\s*(?=[{_CJK}])")
_LIGATURES = str.maketrans(
    {"ﬀ": "ff", "ﬁ": "fi", "ﬂ": "fl", "ﬃ": "ffi", "ﬄ": "ffl", "ﬅ": "st", "ﬆ": "st", "\u00ad": None}
)


@dataclass(frozen=True, slots=True)
class TextSpan:
    """Readable text and the source characters `start` to `end` that it stands for.

    A literal span has as many characters as its text, one for each. Any other text stands for its span as a whole.
    """

    text: str
    start: int
    end: int

    @property
    def is_literal(self) -> bool:
        return len(self.text) == self.end - self.start


@dataclass(frozen=True, slots=True)
class TextBlock:
    """A paragraph, or a heading if `level` is at least 1. `page` counts from 1 in a PDF."""

    spans: tuple[TextSpan, ...]
    level: int = 0
    page: int | None = None

    @property
    def text(self) -> str:
        """The readable text, line breaks included."""
        return "".join(span.text for span in self.spans)


@dataclass(frozen=True, slots=True)
class Sentence:
    """A sentence and its position.

    Attributes:
        text: readable text: no markup, ligatures or soft hyphens, and single spaces. Line breaks within Chinese and
            Japanese text are removed.
        source: the same characters as the source has them.
        start: position of `source` in the text of the file; in a PDF, in the text of its page.
        end: position after the last character.
        section: index of its section.
        page: page number from 1; None outside PDF files.
    """

    text: str
    source: str
    start: int
    end: int
    section: int
    page: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Return text and position; `page` only for PDF files."""
        position = {"start": self.start, "end": self.end} | ({} if self.page is None else {"page": self.page})
        return {"text": self.text, "source": self.source, **position}


@dataclass(frozen=True, slots=True)
class Section:
    """A heading and the sentences `first` to `end` (exclusive) before the next heading of any level."""

    title: str
    level: int
    first: int
    end: int


@dataclass(frozen=True)
class SourceDocument:
    """A document that a reader has parsed.

    Attributes:
        name: file path, or another name for messages.
        pages: the source text: one string, or one a page for PDF files.
        sections: in order; text before the first heading is a section without a title.
        language: language code that the sentences were split by.
    """

    name: str
    pages: tuple[str, ...]
    sections: tuple[Section, ...]
    sentences: tuple[Sentence, ...]
    language: str

    @property
    def text(self) -> str:
        """All sentences, joined by spaces."""
        return " ".join(sentence.text for sentence in self.sentences)

    @property
    def introduction(self) -> range | None:
        """Indices of the sentences of the introduction, subsections included; None without such a heading."""
        for titles in (_INTRODUCTIONS, _INTRODUCTION_FALLBACKS):
            for index, section in enumerate(self.sections):
                if section.level and normalize_title(section.title) in titles:
                    following = (other.first for other in self.sections[index + 1 :] if other.level <= section.level)
                    if sentences := range(section.first, next(following, len(self.sentences))):
                        return sentences
        return None

    @property
    def selectable(self) -> list[int]:
        """Indices of the sentences that a summary may use: those with a letter, outside the references."""
        included = [normalize_title(section.title) not in _REFERENCES for section in self.sections]
        sentences = enumerate(self.sentences)
        return [index for index, item in sentences if included[item.section] and _LETTER.search(item.text)]


def normalize_title(title: str) -> str:
    """Return a heading in lower case without its number: `2.1 Background:` becomes `background`."""
    words = title.strip().rstrip(".: ").casefold()
    known = (*_INTRODUCTIONS, *_INTRODUCTION_FALLBACKS, *_REFERENCES)
    return words if words in known else _NUMBERING.sub("", words, count=1)


def build_document(
    name: str, pages: Sequence[str], blocks: Iterable[TextBlock], language: str | None = None
) -> SourceDocument:
    """Split blocks into sections and sentences; their spans refer to `pages`. `language` is that of `read_document`.

    Raises:
        DataError: there is no sentence, or the script has no punctuation that ends sentences.
    """
    blocks = [block for block in blocks if block.text.strip()]
    language = language or detect_language((block.text for block in blocks), name)
    sentences: list[Sentence] = []
    headings: list[tuple[str, int, int]] = []  # title, level, first sentence
    for block in blocks:
        if block.level:
            headings.append((_normalize_text(block.text), block.level, len(sentences)))
        else:
            headings = headings or [("", 0, 0)]
            sentences.extend(_split_block(block, pages[(block.page or 1) - 1], language, len(headings) - 1))
    if not sentences:
        raise DataError(f"{name} has no sentence to summarize: a text with words is expected.")
    ends = [first for _, _, first in headings[1:]] + [len(sentences)]
    sections = (Section(*heading, end) for heading, end in zip(headings, ends, strict=True))
    return SourceDocument(name, tuple(pages), tuple(sections), tuple(sentences), language)


def _split_block(block: TextBlock, source: str, language: str, section: int) -> Iterable[Sentence]:
    text = block.text
    span_starts = list(itertools.accumulate((len(span.text) for span in block.spans), initial=0))
    for first, last in split_sentences(text, language):
        start, _ = _source_range(block.spans, span_starts, first)
        _, end = _source_range(block.spans, span_starts, last - 1)
        yield Sentence(_normalize_text(text[first:last]), source[start:end], start, end, section, block.page)


def _source_range(spans: Sequence[TextSpan], span_starts: Sequence[int], position: int) -> tuple[int, int]:
    """Return the source characters of the character at `position` of the readable text, where the spans start."""
    index = bisect.bisect_right(span_starts, position) - 1
    span, offset = spans[index], position - span_starts[index]
    return (span.start + offset, span.start + offset + 1) if span.is_literal else (span.start, span.end)


def _normalize_text(text: str) -> str:
    return " ".join(_CJK_LINE_BREAK.sub("", text.translate(_LIGATURES)).split())
