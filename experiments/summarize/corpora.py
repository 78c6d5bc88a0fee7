"""Five collections of technical proposals with human abstracts, split by time within each collection.

A document is summarized without its abstract, which is the reference. Both are read by the same reader, so that neither
has markup. The reader excludes front matter, header fields, tables of contents and checklists from the sentences.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date, datetime
from functools import lru_cache
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from graftlm.config import Config
from graftlm.pipelines.summarize import SourceDocument, read_text
from graftlm.runs.run import Run

# Suffix of the file format of each collection.
CORPORA = {
    "peps": ".rst",
    "rust_rfcs": ".md",
    "eips": ".md",
    "ercs": ".md",
    "keps": ".md",
}
FILES = tuple(f"longdocs/{name}.jsonl" for name in CORPORA)
Part = Literal["train", "validation", "test"]

_DATED = re.compile(r"^\W*(?:created|start date)\W+(\S+)", re.IGNORECASE | re.MULTILINE)
_DATE_FORMATS = ("%Y-%m-%d", "%d-%b-%Y", "%d-%B-%Y")
_DATE_CHARACTERS = 3000  # characters at the start of a document that may contain a date
_KEY_CHARACTERS = 80  # characters by which titles and abstracts are compared


class CorpusSizes(Config):
    """Number of documents.

    Args:
        validation: share of each collection between the training and the test documents in time.
        test: share of each collection, its newest documents.
        max_documents: documents of each collection, evenly spaced in time; None uses all.
    """

    validation: float = Field(0.03, gt=0, lt=0.5)
    test: float = Field(0.05, gt=0, lt=0.5)
    max_documents: int | None = Field(None, ge=6)


@dataclass(frozen=True)
class Sample:
    """A document and its human abstract.

    Attributes:
        id: identifier of the proposal.
        corpus: name of the collection.
        document: the document without the abstract.
        abstract: sentences of the abstract.
    """

    id: str
    corpus: str
    document: SourceDocument
    abstract: tuple[str, ...]

    @property
    def summary(self) -> str:
        """The abstract as one paragraph."""
        return " ".join(self.abstract)

    def sentence_texts(self, count: int | None = None) -> list[str]:
        """Return the selectable sentences, or the first `count` of them."""
        indices = self.document.selectable[:count]
        return [self.document.sentences[index].text for index in indices]


Parts = dict[Part, list[Sample]]


class DocumentRun(Run):
    """A run that reads the documents.

    Args:
        longdocs: folder of the collections.
        sizes: number of documents.
    """

    longdocs: str
    sizes: CorpusSizes

    @property
    def parts(self) -> Parts:
        """All documents by part."""
        return load(self.longdocs, self.sizes)


@lru_cache(maxsize=1)
def load(longdocs: str, sizes: CorpusSizes) -> Parts:
    """Return all documents by part; a collection has at least one in each. A process reads them once."""
    parts: Parts = {"train": [], "validation": [], "test": []}
    known: set[str] = set()
    for corpus in CORPORA:
        rows = _read_rows(Path(longdocs) / f"{corpus}.jsonl", known)
        if sizes.max_documents is not None:
            step = max(1, len(rows) // sizes.max_documents)
            rows = rows[::step][: sizes.max_documents]
        test = max(1, round(sizes.test * len(rows)))
        validation = max(1, round(sizes.validation * len(rows)))
        samples = [sample_of(corpus, row) for row in rows]
        parts["train"].extend(samples[: -test - validation])
        parts["validation"].extend(samples[-test - validation : -test])
        parts["test"].extend(samples[-test:])
    return parts


def _read_rows(path: Path, known: set[str]) -> list[dict[str, Any]]:
    """Return the rows of a file by date, without those that are known already."""
    lines = path.read_text(encoding="utf-8").split("\n")
    rows = in_time(json.loads(line) for line in lines if line)
    return [row for row in rows if _is_new(row, known)]


def _is_new(row: dict[str, Any], known: set[str]) -> bool:
    """Return whether no earlier document of any collection has the same title or beginning of the abstract.

    A proposal that moved to another collection is thus used once. The keys of the row are added to `known`.
    """
    title = str(row.get("title") or row["id"])
    keys = {_key(title), _key(row["abstract"])}
    is_new = known.isdisjoint(keys)
    known.update(keys)
    return is_new


def _key(text: str) -> str:
    words = re.findall(r"\w+", text.casefold())
    return " ".join(words)[:_KEY_CHARACTERS]


def in_time(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows by date. A row without a date has the date of the row with the next lower number."""
    dated: list[tuple[date, dict[str, Any]]] = []
    last = date.min
    for row in sorted(rows, key=_number):
        last = _date(row["text"][:_DATE_CHARACTERS]) or last
        dated.append((last, row))
    dated.sort(key=itemgetter(0))  # keeps the order of rows with the same date
    return [row for _, row in dated]


def _number(row: dict[str, Any]) -> tuple[int, str]:
    """Return the number of a proposal, which follows the order of submission, and its name."""
    match = re.search(r"\d+", row["id"])
    number = int(match[0]) if match else 0
    return number, row["id"]


def _date(head: str) -> date | None:
    """Return the date in the header of a document; None without a readable one."""
    match = _DATED.search(head)
    if match is None:
        return None
    text = match[1].strip("().,")
    for form in _DATE_FORMATS:
        with suppress(ValueError):
            return datetime.strptime(text, form).date()
    return None


def sample_of(corpus: str, row: dict[str, Any]) -> Sample:
    """Return a row as a document without its abstract, and the abstract."""
    start, end = row["abstract_span"]
    text = f"{row['text'][:start]}\n\n{row['text'][end:]}"
    suffix = CORPORA[corpus]
    document = read_text(text, suffix, row["id"], "en")
    abstract = read_text(row["abstract"], suffix, row["id"], "en")
    return Sample(
        id=row["id"],
        corpus=corpus,
        document=document,
        abstract=tuple(sentence.text for sentence in abstract.sentences),
    )


def evenly(samples: Sequence[Sample], limit: int) -> list[Sample]:
    """Return at most `limit` samples, evenly spaced."""
    count = min(limit, len(samples))
    return [samples[index * len(samples) // count] for index in range(count)]
