"""Rule-based checkers: is a text formal or informal, feminine or masculine? One table of rules per kind and language.

A checker finds the markers of its table in a text, adds up their weights, and returns the label with the largest sum.
The code knows no language: all of that is in `checker_tables/*.yaml`.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, get_args

from pydantic import Field, model_validator

from graftlm.config import Config
from graftlm.errors import DataError, MissingExtraError, did_you_mean

CheckerKind = Literal["formality", "gender", "it"]
KINDS: tuple[str, ...] = get_args(CheckerKind)
_SHORTEST_COUNTERPART = 6  # letters; the ends of longer words are often unrelated short words
_TABLES = Path(__file__).parent / "checker_tables"
_LIST_NAME = re.compile(r"\{([a-z_]+)\}")
# The start of a sentence: the start of the text or final punctuation, then blanks, quotes, brackets or dashes.
_SENTENCE_START = re.compile(r"(?:^|[.!?…:;\n])[\s\"'»«“”„‚‘’()\[\]¿¡*–—-]*$")


class Rule(Config):
    """One sort of marker.

    Args:
        label: the label that a match counts for.
        words: whole words or phrases to match; `{name}` inserts the table's list `name`.
        pattern: a regular expression instead, with `{name}` for any word of a list. It matches whole words.
        weight: of one match.
        position: whether the match must start a sentence, or must not.
        after: a regular expression that the text before the match must end with.
        case: whether case matters.
        unless: exceptions, in lower case; `{name}` inserts a list.
        lemma: endings, one of which the word's lemma must have while it differs from the word: the form of a verb
            rather than a noun. Needs simplemma.
        counterpart: pairs of endings. With one replaced by the other, the word or a compound's last part must be a
            word of the dictionary (German -er to -erin: a person rather than a thing). Needs simplemma.
        source: a regular expression that the English source must match; without a source the rule does not apply.
        not_source: a regular expression that the English source must not match; without a source the rule applies.
        role: the grammatical role of the match, if its form shows it.
        reason: why the match counts.
    """

    label: str
    words: tuple[str, ...] = ()
    pattern: str | None = None
    weight: float = Field(1.0, gt=0)
    position: Literal["anywhere", "start", "inside"] = "anywhere"
    after: str | None = None
    case: bool = False
    unless: tuple[str, ...] = ()
    lemma: tuple[str, ...] = ()
    counterpart: tuple[tuple[str, str], ...] = ()
    source: str | None = None
    not_source: str | None = None
    role: Literal["subject", "object"] | None = None
    reason: str

    @model_validator(mode="after")
    def _words_or_pattern(self) -> Self:
        if bool(self.words) == bool(self.pattern):
            raise ValueError(f"the rule {self.reason!r} needs either words or a pattern")
        return self

    def applies_to(self, source: str | None) -> bool:
        """Whether the rule's conditions on the English source hold."""
        if source is None:
            return self.source is None
        excluded = self.not_source and re.search(self.not_source, source, re.IGNORECASE)
        return not excluded and bool(re.search(self.source or "", source, re.IGNORECASE))


class AddressForms(Config):
    """What a language's forms of address leave open, for those who need sentences with a certain label.

    Args:
        third_person: whether the polite form is a third person, which also refers to others.
        label: the label of forms that one person shares with several.
        shared: a regular expression of these forms.
        several: a regular expression of hints that several persons are addressed.
    """

    third_person: bool = False
    label: str | None = None
    shared: str = ""
    several: str = ""


class CheckerTable(Config):
    """The rules of one kind for one language.

    Args:
        labels: in display order.
        method: what the table does and can't do.
        borders: whether the script separates words; if not, matches may lie inside words.
        lists: named lists, each a string of words separated by blanks, or of phrases separated by commas.
        rules: all rules; the weights of their matches add up.
        address: for tables of forms of address.
        clauses: for tables of pronouns: the label whose pronouns may also refer to clauses or to nothing, besides
            neuter.
    """

    kind: str
    language: str
    labels: tuple[str, ...]
    method: str
    borders: bool = True
    lists: dict[str, str] = {}
    rules: tuple[Rule, ...]
    address: AddressForms = AddressForms()
    clauses: str | None = None

    @model_validator(mode="after")
    def _known_names(self) -> Self:
        for rule in self.rules:
            if rule.label not in self.labels:
                raise ValueError(f"the rule {rule.reason!r} votes for {rule.label!r}, which is no label of the table")
            for name in _LIST_NAME.findall(" ".join((rule.pattern or "", *rule.words, *rule.unless))):
                if name not in self.lists:
                    raise ValueError(f"the rule {rule.reason!r} names the list {name!r}, which the table lacks")
        return self

    def words_of(self, name: str) -> list[str]:
        """The words of a list."""
        text = self.lists[name]
        return [word.strip() for word in text.split("," if "," in text else None) if word.strip()]

    def expression(self, rule: Rule) -> re.Pattern[str]:
        """A rule's compiled expression."""
        template = rule.pattern if rule.pattern is not None else _alternatives(self.expand(rule.words))
        expression = _LIST_NAME.sub(lambda match: _alternatives(self.words_of(match[1])), template)
        if self.borders:
            expression = rf"(?<!\w)(?:{expression})(?!\w)"
        return re.compile(expression, 0 if rule.case else re.IGNORECASE)

    def expand(self, words: tuple[str, ...]) -> list[str]:
        """Words, with each `{name}` replaced by its list."""
        names = [(word, _LIST_NAME.fullmatch(word)) for word in words]
        return [item for word, name in names for item in (self.words_of(name[1]) if name else [word])]


def _alternatives(words: list[str]) -> str:
    """An expression for any of the words, longest first; a final `*` matches any ending."""
    longest_first = sorted(set(words), key=len, reverse=True)
    return "(?:" + "|".join(re.escape(word).replace(r"\*", r"\w*") for word in longest_first) + ")"


class Marker(NamedTuple):
    """A match that counts for a label: its `text`, `start` and `weight`, the `reason`, and its grammatical `role`."""

    label: str
    text: str
    start: int
    weight: float
    reason: str
    role: str | None = None

    def overlaps(self, other: Marker) -> bool:
        return self.start < other.start + len(other.text) and other.start < self.start + len(self.text)


@dataclass(frozen=True)
class CheckResult:
    """The markers in text order, the sum of their weights for every label, and the label with the largest sum.

    The label is None without markers, or if two labels share the largest sum.
    """

    label: str | None
    scores: Mapping[str, float]
    markers: tuple[Marker, ...]

    @property
    def mixed(self) -> bool:
        """Whether there are markers of more than one label."""
        return sum(score > 0 for score in self.scores.values()) > 1


class Checker:
    """Finds the label of a text by the rules of a table."""

    def __init__(self, table: CheckerTable) -> None:
        self.table = table
        self._rules = [
            (rule, table.expression(rule), frozenset(word.lower() for word in table.expand(rule.unless)))
            for rule in table.rules
        ]

    def check(self, text: str, source: str | None = None) -> CheckResult:
        """The label of `text`.

        Args:
            text: in the table's language.
            source: the English text that it translates. Some rules need it: a verb without a subject is a formal
                address only if the source addresses somebody.

        Raises:
            MissingExtraError: a rule needs a dictionary that is not installed.
        """
        text = unicodedata.normalize("NFC", text)
        markers: list[Marker] = []
        # Of overlapping markers with one label, the heaviest and then the longest counts.
        for marker in sorted(self._markers(text, source), key=lambda m: (-m.weight, -len(m.text), m.start)):
            if not any(marker.label == other.label and marker.overlaps(other) for other in markers):
                markers.append(marker)
        markers.sort(key=lambda marker: marker.start)
        scores = {label: sum(m.weight for m in markers if m.label == label) for label in self.table.labels}
        best, second, *_ = sorted(scores.values(), reverse=True)
        label = max(scores, key=scores.__getitem__) if best > second else None
        return CheckResult(label, scores, tuple(markers))

    def _markers(self, text: str, source: str | None) -> Iterator[Marker]:
        for rule, expression, exceptions in self._rules:
            for match in expression.finditer(text) if rule.applies_to(source) else ():
                if match[0].lower() not in exceptions and self._counts(rule, match, text):
                    yield Marker(rule.label, match[0], match.start(), rule.weight, rule.reason, rule.role)

    def _counts(self, rule: Rule, match: re.Match[str], text: str) -> bool:
        before = text[: match.start()]
        if rule.after and not re.search(rf"(?<!\w)(?:{rule.after})$", before, re.IGNORECASE):
            return False
        if rule.position != "anywhere" and bool(_SENTENCE_START.search(before)) != (rule.position == "start"):
            return False
        if rule.lemma:
            word = match[0].lower()
            lemma = _simplemma().lemmatize(word, lang=self.table.language)
            if lemma == word or not lemma.endswith(rule.lemma):
                return False
        return not rule.counterpart or _has_counterpart(match[0], rule.counterpart, self.table.language)


@cache
def _has_counterpart(word: str, endings: tuple[tuple[str, str], ...], language: str) -> bool:
    """Whether a word, or the last part of a compound, is in the dictionary with another ending."""
    tails = [word, *(word[start:].capitalize() for start in range(3, len(word) - 4))]
    others = (tail.removesuffix(old) + new for tail in tails for old, new in endings if tail.endswith(old))
    return any(len(other) >= _SHORTEST_COUNTERPART and _simplemma().is_known(other, lang=language) for other in others)


@cache
def _simplemma() -> Any:
    try:
        return import_module("simplemma")
    except ModuleNotFoundError:
        raise MissingExtraError("simplemma", "clarify", "Looking words up in a dictionary") from None


def languages(kind: str) -> tuple[str, ...]:
    """The languages with a table of this kind."""
    return tuple(sorted(path.stem.rpartition("-")[2] for path in _TABLES.glob(f"{kind}-*.yaml")))


@cache
def checker(kind: str, language: str) -> Checker:
    """The checker of a kind for a language.

    Args:
        kind: formality (of address), gender (of persons), or it (gender of the antecedent of "it").
        language: two letters.

    Raises:
        DataError: there is no such kind, or no table for the language.
    """
    if kind not in KINDS:
        raise DataError(f"There is no checker of {kind!r}{did_you_mean(kind, KINDS)}.")
    if language not in languages(kind):
        known = ", ".join(languages(kind))
        raise DataError(f"There is no {kind} checker for the language {language!r}: choose one of {known}.")
    return Checker(CheckerTable.from_yaml(_TABLES / f"{kind}-{language}.yaml"))
