"""Summaries of many documents: some in memory at a time, and a JSON lines file that a later run continues.

A row is the JSON of one document's summary, or has the key `error`. In a file, a row also has the options of the run
and the state of the document's file, so a later run can tell which rows are still valid.
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

from graftlm.errors import DataError, GraftError, RecipeError
from graftlm.pipelines.summarize.readers import SUFFIXES
from graftlm.pipelines.summarize.summary import Summary, summarize, summarize_batch

_LARGE_FILE = 1_000_000  # bytes


@dataclass(frozen=True, slots=True)
class SummaryFailure:
    """A document without a summary, and the error."""

    document: str
    error: str

    to_json = asdict


def summarize_many(paths: Iterable[Path], batch_size: int = 1, **arguments: Any) -> Iterator[Summary | SummaryFailure]:
    """Summarize files with the `arguments` of `summarize`; only `batch_size` documents are in memory.

    The writer completes that many at once. Where one of them fails, each is completed alone.
    """
    paths = iter(paths)
    while batch := list(islice(paths, batch_size)):
        results: list[Summary | SummaryFailure] = []
        with suppress(Exception):  # which document failed, and why, is said when each is alone
            results += summarize_batch(batch, **arguments) if len(batch) > 1 else []
        for path in batch:
            yield results.pop(0) if results else _summarize_or_fail(path, arguments)
            if _file_state(path).get("bytes", 0) >= _LARGE_FILE:
                gc.collect()  # parsers leave reference cycles behind that keep a document in memory


def _summarize_or_fail(path: Path, arguments: Mapping[str, Any]) -> Summary | SummaryFailure:
    try:
        return summarize(path, **arguments)
    except GraftError as error:
        return SummaryFailure(str(path), str(error))
    except Exception as error:  # an unexpected error in one file must not stop the others
        cause = str(error).splitlines()[0].rstrip(".") if str(error) else "no more is known"
        return SummaryFailure(
            str(path),
            f"{path} could not be summarized ({type(error).__name__}: {cause}), which is a bug here or in a library: "
            "leave it out, and report it.",
        )


def find_documents(paths: Iterable[Path], warn: Callable[[str], None] = lambda text: None) -> Iterator[Path]:
    """Yield files, and all documents below folders in the order of their names; each file once.

    `warn` receives one sentence for each file below a folder that no reader knows; hidden files are skipped in silence.
    A folder without a document raises `DataError`.
    """
    seen: set[Path] = set()
    for path in paths:
        files = _documents_below(path, warn) if path.is_dir() else [path]
        yield from (file for file in files if file not in seen)
        seen.update(files)


def _documents_below(folder: Path, warn: Callable[[str], None]) -> list[Path]:
    documents = []
    for file in sorted(file for file in folder.rglob("*") if file.is_file()):
        if file.suffix.lower() in SUFFIXES:
            documents.append(file)
        elif not any(part.startswith(".") for part in file.relative_to(folder).parts):
            warn(f"{file} is skipped: no reader knows files that end in {file.suffix or file.name}.")
    if not documents:
        raise DataError(f"{folder} has no document: files ending in {' '.join(SUFFIXES)} are expected.")
    return documents


def pending_documents(out: Path, paths: Iterable[Path], options: Mapping[str, Any]) -> list[Path]:
    """Return the documents without a valid row in a file, after removing invalid rows from the file.

    A row is invalid if it is cut off, has an error, or is older than its document's last change. Others stay there.
    All rows of a file have the same `options`, the JSON of the run's options.

    Raises DataError if the file holds something else, and RecipeError if the rows of the file have other options.
    """
    by_name = {str(path): path for path in paths}
    done = _keep_valid_rows(out, options, by_name) if out.is_file() else set()
    return [path for name, path in by_name.items() if name not in done]


def append_summaries(
    out: Path, paths: Sequence[Path], options: Mapping[str, Any], **arguments: Any
) -> Iterator[dict[str, Any]]:
    """Append a row for each document to a file, with the arguments of `summarize_many`, and yield the written row.

    Raises `DataError` if the file can't be written.
    """
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        file = out.open("ab")
    except OSError as error:
        raise DataError(f"{out} can't be written to ({error.strerror}): name another file for the summaries.") from None
    with file:
        for path, result in zip(paths, summarize_many(paths, **arguments), strict=True):
            row = result.to_json() | {"options": dict(options), "file": _file_state(path)}
            file.write(json.dumps(row).encode() + b"\n")
            file.flush()
            yield row


def _file_state(path: Path) -> dict[str, int]:
    """Return size and modification time in nanoseconds, or nothing for a missing file."""
    try:
        stat = path.stat()
    except OSError:
        return {}
    return {"bytes": stat.st_size, "modified": stat.st_mtime_ns}


def _keep_valid_rows(out: Path, options: Mapping[str, Any], paths: Mapping[str, Path]) -> set[str]:
    """Rewrite the file with its valid rows, one for each document; returns their documents."""
    draft = out.with_name(f".{out.name}.part")
    done: set[str] = set()
    try:
        with out.open("rb") as old, draft.open("wb") as new:
            for number, line in enumerate(old, 1):
                if not line.endswith(b"\n"):
                    break  # an interruption cut the last line off
                row = _parse_row(line, f"{out} line {number}")
                _check_options(out, row["options"], options)
                name = row["document"]
                path = paths.get(name)
                is_valid = path is None or ("error" not in row and row["file"] == _file_state(path))
                if is_valid and name not in done:
                    new.write(line)
                    done.add(name)
        draft.replace(out)
    finally:
        draft.unlink(missing_ok=True)
    return done


def _parse_row(line: bytes, name: str) -> dict[str, Any]:
    with suppress(ValueError, KeyError, TypeError):
        row = json.loads(line)
        if isinstance(row["document"], str) and isinstance(row["options"], dict) and isinstance(row["file"], dict):
            return row
    raise DataError(f"{name} is no row of graft summarize --batch: name another file for the summaries.")


def _check_options(out: Path, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    for name in {**new, **old}:
        if old.get(name) != new.get(name):
            raise RecipeError(
                f"{out} holds summaries with {name} {old.get(name)}, but this run has {name} {new.get(name)}: name "
                "another file, or use the same options."
            )
