"""Build a document from the blocks of a reader: split the text into sentences and map them back to the source."""

from __future__ import annotations

import bisect
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

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
from graftlm.pipelines.summarize.text import (
    MAX_SENTENCE,
    WORDS,
    check_language,
    detect_language,
    short_parts,
    whole_sentences,
)

_FIELD = re.compile(r"[A-Z][\w /-]{0,40}:(?:\s|$)")
_MAX_FIELD = 300  # in characters
_CAPTION = re.compile(r"\s*(?:Fig(?:ure|\.)?|Table|Tab\.|Listing|Algorithm|Scheme)\s+[A-Z]?\d[\d.]*\s*[.:|–—]\s")
_CJK = "\u2e80-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff00-\uff65"
_CJK_LINE_BREAK = re.compile(rf"(?<=[{_CJK}])[ \t]*[\r\n]\s*(?=[{_CJK}])")
# The mark at the end of a formula, inside the delimiters of LaTeX.
_FORMULA_END = re.compile(r"([.!?])\s*(?:\$\$?|\\[\])]|\\end\{[a-z*]+\})?\s*$")
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
    *,
    files: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> SourceDocument:
    """Split blocks into sections and sentences.

    Args:
        name: name of the document in messages.
        pages: the source text, to which the spans of the blocks refer: one string, or one for each page of a PDF file
            or each file of a LaTeX document.
        blocks: the blocks of a reader, in order.
        language: language code; None detects the language, as in `read_document`.
        files: the name of each of `pages`, if these are files.
        notes: what the reader left out, as predicates of the document, such as "has hidden text". They may grow while
            the blocks are read.

    Raises:
        DataError: there is no sentence, or the script has no punctuation that ends sentences.
        RecipeError: `language` is malformed, or the language has no punctuation that ends sentences.
        MissingExtraError: sentencex is not installed.
    """
    blocks = [block for block in blocks if block.text.strip()]
    blocks = list(_join_formulas(blocks))
    if language:
        language = check_language(language)
    else:
        prose = (block.text for block in blocks if block.kind == "prose")
        language = detect_language(prose, name)
    builder = _DocumentBuilder(pages, language, files)
    for kind, block in _with_kinds(blocks):
        builder.add(block, kind)
    if not builder.sentences:
        left_out = f" (it {'; it '.join(notes)})" if notes else ""
        raise DataError(f"{name} has no sentence to summarize{left_out}: give a text with words.")
    own_notes = list(notes)
    if builder.divided:
        own_notes.append(
            f"has sentences of more than {MAX_SENTENCE:,} characters, which are divided into parts "
            f"({builder.divided:,} in all)"
        )
    return SourceDocument(
        name=name,
        pages=tuple(pages),
        sections=builder.sections(),
        sentences=tuple(builder.sentences),
        language=language,
        passages=tuple(builder.passages),
        notes=tuple(f"{name} {note}." for note in own_notes),
    )


class _DocumentBuilder:
    """Collects the headings, sentences and other passages of a document, block by block."""

    def __init__(self, pages: Sequence[str], language: str, files: Sequence[str]) -> None:
        self.sentences: list[Sentence] = []
        self.passages: list[Sentence] = []
        self.divided = 0  # number of sentences that were divided
        self._pages = pages
        self._files = files
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
        page = (block.page or 1) - 1
        source = self._pages[page]
        positions = _SourcePositions(block.spans)
        if kind == "prose":
            ranges = self._sentence_ranges(_mask_formulas(block.spans))
        else:
            left = len(text) - len(text.lstrip())
            ranges = [(left, len(text.rstrip()))]
        for first, last, start, end in _with_source(ranges, positions):
            yield Sentence(
                text=_normalize_text(text[first:last]),
                source=source[start:end],
                start=start,
                end=end,
                section=len(self._headings) - 1,
                page=block.page,
                kind=kind,
                file=self._files[page] if self._files else None,
            )

    def _sentence_ranges(self, text: str) -> Iterator[tuple[int, int]]:
        """Yield start and end of each sentence, and of each part of one that is too long, which are counted."""
        for first, end in whole_sentences(text, self._language):
            parts = list(short_parts(text, first, end))
            self.divided += len(parts) > 1
            yield from parts

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


def _mask_formulas(spans: Sequence[TextSpan]) -> str:
    """Return the text of spans in which each formula is a word of its length, with the mark that ends it."""
    return "".join(_mask(span.text) if span.is_formula else span.text for span in spans)


def _mask(formula: str) -> str:
    stripped = formula.strip()
    left = formula.find(stripped)
    right = len(formula) - left - len(stripped)
    mark = _FORMULA_END.search(formula)
    word = "x" * len(stripped)
    if mark and len(word) > 2:
        word = word[:-1] + mark[1]
    return " " * left + word + " " * right


def _join_formulas(blocks: Iterable[TextBlock]) -> Iterator[TextBlock]:
    """Yield blocks after joining a displayed formula to the sentence that it stands in.

    The prose before it does not end as a sentence does. The prose after it belongs to the sentence if it begins with a
    lower-case letter or a mark.
    """
    pending: TextBlock | None = None
    after_formula = False
    for block in blocks:
        if pending is not None and _belongs_to_sentence(block, pending, after_formula=after_formula):
            gap = TextSpan(" ", block.spans[0].start, block.spans[0].start)
            spans = block.spans
            after_formula = block.kind == "formula"
            if after_formula:
                spans = tuple(replace(span, is_formula=True) for span in spans)
            pending = replace(pending, spans=(*pending.spans, gap, *spans))
            continue
        if pending is not None:
            yield pending
        pending = block
        after_formula = False
    if pending is not None:
        yield pending


def _belongs_to_sentence(block: TextBlock, before: TextBlock, *, after_formula: bool) -> bool:
    """Return whether a formula follows an unfinished sentence, or the rest of a sentence follows a formula."""
    if before.kind != "prose" or before.level or block.level or block.page != before.page:
        return False
    if block.kind == "formula":
        text = before.text.rstrip()
        return not (SENTENCE_END.search(text) or (after_formula and _FORMULA_END.search(text)))
    beginning = block.text.lstrip()[:1]
    return after_formula and block.kind == "prose" and (beginning.islower() or beginning in ",;.")


def _with_source(
    ranges: Iterable[tuple[int, int]],
    positions: _SourcePositions,
) -> list[tuple[int, int, int, int]]:
    """Return ranges of a text with their ranges in the source.

    A sentence that has no range in the source, such as the second sentence of a LaTeX macro, takes that of the
    sentence before it.
    """
    found: list[tuple[int, int, int, int]] = []
    for first, last in ranges:
        start, _ = positions.find(first)
        _, end = positions.find(last - 1)
        start = max(start, found[-1][3]) if found else start
        if found and end <= start:
            before = found.pop()
            first, start, end = before[0], before[2], before[3]
        found.append((first, last, start, end))
    return found


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
