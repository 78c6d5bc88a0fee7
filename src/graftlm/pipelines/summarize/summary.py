"""The pipeline: read a document, select sentences, write the summary, link it to the extract, format it for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from graftlm.errors import DataError
from graftlm.pipelines.summarize.document import Sentence, SourceDocument
from graftlm.pipelines.summarize.metrics import Faithfulness, faithfulness
from graftlm.pipelines.summarize.ranking import DefaultSelector
from graftlm.pipelines.summarize.readers import read_document
from graftlm.pipelines.summarize.selection import Budget, Extract, Selector, select
from graftlm.pipelines.summarize.text import split_sentences, split_words
from graftlm.pipelines.summarize.writer import AbstractiveWriter

_MIN_OVERLAP = 0.3  # F1 of words from which the nearest extracted sentence counts as support


@dataclass(frozen=True, slots=True)
class SentenceLink:
    """A sentence of a written summary and the extracted sentence with the most similar words.

    Attributes:
        text: the sentence of the summary.
        index: index of the extracted sentence in the document; None if no word is shared.
        overlap: F1 of the two sets of words, 0 to 1.
    """

    text: str
    index: int | None
    overlap: float


@dataclass(frozen=True)
class Summary:
    """The result of `summarize`.

    Attributes:
        text: the written text, or the extract.
        writer: name of the writer; None if the extract is the summary.
        links: a link for each written sentence; empty without a writer.
        faithfulness: support of the text in the document.
        notes: remarks for the user, one sentence each.
    """

    extract: Extract
    text: str
    writer: str | None
    links: tuple[SentenceLink, ...]
    faithfulness: Faithfulness
    notes: tuple[str, ...]

    @property
    def document(self) -> SourceDocument:
        """The summarized document."""
        return self.extract.document

    def to_json(self) -> dict[str, Any]:
        """Return the summary with its extract, links, metrics and notes, and the document's own abstract."""
        return {
            "document": self.document.name,
            "summary": self.text,
            "writer": self.writer,
            "extract": self.extract.to_json(),
            "links": [{"text": link.text, "nearest": link.index, "overlap": link.overlap} for link in self.links],
            "faithfulness": asdict(self.faithfulness),
            "language": self.document.language,
            "abstract": [self.document.sentences[index].text for index in self.document.abstract or ()],
            "notes": list(self.notes),
        }


def summarize(
    document: SourceDocument | str | Path,
    *,
    selector: Selector | None = None,
    writer: AbstractiveWriter | None = None,
    budget: Budget | None = None,
    language: str | None = None,
) -> Summary:
    """Summarize a document with the source of each sentence.

    Args:
        document: a document or a file.
        selector: ranks the sentences; None takes `DefaultSelector`.
        writer: writes the summary from the extract; None returns the extract itself.
        budget: limit of the extract; None allows ten sentences.
        language: language of a file, as for `read_document`.

    Raises:
        DataError: the file can't be read, or has no words.
        RecipeError: no sentence fits into the budget.
    """
    if not isinstance(document, SourceDocument):
        document = read_document(document, language)
    extract = select(
        document, selector or DefaultSelector(), budget or Budget(), writer.count_tokens if writer else None
    )
    if not extract.indices:
        raise DataError(f"{document.name} has no sentence with a letter in it: a text with words is expected.")
    notes = list(extract.notes)
    if document.abstract:
        first, last = document.abstract[0] + 1, document.abstract[-1] + 1
        notes.append(f"{document.name} has an abstract of its own: sentences {first} to {last} of its text.")
    if writer is None:
        return Summary(extract, extract.text, None, (), faithfulness(extract.text, document.text), tuple(notes))
    output = writer.write(extract)
    if document.introduction is None:
        notes.append(
            f"{document.name} has no heading that names an introduction: the writer reads its first sentences instead."
        )
    if len(output.text) > len(document.text):
        notes.append(f"The summary is longer than {document.name} itself: ask for fewer tokens.")
    links, support = link_sentences(output.text, extract), faithfulness(output.text, document.text)
    return Summary(extract, output.text, writer.name, links, support, (*notes, *output.notes))


def link_sentences(text: str, extract: Extract) -> tuple[SentenceLink, ...]:
    """Link each sentence of a summary to the extracted sentence with the most similar words."""
    sentences = [text[start:end] for start, end in split_sentences(text, extract.document.language)]
    sources = [(index, set(split_words(extract.document.sentences[index].text))) for index in extract.indices]
    return tuple(_link(" ".join(sentence.split()), sources) for sentence in sentences)


def _link(sentence: str, sources: Sequence[tuple[int, set[str]]]) -> SentenceLink:
    words = set(split_words(sentence))
    overlaps = [(2 * len(words & other) / max(len(words) + len(other), 1), -index) for index, other in sources]
    overlap, index = max(overlaps, default=(0.0, 0))  # ties go to the earlier sentence
    return SentenceLink(sentence, -index if overlap else None, overlap)


def format_summary(summary: Summary) -> Iterator[str]:
    """Yield lines for people: the summary with references in brackets, then the passages with their positions."""
    numbers = {index: number for number, index in enumerate(summary.extract.indices, start=1)}
    if summary.writer is None:
        yield from (f"{sentence.text} [{number}]" for number, sentence in enumerate(summary.extract.sentences, start=1))
    for link in summary.links:
        number = numbers[link.index] if link.index is not None and _is_supported(link) else None
        yield f"{link.text} [{number or '?'}]"
    yield ""
    for number, sentence in enumerate(summary.extract.sentences, start=1):
        yield f"[{number}] {_location(summary.document, sentence)}"
        if summary.writer is not None:
            yield f"    {sentence.text}"
    if summary.writer is not None:
        yield ""
        yield from _support_lines(summary)


def _is_supported(link: SentenceLink) -> bool:
    return link.index is not None and link.overlap >= _MIN_OVERLAP


def _location(document: SourceDocument, sentence: Sentence) -> str:
    """Return page, characters and section title of a sentence."""
    page = "" if sentence.page is None else f"page {sentence.page}, "
    title = document.sections[sentence.section].title
    return f"{page}characters {sentence.start}–{sentence.end}" + (f", {title}" if title else "")


def _support_lines(summary: Summary) -> Iterator[str]:
    support = summary.faithfulness
    items = {"words": "words", "bigrams": "pairs of words", "numbers": "numbers", "names": "names"}
    shares = {items[key]: getattr(support, key) for key in items}
    parts = ", ".join(f"{share:.0%} of its {name}" for name, share in shares.items() if share is not None)
    yield f"The source has {parts}." if parts else "The summary has no words to look for in the source."
    if support.missing:
        yield f"Not in the source: {', '.join(support.missing)}."
    if not all(map(_is_supported, summary.links)):
        yield "[?]: no extracted sentence is near."
