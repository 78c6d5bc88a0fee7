"""Rules that detect five kinds of ambiguity in an English text: a cheap filter before a model is called.

With a parser (`experiments/clarify/parsing.py`) the rules use parts of speech and grammatical relations. Without one
they use words and their neighbors, and `Detection.limitations` lists what they miss. A text without detections may
still be ambiguous.
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
# The kinds that make a difference in a target language, where these are not all kinds. Japanese nouns have no gender,
# and few of its occupations show one.
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
    """Return the gender of the pronouns in an English text.

    Args:
        text: the English text.

    Returns:
        "feminine" or "masculine"; None if the text has no gendered pronoun, or pronouns of both genders.
    """
    genders = [name for name, pronouns in _PRONOUNS.items() if pronouns.search(text)]
    return genders[0] if len(genders) == 1 else None


class Token(NamedTuple):
    """A word of a text.

    Args:
        text: the word as it is written, without 's and similar contractions.
        lemma: its lemma in lower case; without a parser, the word in lower case.
        pos: its part of speech, a tag of Universal Dependencies; empty without a parser.
        tag: its tag of the Penn Treebank; empty without a parser.
        dep: its relation to its head; empty without a parser.
        head: index of its head; its own index for a root.
        start: offset in the text, in characters.
    """

    text: str
    lemma: str
    pos: str
    tag: str
    dep: str
    head: int
    start: int


Parser = Callable[[str], list[Token]]


class Sense(Config):
    """A meaning of a word.

    Args:
        gloss: the meaning in a few words.
        cues: nearby words that indicate this meaning.
        es: Spanish translations.
        fr: French translations.
        de: German translations.
        ja: Japanese translations.
    """

    gloss: str
    cues: tuple[str, ...]
    es: tuple[str, ...] = ()
    fr: tuple[str, ...] = ()
    de: tuple[str, ...] = ()
    ja: tuple[str, ...] = ()

    def translations(self, language: str) -> frozenset[str]:
        """Return the translations into a language, in lower case.

        Args:
            language: a language code; the result is empty for a language that the table lacks.
        """
        words: tuple[str, ...] = getattr(self, language, ())
        return frozenset(word.lower() for word in words)


@cache
def polysemous_words() -> dict[str, tuple[Sense, ...]]:
    """Return the senses of each listed word with several meanings."""
    adapter = TypeAdapter(dict[str, tuple[Sense, ...]])
    return adapter.validate_python(read_yaml(_FOLDER / "polysemy.yaml"))


@cache
def word_list(name: str) -> frozenset[str]:
    """Return the words or phrases of a list in `word_lists/detection.yaml`, in lower case.

    Args:
        name: the key of the list. In the file, phrases are separated by commas, and words without commas by white
            space.
    """
    text = read_yaml(_FOLDER / "detection.yaml")[name].lower()
    entries = text.split(",") if "," in text else text.split()
    return frozenset(entry.strip() for entry in entries)


@cache
def word_pattern(name: str) -> re.Pattern[str]:
    """Compile a pattern of `word_lists/detection.yaml`.

    Args:
        name: the key of the pattern. In the pattern, `{key}` is replaced by another pattern or by the words of a list.
    """
    patterns: dict[str, str] = read_yaml(_FOLDER / "detection.yaml")["patterns"]

    def fill(match: re.Match[str]) -> str:
        key = match[1]
        if key in patterns:
            return patterns[key]
        longest_first = sorted(word_list(key), key=len, reverse=True)
        return "|".join(re.escape(word) for word in longest_first)

    filled = re.sub(r"\{([a-z_]+)\}", fill, patterns[name])
    return re.compile(filled, re.IGNORECASE)


@dataclass(frozen=True)
class Ambiguity:
    """An ambiguous word.

    Args:
        kind: the kind of ambiguity.
        word: the word.
        start: its offset in the text, in characters.
        reason: why it is ambiguous.
        senses: the possible senses of a polysemous word.
    """

    kind: AmbiguityKind
    word: str
    start: int
    reason: str
    senses: tuple[Sense, ...] = ()


@dataclass(frozen=True)
class Detection:
    """The result of `detect`.

    Args:
        ambiguities: the detected ambiguities in text order.
        limitations: ambiguities that the rules miss without a parser; empty with a parser.
    """

    ambiguities: tuple[Ambiguity, ...]
    limitations: tuple[str, ...]

    @property
    def kinds(self) -> tuple[AmbiguityKind, ...]:
        """The detected kinds without duplicates, in text order."""
        kinds: list[AmbiguityKind] = [ambiguity.kind for ambiguity in self.ambiguities]
        return tuple(dict.fromkeys(kinds))


@dataclass(frozen=True)
class _Analysis:
    """A text with its tokens, its context and the target language; `parsed` is true if the tokens have grammar."""

    text: str
    tokens: list[Token]
    parsed: bool
    context: str
    language: str | None

    def children(self, index: int) -> list[Token]:
        """Return the tokens whose head is a token."""
        return [token for other, token in enumerate(self.tokens) if token.head == index and other != index]

    def has_gender(self) -> bool:
        """Return whether the pronouns of the text or of its context have one gender."""
        return bool(english_gender(self.text) or english_gender(self.context))

    def unmatched(self, words: set[str], pattern: str) -> Iterator[tuple[int, Token]]:
        """Yield index and token of the occurrences of `words` outside the matches of a pattern."""
        spans = [match.span() for match in word_pattern(pattern).finditer(self.text)]
        for index, token in enumerate(self.tokens):
            if token.text.lower() not in words:
                continue
            if not any(start <= token.start < end for start, end in spans):
                yield index, token


def detect(
    text: str,
    *,
    language: str | None = None,
    context: Sequence[str] = (),
    parser: Parser | None = None,
    kinds: Sequence[str] = KINDS,
) -> Detection:
    """Detect the ambiguities of an English text.

    Args:
        text: the English text.
        language: code of the target language; kinds that make no difference there are ignored. None ignores no kind.
        context: surrounding sentences, whose pronouns and cue words may resolve an ambiguity.
        parser: returns the tokens of a text with their grammar, as `load_parser` of `experiments/clarify/parsing.py`
            does; None uses only words and their neighbors.
        kinds: the kinds to detect, from `KINDS`.

    Raises:
        DataError: a kind is unknown.
    """
    for kind in kinds:
        if kind not in KINDS:
            hint = did_you_mean(kind, KINDS)
            raise DataError(f"There is no kind of ambiguity {kind!r}{hint}: name a known one.")
    analysis = _Analysis(
        text=text,
        tokens=parser(text) if parser else split_words(text),
        parsed=parser is not None,
        context=" ".join(context),
        language=language,
    )
    ambiguities: list[Ambiguity] = []
    for kind in _KINDS_BY_LANGUAGE.get(language or "", KINDS):
        if kind in kinds:
            ambiguities.extend(_RULES[kind](analysis))
    ambiguities.sort(key=lambda ambiguity: ambiguity.start)
    return Detection(
        ambiguities=tuple(ambiguities),
        limitations=() if parser else _LIMITATIONS,
    )


def find_ambiguities(text: str, language: str) -> tuple[Ambiguity, ...]:
    """Detect ambiguities without a parser, as a detector of `Chain`.

    Args:
        text: the English text.
        language: code of the output language; for English output, all kinds are detected.
    """
    target = None if language == "en" else language
    return detect(text, language=target).ambiguities


def split_words(text: str) -> list[Token]:
    """Split a text into tokens without grammar. Contractions such as 's are removed from their words."""
    tokens = []
    for index, match in enumerate(_WORD.finditer(text)):
        word = _CONTRACTION.sub("", match[0])
        token = Token(
            text=word,
            lemma=word.lower(),
            pos="",
            tag="",
            dep="",
            head=index,
            start=match.start(),
        )
        tokens.append(token)
    return tokens


def _it(analysis: _Analysis) -> Iterator[Ambiguity]:
    """Yield each "it" that refers to something, unless a noun before it is its antecedent."""
    for index, token in analysis.unmatched({"it"}, "fixed_it"):
        if word_pattern("expletive_it").match(analysis.text[token.start :]):
            continue
        if analysis.parsed and _is_expletive(analysis, index):
            continue
        if analysis.parsed and _has_antecedent(analysis, index):
            continue
        yield Ambiguity("it", token.text, token.start, "no noun before it is its antecedent")


def _is_expletive(analysis: _Analysis, index: int) -> bool:
    """Return whether the parse marks this "it" as an expletive: weather, time, or an extraposed clause."""
    token = analysis.tokens[index]
    if token.dep == "expl":
        return True
    if not token.dep.startswith("nsubj"):
        return False
    head = analysis.tokens[token.head]
    children = analysis.children(token.head)
    weather = word_list("weather_verbs") | word_list("weather_and_time")
    related = [word for word in [head, *children] if word is not token]
    if any(word.lemma in weather for word in related):
        return head.lemma == "be" or head.lemma in weather
    if head.lemma in word_list("raising_verbs"):
        clauses = [child for child in children if child.dep in {"csubj", "ccomp", "xcomp"}]
        return any(clause.pos in {"VERB", "AUX"} for clause in clauses)
    is_predicate = head.lemma == "be" or head.pos in {"ADJ", "NOUN"}
    return is_predicate and _has_extraposed_clause(analysis, token.head)


def _has_extraposed_clause(analysis: _Analysis, head: int) -> bool:
    """Return whether a clause depends on a predicate of the list `extraposed_adjectives`, as in "it is hard to say"."""
    predicates = [head]
    for index, token in enumerate(analysis.tokens):
        if token.head == head and token.dep in {"acomp", "attr"}:
            predicates.append(index)
    lemmas = {analysis.tokens[index].lemma for index in predicates}
    if lemmas.isdisjoint(word_list("extraposed_adjectives")):
        return False
    clauses = {"csubj", "ccomp", "xcomp", "advcl", "acl:relcl", "acl"}
    return any(child.dep in clauses for index in predicates for child in analysis.children(index))


def _has_antecedent(analysis: _Analysis, index: int) -> bool:
    """Return whether a singular noun that denotes neither a person nor a time precedes "it"."""
    excluded = word_list("things_no_antecedent") | word_list("occupations")
    for token in analysis.tokens[:index]:
        is_singular_noun = token.pos == "NOUN" and token.tag in {"NN", ""} and token.dep != "compound"
        if is_singular_noun and token.lemma not in excluded:
            return True
    return False


def _formality(analysis: _Analysis) -> Iterator[Ambiguity]:
    """Yield each "you" and imperative, unless a form of address such as a title shows the formality."""
    if word_pattern("address").search(analysis.text):
        return
    for _, token in analysis.unmatched(_YOU, "idiomatic_you"):
        yield Ambiguity("formality", token.text, token.start, "you does not show how formal the address is")
    if not analysis.parsed:
        return
    for index, token in enumerate(analysis.tokens):
        if _is_imperative(analysis, index):
            yield Ambiguity("formality", token.text, token.start, "an imperative addresses somebody")


def _is_imperative(analysis: _Analysis, index: int) -> bool:
    """Return whether a token is the verb of a main clause in the imperative."""
    token = analysis.tokens[index]
    if token.tag != "VB" or token.dep.lower() != "root" or token.lemma == "let":
        return False
    children = analysis.children(index)
    has_subject = any(child.dep.startswith("nsubj") or child.tag in {"TO", "MD"} for child in children)
    has_auxiliary = any(child.dep.startswith("aux") and child.lemma != "do" for child in children)
    return not (has_subject or has_auxiliary)


def _name(analysis: _Analysis) -> Iterator[Ambiguity]:
    """Yield each first name that women and men have, unless a pronoun shows the gender."""
    if analysis.has_gender():
        return
    names = word_list("names")
    for token in analysis.tokens:
        is_listed = token.text[:1].isupper() and token.text.lower() in names
        if is_listed and _is_first_name(analysis, token):
            yield Ambiguity("name", token.text, token.start, "women and men have this name, and no pronoun decides")


def _is_first_name(analysis: _Analysis, token: Token) -> bool:
    """Return whether a name is no surname (after a title, name or hyphen), and not part of the name of a place."""
    before = analysis.text[: token.start]
    after = analysis.text[token.start + len(token.text) :]
    if word_pattern("title_before").search(before) or word_pattern("name_before").search(before):
        return False
    if word_pattern("name_after").match(after):
        return False
    if not analysis.parsed:
        return True
    if token.pos != "PROPN":
        return False
    previous = [other for other in analysis.tokens if other.start < token.start]
    return not previous or previous[-1].pos != "PROPN"


def _profession(analysis: _Analysis) -> Iterator[Ambiguity]:
    """Yield each singular noun of an occupation, unless a pronoun shows the gender."""
    if analysis.has_gender():
        return
    occupations = word_list("occupations") | word_list("occupations_and_verbs")
    for token in analysis.tokens:
        # The lists have singular forms only, since plurals are not ambiguous.
        if token.text.lower() in occupations and _is_occupation_noun(analysis, token):
            yield Ambiguity("profession", token.text, token.start, "an occupation, and no pronoun shows the gender")


def _is_occupation_noun(analysis: _Analysis, token: Token) -> bool:
    """Return whether an occupation is a noun here; some, such as "guard", are also verbs."""
    if analysis.parsed:
        return token.pos == "NOUN" and token.dep != "compound"
    if token.lemma not in word_list("occupations_and_verbs"):
        return True
    return word_pattern("determiner_before").search(analysis.text[: token.start]) is not None


def _polysemy(analysis: _Analysis) -> Iterator[Ambiguity]:
    """Yield each word with several senses, unless one translation fits all or the words near it select one sense."""
    near = {token.lemma for token in analysis.tokens}
    near.update(word.lower() for word in _WORD.findall(analysis.context))
    for token in analysis.tokens:
        senses = polysemous_words().get(token.text.lower()) or polysemous_words().get(token.lemma)
        if not senses or _is_proper_noun(analysis, token):
            continue
        if analysis.language and _share_translation(senses, analysis.language):
            continue
        cued = [sense for sense in senses if _has_cue(sense, near)]
        if len(cued) != 1:
            yield Ambiguity(
                kind="polysemy",
                word=token.text,
                start=token.start,
                reason="it has several meanings, and no word near it decides",
                senses=tuple(cued or senses),
            )


def _share_translation(senses: Sequence[Sense], language: str) -> bool:
    """Return whether all senses have a translation in common, so that the sense makes no difference."""
    translations = [sense.translations(language) for sense in senses]
    return bool(frozenset.intersection(*translations))


def _is_proper_noun(analysis: _Analysis, token: Token) -> bool:
    """Return whether a capital inside a sentence marks the word as a name."""
    inside = re.search(r"[\w,;]['’\"”]? $", analysis.text[: token.start]) is not None
    return token.text[:1].isupper() and (inside or token.pos == "PROPN")


def _has_cue(sense: Sense, words: set[str]) -> bool:
    """Return whether one of the words indicates a sense."""
    return any(_is_near(cue, words) for cue in sense.cues)


def _is_near(cue: str, words: set[str]) -> bool:
    """Return whether a cue is one of the words, possibly with an ending."""
    if cue in words or f"{cue}s" in words:
        return True
    return len(cue) > 4 and any(word.startswith(cue) for word in words)


_RULES: dict[AmbiguityKind, Callable[[_Analysis], Iterator[Ambiguity]]] = {
    "it": _it,
    "polysemy": _polysemy,
    "formality": _formality,
    "name": _name,
    "profession": _profession,
}
