"""A table at work: it finds markers in a text, adds up their votes and says which label has more of them.

Nothing here knows a language: that is all in the tables.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from graftlm.errors import DataError, MissingExtraError, did_you_mean
from graftlm.pipelines.clarify.checkers.table import Rule, Table

CheckerKind = Literal["formality", "gender", "it"]
KINDS: tuple[str, ...] = get_args(CheckerKind)
_SHORTEST = 6  # letters of a counterpart: the ends of longer words are often short words of another sort
_TABLES = Path(__file__).parent / "tables"
# What stands before a sentence: the beginning, or a mark that ends one; then blanks, quotation marks, brackets, dashes.
_SENTENCE_START = re.compile(r"(?:^|[.!?…:;\n])[\s\"'»«“”„‚‘’()\[\]¿¡*–—-]*$")


class Marker(NamedTuple):
    """A place in a text that votes for a label: the matched `text`, where it `start`s, `why` it counts, its `role`."""

    label: str
    text: str
    start: int
    weight: float
    why: str
    role: str | None = None


@dataclass(frozen=True)
class Verdict:
    """What a checker found.

    Args:
        label: the one with most votes; None where there is no marker, or as many votes for another label.
        scores: votes for every label of the table.
        markers: in the order of the text.
    """

    label: str | None
    scores: Mapping[str, float]
    markers: tuple[Marker, ...]

    @property
    def mixed(self) -> bool:
        """Whether markers of more than one label are there."""
        return sum(score > 0 for score in self.scores.values()) > 1


class Checker:
    """Says which label of its table a text bears.

    Args:
        table: its rules.
    """

    def __init__(self, table: Table) -> None:
        self.table = table
        self._rules = [(rule, table.expression(rule), frozenset(_folded(table, rule))) for rule in table.rules]

    def check(self, text: str, source: str | None = None) -> Verdict:
        """Which label `text` bears.

        Args:
            text: in the table's language.
            source: the English text that it translates. Some rules read it: a verb without a subject is a formal
                address only where somebody is addressed.

        Raises:
            MissingExtraError: a rule needs a dictionary that is not installed.
        """
        text = unicodedata.normalize("NFC", text)
        markers = sorted(_longest(self._markers(text, source)), key=lambda marker: marker.start)
        scores = {label: sum(m.weight for m in markers if m.label == label) for label in self.table.labels}
        return Verdict(_winner(scores), scores, tuple(markers))

    def _markers(self, text: str, source: str | None) -> Iterator[Marker]:
        for rule, expression, unless in self._rules:
            if not _source_allows(rule, source):
                continue
            for found in expression.finditer(text):
                if found[0].lower() not in unless and self._counts(rule, found, text):
                    yield Marker(rule.label, found[0], found.start(), rule.weight, rule.why, rule.role)

    def _counts(self, rule: Rule, found: re.Match[str], text: str) -> bool:
        if rule.after and not re.search(rf"(?<!\w)(?:{rule.after})$", text[: found.start()], re.IGNORECASE):
            return False
        if rule.place != "anywhere" and _starts_sentence(text, found.start()) != (rule.place == "start"):
            return False
        if rule.lemma and not _is_form_of(found[0], rule.lemma, self.table.language):
            return False
        return not rule.counterpart or _has_counterpart(found[0], rule.counterpart, self.table.language)


def _folded(table: Table, rule: Rule) -> list[str]:
    return [word.lower() for word in table.spread(rule.unless)]


def _source_allows(rule: Rule, source: str | None) -> bool:
    if source is None:
        return rule.source is None
    wanted = rule.source is None or re.search(rule.source, source, re.IGNORECASE) is not None
    return wanted and not (rule.not_source and re.search(rule.not_source, source, re.IGNORECASE))


def _starts_sentence(text: str, place: int) -> bool:
    return _SENTENCE_START.search(text[:place]) is not None


def _longest(markers: Iterator[Marker]) -> list[Marker]:
    """Of markers for one label that overlap, the heaviest and then the longest alone: one place votes once."""
    kept: list[Marker] = []
    for marker in sorted(markers, key=lambda m: (-m.weight, -len(m.text), m.start)):
        if not any(marker.label == other.label and _overlap(marker, other) for other in kept):
            kept.append(marker)
    return kept


def _overlap(one: Marker, other: Marker) -> bool:
    return one.start < other.start + len(other.text) and other.start < one.start + len(one.text)


def _winner(scores: Mapping[str, float]) -> str | None:
    best, second, *_ = sorted(scores.values(), reverse=True)
    return max(scores, key=scores.__getitem__) if best > second else None


def _is_form_of(word: str, endings: tuple[str, ...], language: str) -> bool:
    lemma = _lemma(word.lower(), language)
    return lemma != word.lower() and lemma.endswith(endings)


@cache
def _lemma(word: str, language: str) -> str:
    """The dictionary form of a word."""
    return _simplemma().lemmatize(word, lang=language)


@cache
def _has_counterpart(word: str, endings: tuple[tuple[str, str], ...], language: str) -> bool:
    """Whether a word of the dictionary is `word`, or the last part of a compound, with another ending."""
    tails = [word, *(word[start:].capitalize() for start in range(3, len(word) - 4))]
    others = (tail.removesuffix(old) + new for tail in tails for old, new in endings if tail.endswith(old))
    return any(len(other) >= _SHORTEST and _simplemma().is_known(other, lang=language) for other in others)


@cache
def _simplemma() -> Any:
    try:
        return import_module("simplemma")
    except ModuleNotFoundError:
        raise MissingExtraError("simplemma", "clarify", "Looking words up in a dictionary") from None


def languages(kind: str) -> tuple[str, ...]:
    """The languages that have a table of this kind."""
    return tuple(sorted(path.stem.rpartition("-")[2] for path in _TABLES.glob(f"{kind}-*.yaml")))


@cache
def checker(kind: str, language: str) -> Checker:
    """The checker of a kind for a language.

    Args:
        kind: formality (of address), gender (of persons), or it (gender of the thing that "it" stands for).
        language: two letters.

    Raises:
        DataError: there is no such kind, or no table for the language.
    """
    if kind not in KINDS:
        raise DataError(f"There is no checker of {kind!r}{did_you_mean(kind, KINDS)}.")
    if language not in languages(kind):
        known = ", ".join(languages(kind))
        raise DataError(f"There is no {kind} checker for the language {language!r}: choose one of {known}.")
    return Checker(Table.from_yaml(_TABLES / f"{kind}-{language}.yaml"))
