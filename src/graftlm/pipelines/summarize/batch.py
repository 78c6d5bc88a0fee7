"""Summaries of many documents: one document in memory at a time, and a file that an interrupted run goes on with.

A row is one document's JSON: its summary, or under the key `error` what stands in its way. In a file, rows also say
what was asked for and which state of the document they are of, so that a later run can tell what still stands.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from graftlm.errors import DataError, GraftError, RecipeError
from graftlm.pipelines.summarize.readers import SUFFIXES
from graftlm.pipelines.summarize.summary import Summary, summarize

Row = dict[str, Any]
_LARGE = 1_000_000  # bytes


@dataclass(frozen=True, slots=True)
class SummaryFailure:
    """A document of many that has no summary, and why."""

    document: str
    error: str

    def to_json(self) -> Row:
        """All of it."""
        return {"document": self.document, "error": self.error}


def summarize_many(paths: Iterable[Path], **options: Any) -> Iterator[Summary | SummaryFailure]:
    """Summaries of many files, one at a time; only one document is held in memory.

    Args:
        paths: of the files.
        options: as for `summarize`.
    """
    for path in paths:
        yield _attempt(path, options)
        _forget(path)


def _attempt(path: Path, options: Mapping[str, Any]) -> Summary | SummaryFailure:
    try:
        return summarize(path, **options)
    except GraftError as error:
        return SummaryFailure(str(path), str(error))
    except Exception as error:  # whatever a library stumbles over in one file, the others don't wait for it
        cause = str(error).splitlines()[0].rstrip(".") if str(error) else "no more is known"
        return SummaryFailure(
            str(path),
            f"{path} could not be summarised ({type(error).__name__}: {cause}), which is a mistake of ours or of a "
            "library: leave it out, and report it.",
        )


def find_documents(paths: Iterable[Path]) -> Iterator[Path]:
    """Files, and in the place of a folder all documents below it, by name; each once.

    Raises:
        DataError: a folder has no document.
    """
    given: set[Path] = set()
    for path in paths:
        found = _below(path) if path.is_dir() else [path]
        yield from (file for file in found if file not in given)
        given.update(found)


def _below(folder: Path) -> list[Path]:
    found = sorted(file for file in folder.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file())
    if not found:
        raise DataError(f"{folder} has no document: files ending in {' '.join(SUFFIXES)} are expected.")
    return found


def pending(out: Path, paths: Iterable[Path], asked: Mapping[str, Any]) -> list[Path]:
    """The documents that have no summary in a file yet, once lines that no longer stand are taken out of it.

    A line that an interruption cut off goes, as do those with an error and those of documents that were changed since.

    Args:
        out: the file, which need not exist.
        paths: of all documents; rows of others stay in the file.
        asked: what was asked for; a file holds summaries of one kind only.

    Raises:
        DataError: the file holds something else.
        RecipeError: its summaries were asked for otherwise.
    """
    wanted = {str(path): path for path in paths}
    done = _keep(out, asked, wanted) if out.is_file() else set()
    return [path for name, path in wanted.items() if name not in done]


def append_summaries(out: Path, paths: Iterable[Path], asked: Mapping[str, Any], **options: Any) -> Iterator[Row]:
    """Append a row for each document to a file, and give it when it is written.

    Args:
        out: the file.
        paths: of the documents.
        asked: what was asked for, as for `pending`.
        options: as for `summarize`.

    Raises:
        DataError: the file can't be written to.
    """
    with _opened(out) as file:
        for path in paths:
            about = {"asked": dict(asked), "file": stamp(path)}
            row = _attempt(path, options).to_json() | about
            file.write(json.dumps(row).encode() + b"\n")
            file.flush()
            yield row
            _forget(path)


def _forget(path: Path) -> None:
    """Take a large document out of memory at once; libraries leave circles behind that hold it for a while."""
    if stamp(path).get("bytes", 0) >= _LARGE:
        gc.collect()


def _opened(out: Path) -> BinaryIO:
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        return out.open("ab")
    except OSError as error:
        raise DataError(f"{out} can't be written to ({error.strerror}): name another file for the summaries.") from None


def stamp(path: Path) -> dict[str, int]:
    """What tells a file's states apart: size and time of change, in nanoseconds; nothing where there is none."""
    try:
        found = path.stat()
    except OSError:
        return {}
    return {"bytes": found.st_size, "modified": found.st_mtime_ns}


def _keep(out: Path, asked: Mapping[str, Any], paths: Mapping[str, Path]) -> set[str]:
    """Write the file anew with the rows that stand, one a document; gives their documents."""
    draft = out.with_name(f".{out.name}.part")
    done: set[str] = set()
    try:
        with out.open("rb") as old, draft.open("wb") as new:
            for name, line in _standing(out, old, asked, paths):
                if name not in done:
                    new.write(line)
                    done.add(name)
        draft.replace(out)
    finally:
        draft.unlink(missing_ok=True)
    return done


def _standing(
    out: Path, file: BinaryIO, asked: Mapping[str, Any], paths: Mapping[str, Path]
) -> Iterator[tuple[str, bytes]]:
    for number, line in enumerate(file, 1):
        if not line.endswith(b"\n"):
            return  # cut off: the last one
        row = _row(line, f"{out} line {number}")
        _check_asked(out, row["asked"], asked)
        path = paths.get(row["document"])
        if path is None or ("error" not in row and row["file"] == stamp(path)):
            yield row["document"], line


def _row(line: bytes, where: str) -> Row:
    try:
        row = json.loads(line)
        if isinstance(row["document"], str) and isinstance(row["asked"], dict) and isinstance(row["file"], dict):
            return row
    except (ValueError, KeyError, TypeError):
        pass
    raise DataError(f"{where} is no row of graft summarize --batch: name another file for the summaries.") from None


def _check_asked(out: Path, had: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    for name in {**asked, **had}:
        if had.get(name) != asked.get(name):
            raise RecipeError(
                f"{out} holds summaries with {name} {had.get(name)}, and {asked.get(name)} is asked for: name another "
                "file, or ask for the same."
            )
