"""Documents out of local files: plain text (one each), and tables (one a row): JSON lines, JSON lists, parquet, CSV."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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
CSV_SUFFIXES = (".csv",)
TSV_SUFFIXES = (".tsv",)  # tables where one is asked for; documents are read of them as of plain text
TABLE_SUFFIXES = (*JSON_SUFFIXES, *PARQUET_SUFFIXES, *CSV_SUFFIXES)
SUFFIXES = (*TEXT_SUFFIXES, *JSON_SUFFIXES, *PARQUET_SUFFIXES)  # of what a folder is searched for
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


def read_file(path: Path, text_column: str = "text", prompt_column: str | None = None) -> Iterator[Document]:
    """The documents of one file, chosen by its suffix; a file with an unknown suffix is read as plain text.

    Raises:
        DataError: the file can't be read, or is not what its suffix says; the message names the line, row or byte.
    """
    if _suffix(path) in TABLE_SUFFIXES:
        columns = columns_of(text_column, prompt_column)
        yield from (document_of(texts, columns, where) for texts, where in read_rows(path, columns))
    elif prompt_column is not None:
        raise DataError(
            f"{path} is plain text, but the source has a prompt_column: name a JSON, parquet or CSV file, "
            "or leave the prompt_column out."
        )
    else:
        with _whole(path):
            yield Document(_read_text(path), str(path))


def columns_of(text_column: str, prompt_column: str | None) -> dict[str, str]:
    """The columns that a source reads, by the key that names them."""
    return {"text_column": text_column} | ({} if prompt_column is None else {"prompt_column": prompt_column})


def document_of(texts: list[str], columns: Mapping[str, str], where: str) -> Document:
    """The document of one row, from the texts of its columns.

    Raises:
        DataError: there is a prompt, and no text that completes it.
    """
    text, *prompt = texts
    if prompt and not text.strip():
        raise DataError(
            f"{where} has a prompt and an empty completion in the column {columns['text_column']!r}: "
            "give it text, or leave the row out."
        )
    return Document(text, where, *prompt)


def read_rows(path: Path, columns: Mapping[str, str], owner: str = "source") -> Iterator[tuple[list[str], str]]:
    """The texts of some columns of each row of a table, and where that row is.

    Args:
        path: a file of JSON lines, a JSON list, parquet or CSV with a header, by its suffix; also gzipped.
        columns: names of columns by the key that sets each, such as {"text_column": "body"}.
        owner: whose keys they are, for messages.

    Raises:
        DataError: the file can't be read, is not what its suffix says, or lacks a text; the message names the row.
    """
    for values, where in read_values(path, columns, owner):
        yield [check_text(value, name, where) for value, name in zip(values, columns.values(), strict=True)], where


def read_values(
    path: Path, columns: Mapping[str, str], owner: str = "source", head: Sequence[str] = ()
) -> Iterator[tuple[list[Any], str]]:
    """As `read_rows`, but values of any type, as the file has them; those of CSV and TSV are text.

    Args:
        path: as there, or a file of tab-separated values, in which no character quotes another.
        columns: as there.
        owner: as there.
        head: the columns' names where CSV or TSV has no header; empty for one that has.
    """
    suffix = _suffix(path)
    if not is_table(path):
        known = " ".join((*TABLE_SUFFIXES, *TSV_SUFFIXES))
        raise DataError(f"{path} is no table: a file ending in {known} (or .gz) is expected.")
    with _whole(path):
        if suffix in (*CSV_SUFFIXES, *TSV_SUFFIXES):
            yield from _read_csv(path, columns, owner, head)
        else:
            yield from (_read_parquet if suffix in PARQUET_SUFFIXES else _read_json)(path, columns, owner)


def is_table(path: Path) -> bool:
    """Whether a file's suffix says that it holds rows of columns."""
    return _suffix(path) in (*TABLE_SUFFIXES, *TSV_SUFFIXES)


@contextmanager
def _whole(path: Path) -> Iterator[None]:
    """Say in one sentence that a file can't be read to its end."""
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise DataError(f"{path} is not a whole gzip file: fetch it again, or unpack it first.") from None
    except OSError as error:
        raise DataError(f"{path} can't be read ({error.strerror or error}): check the file.") from None


def _open(path: Path) -> BinaryIO:
    return gzip.open(path, "rb") if path.suffix.lower() == ".gz" else path.open("rb")  # type: ignore[return-value]


def read_lines(path: Path) -> list[str]:
    """The lines of a text file, without their ends.

    Raises:
        DataError: it can't be read, or is no UTF-8 text.
    """
    with _whole(path):
        return _read_text(path).split("\n")


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


def _read_json(path: Path, columns: Mapping[str, str], owner: str) -> Iterator[tuple[list[Any], str]]:
    with _open(path) as file:
        is_list = file.read(4096).removeprefix(BYTE_ORDER_MARK).lstrip()[:1] == b"["
        file.seek(0)
        rows = _list_rows(file, path) if is_list else _line_rows(file, path)
        for row, where in rows:
            yield values_of(row, columns, where, owner), where


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


def _read_csv(
    path: Path, columns: Mapping[str, str], owner: str, head: Sequence[str]
) -> Iterator[tuple[list[Any], str]]:
    form: dict[str, Any] = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if _suffix(path) in TSV_SUFFIXES else {}
    with _open(path) as file:
        reader = csv.reader(io.StringIO(_decode(file.read(), str(path)), newline=""), strict=True, **form)
    try:
        said = "the header has" if not head else "the columns are"
        head = head or next(reader, [])
        check_columns(head, columns, str(path), owner)
        for number, cells in enumerate(filter(None, reader), start=1):
            where = f"{path}: row {number}"
            if len(cells) != len(head):
                raise DataError(f"{where} has {len(cells)} cells, but {said} {len(head)}: mend the row.")
            yield values_of(dict(zip(head, cells, strict=True)), columns, where, owner), where
    except csv.Error as error:
        raise DataError(f"{path} is not valid CSV ({error}, at line {reader.line_num}): mend that line.") from None


def _read_parquet(path: Path, columns: Mapping[str, str], owner: str) -> Iterator[tuple[list[Any], str]]:
    names = list(columns.values())
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            check_columns(file.schema_arrow.names, columns, str(path), owner)
            number = 0
            for batch in file.iter_batches(batch_size=1024, columns=names):
                for values in zip(*(batch.column(name).to_pylist() for name in names), strict=True):
                    number += 1
                    yield list(values), f"{path}: row {number}"
    except (pyarrow.ArrowException, EOFError) as error:
        cause = str(error).splitlines()[0].rstrip(".")
        raise DataError(f"{path} is not a whole parquet file ({cause}): fetch it again.") from None


def texts_of(row: Any, columns: Mapping[str, str], where: str, owner: str = "source") -> list[str]:
    """The texts of some columns of one row.

    Raises:
        DataError: the row is no mapping, has no such column, or its value is no text.
    """
    values = values_of(row, columns, where, owner)
    return [check_text(value, name, where) for value, name in zip(values, columns.values(), strict=True)]


def values_of(row: Any, columns: Mapping[str, str], where: str, owner: str = "source") -> list[Any]:
    """The values of some columns of one row.

    Raises:
        DataError: the row is no mapping, or has no such column.
    """
    if not isinstance(row, dict):
        found, first = type(row).__name__, next(iter(columns.values()))
        raise DataError(f"{where} is of type {found}, but an object with the column {first!r} is expected.")
    check_columns(list(row), columns, where, owner)
    return [row[name] for name in columns.values()]


def check_columns(found: Sequence[str], columns: Mapping[str, str], where: str, owner: str = "source") -> None:
    """Raise `DataError` unless all `columns` are among those found."""
    for key, name in columns.items():
        if name not in found:
            names = ", ".join(map(str, found)) or "none"
            raise DataError(f"{where} has no column {name!r} (found: {names}): set the {owner}'s {key}.")


def check_text(value: Any, column: str, where: str) -> str:
    """`value`, when it is a string of whole characters; else raise `DataError`."""
    if not isinstance(value, str):
        found = "nothing" if value is None else f"a value of type {type(value).__name__}"
        raise DataError(f"{where} has {found} in the column {column!r}, but a string is expected.")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where} has half a surrogate pair at character {error.start} of the column {column!r}, "
            "which is not text: mend the row."
        ) from None
    return value
