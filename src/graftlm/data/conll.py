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
    """Yield the words and the tags of each sentence, and its location, from a file with one word per line.

    Empty lines separate sentences. Columns are separated by tabs if the file has any, and otherwise by blanks. Comments
    begin with `#` and have no column of tags. Lines with `-DOCSTART-` are skipped.

    Args:
        path: the file.
        columns: names of the columns of words and tags by the config key that sets each; only used with a `header`.
        header: names of all columns. By default the first column has the words and the last one the tags, and in an
            `.iob2` file, as in Universal NER, the second and the third.

    Raises:
        DataError: the file can't be read, or a line has no tag or a wrong number of columns.
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
        if _is_comment(cells, has_tabs) or cells[0] == "-DOCSTART-":
            continue
        _check_cells(cells, layout, f"{path}: line {number}")
        if not words:
            first_line = number
        words.append(cells[layout.word])
        tags.append(cells[layout.tag])


def _find_columns(path: Path, columns: Mapping[str, str], header: Sequence[str]) -> _Columns:
    if header:
        check_columns(header, columns, str(path), "task")
        word, tag = (list(header).index(name) for name in columns.values())
        return _Columns(word, tag, count=len(header), exact=True)
    if ".iob2" in path.suffixes:
        return _Columns(word=1, tag=2, count=3, exact=False)
    return _Columns(word=0, tag=-1, count=2, exact=False)


def _is_comment(cells: Sequence[str], has_tabs: bool) -> bool:
    """Return whether a line is a comment: with tabs if it has one cell, and otherwise if it looks like `# key = value`.

    Other lines that begin with `#` have a word such as `#1`.
    """
    if not cells[0].startswith("#"):
        return False
    if has_tabs:
        return len(cells) == 1
    return "=" in cells[1:]


def _check_cells(cells: Sequence[str], layout: _Columns, where: str) -> None:
    is_wrong = len(cells) != layout.count if layout.exact else len(cells) < layout.count
    if is_wrong:
        expected = f"{layout.count}" if layout.exact else f"at least {layout.count}"
        raise DataError(
            f"{where} has {len(cells)} columns, but {expected} are expected, including a word and its tag: correct the "
            "line, or name the task's columns."
        )
    if not cells[layout.word].strip() or not cells[layout.tag].strip():
        raise DataError(f"{where} has an empty word or tag: correct the line.")
