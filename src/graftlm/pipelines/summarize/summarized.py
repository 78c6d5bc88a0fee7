"""Documents with human summaries: read from a table, and divided into documents to learn from and held-out ones.

A row has the text of a document in `text`, or the path of its file in `file`, and a human summary in `summary`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from graftlm.config import Config
from graftlm.data.table_files import read_values
from graftlm.errors import DataError, RecipeError
from graftlm.pipelines.summarize.document import SourceDocument
from graftlm.pipelines.summarize.readers import read_document, read_text
from graftlm.pipelines.summarize.text import split_sentences, split_words

_COLUMNS = ("text", "file", "format", "language", "summary")


class SummarizedRow(Config):
    """A row of a table of documents with human summaries.

    Args:
        summary: the human summary.
        text: the text of the document.
        file: the document's file instead of its text; a relative path begins in the folder of the table.
        format: suffix of the format in which `text` is written, as of a file that `read_document` reads.
        language: code of the language; None detects it, as in `read_document`.
    """

    summary: str
    text: str | None = None
    file: str | None = None
    format: str = ".txt"
    language: str | None = None


@dataclass(frozen=True)
class SummarizedDocument:
    """A document with a human summary.

    Attributes:
        document: the document.
        summary: the text of the human summary.
    """

    document: SourceDocument
    summary: str

    @property
    def summary_sentences(self) -> list[str]:
        """The sentences of the human summary."""
        return [self.summary[start:end] for start, end in split_sentences(self.summary, self.document.language)]


def read_summarized(path: str | Path) -> list[SummarizedDocument]:
    """Read documents with human summaries.

    Args:
        path: a file of JSON lines, a JSON list, CSV, TSV or parquet with the columns of `SummarizedRow`. Other columns
            are not read.

    Raises:
        DataError: the file can't be read, has no row, or a row has a wrong type, not exactly one of `text` and `file`,
            no summary, or a summary with more words than its document; or a document can't be read or has no words.
        MissingExtraError: a library that reads the format or splits sentences is not installed.
    """
    path = Path(path)
    columns = {name: name for name in _COLUMNS}
    documents = []
    for values, where in read_values(path, columns, "table", optional=_COLUMNS):
        given = {name: value for name, value in zip(_COLUMNS, values, strict=True) if value is not None}
        if not given.get("summary"):
            raise DataError(
                f"{where} has no summary, but a human summary is expected in the column 'summary': add it, or remove "
                "the row."
            )
        try:
            row = SummarizedRow.parse(given, where=where)
        except RecipeError as error:
            raise DataError(str(error)) from None
        documents.append(_summarized(row, path, where))
    if not documents:
        raise DataError(f"{path} has no rows, but documents with summaries are expected: add them, one in a row.")
    return documents


def _summarized(row: SummarizedRow, path: Path, where: str) -> SummarizedDocument:
    """Return the document of a row with its summary."""
    document = _document(row, path, where)
    summary_words = len(split_words(row.summary))
    document_words = len(split_words(document.text))
    if not summary_words:
        raise DataError(f"{where} has a summary without words, {row.summary!r}: write one, or remove the row.")
    if not document.selectable:
        raise DataError(f"{where} has a document without words: give its text, or remove the row.")
    if summary_words > document_words:
        raise DataError(
            f"{where} has a summary of {summary_words:,} words, but its document has {document_words:,}, and a summary "
            "is expected to be shorter: correct or remove the row."
        )
    return SummarizedDocument(document, row.summary.strip())


def _document(row: SummarizedRow, path: Path, where: str) -> SourceDocument:
    """Return the document of a row."""
    if (row.text is None) == (row.file is None):
        found = "neither text nor file" if row.text is None else "both text and file"
        raise DataError(f"{where} has {found}, but exactly one of them is expected: give the document once.")
    try:
        if row.file is not None:
            return read_document(path.parent / row.file, row.language)
        assert row.text is not None, "one of both is given"
        return read_text(row.text, row.format, where, row.language)
    except RecipeError as error:
        raise DataError(f"{where}: {error}") from None


def hold_out(
    documents: Sequence[SummarizedDocument], share: float, seed: int = 0
) -> tuple[list[SummarizedDocument], list[SummarizedDocument]]:
    """Divide documents at random into those to learn from and held-out ones. Equal documents stay together.

    Args:
        documents: the documents.
        share: share of the different documents that is held out, above 0 and below 1. At least one is held out, and at
            least one is not.
        seed: seed of the choice.

    Returns:
        The documents to learn from and the held-out ones, each in the given order.

    Raises:
        DataError: there are fewer than two different documents.
    """
    texts = list(dict.fromkeys(summarized.document.text for summarized in documents))
    if len(texts) < 2:
        raise DataError(
            f"Different documents with summaries: {len(texts)}, of which at least one is to be held out, so that 2 or "
            "more are expected: add documents."
        )
    count = min(max(1, round(share * len(texts))), len(texts) - 1)
    chosen = set(random.Random(seed).sample(texts, count))
    learned = [summarized for summarized in documents if summarized.document.text not in chosen]
    held_out = [summarized for summarized in documents if summarized.document.text in chosen]
    return learned, held_out
