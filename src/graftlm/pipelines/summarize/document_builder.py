"""Build a document from the blocks of a reader: split the text into sentences and map them back to the source."""

from __future__ import annotations

import bisect
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence

from graftlm.errors import DataError
from graftlm.pipelines.summarize.document import (
    SENTENCE_END,
    BlockKind,
    Section,
    Sentence,
    SourceDocument,
    TextBlock,
    TextSpan,
    normalize_title,
)
from graftlm.pipelines.summarize.text import WORDS, check_language, detect_language, split_sentences

_FIELD = re.compile(r"[A-Z][\w /-]{0,40}:(?:\s|$)")
_MAX_FIELD = 300  # in characters
_CAPTION = re.compile(r"\s*(?:Fig(?:ure|\.)?|Table|Tab\.|Listing|Algorithm|Scheme)\s+[A-Z]?\d[\d.]*\s*[.:|–—]\s")
_CJK = "\u2e80-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff00-\uff65"
_CJK_LINE_BREAK = re.compile(rf"(?<=[{_CJK}])[ \t]*[\r\n]\s*(?=[{_CJK}])")
_SOFT_HYPHEN = "\u00ad"
_LIGATURES = str.maketrans(
    {
        "ﬀ": "ff",
        "ﬁ": "fi",
        "ﬂ": "fl",
        "ﬃ": "ffi",
        "ﬄ": "ffl",
        "ﬅ": "st",
        "ﬆ": "st",
        _SOFT_HYPHEN: None,
    }
)


def build_document(
    name: str,
    pages: Sequence[str],
    blocks: Iterable[TextBlock],
    language: str | None = None,
) -> SourceDocument:
    """Split blocks into sections and sentences.

    Args:
        name: name of the document in messages.
        pages: the source text, to which the spans of the blocks refer: one string, or one for each page of a PDF file.
        blocks: the blocks of a reader, in order.
        language: language code; None detects the language, as in `read_document`.

    Raises:
        DataError: there is no sentence, or the script has no punctuation that ends sentences.
        RecipeError: `language` is malformed, or the language has no punctuation that ends sentences.
        MissingExtraError: sentencex is not installed.
    """
    blocks = [block for block in blocks if block.text.strip()]
    if language:
        language = check_language(language)
    else:
        prose = (block.text for block in blocks if block.kind == "prose")
        language = detect_language(prose, name)
    builder = _DocumentBuilder(pages, language)
    for kind, block in _with_kinds(blocks):
        builder.add(block, kind)
    if not builder.sentences:
        raise DataError(f"{name} has no sentence to summarize: give a text with words.")
    return SourceDocument(
        name=name,
        pages=tuple(pages),
        sections=builder.sections(),
        sentences=tuple(builder.sentences),
        language=language,
        passages=tuple(builder.passages),
    )


class _DocumentBuilder:
    """Collects the headings, sentences and other passages of a document, block by block."""

    def __init__(self, pages: Sequence[str], language: str) -> None:
        self.sentences: list[Sentence] = []
        self.passages: list[Sentence] = []
        self._pages = pages
        self._language = language
        self._headings: list[tuple[str, int, int]] = []  # title, level, index of the first sentence
        self._references_level = 0  # level of the heading of the references, as long as they last

    def add(self, block: TextBlock, kind: BlockKind) -> None:
        """Add the sentences or the passage of a block."""
        if block.level:
            self._add_heading(_normalize_text(block.text), block.level)
        elif not self._headings:
            self._headings.append(("", 0, 0))
        if kind == "prose" and self._references_level:
            kind = "reference"
        passages = self.sentences if kind == "prose" else self.passages
        passages.extend(self._split(block, kind))

    def _add_heading(self, title: str, level: int) -> None:
        self._headings.append((title, level, len(self.sentences)))
        is_below_references = 0 < self._references_level < level
        if not is_below_references:
            is_references = normalize_title(title) in WORDS["references"]
            self._references_level = level if is_references else 0

    def _split(self, block: TextBlock, kind: BlockKind) -> Iterator[Sentence]:
        """Yield the sentences of prose, and any other block as a whole."""
        text = block.text
        source = self._pages[(block.page or 1) - 1]
        positions = _SourcePositions(block.spans)
        if kind == "prose":
            ranges = split_sentences(text, self._language)
        else:
            left = len(text) - len(text.lstrip())
            ranges = [(left, len(text.rstrip()))]
        for first, last in ranges:
            start, _ = positions.find(first)
            _, end = positions.find(last - 1)
            yield Sentence(
                text=_normalize_text(text[first:last]),
                source=source[start:end],
                start=start,
                end=end,
                section=len(self._headings) - 1,
                page=block.page,
                kind=kind,
            )

    def sections(self) -> tuple[Section, ...]:
        """Return the sections; each ends where the next begins."""
        ends = [first for _, _, first in self._headings[1:]]
        ends.append(len(self.sentences))
        sections = []
        for (title, level, first), end in zip(self._headings, ends, strict=True):
            sections.append(Section(title, level, first, end))
        return tuple(sections)


class _SourcePositions:
    """Maps positions in the readable text of a block to the source."""

    def __init__(self, spans: Sequence[TextSpan]) -> None:
        lengths = (len(span.text) for span in spans)
        self._spans = spans
        self._starts = list(itertools.accumulate(lengths, initial=0))

    def find(self, position: int) -> tuple[int, int]:
        """Return the range of source characters that the character at a position represents."""
        index = bisect.bisect_right(self._starts, position) - 1
        span = self._spans[index]
        if not span.is_literal:
            return span.start, span.end
        start = span.start + position - self._starts[index]
        return start, start + 1


def _with_kinds(blocks: Iterable[TextBlock]) -> Iterator[tuple[BlockKind, TextBlock]]:
    """Yield blocks with their kinds, some of which depend on the text.

    Short lines such as `Author: A. Name` before all prose are fields. Paragraphs such as `Table 1: Results` are
    captions in every format.
    """
    is_head = True
    for block in blocks:
        if block.level:
            yield "heading", block
        elif block.kind != "prose":
            yield block.kind, block
        elif is_head and _is_field(block):
            yield "field", block
        else:
            is_head = False
            yield "caption" if _CAPTION.match(block.text) else "prose", block


def _is_field(block: TextBlock) -> bool:
    text = block.text.strip()
    if len(text) > _MAX_FIELD or not _FIELD.match(text):
        return False
    return not SENTENCE_END.search(text)


def aligned_spans(text: str, positions: Sequence[int]) -> Iterator[TextSpan]:
    """Yield the literal spans of a text: the runs whose characters are adjacent in the source.

    Args:
        text: readable text.
        positions: the source position of each character of the text, in increasing order.
    """
    first = 0
    for index in range(1, len(text) + 1):
        if index == len(text) or positions[index] != positions[index - 1] + 1:
            yield TextSpan(text[first:index], positions[first], positions[index - 1] + 1)
            first = index


def _normalize_text(text: str) -> str:
    """Expand ligatures, remove soft hyphens and line breaks in Chinese and Japanese text, and use single spaces."""
    expanded = text.translate(_LIGATURES)
    joined = _CJK_LINE_BREAK.sub("", expanded)
    return " ".join(joined.split())
