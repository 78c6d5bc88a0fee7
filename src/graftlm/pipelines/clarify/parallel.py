"""Parallel text whose sentences stand in the order of their documents."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from graftlm.errors import DataError, did_you_mean
from graftlm.pipelines.clarify.examples import read_aligned, read_lines

_NTREX = {"de": "deu", "fr": "fra", "es": "spa", "ja": "jpn", "it": "ita", "pt": "por"}
_VERSE = re.compile(r"\[(\d+:\d+)\] ?(.*)")


@dataclass(frozen=True)
class Pair:
    """An English sentence and its translation; `id` tells where it stands in its corpus."""

    id: str
    source: str
    target: str


@dataclass(frozen=True)
class Document:
    """The sentences of one document, in order."""

    id: str
    pairs: tuple[Pair, ...]


def read_ntrex(folder: str | Path, language: str) -> list[Document]:
    """NTREX-128: news in English and another language, with the ids of documents.

    Raises:
        DataError: files are missing or don't fit each other.
    """
    if language not in _NTREX:
        raise DataError(f"There is no code of NTREX for the language {language!r}{did_you_mean(language, _NTREX)}.")
    folder = Path(folder)
    names = ("DOCUMENT_IDS.tsv", "newstest2019-src.eng.txt", f"newstest2019-ref.{_NTREX[language]}.txt")
    return _documents("ntrex", read_aligned(*(folder / name for name in names)))


def read_tsv(path: str | Path) -> list[Document]:
    """A file of three columns, split at tabs: document, English sentence, translation.

    Raises:
        DataError: a line has another number of columns.
    """
    rows: list[tuple[str, ...]] = []
    for number, line in enumerate(read_lines(Path(path)), start=1):
        fields = tuple(line.split("\t"))
        if len(fields) != 3:
            raise DataError(
                f"{path}:{number} has {len(fields)} columns, but document, source and translation are three."
            )
        rows.append(fields)
    return _documents(Path(path).stem, rows)


def read_bible(source: str | Path, target: str | Path) -> list[Document]:
    """Two Bibles with one verse a line, `[chapter:verse] text` below `### Book`; a book is a document.

    Verses that one of them lacks are left out. Verses are no sentences: some hold several.

    Raises:
        DataError: a file can't be read, or the two share no verse.
    """
    english, other = _verses(Path(source)), _verses(Path(target))
    rows = [(book, text, other[book, verse]) for (book, verse), text in english.items() if other.get((book, verse))]
    if not rows:
        raise DataError(
            f"{source} and {target} share no verse: name two Bibles with lines such as [1:1] under ### Genesis."
        )
    return _documents("bible", [row for row in rows if row[1]])


def _verses(path: Path) -> dict[tuple[str, str], str]:
    book, verses = "", {}
    for line in read_lines(path):
        if line.startswith("### "):
            book = line[4:].strip()
        elif found := _VERSE.fullmatch(line):
            verses[book, found[1]] = found[2].strip()
    return verses


def _documents(name: str, rows: Sequence[tuple[str, ...]]) -> list[Document]:
    """Consecutive rows of one document together; pairs are numbered from 1 over the whole corpus."""
    documents: list[Document] = []
    for document, group in groupby(enumerate(rows, start=1), key=lambda numbered: numbered[1][0]):
        pairs = tuple(Pair(f"{name}:{number}", row[1], row[2]) for number, row in group)
        documents.append(Document(document, pairs))
    return documents
