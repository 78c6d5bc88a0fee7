"""A page on which people rate summaries blind.

The page is one self-contained HTML file. It shows documents in random order, and the summaries of a document under
letters in random order, with four ratings each (the criteria of table 2.7). The browser stores the ratings, and the
rater downloads them as JSON. The key file beside the page maps summaries to systems; raters do not get it. Identical
summaries of a document are shown once.
"""

from __future__ import annotations

import base64
import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from graftlm.errors import DataError, RecipeError
from graftlm.files.reading import read_text as read_utf8
from graftlm.files.writing import write_atomically
from graftlm.pipelines.summarize.document import SourceDocument
from graftlm.pipelines.summarize.readers import SUFFIXES, read_document, read_text

SCALE = 5
RATINGS_FORMAT, KEY_FORMAT = "graft-ratings-1", "graft-ratings-key-1"
CRITERIA = {
    "coherence": ("Coherence", "Do its sentences belong together, in this order?"),
    "fluency": ("Fluency", "Is each sentence easy to read and without mistakes?"),
    "informativeness": ("Informativeness", "Does it tell the main points of the document?"),
    "relevance": ("Relevance", "Is what it says true to the document?"),
}
_MAX_PAGE_CHARACTERS = 20_000_000  # browsers open a page of this size without trouble


@dataclass(frozen=True)
class RatingItem:
    """A document with its summaries.

    Attributes:
        document: name of the document, for the key.
        passages: pairs of heading and text; the heading may be empty.
        summaries: summary of each system.
        language: language code, for the page.
    """

    document: str
    passages: tuple[tuple[str, str], ...]
    summaries: Mapping[str, str]
    language: str = ""

    @classmethod
    def from_document(cls, document: SourceDocument, summaries: Mapping[str, str]) -> RatingItem:
        """Make an item with the sections of a document as passages."""
        passages = tuple(
            (section.title, " ".join(sentence.text for sentence in document.sentences[section.first : section.end]))
            for section in document.sections
        )
        return cls(document.name, passages, summaries, document.language)


@dataclass(frozen=True)
class RatingPage:
    """The page and its key, which maps summaries to systems."""

    html: str
    key: dict[str, Any]

    def write(self, out: Path) -> list[Path]:
        """Write the page and the key; returns both paths.

        Raises:
            EvaluationError: a file can't be written.
        """
        key = json.dumps(self.key, indent=2, ensure_ascii=False) + "\n"
        return [write_atomically(out, self.html.encode()), write_atomically(key_path(out), key.encode())]


def key_path(page: Path) -> Path:
    """Return the path of a page's key."""
    return page.with_suffix(".key.json")


def rating_page(items: Sequence[RatingItem], seed: int = 0) -> RatingPage:
    """Build the page of documents with their summaries. `seed` decides both orders and the summaries' ids.

    Raises:
        DataError: there is no summary, or more text than a page can hold.
    """
    if not any(item.summaries for item in items):
        raise DataError("There is no summary to rate: name files with summaries of the same documents.")
    rng = random.Random(f"ratings {seed}")
    documents, key_rows = [], {}
    for item in rng.sample(list(items), len(items)):
        shown = []
        for text, systems in _shuffled_summaries(item, rng):
            summary_id = f"{rng.getrandbits(48):012x}"
            shown.append({"id": summary_id, "text": text})
            key_rows[summary_id] = {"document": item.document, "systems": systems}
        documents.append({"language": item.language, "passages": item.passages, "summaries": shown})
    page_id = hashlib.sha256(json.dumps(documents).encode()).hexdigest()[:12]
    data = {"format": RATINGS_FORMAT, "page": page_id, "scale": SCALE, "criteria": CRITERIA, "documents": documents}
    key = {"format": KEY_FORMAT, "page": page_id, "seed": seed, "scale": SCALE, "summaries": key_rows}
    return RatingPage(_render_html(data), key)


def _shuffled_summaries(item: RatingItem, rng: random.Random) -> list[tuple[str, list[str]]]:
    """Return the distinct summaries of a document in random order, each with its systems."""
    by_text: dict[str, list[str]] = {}
    for system in sorted(item.summaries):
        by_text.setdefault(" ".join(item.summaries[system].split()), []).append(system)
    return rng.sample(list(by_text.items()), len(by_text))


def _render_html(data: Mapping[str, Any]) -> str:
    embedded = json.dumps(data, ensure_ascii=False).replace("<", "\\u003c")  # no text may end the script element
    if len(embedded) > _MAX_PAGE_CHARACTERS:
        raise DataError(
            f"The page would have {len(embedded):,} characters, and one may have {_MAX_PAGE_CHARACTERS:,}: "
            "take fewer documents."
        )
    assets = Path(__file__)
    style, script, html = (assets.with_suffix(f".{kind}").read_text(encoding="utf-8") for kind in ("css", "js", "html"))
    policy = f"default-src 'none'; style-src '{_csp_hash(style)}'; script-src '{_csp_hash(script)}'"
    for name, text in {"policy": policy, "style": style, "script": script, "data": embedded}.items():
        html = html.replace("{{" + name + "}}", text, 1)
    return html


def _csp_hash(text: str) -> str:
    """Return the hash that a content security policy allows a script or style by."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def parse_systems(arguments: Sequence[str]) -> dict[str, Path]:
    """Parse `NAME=FILE`, or `FILE` with the file's stem as the name; returns files by system.

    Raises:
        RecipeError: a name is missing or used twice.
    """
    systems: dict[str, Path] = {}
    for argument in arguments:
        name, separator, path = argument.partition("=")
        name, file = (name, Path(path)) if separator else (Path(argument).stem, Path(argument))
        if not name or name == "agreement":
            raise RecipeError(f"{argument} has no name that a row of results can have: give it one, as NAME=FILE.")
        if name in systems:
            raise RecipeError(f"{systems[name]} and {file} are both called {name}: give them names, as NAME=FILE.")
        systems[name] = file
    return systems


def load_rating_items(
    systems: Mapping[str, Path], limit: int | None = None, seed: int = 0
) -> tuple[list[RatingItem], list[str]]:
    """Load the documents that all systems summarized, with their summaries.

    Args:
        systems: JSON lines files by system. A row has `document` and `summary`. Its `text` is the document itself;
            without it `document` names a file. Rows with `error` count as missing.
        limit: maximum number of documents, sampled if there are more.
        seed: random seed of the sample.

    Returns:
        The items, and notes on documents that were left out.

    Raises:
        DataError: a file has another form, no document is in all files, or a document can't be read.
    """
    rows = {name: _read_rows(path) for name, path in systems.items()}
    documents = dict.fromkeys(document for of_system in rows.values() for document in of_system)
    shared = [document for document in documents if all(document in of_system for of_system in rows.values())]
    if not shared:
        raise DataError(
            f"No document has a summary in each of {', '.join(map(str, systems.values()))}: check the files."
        )
    notes = []
    if len(shared) < len(documents):
        notes.append(f"Of {len(documents)} documents {len(shared)} have a summary of every system, and are taken.")
    if limit is not None and limit < len(shared):
        notes.append(f"Of those {limit} are drawn." if notes else f"Of {len(shared)} documents {limit} are drawn.")
        shared = random.Random(f"documents {seed}").sample(shared, limit)
    return [_rating_item(document, {name: rows[name][document] for name in systems}) for document in shared], notes


def _rating_item(name: str, rows: Mapping[str, dict[str, str]]) -> RatingItem:
    """Make the item of one document from its row of each system."""
    text = next((row["text"] for row in rows.values() if row.get("text") is not None), None)
    suffix = Path(name).suffix.lower()
    suffix = suffix if suffix in SUFFIXES and suffix != ".pdf" else ".txt"
    document = read_document(name) if text is None else read_text(text, suffix, name)
    return RatingItem.from_document(document, {system: row["summary"] for system, row in rows.items()})


def _read_rows(path: Path) -> dict[str, dict[str, str]]:
    """Return the rows with a summary, by document."""
    lines = StringIO(read_utf8(path))  # splits at line feeds only
    rows = [_parse_row(line, f"{path} line {number}") for number, line in enumerate(lines, 1)]
    return {row["document"]: row for row in rows if "error" not in row}


def _parse_row(line: str, name: str) -> dict[str, str]:
    with suppress(ValueError, KeyError, TypeError):
        row = json.loads(line)
        if "error" in row or all(isinstance(row[key], str) for key in ("document", "summary")):
            return row
    raise DataError(f"{name} has no document and summary: rows such as those of graft summarize --batch are expected.")
