"""Summaries of many documents: a stream of results, and a JSON Lines file that a later run continues.

A row is the JSON of the summary of one document, or has the key `error`. In a file, a row also has the options of the
run and the state of the document's file, by which a later run decides whether the row is still valid.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from graftlm.errors import DataError, GraftError, RecipeError, first_line
from graftlm.files.writing import write_errors
from graftlm.pipelines.summarize.readers import SUFFIXES
from graftlm.pipelines.summarize.summary import Summary, summarize, summarize_batch

_ROW_TYPES = {"document": str, "options": dict, "file": dict}
_LARGE_FILE = 1_000_000  # bytes of a document after which unreachable objects are freed
_OTHER_FILE = "name another file for the summaries"


@dataclass(frozen=True, slots=True)
class SummaryFailure:
    """The error of a document that could not be summarized.

    Attributes:
        document: path of the file.
        error: message of the error.
    """

    document: str
    error: str

    def to_json(self) -> dict[str, object]:
        """Return the fields as a dictionary."""
        return asdict(self)


def summarize_many(paths: Iterable[Path], batch_size: int = 1, **arguments: Any) -> Iterator[Summary | SummaryFailure]:
    """Summarize files in order, and go on after errors. At most `batch_size` documents are in memory.

    Args:
        paths: the files.
        batch_size: number of documents that the writer completes in one batch, at least 1. If the batch fails, each
            document is completed alone.
        **arguments: arguments of `summarize`.

    Yields:
        The summary of each file, or the error.

    Raises:
        RecipeError: `batch_size` is below 1.
    """
    if batch_size < 1:
        raise RecipeError(f"batch_size is {batch_size}, but a whole number from 1 is expected: set a larger one.")
    remaining = iter(paths)
    while batch := list(islice(remaining, batch_size)):
        summaries = _summarize_together(batch, arguments)
        for path in batch:
            yield summaries.pop(0) if summaries else _summarize_or_fail(path, arguments)
            if _file_state(path).get("bytes", 0) >= _LARGE_FILE:
                gc.collect()  # Parsers leave reference cycles, which would keep the document in memory.


def _summarize_together(paths: Sequence[Path], arguments: Mapping[str, Any]) -> list[Summary]:
    """Return the summaries of a batch; an empty list if it has one document or fails."""
    if len(paths) > 1:
        # Summarizing the documents alone then finds which one failed, and why.
        with suppress(Exception):
            return summarize_batch(paths, **arguments)
    return []


def _summarize_or_fail(path: Path, arguments: Mapping[str, Any]) -> Summary | SummaryFailure:
    """Return the summary of a file, or its error."""
    try:
        return summarize(path, **arguments)
    except GraftError as error:
        return SummaryFailure(str(path), str(error))
    except Exception as error:
        # An unexpected error in one file must not stop the others.
        kind = type(error).__name__
        cause = f"{kind}: {first_line(error)}" if str(error) else kind
        message = (
            f"{path} could not be summarized ({cause}), which is a bug in GraftLM or in a library: "
            "exclude the file, and report the bug."
        )
        return SummaryFailure(str(path), message)


def find_documents(paths: Iterable[Path], warn: Callable[[str], None] = lambda text: None) -> Iterator[Path]:
    """Yield files, and all documents in folders and their subfolders in the order of their names; each file once.

    Args:
        paths: files and folders. Files are not checked.
        warn: called with a sentence about each file in a folder that no reader supports, unless it is hidden.

    Raises:
        DataError: a folder has no document.
    """
    seen: set[Path] = set()
    for path in paths:
        files = _documents_below(path, warn) if path.is_dir() else [path]
        for file in files:
            if file not in seen:
                seen.add(file)
                yield file


def _documents_below(folder: Path, warn: Callable[[str], None]) -> list[Path]:
    """Return the documents in a folder and its subfolders in the order of their names."""
    documents: list[Path] = []
    for file in sorted(folder.rglob("*")):
        if not file.is_file():
            continue
        if file.suffix.lower() in SUFFIXES:
            documents.append(file)
        elif not _is_hidden(file.relative_to(folder)):
            form = f"files that end in {file.suffix}" if file.suffix else "files without a suffix"
            warn(f"{file} is skipped: no reader supports {form}.")
    if not documents:
        raise DataError(
            f"The folder {folder} has no documents, but files that end in one of {', '.join(SUFFIXES)} are expected: "
            "name another folder."
        )
    return documents


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def pending_documents(out: Path, paths: Iterable[Path], options: Mapping[str, object]) -> list[Path]:
    """Return the documents without a valid row in a file, after removing invalid rows from the file.

    A row is invalid if it is truncated, has an error, or is older than the last change of its document. Rows of other
    documents are kept.

    Args:
        out: the file of summaries; it may be missing.
        paths: the documents.
        options: the options of the run, as JSON values; all rows of a file have the same ones.

    Raises:
        DataError: the file has other content, or can't be read or rewritten.
        RecipeError: a row of the file has other options.
    """
    by_name = {str(path): path for path in paths}
    if not out.is_file():
        return list(by_name.values())
    done = _keep_valid_rows(out, options, by_name)
    return [path for name, path in by_name.items() if name not in done]


def append_summaries(
    out: Path,
    paths: Sequence[Path],
    options: Mapping[str, object],
    **arguments: Any,
) -> Iterator[dict[str, object]]:
    """Append a row for each document to a file, and yield the written row.

    Args:
        out: the file of summaries. Its folder is created.
        paths: the documents.
        options: the options of the run, as JSON values.
        **arguments: arguments of `summarize_many`.

    Raises:
        DataError: the file can't be written.
        RecipeError: `batch_size` is below 1.
    """
    results = summarize_many(paths, **arguments)
    with write_errors(out, DataError, _OTHER_FILE):
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("ab") as file:
            for path, result in zip(paths, results, strict=True):
                row = {
                    **result.to_json(),
                    "options": dict(options),
                    "file": _file_state(path),
                }
                file.write(json.dumps(row).encode() + b"\n")
                file.flush()
                yield row


def _file_state(path: Path) -> dict[str, int]:
    """Return size and modification time in nanoseconds; empty for a missing file."""
    try:
        stat = path.stat()
    except OSError:
        return {}
    return {"bytes": stat.st_size, "modified": stat.st_mtime_ns}


def _keep_valid_rows(out: Path, options: Mapping[str, object], paths: Mapping[str, Path]) -> set[str]:
    """Rewrite the file with its valid rows, one for each document; returns the names of their documents."""
    draft = out.with_name(f".{out.name}.part")
    done: set[str] = set()
    with write_errors(out, DataError, _OTHER_FILE):
        try:
            with out.open("rb") as old, draft.open("wb") as new:
                for number, line in enumerate(old, start=1):
                    if not line.endswith(b"\n"):
                        break  # An interruption truncated the last line.
                    row = _parse_row(line, f"{out} line {number}")
                    _check_options(out, row["options"], options)
                    name = row["document"]
                    if name not in done and _is_valid(row, paths.get(name)):
                        new.write(line)
                        done.add(name)
            draft.replace(out)
        finally:
            draft.unlink(missing_ok=True)
    return done


def _is_valid(row: Mapping[str, object], path: Path | None) -> bool:
    """Return whether a row belongs to another document, or summarizes the current state of its document."""
    if path is None:
        return True
    return "error" not in row and row["file"] == _file_state(path)


def _parse_row(line: bytes, name: str) -> dict[str, Any]:
    """Return a row, or raise `DataError` if a line is not JSON with the keys `document`, `options` and `file`."""
    with suppress(ValueError, KeyError, TypeError):
        row = json.loads(line)
        if all(isinstance(row[key], kind) for key, kind in _ROW_TYPES.items()):
            return row
    raise DataError(f"{name} was not written by graft summarize --batch: {_OTHER_FILE}.")


def _check_options(out: Path, old: Mapping[str, object], new: Mapping[str, object]) -> None:
    for name in {**new, **old}:
        if old.get(name) != new.get(name):
            raise RecipeError(
                f"The summaries in {out} have {name} {old.get(name)}, but this run has {name} {new.get(name)}: "
                "name another file, or use the same options."
            )
