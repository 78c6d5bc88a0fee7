"""The words that detection knows: tables beside this file, and a reader for statistics of first names."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from pathlib import Path

from pydantic import RootModel

from graftlm.config import Config, read_yaml
from graftlm.errors import DataError
from graftlm.pipelines.clarify.examples import read_lines

_FOLDER = Path(__file__).parent / "words"


class Sense(Config):
    """One meaning of a word.

    Args:
        gloss: the meaning in a few words.
        cues: words that give it away where they stand near.
        es, fr, de, ja: its translations.
    """

    gloss: str
    cues: tuple[str, ...]
    es: tuple[str, ...] = ()
    fr: tuple[str, ...] = ()
    de: tuple[str, ...] = ()
    ja: tuple[str, ...] = ()

    def translations(self, language: str) -> frozenset[str]:
        """In one language, in lower case; none where the language is not in the table."""
        return frozenset(word.lower() for word in getattr(self, language, ()))


class _Senses(RootModel[dict[str, tuple[Sense, ...]]]):
    """The table of polysemous words."""


@cache
def polysemous_words() -> dict[str, tuple[Sense, ...]]:
    """Words of several meanings, each with its senses."""
    return _Senses.model_validate(read_yaml(_FOLDER / "polysemy.yaml")).root


@cache
def word_list(name: str) -> frozenset[str]:
    """One of the lists of `words/detection.yaml`, in lower case; phrases are those between commas."""
    text = read_yaml(_FOLDER / "detection.yaml")[name].lower()
    return frozenset(word.strip() for word in (text.split(",") if "," in text else text.split()))


def unisex_names(folder: str | Path, share: float = 0.4, least: int = 1000) -> frozenset[str]:
    """First names that are borne by both women and men, from the files of the US Social Security Administration.

    Args:
        folder: with files yobYEAR.txt, of lines name,F or M,number.
        share: each gender's smallest share of a name's bearers.
        least: bearers that a name has to have.

    Raises:
        DataError: there are no such files, or a line is of another form.
    """
    files = sorted(Path(folder).glob("yob*.txt"))
    if not files:
        raise DataError(
            f"{folder} holds no files yobYEAR.txt: fetch the national data of baby names, or leave them out."
        )
    counts = {"F": Counter[str](), "M": Counter[str]()}
    for path in files:
        for number, line in enumerate(read_lines(path), start=1):
            found = re.fullmatch(r"([^,]+),([FM]),(\d+)", line)
            if found is None:
                raise DataError(f"{path}:{number} is {line!r}, but a line such as Riley,F,4000 is expected.")
            counts[found[2]][found[1].lower()] += int(found[3])
    totals = counts["F"] + counts["M"]
    return frozenset(
        name
        for name, total in totals.items()
        if total >= least and min(counts["F"][name], counts["M"][name]) >= share * total
    )
