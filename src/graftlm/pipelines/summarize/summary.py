"""From a file to a summary that can be checked: read, select, write, link."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graftlm.errors import DataError
from graftlm.pipelines.summarize.baselines import SumySelector
from graftlm.pipelines.summarize.document import SourceDocument
from graftlm.pipelines.summarize.metrics import Faithfulness, faithfulness
from graftlm.pipelines.summarize.readers import read_document
from graftlm.pipelines.summarize.selection import Budget, Extract, Selector, select
from graftlm.pipelines.summarize.text import split_sentences, split_words
from graftlm.pipelines.summarize.writer import AbstractiveWriter

DEFAULT_NOTE = "No trained selector is named: LexRank of sumy, which is not trained, chose the sentences."


@dataclass(frozen=True, slots=True)
class SentenceLink:
    """A sentence of a written summary, and the extracted sentence that is nearest to it.

    Attributes:
        text: the summary's sentence.
        index: of the nearest extracted sentence in the document; None where they share no word.
        overlap: F1 of their words, 0 to 1.
    """

    text: str
    index: int | None
    overlap: float

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        return {"text": self.text, "nearest": self.index, "overlap": self.overlap}


@dataclass(frozen=True)
class Summary:
    """What `summarize` gives.

    Attributes:
        extract: the sentences that were selected.
        text: the summary: what the writer wrote, or the extract.
        writer: its name; None where the extract is the summary.
        links: for each written sentence the selected one nearest to it; none without a writer.
        faithfulness: what of the text stands in the document.
        notes: what the user should know, a sentence each.
    """

    extract: Extract
    text: str
    writer: str | None
    links: tuple[SentenceLink, ...]
    faithfulness: Faithfulness
    notes: tuple[str, ...]

    @property
    def document(self) -> SourceDocument:
        """What was summarised."""
        return self.extract.document

    def to_json(self) -> dict[str, Any]:
        """Summary, provenance and figures."""
        return {
            "document": self.document.where,
            "summary": self.text,
            "writer": self.writer,
            "extract": self.extract.to_json(),
            "links": [link.to_json() for link in self.links],
            "faithfulness": self.faithfulness.to_json(),
            "language": self.document.language,
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
    """Summarise a document, and say where each sentence comes from.

    Args:
        document: one that was read, or a file.
        selector: ranks sentences; None takes LexRank, and a note says so.
        writer: writes the summary from the extract; None gives the extract itself.
        budget: of the extract; by default ten sentences.
        language: of a file, as for `read_document`.

    Raises:
        DataError: the file can't be read as a document.
        RecipeError: the budget does not fit.
    """
    if not isinstance(document, SourceDocument):
        document = read_document(document, language)
    chosen = selector or SumySelector()
    count = writer.count_tokens if writer is not None else None
    extract = select(document, chosen, budget or Budget(), count)
    if not extract.indices:
        raise DataError(f"{document.where} has no sentence with a letter in it: a text with words is expected.")
    notes = extract.notes if selector is not None else (DEFAULT_NOTE, *extract.notes)
    source = " ".join(sentence.text for sentence in document.sentences)
    if writer is None:
        text, links = extract.text, ()
    else:
        written = writer.write(extract)
        text, links = written.text, link(written.text, extract)
        notes = (*notes, *_notes(document, text, source), *written.notes)
    name = writer.name if writer is not None else None
    return Summary(extract, text, name, links, faithfulness(text, source), notes)


def _notes(document: SourceDocument, written: str, source: str) -> tuple[str, ...]:
    """What the user should know about a written summary."""
    notes = []
    if document.introduction is None:
        notes.append(
            f"{document.where} has no heading that names an introduction: the writer reads its first sentences instead."
        )
    if len(written) > len(source):
        notes.append(f"The summary is longer than {document.where} itself: ask for fewer tokens.")
    return tuple(notes)


def link(text: str, extract: Extract) -> tuple[SentenceLink, ...]:
    """Each sentence of a summary, and the extracted sentence whose words are nearest to its own."""
    sentences = [text[start:end] for start, end in split_sentences(text, extract.document.language)]
    sources = [(index, set(split_words(extract.document.sentences[index].text))) for index in extract.indices]
    return tuple(_nearest(" ".join(sentence.split()), sources) for sentence in sentences)


def _nearest(sentence: str, sources: Sequence[tuple[int, set[str]]]) -> SentenceLink:
    words = set(split_words(sentence))
    overlaps = [(2 * len(words & known) / max(len(words) + len(known), 1), -index) for index, known in sources]
    overlap, index = max(overlaps, default=(0.0, 0))
    return SentenceLink(sentence, -index if overlap else None, overlap)
