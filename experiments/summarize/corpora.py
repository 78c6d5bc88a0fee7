"""Five collections of technical proposals with human abstracts, split by time within each.

A document is summarized without its abstract, which is the reference. Both are read in the same way, so that neither
has markup; the reader knows front matter, header fields, tables of contents and checklists, which have no sentences.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from graftlm.config import Config
from graftlm.pipelines.summarize import SourceDocument, read_text
from graftlm.runs.run import Run

CORPORA = {"peps": ".rst", "rust_rfcs": ".md", "eips": ".md", "ercs": ".md", "keps": ".md"}
FILES = tuple(f"longdocs/{name}.jsonl" for name in CORPORA)
Part = Literal["train", "validation", "test"]

_DATED = re.compile(r"^\W*(?:created|start date)\W+(\S+)", re.IGNORECASE | re.MULTILINE)
_DATE_FORMATS = ("%Y-%m-%d", "%d-%b-%Y", "%d-%B-%Y")
_DATE_CHARACTERS = 3000  # characters that may hold a date
_KEY_CHARACTERS = 80  # characters that tell titles and abstracts apart


class CorpusSizes(Config):
    """Number of documents.

    Args:
        validation: share of each corpus, between the others in time.
        test: share of each corpus, its newest.
        max_documents: of each corpus, evenly spaced in time; None takes all.
    """

    validation: float = Field(0.03, gt=0, lt=0.5)
    test: float = Field(0.05, gt=0, lt=0.5)
    max_documents: int | None = Field(None, ge=6)


@dataclass(frozen=True)
class Sample:
    """A document, and the sentences of its human abstract."""

    id: str
    corpus: str
    document: SourceDocument
    abstract: tuple[str, ...]

    @property
    def summary(self) -> str:
        """The abstract as one paragraph."""
        return " ".join(self.abstract)


Parts = dict[Part, list[Sample]]


class DocumentRun(Run):
    """A run that reads the documents.

    Args:
        longdocs: folder of the collections.
    """

    longdocs: str
    sizes: CorpusSizes

    @property
    def parts(self) -> Parts:
        """All documents by part."""
        return load(self.longdocs, self.sizes)


@lru_cache(maxsize=1)
def load(longdocs: str, sizes: CorpusSizes) -> Parts:
    """All documents by part; a collection has at least one in each. A process reads them once."""
    parts: Parts = {"train": [], "validation": [], "test": []}
    known: set[str] = set()
    for corpus in CORPORA:
        lines = (Path(longdocs) / f"{corpus}.jsonl").read_text(encoding="utf-8").split("\n")
        rows = [row for row in in_time(json.loads(line) for line in lines if line) if _is_new(row, known)]
        if sizes.max_documents is not None:
            rows = rows[:: max(1, len(rows) // sizes.max_documents)][: sizes.max_documents]
        test, validation = (max(1, round(share * len(rows))) for share in (sizes.test, sizes.validation))
        parts["train"] += [sample_of(corpus, row) for row in rows[: -test - validation]]
        parts["validation"] += [sample_of(corpus, row) for row in rows[-test - validation : -test]]
        parts["test"] += [sample_of(corpus, row) for row in rows[-test:]]
    return parts


def _is_new(row: dict[str, Any], known: set[str]) -> bool:
    """Whether no earlier document of any collection has its title or the beginning of its abstract.

    A proposal that moved to another collection is thus taken once.
    """
    texts = (str(row.get("title") or row["id"]), row["abstract"])
    own = {" ".join(re.findall(r"\w+", text.casefold()))[:_KEY_CHARACTERS] for text in texts}
    is_new = not own & known
    known |= own
    return is_new


def in_time(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows by date. A row without a date has the date of the row with the next lower number."""
    dated, last = [], date.min
    for row in sorted(rows, key=_number):
        last = _date(row["text"][:_DATE_CHARACTERS]) or last
        dated.append((last, len(dated), row))
    return [row for _, _, row in sorted(dated, key=lambda item: item[:2])]


def _number(row: dict[str, Any]) -> tuple[int, str]:
    """The number of a proposal, in the order of submission, and its name."""
    match = re.search(r"\d+", row["id"])
    return int(match[0]) if match else 0, row["id"]


def _date(head: str) -> date | None:
    match = _DATED.search(head)
    for form in _DATE_FORMATS if match else ():
        with suppress(ValueError):
            return datetime.strptime(match[1].strip("().,"), form).date()  # type: ignore[index]  # there is a match
    return None


def sample_of(corpus: str, row: dict[str, Any]) -> Sample:
    """A row as a document without its abstract, and the abstract."""
    start, end = row["abstract_span"]
    text = f"{row['text'][:start]}\n\n{row['text'][end:]}"
    document, abstract = (read_text(part, CORPORA[corpus], row["id"], "en") for part in (text, row["abstract"]))
    return Sample(row["id"], corpus, document, tuple(sentence.text for sentence in abstract.sentences))


def evenly(samples: Sequence[Sample], limit: int) -> list[Sample]:
    """At most `limit` samples, evenly spaced."""
    count = min(limit, len(samples))
    return [samples[index * len(samples) // count] for index in range(count)]
