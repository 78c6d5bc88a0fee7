"""Summaries of several systems, from the files that batches write, as what a page shows."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

from graftlm.errors import DataError, RecipeError
from graftlm.pipelines.summarize.rating.page import RatingItem
from graftlm.pipelines.summarize.readers import SUFFIXES, read_document, read_text


def parse_systems(named: Sequence[str]) -> dict[str, Path]:
    """Files by their systems' names, from `NAME=FILE`, or from `FILE`, which is named by its own name.

    Raises:
        RecipeError: two systems have one name, or one has none.
    """
    found: dict[str, Path] = {}
    for text in named:
        name, mark, path = text.partition("=")
        file = Path(path if mark else text)
        name = name if mark else file.stem
        if not name or name == "agreement":
            raise RecipeError(f"{text} has no name that a row of results can have: give it one, as NAME=FILE.")
        if name in found:
            raise RecipeError(f"{found[name]} and {file} are both called {name}: give them names, as NAME=FILE.")
        found[name] = file
    return found


def load_rating_items(
    systems: Mapping[str, Path], most: int | None = None, seed: int = 0
) -> tuple[list[RatingItem], list[str]]:
    """The documents that all systems summarised, with their summaries.

    Args:
        systems: JSON lines with `document` and `summary`, by system; a row's `text` is the document itself, else
            `document` names its file. Rows with an `error` count as missing.
        most: documents, drawn where there are more.
        seed: of the drawing.

    Returns:
        the documents, and a note on those that were left out.

    Raises:
        DataError: a file is not of this form, no document is in all of them, or one can't be read.
    """
    rows = {name: _rows(path) for name, path in systems.items()}
    every = dict.fromkeys(document for found in rows.values() for document in found)
    shared = [document for document in every if all(document in found for found in rows.values())]
    if not shared:
        raise DataError(
            f"No document has a summary in each of {', '.join(map(str, systems.values()))}: check the files."
        )
    notes = []
    if len(shared) < len(every):
        notes.append(f"Of {len(every)} documents {len(shared)} have a summary of every system, and are taken.")
    if most is not None and most < len(shared):
        notes.append(f"Of those {most} are drawn." if notes else f"Of {len(shared)} documents {most} are drawn.")
        shared = random.Random(f"documents {seed}").sample(shared, most)
    return [_item(document, rows) for document in shared], notes


def _item(document: str, rows: Mapping[str, Mapping[str, tuple[str, str | None]]]) -> RatingItem:
    found = {name: of[document] for name, of in rows.items()}
    text = next((text for _, text in found.values() if text is not None), None)
    suffix = Path(document).suffix.lower()
    plain = suffix if suffix in SUFFIXES and suffix != ".pdf" else ".txt"
    read = read_document(document) if text is None else read_text(text, plain, document)
    return RatingItem.of(read, {name: summary for name, (summary, _) in found.items()})


def _rows(path: Path) -> dict[str, tuple[str, str | None]]:
    """Summary and, where it is there, text of each document."""
    found: dict[str, tuple[str, str | None]] = {}
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                row = _row(line, f"{path} line {number}")
                if "error" not in row:
                    found[row["document"]] = row["summary"], row.get("text")
    except OSError as error:
        raise DataError(f"{path} can't be read ({error.strerror}): check the file.") from None
    except UnicodeDecodeError:
        raise DataError(f"{path} is not UTF-8 text: a file of JSON lines is expected.") from None
    return found


def _row(line: str, where: str) -> dict[str, str]:
    try:
        row = json.loads(line)
        if "error" in row or all(isinstance(row[key], str) for key in ("document", "summary")):
            return row
    except (ValueError, KeyError, TypeError):
        pass
    raise DataError(
        f"{where} has no document and summary: rows such as those of graft summarize --batch are expected."
    ) from None
