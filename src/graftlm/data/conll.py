"""Read tagged sentences of CoNLL files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from graftlm.data.table_files import check_columns
from graftlm.errors import DataError
from graftlm.files.reading import read_text


class _Columns(NamedTuple):
    """The positions of the columns of words and tags, and the number of columns; `exact` forbids more."""

    word: int
    tag: int
    count: int
    exact: bool


def read_conll(
    path: Path,
    columns: Mapping[str, str],
    header: Sequence[str] = (),
) -> Iterator[tuple[tuple[list[str], list[str]], str]]:
    """Read tagged sentences from a file with one word per line.

    Empty lines separate sentences. Columns are separated by tabs if the file has any, and otherwise by blanks. Lines
    whose first column is `-DOCSTART-` are skipped, and so are comments: lines that begin with `#` and, in a file with
    tabs, have one column, or in a file with blanks, look like `# key = value`.

    Args:
        path: a UTF-8 file, which may be gzipped.
        columns: names of the columns of words and tags by the config key that sets each; only used with a `header`.
        header: names of all columns. By default the first column has the words and the last one the tags, and in an
            `.iob2` file, as in Universal NER, the second and the third.

    Yields:
        The words and the tags of a sentence, and the location of its first line.

    Raises:
        DataError: the file can't be read, `header` lacks a column or has it twice, a line has a wrong number of
            columns, or a word or tag is empty.
    """
    layout = _find_columns(path, columns, header)
    lines = read_text(path).split("\n")
    has_tabs = any("\t" in line for line in lines)
    words: list[str] = []
    tags: list[str] = []
    first_line = 0
    for number, line in enumerate([*lines, ""], start=1):
        if not line.strip():
            if words:
                yield (words, tags), f"{path}: line {first_line}"
            words = []
            tags = []
            continue
        cells = line.rstrip().split("\t") if has_tabs else line.split()
        if _is_comment(cells, has_tabs=has_tabs) or cells[0] == "-DOCSTART-":
            continue
        _check_cells(cells, layout, f"{path}: line {number}")
        if not words:
            first_line = number
        words.append(cells[layout.word])
        tags.append(cells[layout.tag])


def _find_columns(path: Path, columns: Mapping[str, str], header: Sequence[str]) -> _Columns:
    """Return the positions of the words and tags: by the names in `header`, or by the suffix of the file."""
    if header:
        check_columns(header, columns, str(path), "task")
        word, tag = (list(header).index(name) for name in columns.values())
        return _Columns(word, tag, count=len(header), exact=True)
    if ".iob2" in path.suffixes:
        return _Columns(word=1, tag=2, count=3, exact=False)
    return _Columns(word=0, tag=-1, count=2, exact=False)


def _is_comment(cells: Sequence[str], *, has_tabs: bool) -> bool:
    """Return whether a line is a comment: with tabs if it has one cell, and otherwise if it looks like `# key = value`.

    Other lines that begin with `#` have a word such as `#1`.
    """
    if not cells[0].startswith("#"):
        return False
    if has_tabs:
        return len(cells) == 1
    return "=" in cells[1:]


def _check_cells(cells: Sequence[str], layout: _Columns, where: str) -> None:
    """Raise `DataError` if a line has a wrong number of columns, or an empty word or tag."""
    if layout.exact and len(cells) != layout.count:
        raise DataError(
            f"{where}: the number of columns is {len(cells)}, but the task names {layout.count}: correct the line, or "
            "the task's columns."
        )
    if len(cells) < layout.count:
        raise DataError(
            f"{where}: the number of columns is {len(cells)}, but at least {layout.count} are expected, including a "
            "word and its tag: correct the line, or name the task's columns."
        )
    for name, cell in (("word", cells[layout.word]), ("tag", cells[layout.tag])):
        if not cell.strip():
            raise DataError(f"{where} has an empty {name}: fill it in, or remove the line.")
