"""Rule-based checkers: is a text formal or informal, feminine or masculine? There is a table per kind and language.

A checker finds the markers of its table in a text, adds up their weights, and returns the label with the largest sum.
All knowledge of a language is in `checker_tables/*.yaml`.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
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
_SHORTEST_COUNTERPART = 6  # letters; the ends of long words are often unrelated short words
_TABLES = Path(__file__).parent / "checker_tables"
_LIST_NAME = re.compile(r"\{([a-z_]+)\}")
# The start of a sentence: the start of the text or final punctuation, then blanks, quotes, brackets or dashes.
_SENTENCE_START = re.compile(r"(?:^|[.!?…:;\n])[\s\"'»«“”„‚‘’()\[\]¿¡*–—-]*$")


class Rule(Config):
    """A rule that finds markers of a label.

    Args:
        label: the label that a match counts for.
        words: whole words or phrases to match; `{name}` inserts the table's list `name`.
        pattern: a regular expression instead of words, with `{name}` for any word of a list. It matches whole words.
        weight: the weight of a match.
        position: whether the match must be at the start of a sentence, or inside it.
        after: a regular expression that the text before the match must end with.
        case: whether case matters.
        unless: exceptions, in lower case; `{name}` inserts a list.
        lemma: possible endings of the word's lemma, which must differ from the word: the form of a verb rather than a
            noun. Requires simplemma.
        counterpart: pairs of endings. If one is replaced by the other, the word or a compound's last part must be a
            word of the dictionary (German -er to -erin: a person rather than a thing). Requires simplemma.
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
        """Return whether the English source satisfies the conditions of the rule."""
        if source is None:
            return self.source is None
        if self.not_source and re.search(self.not_source, source, re.IGNORECASE):
            return False
        return self.source is None or re.search(self.source, source, re.IGNORECASE) is not None


class AddressForms(Config):
    """Ambiguities of a language's forms of address, for the builder, which needs sentences with certain labels.

    Args:
        third_person: whether the polite form is a third person, which may also refer to others.
        label: the label of forms that address one person or several.
        shared: a regular expression of these forms.
        several: a regular expression of hints that several persons are addressed.
    """

    third_person: bool = False
    label: str | None = None
    shared: str = ""
    several: str = ""


class CheckerTable(Config):
    """The rules of a kind for a language.

    Args:
        kind: kind of the checker.
        language: language code, two letters.
        labels: the labels in display order.
        method: method and limits of the table.
        borders: whether the script separates words; if not, matches may be inside words.
        lists: named lists: strings of words separated by white space, or of phrases separated by commas.
        rules: all rules; the weights of their matches add up.
        address: ambiguities of the forms of address, for tables of formality.
        clauses: for tables of pronouns, the label whose pronouns may also refer to clauses or to nothing, in addition
            to neuter.
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
                raise ValueError(f"the label {rule.label!r} of the rule {rule.reason!r} should be one of the table")
            templates = " ".join([rule.pattern or "", *rule.words, *rule.unless])
            for name in _LIST_NAME.findall(templates):
                if name not in self.lists:
                    raise ValueError(f"the rule {rule.reason!r} names the list {name!r}, which the table lacks")
        return self

    def words_of(self, name: str) -> list[str]:
        """Return the words of a list."""
        text = self.lists[name]
        entries = text.split(",") if "," in text else text.split()
        stripped = [entry.strip() for entry in entries]
        return [entry for entry in stripped if entry]

    def expression(self, rule: Rule) -> re.Pattern[str]:
        """Compile the expression of a rule."""
        template = rule.pattern
        if template is None:
            template = _alternatives(self.expand(rule.words))
        expression = _LIST_NAME.sub(lambda match: _alternatives(self.words_of(match[1])), template)
        if self.borders:
            expression = rf"(?<!\w)(?:{expression})(?!\w)"
        flags = re.NOFLAG if rule.case else re.IGNORECASE
        return re.compile(expression, flags)

    def expand(self, words: tuple[str, ...]) -> list[str]:
        """Replace each `{name}` among words by its list."""
        expanded = []
        for word in words:
            name = _LIST_NAME.fullmatch(word)
            if name is None:
                expanded.append(word)
            else:
                expanded.extend(self.words_of(name[1]))
        return expanded


def _alternatives(words: list[str]) -> str:
    """Return an expression for any of the words, longest first; a final `*` matches any ending."""
    longest_first = sorted(set(words), key=len, reverse=True)
    patterns = [re.escape(word).replace(r"\*", r"\w*") for word in longest_first]
    return f"(?:{'|'.join(patterns)})"


class Marker(NamedTuple):
    """A match that counts for a label.

    Args:
        label: the label.
        text: the matched text.
        start: its offset, in characters.
        weight: its weight.
        reason: why it counts.
        role: its grammatical role, if its form shows it.
    """

    label: str
    text: str
    start: int
    weight: float
    reason: str
    role: str | None = None

    @property
    def end(self) -> int:
        """Offset of the end of the match, in characters."""
        return self.start + len(self.text)

    def overlaps(self, other: Marker) -> bool:
        """Return whether two markers have characters in common."""
        return self.start < other.end and other.start < self.end


@dataclass(frozen=True)
class CheckResult:
    """The result of `Checker.check`.

    Args:
        label: the label with the largest score; None without markers, or if two labels have the largest score.
        scores: sum of the weights by label.
        markers: the markers in text order.
    """

    label: str | None
    scores: Mapping[str, float]
    markers: tuple[Marker, ...]

    @property
    def mixed(self) -> bool:
        """Whether there are markers of more than one label."""
        found = [label for label, score in self.scores.items() if score > 0]
        return len(found) > 1


class Checker:
    """Finds the label of a text by the rules of a table.

    Args:
        table: the table.
    """

    def __init__(self, table: CheckerTable) -> None:
        self.table = table
        self._rules: list[_CompiledRule] = []
        for rule in table.rules:
            exceptions = frozenset(word.lower() for word in table.expand(rule.unless))
            self._rules.append(_CompiledRule(rule, table.expression(rule), exceptions))

    def check(self, text: str, source: str | None = None) -> CheckResult:
        """Find the label of a text.

        Args:
            text: the text, in the table's language.
            source: the English text that it translates. Some rules require it: a verb without a subject is a formal
                address only if the source addresses somebody.

        Raises:
            MissingExtraError: a rule needs a dictionary that is not installed.
        """
        normalized = unicodedata.normalize("NFC", text)
        markers = _without_overlaps(self._markers(normalized, source))
        scores: dict[str, float] = {}
        for label in self.table.labels:
            scores[label] = sum(marker.weight for marker in markers if marker.label == label)
        best, second, *_ = sorted(scores.values(), reverse=True)
        label = None
        if best > second:
            label = max(scores, key=scores.__getitem__)
        return CheckResult(label=label, scores=scores, markers=tuple(markers))

    def _markers(self, text: str, source: str | None) -> Iterator[Marker]:
        """Yield the markers of a text, which may overlap."""
        for rule, expression, exceptions in self._rules:
            if not rule.applies_to(source):
                continue
            for match in expression.finditer(text):
                if match[0].lower() not in exceptions and self._counts(rule, match, text):
                    yield Marker(
                        label=rule.label,
                        text=match[0],
                        start=match.start(),
                        weight=rule.weight,
                        reason=rule.reason,
                        role=rule.role,
                    )

    def _counts(self, rule: Rule, match: re.Match[str], text: str) -> bool:
        """Return whether a match satisfies the conditions of its rule on the text and on the dictionary."""
        before = text[: match.start()]
        if rule.after and not re.search(rf"(?<!\w)(?:{rule.after})$", before, re.IGNORECASE):
            return False
        starts_sentence = _SENTENCE_START.search(before) is not None
        if rule.position == "start" and not starts_sentence:
            return False
        if rule.position == "inside" and starts_sentence:
            return False
        if rule.lemma:
            word = match[0].lower()
            lemma = _simplemma().lemmatize(word, lang=self.table.language)
            if lemma == word or not lemma.endswith(rule.lemma):
                return False
        if rule.counterpart:
            return _has_counterpart(match[0], rule.counterpart, self.table.language)
        return True


class _CompiledRule(NamedTuple):
    """A rule, its compiled expression, and its exceptions in lower case."""

    rule: Rule
    expression: re.Pattern[str]
    exceptions: frozenset[str]


def _without_overlaps(markers: Iterable[Marker]) -> list[Marker]:
    """Return the markers in text order; of overlapping ones with the same label, the heaviest and longest remains."""
    kept: list[Marker] = []
    for marker in sorted(markers, key=lambda marker: (-marker.weight, -len(marker.text), marker.start)):
        of_label = [other for other in kept if other.label == marker.label]
        if not any(marker.overlaps(other) for other in of_label):
            kept.append(marker)
    kept.sort(key=lambda marker: marker.start)
    return kept


@cache
def _has_counterpart(word: str, endings: tuple[tuple[str, str], ...], language: str) -> bool:
    """Return whether a word, or the last part of a compound, is in the dictionary with another ending."""
    compound_parts = [word[start:].capitalize() for start in range(3, len(word) - 4)]
    for tail in [word, *compound_parts]:
        for old, new in endings:
            if not tail.endswith(old):
                continue
            other = tail.removesuffix(old) + new
            if len(other) >= _SHORTEST_COUNTERPART and _simplemma().is_known(other, lang=language):
                return True
    return False


@cache
def _simplemma() -> Any:
    try:
        return import_module("simplemma")
    except ModuleNotFoundError:
        raise MissingExtraError("simplemma", "clarify", "Looking up words in a dictionary") from None


def languages(kind: str) -> tuple[str, ...]:
    """Return the languages that have a table of a kind."""
    names = [path.stem.rpartition("-")[2] for path in _TABLES.glob(f"{kind}-*.yaml")]
    return tuple(sorted(names))


@cache
def checker(kind: str, language: str) -> Checker:
    """Return the checker of a kind for a language.

    Args:
        kind: formality (of address), gender (of persons), or it (gender of the antecedent of "it").
        language: language code, two letters.

    Raises:
        DataError: there is no such kind, or no table for the language.
    """
    if kind not in KINDS:
        raise DataError(f"There is no checker of the kind {kind!r}{did_you_mean(kind, KINDS)}.")
    if language not in languages(kind):
        known = ", ".join(languages(kind))
        raise DataError(f"There is no {kind} checker for the language {language!r}: choose one of {known}.")
    return Checker(CheckerTable.from_yaml(_TABLES / f"{kind}-{language}.yaml"))
