"""Five collections of technical proposals with human abstracts, split by time within each.

What is summarized is the document without its abstract and without what is no text: front matter, header fields,
tables of contents and a checklist that all documents of a collection share. The abstract is what a summary is compared
with; it is read as the document is, so that neither has markup.
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

from experiments.jobs import Job
from graftlm.config import Config
from graftlm.errors import DataError
from graftlm.pipelines.summarize import SourceDocument, oracle_extract, read_text

CORPORA = {"peps": ".rst", "rust_rfcs": ".md", "eips": ".md", "ercs": ".md", "keps": ".md"}
FILES = tuple(f"longdocs/{name}.jsonl" for name in CORPORA)
Part = Literal["train", "validation", "test"]

_DATED = re.compile(r"^\W*(?:created|start date)\W+(\S+)", re.IGNORECASE | re.MULTILINE)
_FORMS = ("%Y-%m-%d", "%d-%b-%Y", "%d-%B-%Y")
_HEAD = 3000  # characters that may hold a date
_SAME = 80  # characters that tell titles and abstracts apart
_BESIDE = (
    re.compile(r"\A---\n.*?\n---\n", re.DOTALL),  # front matter
    re.compile(r"\A(?:[A-Z][\w-]*:.*\n(?:[ \t]+\S.*\n)*)+"),  # header fields
    re.compile(r"\A\s*(?:[-*] [A-Z][\w ]+:.*\n)+"),  # the same as a list
    re.compile(r"^\s*[-*+] \[[^\]\n]*\]\(#[^)\n]*\)\s*\n", re.MULTILINE),  # a table of contents
    re.compile(r"^#+ Release Signoff Checklist.*?(?=^#+ |\Z)", re.DOTALL | re.MULTILINE),
)


class Sizes(Config):
    """How many documents there are.

    Args:
        validation: share of each corpus, between the others in time.
        test: share of each corpus, its newest.
        most: documents of each corpus, evenly spaced in time; all when absent.
    """

    validation: float = Field(0.03, gt=0, lt=0.5)
    test: float = Field(0.05, gt=0, lt=0.5)
    most: int | None = Field(None, ge=6)


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


@lru_cache(maxsize=1)
def load(data: str, sizes: Sizes) -> Parts:
    """All documents by part, kept for the next jobs of this process.

    Raises:
        DataError: a collection is missing.
    """
    parts: Parts = {"train": [], "validation": [], "test": []}
    known: set[str] = set()
    for corpus in CORPORA:
        rows = [row for row in in_time(_rows(Path(data), corpus)) if _is_new(row, known)]
        if sizes.most is not None:
            rows = rows[:: max(1, len(rows) // sizes.most)][: sizes.most]
        ends = _ends(len(rows), sizes)
        for part, (first, end) in ends.items():
            parts[part] += [sample_of(corpus, row) for row in rows[first:end]]
    return parts


def _rows(data: Path, corpus: str) -> list[dict[str, Any]]:
    path = data / "longdocs" / f"{corpus}.jsonl"
    if not path.exists():
        names = ", ".join(FILES)
        raise DataError(f"The data folder {data} lacks longdocs/{path.name}: pass --data with one that holds {names}.")
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def _is_new(row: dict[str, Any], known: set[str]) -> bool:
    """Whether no document before it, of any collection, has its title or its abstract's beginning.

    So a proposal that moved is taken once.
    """
    texts = (str(row.get("title") or row["id"]), row["abstract"])
    own = {" ".join(re.findall(r"\w+", text.casefold()))[:_SAME] for text in texts}
    is_new = not own & known
    known |= own
    return is_new


def _ends(count: int, sizes: Sizes) -> dict[Part, tuple[int, int]]:
    """From which to which document each part goes; at least one to each."""
    test = max(1, round(sizes.test * count))
    validation = max(1, round(sizes.validation * count))
    train = count - validation - test
    return {"train": (0, train), "validation": (train, train + validation), "test": (train + validation, count)}


def in_time(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows by date; one without a date goes with the one before it by number."""
    dated, last = [], date.min
    for row in sorted(rows, key=_number):
        last = _date(row["text"][:_HEAD]) or last
        dated.append((last, len(dated), row))
    return [row for _, _, row in sorted(dated, key=lambda item: item[:2])]


def _number(row: dict[str, Any]) -> tuple[int, str]:
    """The number that a proposal got when it was handed in, and its name."""
    found = re.findall(r"\d+", row["id"])
    return int(found[0]) if found else 0, row["id"]


def _date(head: str) -> date | None:
    match = _DATED.search(head)
    for form in _FORMS if match else ():
        with suppress(ValueError):
            return datetime.strptime(match[1].strip("().,"), form).date()  # type: ignore[index]  # there is a match
    return None


def sample_of(corpus: str, row: dict[str, Any]) -> Sample:
    """A row as a document without its abstract, and the abstract."""
    start, end = row["abstract_span"]
    text = f"{row['text'][:start]}\n\n{row['text'][end:]}"
    for beside in _BESIDE:
        text = beside.sub("", text)
    documents = [read_text(one, CORPORA[corpus], row["id"], "en") for one in (text, row["abstract"])]
    return Sample(row["id"], corpus, documents[0], tuple(sentence.text for sentence in documents[1].sentences))


class Labels(Job):
    """The oracle's extracts of all documents."""

    data: str
    sizes: Sizes


def label(job: Labels, _: Path) -> dict[str, Any]:
    """By document, the sentences of its gold extract: for each of the abstract's the two nearest."""
    parts = load(job.data, job.sizes)
    return {"gold": {sample.id: _gold(sample) for part in parts.values() for sample in part}}


def _gold(sample: Sample) -> list[int]:
    selectable = sample.document.selectable
    sentences = [sample.document.sentences[index].text for index in selectable]
    return [selectable[place] for place in oracle_extract(sentences, sample.abstract)]


def mean_sentences(samples: Sequence[Sample]) -> int:
    """How many sentences abstracts have on average, rounded."""
    return max(1, round(sum(len(sample.abstract) for sample in samples) / max(len(samples), 1)))
