"""Read rows of tables: JSON lines, JSON lists, parquet, CSV and TSV files, optionally gzipped."""

from __future__ import annotations

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from graftlm.errors import DataError, first_line, shorten
from graftlm.files.reading import BYTE_ORDER_MARK, decode_utf8, open_binary, read_errors

JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
TABLE_SUFFIXES = (*JSON_SUFFIXES, ".parquet", ".csv", ".tsv")

_BYTE_ORDER_MARK = "\ufeff"
_OTHER_SEPARATORS = (";", "\t", "|")
_QUOTED = re.compile(r'"(?:[^"]|"")*"')  # a cell with quotes as in RFC 4180

LocatedValues = tuple[list[Any], str]
"""The values of some columns of a row, and the row's location, such as `data.csv: row 3`."""


def file_suffix(path: Path) -> str:
    """Return the file's suffix in lower case, such as `.csv`, ignoring `.gz`; an empty string if there is none."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    suffixes = [suffix for suffix in suffixes if suffix != ".gz"]
    return suffixes[-1] if suffixes else ""


def is_table(path: Path) -> bool:
    """Return whether the file's suffix is one of a table format."""
    return file_suffix(path) in TABLE_SUFFIXES


def read_rows(path: Path, columns: Mapping[str, str], owner: str = "source") -> Iterator[tuple[list[str], str]]:
    """Yield the texts of some columns of each row, and the row's location.

    Args:
        path: the file.
        columns: see `read_values`.
        owner: see `read_values`.

    Raises:
        DataError: see `read_values`; or a value is not a string, or has a lone surrogate.
    """
    for values, where in read_values(path, columns, owner):
        texts = []
        for value, column in zip(values, columns.values(), strict=True):
            texts.append(check_text(value, column, where))
        yield texts, where


def read_values(
    path: Path,
    columns: Mapping[str, str],
    owner: str = "source",
    header: Sequence[str] = (),
    optional: Collection[str] = (),
) -> Iterator[LocatedValues]:
    """Yield the values of some columns of each row, and the row's location, such as `data.csv: row 3`.

    Args:
        path: a file of JSON lines, a JSON list, parquet, CSV or TSV, whose suffix determines the format. CSV is quoted
            as in RFC 4180, and a blank before a quoted cell is refused. TSV has no quoting, and a quoted one is
            refused. Empty lines are skipped. Each format may be gzipped, except parquet.
        columns: names of columns by the config key that sets each, such as {"text_column": "body"}.
        owner: the config that has these keys, for error messages.
        header: names of all columns of a CSV or TSV file without a header; other formats ignore it. If it is empty, the
            first row of the file has the names.
        optional: the keys of `columns` whose column may be missing; its values are then None.

    Raises:
        DataError: the suffix is not that of a table, the file can't be read or is not valid in its format, it lacks a
            column or has it twice, a row has a wrong form or number of cells, or an object has a key twice.
    """
    suffix = file_suffix(path)
    if suffix not in TABLE_SUFFIXES:
        expected = ", ".join(TABLE_SUFFIXES)
        raise DataError(f"{path} is not a table: give a file that ends in {expected}, optionally followed by .gz.")
    with read_errors(path):
        if suffix in (".csv", ".tsv"):
            yield from _read_csv(path, columns, owner, header, optional)
        elif suffix == ".parquet":
            yield from _read_parquet(path, columns, owner, optional)
        else:
            yield from _read_json(path, columns, owner, optional)


def _read_json(
    path: Path,
    columns: Mapping[str, str],
    owner: str,
    optional: Collection[str],
) -> Iterator[LocatedValues]:
    """Read JSON lines, or a list if the file begins with a bracket."""
    for row, where in _parsed_rows(path):
        yield values_of(row, columns, where, owner, optional), where


def read_objects(path: Path) -> Iterator[tuple[dict[str, object], str]]:
    """Yield the objects of a JSON file, and the location of each.

    Args:
        path: a file of JSON lines or a JSON list, which may be gzipped.

    Raises:
        DataError: the suffix is not that of JSON, or the file can't be read or is not valid.
    """
    if file_suffix(path) not in JSON_SUFFIXES:
        expected = ", ".join(JSON_SUFFIXES)
        raise DataError(f"{path} is not a JSON file: give a file that ends in {expected}, optionally followed by .gz.")
    with read_errors(path):
        for row, where in _parsed_rows(path):
            if not isinstance(row, dict):
                raise DataError(f"{where} is {type_name(row)}, but an object is expected: correct the row.")
            yield row, where


def _parsed_rows(path: Path) -> Iterator[tuple[object, str]]:
    """Yield the values of JSON lines, or of a list if the file begins with a bracket, and their locations."""
    with open_binary(path) as file:
        beginning = file.read(4096).removeprefix(BYTE_ORDER_MARK)
        file.seek(0)
        if beginning.lstrip().startswith(b"["):
            rows = _parse_json(file.read(), str(path))
            for number, row in enumerate(rows, start=1):
                yield row, f"{path}: row {number}"
            return
        for number, line in enumerate(file, start=1):
            if line.strip():
                where = f"{path}: line {number}"
                yield _parse_json(line.rstrip(), where), where


def _parse_json(data: bytes, where: str) -> Any:
    text = decode_utf8(data, where)
    try:
        return json.loads(text, object_pairs_hook=unique_keys)
    except RepeatedKeyError as error:
        raise DataError(
            f"{where} has an object with the key {error.key!r} more than once: rename all but one."
        ) from None
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if "\n" in text else ""
        cause = f"{error.msg.removesuffix(' at')} at {line}column {error.colno}"
    except RecursionError:
        cause = "nested too deeply"
    raise DataError(f"{where} is not valid JSON ({cause}): one object per line, or one list of objects, is expected.")


class RepeatedKeyError(Exception):
    """An object of a JSON file has a key more than once, of which Python would keep the last value."""

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of JSON with these keys and values."""
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = Counter(key for key, _ in pairs)
        raise RepeatedKeyError(keys.most_common(1)[0][0])
    return values


def _read_csv(
    path: Path,
    columns: Mapping[str, str],
    owner: str,
    header: Sequence[str],
    optional: Collection[str],
) -> Iterator[LocatedValues]:
    """Read CSV or, by the suffix of the file, TSV without quoting."""
    with open_binary(path) as file:
        text = decode_utf8(file.read(), str(path)).lstrip(_BYTE_ORDER_MARK)
    # Of the process, and never lowered: the default limit of 131,072 characters is shorter than many articles.
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))
    lines = io.StringIO(text, newline="")
    record: list[str] = []
    is_tsv = file_suffix(path) == ".tsv"
    if is_tsv:
        reader = csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE, strict=True)
    else:
        reader = csv.reader(_recorded(lines, record), strict=True)
    try:
        names = header or next(reader, [])
        if record:
            _check_blanks(names, record, str(path))
        check_columns(names, columns, str(path), owner, optional)
        rows = (cells for cells in reader if cells)
        for number, cells in enumerate(rows, start=1):
            where = f"{path}: row {number}"
            # A file that was appended to another may have brought its mark.
            cells[0] = cells[0].removeprefix(_BYTE_ORDER_MARK)
            if is_tsv:
                _check_unquoted(cells, where)
            else:
                _check_blanks(cells, record, where)
            _check_cells(cells, names, where, has_header=not header)
            row = dict(zip(names, cells, strict=True))
            yield values_of(row, columns, where, owner, optional), where
    except csv.Error as error:
        raise DataError(f"{path} is not valid CSV ({error}, at line {reader.line_num}): correct that line.") from None


def _recorded(lines: Iterable[str], record: list[str]) -> Iterator[str]:
    """Yield lines after adding them to the record."""
    for line in lines:
        record.append(line)
        yield line


def _check_blanks(cells: Sequence[str], record: list[str], where: str) -> None:
    """Raise `DataError` if a row of CSV has a quoted cell after a blank, whose quotation marks would be read as text.

    Args:
        cells: the cells of the row.
        record: the lines of the row in the file, which are removed.
        where: the row's location.
    """
    for cell in cells:
        quoted = cell.strip(" \t")
        if cell[:1] not in (" ", "\t") or not _QUOTED.fullmatch(quoted):
            continue
        # The file doubles the marks of a text whose cell is quoted from its beginning.
        if cell.replace('"', '""') not in "".join(record):
            raise DataError(
                f"{where} has the quoted cell {shorten(quoted)} after a blank, but a quoted cell of CSV begins with "
                "its quotation mark: remove the blank."
            )
    record.clear()


def _check_unquoted(cells: Sequence[str], where: str) -> None:
    """Raise `DataError` if a row of TSV has quoted cells, whose quotation marks would be read as text.

    Quotation marks of a text, as in `"Yes"`, are fine if other cells have none.
    """
    quoted = [cell for cell in cells if _QUOTED.fullmatch(cell)]
    is_quoted_row = len(cells) > 1 and len(quoted) == len(cells)
    if is_quoted_row or any('""' in cell[1:-1] for cell in quoted):
        raise DataError(
            f"{where} has the quoted cell {shorten(quoted[0])}, but a TSV file has no quoting: save the table as CSV."
        )


def _check_cells(cells: Sequence[str], names: Sequence[str], where: str, *, has_header: bool) -> None:
    """Raise `DataError` if a row repeats the names of the columns, or has another number of cells."""
    if list(cells) == list(names):
        remedy = "remove the row" if has_header else "remove the row, or leave the setting columns out"
        raise DataError(f"{where} contains the names of the columns, but values are expected: {remedy}.")
    if len(cells) != len(names):
        source = "the header" if has_header else "the setting columns"
        raise DataError(
            f"{where}: the number of cells is {len(cells)}, but {source} has {len(names)} names: correct the row."
        )


def _read_parquet(
    path: Path,
    columns: Mapping[str, str],
    owner: str,
    optional: Collection[str],
) -> Iterator[LocatedValues]:
    import pyarrow.parquet  # takes a quarter of a second

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            check_columns(file.schema_arrow.names, columns, str(path), owner, optional)
            present = [name for name in columns.values() if name in file.schema_arrow.names]
            for batch in file.iter_batches(batch_size=1024, columns=present):
                for row in batch.to_pylist():
                    number += 1
                    yield [row.get(name) for name in columns.values()], f"{path}: row {number}"
    except (pyarrow.ArrowException, EOFError) as error:
        raise DataError(
            f"{path} can't be read as a parquet file ({first_line(error)}): fetch or write it again."
        ) from None


def values_of(
    row: object,
    columns: Mapping[str, str],
    where: str,
    owner: str = "source",
    optional: Collection[str] = (),
) -> list[Any]:
    """Return the values of some columns of a row, in the order of `columns`.

    Args:
        row: the row, a dict by the names of columns.
        columns: see `read_values`.
        where: the row's location, for error messages.
        owner: see `read_values`.
        optional: see `read_values`.

    Raises:
        DataError: the row is not a dict, or lacks a column.
    """
    if not isinstance(row, dict):
        names = " and ".join(repr(name) for name in columns.values())
        raise DataError(
            f"{where} is of type {type(row).__name__}, but an object with {names} is expected: correct the row."
        )
    for key, column in columns.items():
        if column not in row and key not in optional:
            check_columns(list(row), columns, where, owner, optional)
    return [row.get(column) for column in columns.values()]


def check_columns(
    names: Sequence[str],
    columns: Mapping[str, str],
    where: str,
    owner: str = "source",
    optional: Collection[str] = (),
) -> None:
    """Raise `DataError` unless each of `columns` is exactly once among `names`.

    Args:
        names: the names that a table has.
        columns: see `read_values`.
        where: the table's location, for error messages.
        owner: see `read_values`.
        optional: see `read_values`.
    """
    for key, column in columns.items():
        count = list(names).count(column)
        if count == 0 and key not in optional:
            found = ", ".join(str(name) for name in names) or "none"
            remedy = f"set the {owner}'s {key} to one of these"
            if key == "messages_column":
                remedy = (
                    f"set the {owner}'s {key} to one of these that has messages, or its prompt_column to that of "
                    f"questions and its {key} to that of answers"
                )
            if len(names) == 1 and any(separator in found for separator in _OTHER_SEPARATORS):
                remedy = "separate the cells by commas in CSV, or by tabs in TSV"
            raise DataError(f"{where} has no column {column!r} (found: {found}): {remedy}, or correct the data.")
        if count > 1:
            raise DataError(f"{where} has {count} columns {column!r}: rename all but one.")


def check_text(value: object, column: str, where: str) -> str:
    """Return a value if it is a string that UTF-8 can encode.

    Args:
        value: the value, of any type.
        column: the name of its column, for error messages.
        where: the row's location, for error messages.

    Raises:
        DataError: the value is not a string, or has a lone surrogate.
    """
    if not isinstance(value, str):
        raise DataError(
            f"{where} has {type_name(value)} in the column {column!r}, but a string is expected: correct the row, or "
            "name another column."
        )
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where} has a lone surrogate at character {error.start} of the column {column!r}, which is not valid "
            "text: correct the row."
        ) from None
    return value


def type_name(value: object) -> str:
    """Return a description of a value's type for error messages, such as "a value of type int"; "nothing" for None."""
    if value is None:
        return "nothing"
    return f"a value of type {type(value).__name__}"
