"""Sentences with a tag for each word, as CoNLL's tasks write them: a word a line, an empty line after each sentence.

Columns stand apart by tabs, in a file that has any, else by blanks. Without names the first column is the word and the
last the tag; of an `.iob2` file, as Universal NER has it, the second and the third. Lines of comments begin with `#`
and have no column of tags; `-DOCSTART-` lines are passed over.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from graftlm.data.tables import check_columns
from graftlm.errors import DataError
from graftlm.io import read_text

_DOCUMENT = "-DOCSTART-"
_IOB2 = (1, 2)


def read_conll(
    path: Path, columns: dict[str, str], head: Sequence[str] = ()
) -> Iterator[tuple[list[str], list[str], str]]:
    """The words and tags of each sentence, and where it begins.

    Args:
        path: the file.
        columns: the columns of words and of tags, by the key that sets each; read where `head` names columns.
        head: the columns' names; empty for the usual places.

    Raises:
        DataError: the file can't be read, or a line has no tag, or too few or too many columns.
    """
    lines = read_text(path).split("\n")
    tabs = any("\t" in line for line in lines)
    places = _places(path, columns, head)
    words: list[str] = []
    tags: list[str] = []
    began = 0
    for number, line in enumerate([*lines, ""], start=1):
        if not line.strip():
            if words:
                yield words, tags, f"{path}: line {began}"
            words, tags = [], []
            continue
        cells = line.rstrip().split("\t") if tabs else line.split()
        if _is_comment(cells, tabs) or cells[0] == _DOCUMENT:
            continue
        _check(cells, head, places, f"{path}: line {number}")
        began = began if words else number
        words.append(cells[places[0]])
        tags.append(cells[places[1]])


def _places(path: Path, columns: dict[str, str], head: Sequence[str]) -> tuple[int, int]:
    if not head:
        return _IOB2 if ".iob2" in path.suffixes else (0, -1)
    check_columns(head, columns, str(path), "task")
    word, tag = (list(head).index(name) for name in columns.values())
    return word, tag


def _is_comment(cells: Sequence[str], tabs: bool) -> bool:
    return cells[0].startswith("#") and (len(cells) == 1 if tabs else "=" in cells[1:])


def _check(cells: Sequence[str], head: Sequence[str], places: tuple[int, int], where: str) -> None:
    wanted = len(head) or max(2, *(place + 1 for place in places))
    if len(cells) < wanted or (head and len(cells) != wanted):
        raise DataError(
            f"{where} has {len(cells)} columns, but {wanted}{'' if head else ' or more'} are expected, a word and its "
            "tag among them: correct the line, or name the task's columns."
        )
    if not all(cells[place].strip() for place in places):
        raise DataError(f"{where} has an empty word or tag: correct the line.")
