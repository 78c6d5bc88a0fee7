"""Labels for sentences of a parallel corpus, where the sentence leaves something open and its translation decides.

In doubt a sentence gets none. Why it got none is told in a few words, which the builder counts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from graftlm.pipelines.clarify.ambiguity import Ambiguity
from graftlm.pipelines.clarify.checkers import CheckerKind, Verdict, checker
from graftlm.pipelines.clarify.checkers.table import Address, Table
from graftlm.pipelines.clarify.examples import GENDERED, AmbiguityKind, english_gender
from graftlm.pipelines.clarify.parallel import Document, Pair
from graftlm.pipelines.clarify.parsing import Token
from graftlm.pipelines.clarify.vocabulary import word_list

CHECKERS: dict[AmbiguityKind, CheckerKind] = {
    "formality": "formality",
    "it": "it",
    "name": "gender",
    "profession": "gender",
}
_LONGEST = 20  # words from which a sentence for formality is too long
_OTHERS = re.compile(r"\b(?:they|them|their|theirs|she|her|hers)\b", re.IGNORECASE)
_OLD = re.compile(r"\b(?:thou|thee|thy|thine|ye)\b", re.IGNORECASE)
_GENERIC = re.compile(
    r"\b(?:if|when|whenever|once|unless|until|because|the (?:more|less|longer)) you\b"
    r"|\byou (?:never know|(?:just )?have to|can['’]t|can only)\b|\byou(?:['’]d| would) (?:have )?(?:thought|think)\b",
    re.IGNORECASE,
)
_THINGS = {"what", "whatever", "whoever", "this", "that"}
_CLAUSES = {"csubj", "ccomp", "xcomp", "oprd"}
_TALK = re.compile(r"\b(?:i|me|my|we|us|our)\b|\?", re.IGNORECASE)  # what somebody says to somebody has one of these


@dataclass(frozen=True)
class Candidate:
    """An ambiguity of one English sentence, with its words; without a parse these have no relations."""

    found: Ambiguity
    pair: Pair
    tokens: Sequence[Token] = field(repr=False)
    parsed: bool

    @cached_property
    def token(self) -> Token:
        """The ambiguous word."""
        return next(token for token in self.tokens if token.start == self.found.start)

    @property
    def before(self) -> list[Token]:
        """The words before it."""
        return [token for token in self.tokens if token.start < self.found.start]


class Judged(NamedTuple):
    """A sentence's label; or None, and why there is none."""

    label: str | None
    reason: str = ""


class Labeller:
    """Labels the sentences of one document.

    Args:
        document: of which the whole may say what a sentence does not.
        language: of the translations, two letters.
    """

    def __init__(self, document: Document, language: str) -> None:
        self._document, self._language = document, language

    def problem(self, candidate: Candidate) -> str | None:
        """Why a candidate is left out for what its English says, or None."""
        return _PROBLEMS[candidate.found.kind](self, candidate)

    def label(self, candidate: Candidate, context: Sequence[str]) -> Judged:
        """What decides: of persons first the English pronouns beside them, else the translation's markers, if alike.

        A name's own gender shows in few translations, and other words of the sentence have theirs: for names, the
        sentences after it decide rather than the translation.
        """
        kind, pair = candidate.found.kind, candidate.pair
        if kind in ("name", "profession") and (told := english_gender(pair.source)):
            return Judged(told)
        if kind == "name":
            return Judged(english_gender(" ".join(context)), "no pronoun decides, or both genders")
        rules = checker(CHECKERS[kind], self._language)
        verdict = rules.check(pair.target, pair.source)
        if verdict.mixed or verdict.label is None:
            return Judged(None, "no marker decides, or both labels")
        doubt = {"formality": self._doubtful_address, "it": _doubtful_thing}.get(kind)
        reason = doubt(candidate, verdict, rules.table) if doubt else None
        return Judged(None, reason) if reason else Judged(verdict.label)

    def _formality_problem(self, candidate: Candidate) -> str | None:
        source = candidate.pair.source
        if len(source.split()) >= _LONGEST:
            return "20 words or more"
        if _OLD.search(source):
            return "thou and ye, which tell it"
        if _GENERIC.search(source) and not _TALK.search(source):
            return "you that may be people in general"
        if checker("formality", self._language).table.address.third_person and _OTHERS.search(source):
            return "pronouns of others, which the polite form may stand for"
        return None

    def _doubtful_address(self, candidate: Candidate, verdict: Verdict, table: Table) -> str | None:
        """Whether no marker says so by itself, or all are forms of several persons where several may be meant."""
        markers = [marker for marker in verdict.markers if marker.weight >= 1]
        if not markers:
            return "no marker that says so by itself"
        shared = verdict.label == table.address.label
        shared = shared and all(re.fullmatch(table.address.shared, one.text, re.IGNORECASE) for one in markers)
        return "a form that several persons share" if shared and self._several else None

    @cached_property
    def _several(self) -> bool:
        """Whether the document anywhere addresses several persons, or a single one in the other way.

        Where French says tu to somebody, vous may be several; where it never does, vous is polite, unless something
        shows that there are several.
        """
        rules = checker("formality", self._language)
        address = rules.table.address
        shown, phrases = _any_of(address.several), _any_of("|".join(map(re.escape, word_list("several_addressed"))))
        return any(
            shown.search(pair.target) or phrases.search(pair.source) or _says_other(rules.check(pair.target), address)
            for pair in self._document.pairs
        )

    def _it_problem(self, candidate: Candidate) -> str | None:
        source = candidate.pair.source
        if len(re.findall(r"\bit\b", source, re.IGNORECASE)) > 1:
            return "it more than once"
        if GENDERED.search(source):
            return "pronouns of persons, which its own can't be told from"
        if candidate.parsed and _role(candidate) is None:
            return "it that is neither subject nor object"
        if candidate.parsed and _named_here(candidate):
            return "what the sentence itself names may be meant"
        return None

    def _name_problem(self, candidate: Candidate) -> str | None:
        others = [token for token in candidate.tokens if token.pos == "PROPN" and not _of_name(token, candidate)]
        if candidate.parsed and others and not candidate.token.dep.startswith("nsubj"):
            return "other names, whose pronouns may be those"
        return self._person_problem(candidate)

    def _person_problem(self, candidate: Candidate) -> str | None:
        source = candidate.pair.source
        return "persons of both genders" if GENDERED.search(source) and english_gender(source) is None else None

    def _no_problem(self, candidate: Candidate) -> None:
        return None


_PROBLEMS: dict[AmbiguityKind, Callable[[Labeller, Candidate], str | None]] = {
    "formality": Labeller._formality_problem,
    "it": Labeller._it_problem,
    "name": Labeller._name_problem,
    "profession": Labeller._person_problem,
    "polysemy": Labeller._no_problem,
}


def _any_of(expression: str) -> re.Pattern[str]:
    return re.compile(rf"(?<!\w)(?:{expression})(?!\w)", re.IGNORECASE)


def _says_other(verdict: Verdict, address: Address) -> bool:
    return any(marker.label != address.label and marker.weight > 1 for marker in verdict.markers)


def _of_name(token: Token, candidate: Candidate) -> bool:
    """Whether a word stands in the name itself, as a surname does."""
    between = candidate.pair.source[candidate.found.start : token.start]
    return token.start >= candidate.found.start and re.fullmatch(r"(?:[A-Z][\w.'’-]* )*", between) is not None


def _role(candidate: Candidate) -> str | None:
    """Subject or object; None where it is neither."""
    relation = candidate.token.dep
    return "subject" if relation.startswith("nsubj") else "object" if relation == "obj" else None


def _named_here(candidate: Candidate) -> bool:
    """Whether "it" may stand for a name or a clause before it, or for the subject that its own clause hangs on."""
    if any(one.pos == "PROPN" or one.lemma in _THINGS for one in candidate.before):
        return True
    head = candidate.tokens[candidate.token.head]
    after = (one for one in candidate.tokens if one.head == head.head and one.start > candidate.token.start)
    return head.dep == "advcl" and any(one.dep.startswith("nsubj") and one.pos in {"NOUN", "PROPN"} for one in after)


def _doubtful_thing(candidate: Candidate, verdict: Verdict, table: Table) -> str | None:
    """Whether a pronoun of the translation is not that of "it", or may stand for no thing, as all neuter ones may."""
    wanted = (_role(candidate), None) if candidate.parsed else ("subject", "object", None)
    if any(marker.role not in wanted for marker in verdict.markers):
        return "a pronoun in another role"
    if verdict.label == "neuter":
        return "neuter, which stands for clauses and for nothing as well"
    if verdict.label != table.clauses:
        return None
    return _doubt_by_parse(candidate) if candidate.parsed else _doubt_by_words(candidate)


def _doubt_by_parse(candidate: Candidate) -> str | None:
    """Why "it" may stand for a clause, or for nothing."""
    place = candidate.tokens.index(candidate.token)
    head = candidate.token.head
    around = [one for one in candidate.tokens if one.head == head and one is not candidate.token]
    predicates = {head, *(candidate.tokens.index(one) for one in around if one.dep == "acomp")}
    hanging = [one for one in candidate.tokens[place:] if one.head in predicates]
    if candidate.tokens[head].lemma in word_list("clausal_verbs"):
        return "a verb of saying or doing: it may stand for a clause"
    if any(one.dep in _CLAUSES or one.dep == "prt" for one in hanging):
        return "a clause or a particle hangs on its verb: it may stand for nothing"
    if candidate.tokens[head].lemma == "be" and len(predicates) == 1:
        return "a noun or a place behind be: it may stand for nothing"
    return None


def _doubt_by_words(candidate: Candidate) -> str | None:
    near = set(re.findall(r"\w+", candidate.pair.source.lower()))
    return "a verb of saying or doing: it may stand for a clause" if near & word_list("clausal_verbs") else None
