"""The form of a checker's table: lists of words and rules on them, written as YAML beside this file."""

from __future__ import annotations

import re
from typing import Literal, Self

from pydantic import Field, model_validator

from graftlm.config import Config

_NAMED_LIST = re.compile(r"\{([a-z_]+)\}")


class Rule(Config):
    """What one sort of marker says.

    Args:
        label: what a match votes for.
        words: whole words or phrases, of which one has to be there.
        pattern: or a regular expression; `{name}` stands for any word of the table's list `name`. It begins and ends
            at a word's border.
        weight: of one vote.
        place: whether the match has to begin a sentence or must not.
        after: a regular expression that the text before the match must end with.
        case: whether capitals count.
        unless: matches that are no marker, in lower case; `{name}` takes a list in.
        lemma: endings, of which the word's dictionary form must have one, and be another word than the match: a verb's
            form rather than a noun. Needs the package simplemma.
        counterpart: pairs of endings; with one put for the other the word, or a compound's last part, must be another
            word of the dictionary (German -er to -erin: a person rather than a thing). Needs simplemma too.
        source: a regular expression that has to match the English source; the rule rests where no source is known.
        not_source: one that must not match it; the rule stands where no source is known.
        role: what the match is in its sentence, where its form says so.
        why: what the rule rests on, in words.
    """

    label: str
    words: tuple[str, ...] = ()
    pattern: str | None = None
    weight: float = Field(1.0, gt=0)
    place: Literal["anywhere", "start", "inside"] = "anywhere"
    after: str | None = None
    case: bool = False
    unless: tuple[str, ...] = ()
    lemma: tuple[str, ...] = ()
    counterpart: tuple[tuple[str, str], ...] = ()
    source: str | None = None
    not_source: str | None = None
    role: Literal["subject", "object"] | None = None
    why: str

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if bool(self.words) == bool(self.pattern):
            raise ValueError(f"the rule {self.why!r} needs either words or a pattern")
        return self


class Address(Config):
    """What a language's forms of address leave open; for those who look for sentences that are sure of their label.

    Args:
        third_person: whether the polite form is one of the third person, which other persons have too.
        label: that of forms which several persons share with a single one.
        shared: a regular expression of these forms, as they stand in a text.
        several: one of what shows that several are addressed.
    """

    third_person: bool = False
    label: str | None = None
    shared: str = ""
    several: str = ""


class Table(Config):
    """All rules of one kind for one language.

    Args:
        labels: in the order in which they are shown.
        method: what the table does and can't do, in words.
        borders: whether words are set apart from each other in writing; if not, matches may lie inside of words.
        lists: named lists of words, each a string of words separated by blanks or, for phrases, by commas.
        rules: all of them are tried; their votes add up.
        address: of a table of forms of address.
        clauses: of a table of pronouns, the label of those that stand for clauses and for nothing as well as for a
            thing, besides neuter ones, which all do.
    """

    kind: str
    language: str
    labels: tuple[str, ...]
    method: str
    borders: bool = True
    lists: dict[str, str] = {}
    rules: tuple[Rule, ...]
    address: Address = Address()
    clauses: str | None = None

    @model_validator(mode="after")
    def _known_names(self) -> Self:
        for rule in self.rules:
            if rule.label not in self.labels:
                raise ValueError(f"the rule {rule.why!r} votes for {rule.label!r}, which is no label of the table")
            for name in self._names_in(rule):
                if name not in self.lists:
                    raise ValueError(f"the rule {rule.why!r} names the list {name!r}, which the table lacks")
        return self

    @staticmethod
    def _names_in(rule: Rule) -> list[str]:
        return _NAMED_LIST.findall(" ".join((rule.pattern or "", *rule.words, *rule.unless)))

    def words_of(self, name: str) -> list[str]:
        """The words of one of the lists."""
        text = self.lists[name]
        return [word.strip() for word in text.split("," if "," in text else None) if word.strip()]

    def expression(self, rule: Rule) -> re.Pattern[str]:
        """The compiled expression of a rule."""
        written = rule.pattern if rule.pattern is not None else _alternatives(self.spread(rule.words))
        filled = _NAMED_LIST.sub(lambda found: _alternatives(self.words_of(found[1])), written)
        if self.borders:
            filled = rf"(?<!\w)(?:{filled})(?!\w)"
        return re.compile(filled, 0 if rule.case else re.IGNORECASE)

    def spread(self, words: tuple[str, ...]) -> list[str]:
        """Words, with those of the lists that stand among them by `{name}`."""
        spread: list[str] = []
        for word in words:
            named = _NAMED_LIST.fullmatch(word)
            spread += self.words_of(named[1]) if named else [word]
        return spread


def _alternatives(words: list[str]) -> str:
    """An expression for any of the words, the longest first; a `*` at a word's end takes any ending."""
    longest_first = sorted(set(words), key=len, reverse=True)
    return "(?:" + "|".join(re.escape(word).replace(r"\*", r"\w*") for word in longest_first) + ")"
