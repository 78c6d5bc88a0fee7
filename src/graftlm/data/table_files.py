"""Rows of tables: JSON lines, JSON lists, parquet, CSV and TSV files, also gzipped."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from graftlm.errors import DataError, first_line
from graftlm.files.reading import BYTE_ORDER_MARK, decode_utf8, open_binary, read_errors

JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
TABLE_SUFFIXES = (*JSON_SUFFIXES, ".parquet", ".csv", ".tsv")


def file_suffix(path: Path) -> str:
    """The suffix in lower case, without a final `.gz`."""
    suffixes = [suffix.lower() for suffix in path.suffixes if suffix.lower() != ".gz"]
    return suffixes[-1] if suffixes else ""


def is_table(path: Path) -> bool:
    """Whether a file holds a table, by its suffix."""
    return file_suffix(path) in TABLE_SUFFIXES


def read_rows(path: Path, columns: Mapping[str, str], owner: str = "source") -> Iterator[tuple[list[str], str]]:
    """The texts of some columns of each row, and the row's location; see `read_values`.

    Raises DataError as there, or if a value is not a string.
    """
    for values, where in read_values(path, columns, owner):
        yield [check_text(value, name, where) for value, name in zip(values, columns.values(), strict=True)], where


def read_values(
    path: Path, columns: Mapping[str, str], owner: str = "source", header: Sequence[str] = ()
) -> Iterator[tuple[list[Any], str]]:
    """The values of some columns of each row, and the row's location, such as `data.csv: row 3`.

    Args:
        path: a file of JSON lines, a JSON list, parquet, CSV or TSV, by its suffix. In TSV no character quotes another.
        columns: names of columns by the config key that sets each, such as {"text_column": "body"}.
        owner: the config that has these keys, for messages.
        header: names of all columns of a CSV or TSV file without a header.

    Raises DataError if the file can't be read, contradicts its suffix, or lacks a column; the message names the row.
    """
    suffix = file_suffix(path)
    if suffix not in TABLE_SUFFIXES:
        raise DataError(f"{path} is no table: a file ending in {' '.join(TABLE_SUFFIXES)} (or .gz) is expected.")
    with read_errors(path):
        if suffix in (".csv", ".tsv"):
            yield from _read_csv(path, columns, owner, header)
        else:
            yield from (_read_parquet if suffix == ".parquet" else _read_json)(path, columns, owner)


def _read_json(path: Path, columns: Mapping[str, str], owner: str) -> Iterator[tuple[list[Any], str]]:
    with open_binary(path) as file:
        is_list = file.read(4096).removeprefix(BYTE_ORDER_MARK).lstrip()[:1] == b"["
        file.seek(0)
        rows = _parse_json(file.read(), str(path)) if is_list else file
        for number, row in enumerate(rows, start=1):
            where = f"{path}: {'row' if is_list else 'line'} {number}"
            if is_list:
                yield values_of(row, columns, where, owner), where
            elif row.strip():
                yield values_of(_parse_json(row, where), columns, where, owner), where


def _parse_json(data: bytes, where: str) -> Any:
    text = decode_utf8(data, where)
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        cause = getattr(error, "msg", "nested too deep")
        why = f"{where} is not valid JSON ({cause}): one object per line, or one list of objects, is expected."
        raise DataError(why) from None


def _read_csv(
    path: Path, columns: Mapping[str, str], owner: str, header: Sequence[str]
) -> Iterator[tuple[list[Any], str]]:
    tabs: dict[str, Any] = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if file_suffix(path) == ".tsv" else {}
    with open_binary(path) as file:
        reader = csv.reader(io.StringIO(decode_utf8(file.read(), str(path)), newline=""), strict=True, **tabs)
    try:
        expected = "the columns are" if header else "the header has"
        header = header or next(reader, [])
        check_columns(header, columns, str(path), owner)
        for number, cells in enumerate(filter(None, reader), start=1):
            where = f"{path}: row {number}"
            if cells == list(header):
                raise DataError(f"{where} has the names of the columns: leave columns out, or remove the row.")
            if len(cells) != len(header):
                raise DataError(f"{where} has {len(cells)} cells, but {expected} {len(header)}: correct the row.")
            yield values_of(dict(zip(header, cells, strict=True)), columns, where, owner), where
    except csv.Error as error:
        raise DataError(f"{path} is not valid CSV ({error}, at line {reader.line_num}): correct that line.") from None


def _read_parquet(path: Path, columns: Mapping[str, str], owner: str) -> Iterator[tuple[list[Any], str]]:
    import pyarrow.parquet  # takes a quarter of a second

    names = list(columns.values())
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            check_columns(file.schema_arrow.names, columns, str(path), owner)
            batches = file.iter_batches(batch_size=1024, columns=names)
            rows = (row for batch in batches for row in batch.to_pylist())
            for number, row in enumerate(rows, start=1):
                yield [row[name] for name in names], f"{path}: row {number}"
    except (pyarrow.ArrowException, EOFError) as error:
        raise DataError(f"{path} is not a whole parquet file ({first_line(error)}): fetch it again.") from None


def values_of(row: Any, columns: Mapping[str, str], where: str, owner: str = "source") -> list[Any]:
    """The values of some columns of one row. Raises `DataError` if the row is not a dict, or lacks a column."""
    if not isinstance(row, dict):
        first = next(iter(columns.values()))
        raise DataError(f"{where} is of type {type(row).__name__}, but an object with a column {first!r} is expected.")
    check_columns(list(row), columns, where, owner)
    return [row[name] for name in columns.values()]


def check_columns(names: Sequence[str], columns: Mapping[str, str], where: str, owner: str = "source") -> None:
    """Raise `DataError` unless all `columns` are among `names`."""
    for key, name in columns.items():
        if name not in names:
            known = ", ".join(map(str, names)) or "none"
            raise DataError(f"{where} has no column {name!r} (found: {known}): set the {owner}'s {key}.")
        if list(names).count(name) > 1:
            raise DataError(f"{where} has two columns {name!r}: rename one.")


def check_text(value: Any, column: str, where: str) -> str:
    """Return `value` if it is a string without lone surrogates; else raise `DataError`."""
    if not isinstance(value, str):
        raise DataError(f"{where} has {type_name(value)} in the column {column!r}, but a string is expected.")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where} has half a surrogate pair at character {error.start} of the column {column!r}, "
            "which is not text: correct the row."
        ) from None
    return value


def type_name(value: Any) -> str:
    """A value's type, for messages."""
    return "nothing" if value is None else f"a value of type {type(value).__name__}"
