"""Documents of the pipeline: sections and sentences, each with its character span in the source.

A reader yields blocks. A block is a list of text spans: readable text and the characters of the source that it stands
for. Sentences are split in the readable text and mapped back to the source, so a span may contain markup.
"""

from __future__ import annotations

import bisect
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from graftlm.errors import DataError
from graftlm.pipelines.summarize.text import WORDS, check_language, detect_language, split_sentences, split_words

_NUMBERING = re.compile(
    r"^\s*(?:(?:chapter|section|appendix)\s+)?(?:\d+(?:\.\d+)*[.):]?|(?:[A-Z](?:\.\d+)*|[IVXLC]+)[.):])\s+",
    re.IGNORECASE,
)
_OPENINGS = (*WORDS["introductions"], *WORDS["introduction_fallbacks"], *WORDS["abstracts"])
_LETTER = re.compile(r"[^\W\d_]")
_FIELD = re.compile(r"[A-Z][\w /-]{0,40}:(?:\s|$)")
_CAPTION = re.compile(r"\s*(?:Fig(?:ure|\.)?|Table|Tab\.|Listing|Algorithm|Scheme)\s+[A-Z]?\d[\d.]*\s*[.:|–—]\s")
_END = re.compile(r"[.!?…。！？।։።۔؟][\"'”’»)\]」』]*$")
_MIN_WORDS = 4  # of a whole sentence
_MAX_FIELD = 300  # characters
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


BlockKind = Literal[
    "prose", "heading", "code", "table", "formula", "caption", "reference", "field", "note", "furniture"
]


@dataclass(frozen=True, slots=True)
class TextBlock:
    """A paragraph, or a heading if `level` is at least 1. `page` counts from 1 in a PDF.

    Only `prose` has sentences. A `field` is metadata or an entry of a form, a `note` a footnote; `furniture` is
    navigation and the running heads and feet of pages.
    """

    spans: tuple[TextSpan, ...]
    level: int = 0
    page: int | None = None
    kind: BlockKind = "prose"

    @property
    def text(self) -> str:
        """The readable text, line breaks included."""
        return "".join(span.text for span in self.spans)


@dataclass(frozen=True, slots=True)
class Sentence:
    """A sentence and its position; or another passage, such as a table, as a whole.

    Attributes:
        text: readable text: no markup, ligatures or soft hyphens, and single spaces. Line breaks within Chinese and
            Japanese text are removed.
        source: the same characters as the source has them.
        start: position of `source` in the text of the file; in a PDF, in the text of its page.
        end: position after the last character.
        section: index of its section.
        page: page number from 1; None outside PDF files.
        kind: kind of the block that it belongs to.
    """

    text: str
    source: str
    start: int
    end: int
    section: int
    page: int | None = None
    kind: BlockKind = "prose"

    @property
    def is_whole(self) -> bool:
        """Whether the text begins and ends as a sentence does, is four words long, and is letters for the most part.

        The pieces of a sentence that a page break divides are not whole, nor are most items of lists.
        """
        text = self.text.lstrip("\"'“‘«([")
        letters = len(_LETTER.findall(text))
        starts = not text[:1].islower() and _END.search(text) is not None
        return starts and 2 * letters > len(text) - text.count(" ") and len(split_words(text)) >= _MIN_WORDS

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
        sentences: of the prose.
        language: language code that the sentences were split by.
        passages: what is no prose, each whole: headings, code, tables, formulas, captions, references, fields.
    """

    name: str
    pages: tuple[str, ...]
    sections: tuple[Section, ...]
    sentences: tuple[Sentence, ...]
    language: str
    passages: tuple[Sentence, ...] = ()

    @property
    def text(self) -> str:
        """All sentences, joined by spaces."""
        return " ".join(sentence.text for sentence in self.sentences)

    @property
    def title(self) -> str:
        """The first heading, unless it is one of an introduction or abstract; "" without one."""
        title = next((section.title for section in self.sections if section.level), "")
        return "" if normalize_title(title) in _OPENINGS else title

    @property
    def introduction(self) -> range | None:
        """Indices of the sentences of the introduction, subsections included; None without such a heading."""
        return self._sentences_below(WORDS["introductions"]) or self._sentences_below(WORDS["introduction_fallbacks"])

    @property
    def abstract(self) -> range | None:
        """Indices of the sentences of an abstract that the document has; None without such a heading."""
        return self._sentences_below(WORDS["abstracts"])

    def _sentences_below(self, titles: Sequence[str]) -> range | None:
        for index, section in enumerate(self.sections):
            if section.level and normalize_title(section.title) in titles:
                following = (other.first for other in self.sections[index + 1 :] if other.level <= section.level)
                if sentences := range(section.first, next(following, len(self.sentences))):
                    return sentences
        return None

    @property
    def selectable(self) -> list[int]:
        """Indices of the sentences that a summary may use: whole ones.

        Where most are not whole, as in notes without capitals or full stops, all that have a letter.
        """
        lettered = [index for index, sentence in enumerate(self.sentences) if _LETTER.search(sentence.text)]
        whole = [index for index in lettered if self.sentences[index].is_whole]
        return whole if 2 * len(whole) > len(lettered) else lettered


def normalize_title(title: str) -> str:
    """Return a heading in lower case without its number: `2.1 Background:` becomes `background`."""
    words = title.strip().rstrip(".: ").casefold()
    return words if words in (*_OPENINGS, *WORDS["references"]) else _NUMBERING.sub("", words, count=1)


def build_document(
    name: str, pages: Sequence[str], blocks: Iterable[TextBlock], language: str | None = None
) -> SourceDocument:
    """Split blocks into sections and sentences; their spans refer to `pages`. `language` is that of `read_document`.

    Raises DataError if there is no sentence, or the script has no punctuation that ends sentences, and RecipeError if
    sentences can't be split by the language.
    """
    blocks = [block for block in blocks if block.text.strip()]
    prose = (block.text for block in blocks if block.kind == "prose")
    language = check_language(language) if language else detect_language(prose, name)
    sentences: list[Sentence] = []
    passages: list[Sentence] = []
    headings: list[tuple[str, int, int]] = []  # title, level, first sentence
    references = 0  # level of the heading of the references, while they last
    for kind, block in _with_fields(blocks):
        if block.level:
            headings.append((_normalize_text(block.text), block.level, len(sentences)))
            if not 0 < references < block.level:
                references = block.level if normalize_title(headings[-1][0]) in WORDS["references"] else 0
        headings = headings or [("", 0, 0)]
        kind = "reference" if references and kind == "prose" else kind
        split = _split_block(block, kind, pages[(block.page or 1) - 1], language, len(headings) - 1)
        (sentences if kind == "prose" else passages).extend(split)
    if not sentences:
        raise DataError(f"{name} has no sentence to summarize: a text with words is expected.")
    ends = [first for _, _, first in headings[1:]] + [len(sentences)]
    sections = (Section(*heading, end) for heading, end in zip(headings, ends, strict=True))
    return SourceDocument(name, tuple(pages), tuple(sections), tuple(sentences), language, tuple(passages))


def _with_fields(blocks: Iterable[TextBlock]) -> Iterator[tuple[BlockKind, TextBlock]]:
    """Yield blocks with their kinds. Short lines such as `Author: A. Name` above all other text are fields.

    Paragraphs such as `Table 1: Results` are captions in every format.
    """
    is_head = True
    for block in blocks:
        text = block.text.strip()
        is_prose = block.kind == "prose" and not block.level
        is_field = is_prose and len(text) <= _MAX_FIELD and _FIELD.match(text) is not None and not _END.search(text)
        is_head = is_head and (is_field or not is_prose)
        is_caption = is_prose and _CAPTION.match(block.text)
        kind = "field" if is_head and is_field else "caption" if is_caption else block.kind
        yield "heading" if block.level else kind, block


def _split_block(block: TextBlock, kind: BlockKind, source: str, language: str, section: int) -> Iterable[Sentence]:
    """Yield the sentences of prose, and any other block as a whole."""
    text = block.text
    span_starts = list(itertools.accumulate((len(span.text) for span in block.spans), initial=0))
    left = len(text) - len(text.lstrip())
    whole = [(left, len(text.rstrip()))]
    for first, last in split_sentences(text, language) if kind == "prose" else whole:
        start, _ = _source_range(block.spans, span_starts, first)
        _, end = _source_range(block.spans, span_starts, last - 1)
        yield Sentence(_normalize_text(text[first:last]), source[start:end], start, end, section, block.page, kind)


def _source_range(spans: Sequence[TextSpan], span_starts: Sequence[int], position: int) -> tuple[int, int]:
    """Return the source characters of the character at `position` of the readable text, where the spans start."""
    index = bisect.bisect_right(span_starts, position) - 1
    span, offset = spans[index], position - span_starts[index]
    return (span.start + offset, span.start + offset + 1) if span.is_literal else (span.start, span.end)


def aligned_spans(text: str, positions: Sequence[int]) -> Iterator[TextSpan]:
    """Yield literal spans of a text whose characters stand at rising `positions` of the source."""
    first = 0
    for index in range(1, len(text) + 1):
        if index == len(text) or positions[index] != positions[index - 1] + 1:
            yield TextSpan(text[first:index], positions[first], positions[index - 1] + 1)
            first = index


def _normalize_text(text: str) -> str:
    return " ".join(_CJK_LINE_BREAK.sub("", text.translate(_LIGATURES)).split())
