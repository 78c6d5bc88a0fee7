"""Documents of the pipeline: sections and sentences, each with its character span in the source.

A reader yields blocks. A block is a list of text spans: readable text and the source characters that it represents.
`build_document` splits the readable text into sentences and maps them back to the source, so a span may contain markup.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from graftlm.pipelines.summarize.text import WORDS, split_words

BlockKind = Literal[
    "prose",
    "heading",
    "code",
    "table",
    "formula",
    "caption",
    "reference",
    "field",
    "note",
    "furniture",
]

SENTENCE_END = re.compile(r"[.!?…。！？।։።۔؟][\"'”’»)\]」』]*$")
"""The end of a text that ends as a sentence does, closing quotation marks and brackets included."""

_NUMBERING = re.compile(
    r"^\s*(?:(?:chapter|section|appendix)\s+)?(?:\d+(?:\.\d+)*[.):]?|(?:[A-Z](?:\.\d+)*|[IVXLC]+)[.):])\s+",
    re.IGNORECASE,
)
_OPENINGS = (*WORDS["introductions"], *WORDS["introduction_fallbacks"], *WORDS["abstracts"])
_KNOWN_TITLES = (*_OPENINGS, *WORDS["references"])
_LETTER = re.compile(r"[^\W\d_]")
_OPENING_MARKS = "\"'“‘«(["
_MIN_WORDS = 4  # minimum length of a complete sentence


@dataclass(frozen=True, slots=True)
class TextSpan:
    """Readable text and the range of source characters that it represents.

    A literal span has exactly one source character for each character of its text. Any other text represents its
    range as a whole.

    Attributes:
        text: the readable text.
        start: position of the first source character.
        end: position after the last source character.
        is_formula: whether the text is a formula, in which no sentence ends before its last character.
    """

    text: str
    start: int
    end: int
    is_formula: bool = False

    @property
    def is_literal(self) -> bool:
        """Whether each character of the text has one character of the source."""
        return len(self.text) == self.end - self.start


@dataclass(frozen=True, slots=True)
class TextBlock:
    """A paragraph, a heading or another block of a document.

    Attributes:
        spans: the text in order.
        level: level of a heading, from 1; 0 for other blocks.
        page: number of the page of a PDF file, or of the file of a LaTeX document in several files, from 1.
        kind: only `prose` is split into sentences. A `field` is metadata or an entry of a form, and a `note` a
            footnote; `furniture` is navigation and the running headers and footers of pages.
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
        source: the same passage as it is written in the source.
        start: position of `source` in the text of the file; in a PDF, in the text of its page.
        end: position after the last character.
        section: index of its section.
        page: number of its page in a PDF, or of its file in a LaTeX document in several files, from 1; None in others.
        kind: kind of the block that contains it.
        file: name of its file in a LaTeX document in several files.
    """

    text: str
    source: str
    start: int
    end: int
    section: int
    page: int | None = None
    kind: BlockKind = "prose"
    file: str | None = None

    @property
    def is_whole(self) -> bool:
        """Whether the text is a complete sentence.

        A complete sentence begins and ends as a sentence does, has at least four words, and consists mostly of letters.
        The pieces of a sentence that a page break divides are not complete, nor are most items of lists.
        """
        text = self.text.lstrip(_OPENING_MARKS)
        if text[:1].islower() or not SENTENCE_END.search(text):
            return False
        letters = len(_LETTER.findall(text))
        characters = len(text) - text.count(" ")
        return 2 * letters > characters and len(split_words(text)) >= _MIN_WORDS

    def to_json(self) -> dict[str, object]:
        """Return text and position; `page` only for PDF files, `file` only for LaTeX in several files."""
        row: dict[str, object] = {
            "text": self.text,
            "source": self.source,
            "start": self.start,
            "end": self.end,
        }
        if self.file is not None:
            row["file"] = self.file
        elif self.page is not None:
            row["page"] = self.page
        return row


@dataclass(frozen=True, slots=True)
class Section:
    """A heading and the sentences between it and the next heading of any level.

    Attributes:
        title: text of the heading; empty before the first heading.
        level: level of the heading, from 1; 0 without a heading.
        first: index of the first sentence.
        end: index after the last sentence.
    """

    title: str
    level: int
    first: int
    end: int


@dataclass(frozen=True)
class SourceDocument:
    """A document that a reader has parsed.

    Attributes:
        name: file path, or another name for messages.
        pages: the source text: one string, or one for each page of a PDF file or each file of a LaTeX document.
        sections: in order; text before the first heading is a section without a title.
        sentences: the sentences of the prose.
        language: code of the language whose rules split the sentences.
        passages: blocks other than prose, each as a whole: headings, code, tables, formulas, captions, references,
            fields.
        notes: what the reader left out or could not know, as sentences.
    """

    name: str
    pages: tuple[str, ...]
    sections: tuple[Section, ...]
    sentences: tuple[Sentence, ...]
    language: str
    passages: tuple[Sentence, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """All sentences, joined by spaces."""
        return " ".join(sentence.text for sentence in self.sentences)

    @property
    def title(self) -> str:
        """The first heading; empty without one, or if it is the heading of an introduction or abstract."""
        headings = (section.title for section in self.sections if section.level)
        title = next(headings, "")
        return "" if normalize_title(title) in _OPENINGS else title

    @property
    def introduction(self) -> range | None:
        """Indices of the sentences of the introduction, subsections included; None without such a heading."""
        named = self._sentences_below(WORDS["introductions"])
        return named or self._sentences_below(WORDS["introduction_fallbacks"])

    @property
    def abstract(self) -> range | None:
        """Indices of the sentences of the document's abstract; None without such a heading."""
        return self._sentences_below(WORDS["abstracts"])

    def _sentences_below(self, titles: Sequence[str]) -> range | None:
        """Return the sentences of the first non-empty section with one of the titles, subsections included."""
        for index, section in enumerate(self.sections):
            if section.level and normalize_title(section.title) in titles:
                sentences = range(section.first, self._end_with_subsections(index))
                if sentences:
                    return sentences
        return None

    def _end_with_subsections(self, index: int) -> int:
        """Return the index after the last sentence of a section and its subsections."""
        level = self.sections[index].level
        for other in self.sections[index + 1 :]:
            if other.level <= level:
                return other.first
        return len(self.sentences)

    @property
    def selectable(self) -> list[int]:
        """Indices of the sentences that a summary may use.

        These are the complete sentences, or all sentences with a letter if at least half of them are incomplete, as in
        notes without capitals or full stops.
        """
        lettered = [index for index, sentence in enumerate(self.sentences) if _LETTER.search(sentence.text)]
        whole = [index for index in lettered if self.sentences[index].is_whole]
        most_are_whole = 2 * len(whole) > len(lettered)
        return whole if most_are_whole else lettered


def normalize_title(title: str) -> str:
    """Return a heading in lower case without its number: `2.1 Background:` becomes `background`."""
    words = title.strip().rstrip(".: ").casefold()
    if words in _KNOWN_TITLES:
        return words
    return _NUMBERING.sub("", words, count=1)
