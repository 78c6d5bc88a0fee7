"""Labels for languages that no public set labels: read by a person, or derived from another language of the text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from graftlm.config import read_yaml
from graftlm.errors import DataError, did_you_mean
from graftlm.pipelines.clarify.datasets import (
    AmbiguityKind,
    AmbiguousExample,
    ParallelDocument,
    SentencePair,
    english_gender,
    parallel_documents,
    read_aligned,
    read_lines,
)

_READ = Path(__file__).with_name("read.yaml")
_DANISH_SINGULAR = re.compile(r"\b(?:du|dig|din|dit|dine)\b", re.IGNORECASE)
# I is the plural you except at the start of a sentence, where it may be the preposition.
_DANISH_PLURAL = re.compile(r"(?<=\w )I\b|(?<=, )I\b|\b(?:[Ee]der|[Ee]ders|[Jj]er|[Jj]eres)\b")
_VERSE = re.compile(r"\[(\d+:\d+)\] ?(.*)")
_NTREX = {"de": "deu", "fr": "fra", "es": "spa", "ja": "jpn", "it": "ita", "pt": "por"}
GENDER_LANGUAGES = ("de", "es", "fr")


def read_by_hand(parallel: Path, language: str) -> Iterator[AmbiguousExample]:
    """NTREX's sentences whose form of address a person read, in the languages of `read.yaml`.

    Raises:
        DataError: NTREX is incomplete.
    """
    labels = read_yaml(_READ).get(language, {})
    known = {f"ntrex:{line}": label for label, lines in labels.items() for line in lines}
    if known and (parallel / "ntrex").is_dir():
        for pair in _ntrex(parallel, language):
            if pair.id in known:
                yield _example("formality", language, pair, known[pair.id])


def labelled_by_danish(parallel: Path, language: str) -> Iterator[AmbiguousExample]:
    """Verses of the French Bible, where tu is one person and vous several, like du and I in the Danish one.

    Only verses whose Danish has one of the two count, and no psalms, whose verses the two Bibles number differently.
    The checker gets no English source, since English hides the difference.

    Raises:
        DataError: a Bible can't be read.
    """
    danish, french = (parallel / "bible" / name for name in ("DaOT1871NT1907.txt", "FreSynodale1921.txt"))
    if language != "fr" or not danish.exists():
        return
    for document in read_bible(danish, french):
        for pair in document.pairs if document.id != "Psalms" else ():
            singular, plural = _DANISH_SINGULAR.search(pair.source), _DANISH_PLURAL.search(pair.source)
            if bool(singular) != bool(plural):
                label = "informal" if singular else "formal"
                yield _example("formality", language, replace(pair, source=""), label)


def labelled_by_pronouns(parallel: Path, language: str) -> Iterator[AmbiguousExample]:
    """NTREX's sentences whose English pronouns have one gender. The sentence may be about other persons as well.

    Raises:
        DataError: NTREX is incomplete.
    """
    if language in GENDER_LANGUAGES and (parallel / "ntrex").is_dir():
        for pair in _ntrex(parallel, language):
            if gender := english_gender(pair.source):
                yield _example("profession", language, pair, gender)


def _ntrex(parallel: Path, language: str) -> Iterator[SentencePair]:
    for document in read_ntrex(parallel / "ntrex", language):
        yield from document.pairs


def _example(kind: AmbiguityKind, language: str, pair: SentencePair, label: str) -> AmbiguousExample:
    """An example whose whole reference counts as marked."""
    return AmbiguousExample(pair.id, kind, language, pair.source, (), pair.target, label, marks=(pair.target,))


def read_ntrex(folder: str | Path, language: str) -> list[ParallelDocument]:
    """NTREX-128: news in English and another language, with document ids."""
    if language not in _NTREX:
        raise DataError(f"There is no code of NTREX for the language {language!r}{did_you_mean(language, _NTREX)}.")
    names = ("DOCUMENT_IDS.tsv", "newstest2019-src.eng.txt", f"newstest2019-ref.{_NTREX[language]}.txt")
    return parallel_documents("ntrex", read_aligned(*(Path(folder) / name for name in names)))


def read_bible(source: str | Path, target: str | Path) -> list[ParallelDocument]:
    """Two Bibles with one verse per line, `[chapter:verse] text` below `### Book`; a book is a document.

    Verses that one Bible lacks are omitted. Some verses hold several sentences.
    """
    english, other = _verses(Path(source)), _verses(Path(target))
    rows = [(key[0], text, other[key]) for key, text in english.items() if other.get(key)]
    if not rows:
        raise DataError(
            f"{source} and {target} share no verse: name two Bibles with lines such as [1:1] under ### Genesis."
        )
    return parallel_documents("bible", [row for row in rows if row[1]])


def _verses(path: Path) -> dict[tuple[str, str], str]:
    book, verses = "", {}
    for line in read_lines(path):
        if line.startswith("### "):
            book = line[4:].strip()
        elif match := _VERSE.fullmatch(line):
            verses[book, match[1]] = match[2].strip()
    return verses
