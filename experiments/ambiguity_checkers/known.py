"""Labels for languages that no public set marks: read by a person, or told by another language of the same text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from graftlm.config import read_yaml
from graftlm.pipelines.clarify.examples import AmbiguityKind, Example, english_gender
from graftlm.pipelines.clarify.parallel import Pair, read_bible, read_ntrex

_READ = Path(__file__).with_name("read.yaml")
_DANISH_ONE = re.compile(r"\b(?:du|dig|din|dit|dine)\b", re.IGNORECASE)
# I is the plural you where it begins no sentence; there it may be the preposition.
_DANISH_SEVERAL = re.compile(r"(?<=\w )I\b|(?<=, )I\b|\b(?:[Ee]der|[Ee]ders|[Jj]er|[Jj]eres)\b")
GENDER_LANGUAGES = ("de", "es", "fr")


def read_by_hand(parallel: Path, language: str) -> Iterator[Example]:
    """NTREX's sentences whose address was read, in the languages that `read.yaml` has.

    Raises:
        DataError: NTREX is incomplete.
    """
    labels = read_yaml(_READ).get(language, {})
    known = {f"ntrex:{line}": label for label, lines in labels.items() for line in lines}
    if known and (parallel / "ntrex").is_dir():
        for pair in _ntrex(parallel, language):
            if pair.id in known:
                yield _example("formality", language, pair, known[pair.id])


def told_by_danish(parallel: Path, language: str) -> Iterator[Example]:
    """Verses of the French New Testament, where tu is one person and vous several, as du and I in the Danish one.

    Only verses whose Danish has one of the two are taken, and no psalms, whose verses the two count differently.

    English hides which it is; no English is given to the checker.

    Raises:
        DataError: a Bible can't be read.
    """
    danish, french = (parallel / "bible" / name for name in ("DaOT1871NT1907.txt", "FreSynodale1921.txt"))
    if language != "fr" or not danish.exists():
        return
    for document in read_bible(danish, french):
        for pair in document.pairs if document.id != "Psalms" else ():
            one, several = _DANISH_ONE.search(pair.source), _DANISH_SEVERAL.search(pair.source)
            if bool(one) != bool(several):
                yield _example("formality", language, replace(pair, source=""), "informal" if one else "formal")


def told_by_pronouns(parallel: Path, language: str) -> Iterator[Example]:
    """NTREX's sentences whose English has pronouns of one gender alone: the persons they speak of may be others still.

    Raises:
        DataError: NTREX is incomplete.
    """
    if language in GENDER_LANGUAGES and (parallel / "ntrex").is_dir():
        for pair in _ntrex(parallel, language):
            if told := english_gender(pair.source):
                yield _example("profession", language, pair, told)


def _ntrex(parallel: Path, language: str) -> Iterator[Pair]:
    for document in read_ntrex(parallel / "ntrex", language):
        yield from document.pairs


def _example(kind: AmbiguityKind, language: str, pair: Pair, label: str) -> Example:
    """An example whose whole reference counts as marked."""
    return Example(pair.id, kind, language, pair.source, reference=pair.target, label=label, marks=(pair.target,))
