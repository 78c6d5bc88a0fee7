"""Read tagged sentences of CoNLL files."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from graftlm.data.table_files import check_columns, file_suffix
from graftlm.errors import DataError
from graftlm.files.reading import read_text

# Words may contain no-break and other blanks of Unicode, which separate no columns.
_BLANKS = " \t"
_SEPARATOR = re.compile(r"[ \t]+")
_LINE_END = re.compile(r"\r\n|\r|\n")
_WORD_RANGE = re.compile(r"\d+-\d+")
_EMPTY_NODE = re.compile(r"\d+\.\d+")


_SUFFIXES = frozenset({".bio", ".bioes", ".conll", ".conllu", ".iob", ".iob2"})
_TAG = re.compile(r"O|[BIES]-\S+")


class _Columns(NamedTuple):
    """The positions of the columns of words and tags, and the number of columns; `exact` forbids more.

    With `numbered`, the first column numbers the words as CoNLL-U does.
    """

    word: int
    tag: int
    count: int
    exact: bool
    numbered: bool = False


def is_conll(path: Path) -> bool:
    """Return whether the file's suffix is one of files with a word and its tag on each line, such as `.conll`."""
    return file_suffix(path) in _SUFFIXES


def ends_in_tag(line: str, separator: str | None = None) -> bool:
    """Return whether a line has several columns, of which the last is a tag such as `O` or `B-place`.

    Args:
        line: the line.
        separator: what separates columns; None for white space. A sentence may end in such a word too, as in `a B-52`.
    """
    cells = line.strip().split(separator)
    return len(cells) > 1 and _TAG.fullmatch(cells[-1]) is not None


def read_conll(
    path: Path,
    columns: Mapping[str, str],
    header: Sequence[str] = (),
    skipped: Counter[str] | None = None,
) -> Iterator[tuple[tuple[list[str], list[str]], str]]:
    """Read tagged sentences from a file with one word per line.

    Empty lines separate sentences. Columns are separated by tabs if the file has any, and otherwise by spaces. Lines
    whose first column is `-DOCSTART-` are skipped, and so are comments: lines that begin with `#` and, in a file with
    tabs, have one column, or in a file with spaces, look like `# key = value`. Where words are numbered, the lines of
    multiword tokens, such as `3-4`, and of empty nodes, such as `5.1`, are skipped: the words of a token follow it,
    and an empty node is not in the text.

    Args:
        path: a UTF-8 file, which may be gzipped.
        columns: names of the columns of words and tags by the config key that sets each; only used with a `header`.
        header: names of all columns; `id` is that of the words' numbers. By default the first column has the words and
            the last one the tags; in an `.iob2` file, as in Universal NER, the second and the third; in a `.conllu`
            file the second and the fourth, which has universal parts of speech.
        skipped: counts the skipped multiword tokens and empty nodes.

    Yields:
        The words and the tags of a sentence, and the location of its first line.

    Raises:
        DataError: the file can't be read, `header` lacks a column or has it twice, a line has a wrong number of
            columns, a word or tag is empty, or the words of a sentence are their numbers.
    """
    layout = _find_columns(path, columns, header)
    skipped = Counter() if skipped is None else skipped
    lines = _LINE_END.split(read_text(path))
    first_tab = next((number for number, line in enumerate(lines, start=1) if "\t" in line), 0)
    has_tabs = first_tab > 0
    words: list[str] = []
    tags: list[str] = []
    first_line = 0
    for number, line in enumerate([*lines, ""], start=1):
        if not line.strip(_BLANKS):
            if words:
                where = f"{path}: line {first_line}"
                _check_words(words, layout, where)
                yield (words, tags), where
            words = []
            tags = []
            continue
        stripped = line.rstrip(_BLANKS)
        cells = stripped.split("\t") if has_tabs else _SEPARATOR.split(stripped.lstrip(_BLANKS))
        if _is_comment(cells, has_tabs=has_tabs) or cells[0] == "-DOCSTART-":
            continue
        if layout.numbered and _WORD_RANGE.fullmatch(cells[0]):
            skipped["multiword tokens"] += 1
            continue
        if layout.numbered and _EMPTY_NODE.fullmatch(cells[0]):
            skipped["empty nodes"] += 1
            continue
        where = f"{path}: line {number}"
        if has_tabs and len(cells) == 1 and " " in stripped:
            raise _separator_error(where, first_tab)
        _check_cells(cells, layout, where)
        if not words:
            first_line = number
        words.append(cells[layout.word])
        tags.append(cells[layout.tag])


def _find_columns(path: Path, columns: Mapping[str, str], header: Sequence[str]) -> _Columns:
    """Return the positions of the words and tags: by the names in `header`, or by the suffix of the file."""
    if header:
        check_columns(header, columns, str(path), "task")
        word, tag = (list(header).index(name) for name in columns.values())
        return _Columns(word, tag, count=len(header), exact=True, numbered=header[0].casefold() == "id")
    if ".conllu" in path.suffixes:
        return _Columns(word=1, tag=3, count=10, exact=False, numbered=True)
    if ".iob2" in path.suffixes:
        return _Columns(word=1, tag=2, count=3, exact=False, numbered=True)
    return _Columns(word=0, tag=-1, count=2, exact=False)


def _check_words(words: Sequence[str], layout: _Columns, where: str) -> None:
    """Raise `DataError` if the words of a sentence are 1, 2 and so on, in a column that nobody named."""
    numbers = [str(number) for number in range(1, len(words) + 1)]
    if len(words) > 1 and not layout.exact and words == numbers:
        raise DataError(
            f"{where}: the column of words has the numbers of the words: name the task's columns, or end the name of "
            "a CoNLL-U file in .conllu."
        )


def _is_comment(cells: Sequence[str], *, has_tabs: bool) -> bool:
    """Return whether a line is a comment: with tabs if it has one cell, and otherwise if it looks like `# key = value`.

    Other lines that begin with `#` have a word such as `#1`.
    """
    if not cells[0].startswith("#"):
        return False
    if has_tabs:
        return len(cells) == 1
    return "=" in cells[1:]


def _separator_error(where: str, first_tab: int) -> DataError:
    """Return the error for a line with spaces and no tab, in a file in which another line has a tab."""
    return DataError(
        f"{where} has spaces and no tab, but the file counts as separated by tabs because of line {first_tab}: "
        "separate the columns of all lines alike."
    )


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
