"""One example of an ambiguity: an English text that can be translated in more than one way, and what decides."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from graftlm.errors import DataError

AmbiguityKind = Literal["it", "polysemy", "formality", "name", "profession"]
KINDS: tuple[AmbiguityKind, ...] = get_args(AmbiguityKind)
GENDERED = re.compile(r"\b(?:she|her|hers|herself|he|him|his|himself)\b", re.IGNORECASE)
_WOMAN = re.compile(r"\b(?:she|her|hers|herself)\b", re.IGNORECASE)
_MAN = re.compile(r"\b(?:he|him|his|himself)\b", re.IGNORECASE)


@dataclass(frozen=True)
class Example:
    """An ambiguous text with its translation.

    Args:
        id: unique in its set.
        kind: what is ambiguous.
        language: of the translation, two letters; empty where there is none.
        source: the English text.
        context: English sentences that decide, in their order; what a user knows.
        reference: the right translation.
        label: what the reference says: formal, informal or neutral; feminine, masculine, neuter or neutral; of a
            polysemous word its translation; None where the set does not tell.
        contrast: a translation that says the opposite.
        word: the ambiguous word.
        marks: parts of the reference that bear the label, where the set marks them.
        reference_context: translations of the context's sentences.
    """

    id: str
    kind: AmbiguityKind
    language: str
    source: str
    context: tuple[str, ...] = ()
    reference: str = ""
    label: str | None = None
    contrast: str | None = None
    word: str | None = None
    marks: tuple[str, ...] = ()
    reference_context: tuple[str, ...] = ()


def english_gender(text: str) -> str | None:
    """The gender that the pronouns of an English text tell: None where there are none, or of both."""
    women, men = _WOMAN.search(text), _MAN.search(text)
    if bool(women) == bool(men):
        return None
    return "feminine" if women else "masculine"


def read_lines(path: Path) -> list[str]:
    """The lines of a file, told apart by line feeds alone: other separators, such as U+2028, are part of a line.

    Bytes that are not UTF-8 become U+FFFD.

    Raises:
        DataError: the file can't be read.
    """
    try:
        text = path.read_bytes().decode("utf-8", errors="replace")
    except OSError as error:
        raise DataError(f"{path} can't be read ({error.strerror}): check the folder of data sets.") from None
    lines = text.removeprefix("\ufeff").split("\n")
    return [line.removesuffix("\r") for line in (lines if lines[-1] else lines[:-1])]


def read_aligned(*paths: Path) -> list[tuple[str, ...]]:
    """Lines of files that belong together.

    Raises:
        DataError: a file can't be read, or they have different numbers of lines.
    """
    columns = [read_lines(path) for path in paths]
    if len({len(column) for column in columns}) > 1:
        counts = ", ".join(f"{path.name} has {len(column)}" for path, column in zip(paths, columns, strict=True))
        raise DataError(f"Files that belong together have different numbers of lines ({counts}): fetch them again.")
    return list(zip(*columns, strict=True))
