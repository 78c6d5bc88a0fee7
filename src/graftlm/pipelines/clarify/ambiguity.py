"""Rules that detect five kinds of ambiguity in an English text: a cheap filter before a model is asked.

With a parser (`experiments/clarify/parsing.py`) the rules know subjects, nouns and verbs. Without one they know words
and their neighbours; `Detection.limitations` lists what they miss. A text without detections is not proved unambiguous.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from pydantic import TypeAdapter

from graftlm.config import Config, read_yaml
from graftlm.errors import DataError, did_you_mean

AmbiguityKind = Literal["it", "polysemy", "formality", "name", "profession"]
KINDS: tuple[AmbiguityKind, ...] = get_args(AmbiguityKind)
_PRONOUNS = {
    "feminine": re.compile(r"\b(?:she|her|hers|herself)\b", re.IGNORECASE),
    "masculine": re.compile(r"\b(?:he|him|his|himself)\b", re.IGNORECASE),
}
_FOLDER = Path(__file__).parent / "word_lists"
# The kinds that make a difference in a language. Japanese nouns have no gender, and few of its occupations show one.
_KINDS_BY_LANGUAGE: dict[str, tuple[AmbiguityKind, ...]] = {"ja": ("it", "polysemy", "formality", "name")}
_LIMITATIONS = (
    'whether a noun of the text is the antecedent of "it"',
    '"it" without a referent, beyond frequent phrases',
    "imperatives, which address somebody without the word you",
    "whether a word is a noun, a verb or a name, beyond its article and its capital",
)
_WORD = re.compile(r"[^\W_]+(?:['’][^\W_]+)?")
_CONTRACTION = re.compile(r"['’](?:s|re|ll|ve|d|m)$", re.IGNORECASE)
_YOU = {"you", "your", "yours", "yourself", "yourselves"}


def english_gender(text: str) -> str | None:
    """The gender of the pronouns in an English text: feminine, masculine, or None for no pronoun or both."""
    genders = [name for name, pronouns in _PRONOUNS.items() if pronouns.search(text)]
    return genders[0] if len(genders) == 1 else None


class Token(NamedTuple):
    """One word."""

    text: str
    lemma: str  # in lower case
    pos: str  # part of speech, a tag of Universal Dependencies
    tag: str  # of the Penn Treebank
    dep: str  # relation to the head
    head: int  # its index; a root's own index
    start: int  # offset in the text


Parser = Callable[[str], list[Token]]


class Sense(Config):
    """One meaning of a word.

    Args:
        gloss: the meaning in a few words.
        cues: nearby words that indicate this meaning.
        es, fr, de, ja: translations.
    """

    gloss: str
    cues: tuple[str, ...]
    es: tuple[str, ...] = ()
    fr: tuple[str, ...] = ()
    de: tuple[str, ...] = ()
    ja: tuple[str, ...] = ()

    def translations(self, language: str) -> frozenset[str]:
        """The translations into one language, in lower case; empty for a language that the table lacks."""
        return frozenset(word.lower() for word in getattr(self, language, ()))


@cache
def polysemous_words() -> dict[str, tuple[Sense, ...]]:
    """Words with several meanings, and their senses."""
    return TypeAdapter(dict[str, tuple[Sense, ...]]).validate_python(read_yaml(_FOLDER / "polysemy.yaml"))


@cache
def word_list(name: str) -> frozenset[str]:
    """A list of `word_lists/detection.yaml`, in lower case. Commas separate phrases, else blanks separate words."""
    text = read_yaml(_FOLDER / "detection.yaml")[name].lower()
    return frozenset(word.strip() for word in (text.split(",") if "," in text else text.split()))


@cache
def word_pattern(name: str) -> re.Pattern[str]:
    """A pattern of `word_lists/detection.yaml`, compiled, with its lists filled in."""
    patterns = read_yaml(_FOLDER / "detection.yaml")["patterns"]

    def fill(match: re.Match[str]) -> str:
        if match[1] in patterns:
            return patterns[match[1]]
        return "|".join(map(re.escape, sorted(word_list(match[1]), key=len, reverse=True)))

    return re.compile(re.sub(r"\{([a-z_]+)\}", fill, patterns[name]), re.IGNORECASE)


@dataclass(frozen=True)
class Ambiguity:
    """An ambiguous word: its position, the reason, and the senses of a polysemous word."""

    kind: AmbiguityKind
    word: str
    start: int
    reason: str
    senses: tuple[Sense, ...] = ()


@dataclass(frozen=True)
class Detection:
    """Detected ambiguities in text order, and what the rules miss without a parser (empty with one)."""

    ambiguities: tuple[Ambiguity, ...]
    limitations: tuple[str, ...]

    @property
    def kinds(self) -> tuple[AmbiguityKind, ...]:
        """The detected kinds without duplicates, in text order."""
        return tuple(dict.fromkeys(ambiguity.kind for ambiguity in self.ambiguities))


@dataclass(frozen=True)
class _Analysis:
    """A text with its tokens, its context and the target language."""

    text: str
    tokens: list[Token]
    parsed: bool
    context: str
    language: str | None

    def children(self, index: int) -> list[Token]:
        return [token for other, token in enumerate(self.tokens) if token.head == index and other != index]

    def has_gender(self) -> bool:
        return bool(english_gender(self.text) or english_gender(self.context))

    def unmatched(self, words: set[str], pattern: str) -> Iterator[tuple[int, Token]]:
        """The tokens among `words`, with their index, outside the matches of a pattern."""
        spans = [match.span() for match in word_pattern(pattern).finditer(self.text)]
        for index, token in enumerate(self.tokens):
            if token.text.lower() in words and not any(start <= token.start < end for start, end in spans):
                yield index, token


def detect(
    text: str,
    *,
    language: str | None = None,
    context: Sequence[str] = (),
    parser: Parser | None = None,
    kinds: Sequence[str] = KINDS,
) -> Detection:
    """The ambiguities of an English text.

    Args:
        language: the target language; kinds that make no difference there are ignored.
        context: surrounding sentences; their pronouns and cue words may resolve an ambiguity.
        parser: from `load_parser`; None uses words and their neighbours alone.

    Raises DataError if a kind is unknown.
    """
    for kind in kinds:
        if kind not in KINDS:
            raise DataError(f"There is no ambiguity of the kind {kind!r}{did_you_mean(kind, KINDS)}.")
    tokens = parser(text) if parser else split_words(text)
    analysis = _Analysis(text, tokens, parser is not None, " ".join(context), language)
    selected = [kind for kind in _KINDS_BY_LANGUAGE.get(language or "", KINDS) if kind in kinds]
    ambiguities = [ambiguity for kind in selected for ambiguity in _RULES[kind](analysis)]
    ambiguities.sort(key=lambda ambiguity: ambiguity.start)
    return Detection(tuple(ambiguities), () if parser else _LIMITATIONS)


def find_ambiguities(text: str, language: str) -> tuple[Ambiguity, ...]:
    """The detector of `Chain`: ambiguities by words alone. For English output all kinds count."""
    return detect(text, language=None if language == "en" else language).ambiguities


def split_words(text: str) -> list[Token]:
    """Words as tokens without grammar, with contractions such as 's cut off."""
    words = [(_CONTRACTION.sub("", match[0]), match.start()) for match in _WORD.finditer(text)]
    return [Token(word, word.lower(), "", "", "", index, start) for index, (word, start) in enumerate(words)]


def _it(analysis: _Analysis) -> Iterator[Ambiguity]:
    for index, token in analysis.unmatched({"it"}, "fixed_it"):
        if word_pattern("expletive_it").match(analysis.text[token.start :]):
            continue
        if not (analysis.parsed and (_is_expletive(analysis, index) or _has_antecedent(analysis, index))):
            yield Ambiguity("it", token.text, token.start, "no noun before it is its antecedent")


def _is_expletive(analysis: _Analysis, index: int) -> bool:
    """Whether the parse marks this "it" as an expletive: weather, time, or an extraposed clause."""
    token = analysis.tokens[index]
    if token.dep == "expl" or not token.dep.startswith("nsubj"):
        return token.dep == "expl"
    head, children = analysis.tokens[token.head], analysis.children(token.head)
    weather = word_list("weather_verbs") | word_list("weather_and_time")
    if any(word.lemma in weather for word in [head, *children] if word is not token):
        return head.lemma == "be" or head.lemma in weather
    if head.lemma in word_list("raising_verbs"):
        return any(child.dep in {"csubj", "ccomp", "xcomp"} and child.pos in {"VERB", "AUX"} for child in children)
    return (head.lemma == "be" or head.pos in {"ADJ", "NOUN"}) and _has_extraposed_clause(analysis, token.head)


def _has_extraposed_clause(analysis: _Analysis, head: int) -> bool:
    """Whether a clause depends on a predicate such as "it is hard to say"."""
    tokens = enumerate(analysis.tokens)
    predicates = [head, *(i for i, token in tokens if token.head == head and token.dep in {"acomp", "attr"})]
    if not any(analysis.tokens[index].lemma in word_list("extraposed_adjectives") for index in predicates):
        return False
    clauses = {"csubj", "ccomp", "xcomp", "advcl", "acl:relcl", "acl"}
    return any(child.dep in clauses for index in predicates for child in analysis.children(index))


def _has_antecedent(analysis: _Analysis, index: int) -> bool:
    """Whether a singular noun that is no person and no time precedes "it"."""
    excluded = word_list("things_no_antecedent") | word_list("occupations")
    return any(
        token.pos == "NOUN" and token.tag in {"NN", ""} and token.lemma not in excluded and token.dep != "compound"
        for token in analysis.tokens[:index]
    )


def _formality(analysis: _Analysis) -> Iterator[Ambiguity]:
    if word_pattern("address").search(analysis.text):
        return
    for _, token in analysis.unmatched(_YOU, "idiomatic_you"):
        yield Ambiguity("formality", token.text, token.start, "you does not show how formal the address is")
    for index, token in enumerate(analysis.tokens if analysis.parsed else ()):
        if token.tag != "VB" or token.dep.lower() != "root" or token.lemma == "let":
            continue
        children = analysis.children(index)
        has_subject = any(child.dep.startswith("nsubj") or child.tag in {"TO", "MD"} for child in children)
        has_auxiliary = any(child.dep.startswith("aux") and child.lemma != "do" for child in children)
        if not (has_subject or has_auxiliary):
            yield Ambiguity("formality", token.text, token.start, "an imperative addresses somebody")


def _name(analysis: _Analysis) -> Iterator[Ambiguity]:
    if analysis.has_gender():
        return
    for token in analysis.tokens:
        is_listed = token.text[:1].isupper() and token.text.lower() in word_list("names")
        if is_listed and _is_first_name(analysis, token):
            yield Ambiguity("name", token.text, token.start, "women and men have this name, and no pronoun decides")


def _is_first_name(analysis: _Analysis, token: Token) -> bool:
    """Whether the name is no surname (after a title, a name or a hyphen) and no part of a place's name."""
    before, after = analysis.text[: token.start], analysis.text[token.start + len(token.text) :]
    if any(word_pattern(name).search(before) for name in ("title_before", "name_before")):
        return False
    if word_pattern("name_after").match(after):
        return False
    previous = [other for other in analysis.tokens if other.start < token.start][-1:]
    return not analysis.parsed or (token.pos == "PROPN" and not any(other.pos == "PROPN" for other in previous))


def _profession(analysis: _Analysis) -> Iterator[Ambiguity]:
    if analysis.has_gender():
        return
    verbs = word_list("occupations_and_verbs")
    for token in analysis.tokens:
        if token.text.lower() not in word_list("occupations") | verbs:  # plurals are not ambiguous
            continue
        if analysis.parsed:
            is_noun = token.pos == "NOUN" and token.dep != "compound"
        else:
            determiner = word_pattern("determiner_before").search(analysis.text[: token.start])
            is_noun = token.lemma not in verbs or determiner is not None
        if is_noun:
            yield Ambiguity("profession", token.text, token.start, "an occupation, and no pronoun shows the gender")


def _polysemy(analysis: _Analysis) -> Iterator[Ambiguity]:
    near = {token.lemma for token in analysis.tokens} | {word.lower() for word in _WORD.findall(analysis.context)}
    for token in analysis.tokens:
        senses = polysemous_words().get(token.text.lower()) or polysemous_words().get(token.lemma)
        if not senses or _is_proper_noun(analysis, token):
            continue
        if analysis.language and frozenset.intersection(*(s.translations(analysis.language) for s in senses)):
            continue  # one translation serves all senses
        cued = [sense for sense in senses if any(_is_near(cue, near) for cue in sense.cues)]
        if len(cued) != 1:
            reason = "it has several meanings, and no word near it decides"
            yield Ambiguity("polysemy", token.text, token.start, reason, tuple(cued or senses))


def _is_proper_noun(analysis: _Analysis, token: Token) -> bool:
    """Whether a capital inside a sentence marks the word as a name."""
    inside = re.search(r"[\w,;]['’\"”]? $", analysis.text[: token.start]) is not None
    return token.text[:1].isupper() and (inside or token.pos == "PROPN")


def _is_near(cue: str, words: set[str]) -> bool:
    return cue in words or f"{cue}s" in words or any(len(cue) > 4 and word.startswith(cue) for word in words)


_RULES = {"it": _it, "polysemy": _polysemy, "formality": _formality, "name": _name, "profession": _profession}
