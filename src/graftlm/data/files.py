"""Documents out of local files: plain text (one document each), JSON lines, JSON lists and parquet (one per row)."""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow
import pyarrow.parquet

from graftlm.data.documents import Document
from graftlm.errors import DataError

TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst", ".tex", ".py")
JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
PARQUET_SUFFIXES = (".parquet",)
SUFFIXES = (*TEXT_SUFFIXES, *JSON_SUFFIXES, *PARQUET_SUFFIXES)
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def find_files(path: Path, pattern: str | None = None) -> list[Path]:
    """The file at `path`, or the files below a folder, sorted by their path; hidden files and folders are skipped.

    Args:
        pattern: a glob such as `*.c` or `letters/*.txt`; without one, files with a known suffix are taken.

    Raises:
        DataError: nothing is there, or the folder holds no such file.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise DataError(f"There is no file or folder {path}: check the source's path.")
    found = sorted(file for file in _walk(path) if _wanted(file.relative_to(path), pattern))
    if not found:
        looked_for = f"files that match {pattern!r}" if pattern else f"files ending in {' '.join(SUFFIXES)} (or .gz)"
        raise DataError(f"The folder {path} holds no {looked_for}: put text there, or set the source's pattern.")
    return found


def _walk(folder: Path) -> Iterator[Path]:
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(root, name) for name in names if not name.startswith("."))


def _wanted(relative: Path, pattern: str | None) -> bool:
    if pattern is None:
        return _suffix(relative) in SUFFIXES
    return fnmatch(relative.as_posix() if "/" in pattern else relative.name, pattern)


def _suffix(path: Path) -> str:
    """The suffix in lower case, without a final `.gz`."""
    suffixes = [suffix.lower() for suffix in path.suffixes if suffix.lower() != ".gz"]
    return suffixes[-1] if suffixes else ""


def read_file(path: Path, text_column: str = "text") -> Iterator[Document]:
    """The documents of one file, chosen by its suffix; a file with an unknown suffix is read as plain text.

    Raises:
        DataError: the file can't be read, or is not what its suffix says; the message names the line, row or byte.
    """
    suffix = _suffix(path)
    try:
        if suffix in PARQUET_SUFFIXES:
            yield from _read_parquet(path, text_column)
        elif suffix in JSON_SUFFIXES:
            yield from _read_json(path, text_column)
        else:
            yield Document(_read_text(path), str(path))
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise DataError(f"{path} is not a whole gzip file: fetch it again, or unpack it first.") from None
    except OSError as error:
        raise DataError(f"{path} can't be read ({error.strerror or error}): check the file.") from None


def _open(path: Path) -> BinaryIO:
    return gzip.open(path, "rb") if path.suffix.lower() == ".gz" else path.open("rb")  # type: ignore[return-value]


def _read_text(path: Path) -> str:
    with _open(path) as file:
        data = file.read()
    if b"\0" in data:
        raise DataError(
            f"{path} is a binary file (a NUL byte at byte {data.index(0)}), but UTF-8 text is expected: "
            "convert it, or leave it out by the source's pattern."
        )
    return _decode(data, str(path)).replace("\r\n", "\n")


def _decode(data: bytes, where: str) -> str:
    skipped = len(BYTE_ORDER_MARK) if data.startswith(BYTE_ORDER_MARK) else 0
    try:
        return data[skipped:].decode("utf-8")
    except UnicodeDecodeError as error:
        at = error.start + skipped
        raise DataError(
            f"{where} is not UTF-8 text (byte {at} is 0x{data[at]:02x}): convert it to UTF-8 first."
        ) from None


def _read_json(path: Path, text_column: str) -> Iterator[Document]:
    with _open(path) as file:
        is_list = file.read(4096).removeprefix(BYTE_ORDER_MARK).lstrip()[:1] == b"["
        file.seek(0)
        rows = _list_rows(file, path) if is_list else _line_rows(file, path)
        for row, where in rows:
            yield Document(text_of(row, text_column, where), where)


def _list_rows(file: BinaryIO, path: Path) -> Iterator[tuple[Any, str]]:
    rows = _parse(_decode(file.read(), str(path)), str(path))
    yield from ((row, f"{path}: row {number}") for number, row in enumerate(rows, start=1))


def _line_rows(file: BinaryIO, path: Path) -> Iterator[tuple[Any, str]]:
    for number, line in enumerate(file, start=1):
        if line.strip():
            where = f"{path}: line {number}"
            yield _parse(_decode(line, where), where), where


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        cause = getattr(error, "msg", "nested too deep")
        raise DataError(
            f"{where} is not valid JSON ({cause}): one object per line, or one list of objects, is expected."
        ) from None


def _read_parquet(path: Path, text_column: str) -> Iterator[Document]:
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            check_columns(file.schema_arrow.names, text_column, str(path))
            number = 0
            for batch in file.iter_batches(batch_size=1024, columns=[text_column]):
                for value in batch.column(0).to_pylist():
                    number += 1
                    yield Document(check_text(value, text_column, f"{path}: row {number}"), f"{path}: row {number}")
    except (pyarrow.ArrowException, EOFError) as error:
        cause = str(error).splitlines()[0].rstrip(".")
        raise DataError(f"{path} is not a whole parquet file ({cause}): fetch it again.") from None


def text_of(row: Any, text_column: str, where: str) -> str:
    """The text of one row.

    Raises:
        DataError: the row is no mapping, has no such column, or its value is no text.
    """
    if not isinstance(row, dict):
        found = type(row).__name__
        raise DataError(f"{where} is of type {found}, but an object with the column {text_column!r} is expected.")
    check_columns(list(row), text_column, where)
    return check_text(row[text_column], text_column, where)


def check_columns(columns: list[str], text_column: str, where: str) -> None:
    """Raise `DataError` unless `text_column` is among the columns."""
    if text_column not in columns:
        found = ", ".join(map(str, columns)) or "none"
        raise DataError(f"{where} has no column {text_column!r} (found: {found}): set the source's text_column.")


def check_text(value: Any, text_column: str, where: str) -> str:
    """`value`, when it is a string of whole characters; else raise `DataError`."""
    if not isinstance(value, str):
        found = "nothing" if value is None else f"a value of type {type(value).__name__}"
        raise DataError(f"{where} has {found} in the column {text_column!r}, but a string is expected.")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where} has half a surrogate pair at character {error.start} of the column {text_column!r}, "
            "which is not text: mend the row."
        ) from None
    return value
