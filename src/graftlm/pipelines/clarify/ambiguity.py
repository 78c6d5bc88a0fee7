"""Which of five ambiguities an English text has, by rules: a cheap first pass before any model is asked.

With a parser (`parsing.load_parser`) the rules know subjects, nouns and verbs. Without one they know words and their
neighbours alone; `Detection.unseen` says what that leaves out. A text with nothing found is not proved unambiguous.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from graftlm.errors import DataError, did_you_mean
from graftlm.pipelines.clarify.examples import KINDS, AmbiguityKind, english_gender
from graftlm.pipelines.clarify.parsing import Parser, Token
from graftlm.pipelines.clarify.vocabulary import Sense, polysemous_words, word_list

# What makes a difference in a language. Japanese nouns have no gender, and few of its occupations tell a person's.
_BY_LANGUAGE: dict[str, tuple[AmbiguityKind, ...]] = {"ja": ("it", "polysemy", "formality", "name")}
_UNSEEN = (
    'whether a noun of the text is what "it" stands for',
    '"it" that stands for nothing, beyond frequent phrases',
    "imperatives, which address somebody without saying you",
    "whether a word is a noun, a verb or a name, beyond its article and its capital",
)
_WORD = re.compile(r"[^\W_]+(?:['’][^\W_]+)?")
_CONTRACTED = re.compile(r"['’](?:s|re|ll|ve|d|m)$", re.IGNORECASE)
_BE = (
    r"(?:['’]s|['’]ll be|['’]d be| is| was| will be| would be| has been| isn['’]t| wasn['’]t| may be| might be| can be)"
)
_ADVERB = r"(?: (?:not|very|so|too|really|just|now|still|already|also|more|quite|pretty|only|always|never|almost))*"
_TITLE = re.compile(r"(?:mr|mrs|ms|miss|sir|lady|lord|king|queen|prince|princess)\.?\s*$", re.IGNORECASE)
_DETERMINER = r"(?:an?|the|my|your|his|her|our|their|its|this|that|each|every|another|any|as|some|which|no)"


@dataclass(frozen=True)
class Ambiguity:
    """One ambiguous word: where it stands, why it counts, and of a polysemous one its senses."""

    kind: AmbiguityKind
    word: str
    start: int
    reason: str
    senses: tuple[Sense, ...] = ()


@dataclass(frozen=True)
class Detection:
    """What was found, in the order of the text, and what rules without a parser can't see (empty with one)."""

    found: tuple[Ambiguity, ...]
    unseen: tuple[str, ...]

    @property
    def kinds(self) -> tuple[AmbiguityKind, ...]:
        """The kinds that were found, each once, in the order of the text."""
        return tuple(dict.fromkeys(ambiguity.kind for ambiguity in self.found))


@dataclass(frozen=True)
class _Reading:
    """A text, its words, and what is known around it."""

    text: str
    tokens: list[Token]
    parsed: bool
    context: str
    language: str | None

    def children(self, place: int) -> list[Token]:
        return [token for other, token in enumerate(self.tokens) if token.head == place and other != place]


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
        text: a sentence, a few, or a single word.
        language: into which it is to be translated; kinds that make no difference there are left out.
        context: sentences around it that the one who writes knows too: their pronouns and cues may decide.
        parser: from `load_parser`; without one words and their neighbours have to do.
        kinds: those that are looked for.

    Raises:
        DataError: a kind is not known.
    """
    for kind in kinds:
        if kind not in KINDS:
            raise DataError(f"There is no ambiguity of the kind {kind!r}{did_you_mean(kind, KINDS)}.")
    tokens = parser(text) if parser else words(text)
    reading = _Reading(text, tokens, parser is not None, " ".join(context), language)
    wanted = [kind for kind in _BY_LANGUAGE.get(language or "", KINDS) if kind in kinds]
    found = [ambiguity for kind in wanted for ambiguity in _RULES[kind](reading)]
    return Detection(tuple(sorted(found, key=lambda one: one.start)), () if parser else _UNSEEN)


def words(text: str) -> list[Token]:
    """Words without grammar; what is contracted with a word ("it's") is cut off."""
    words = [(_CONTRACTED.sub("", found[0]), found.start()) for found in _WORD.finditer(text)]
    return [Token(word, word.lower(), "", "", "", place, start) for place, (word, start) in enumerate(words)]


def _it(reading: _Reading) -> Iterator[Ambiguity]:
    fixed = _phrases(reading.text, word_list("fixed_expressions"))
    for place, token in enumerate(reading.tokens):
        if token.text.lower() != "it" or _covered(token, fixed):
            continue
        if _expletive_by_words(reading.text[token.start :]) or (reading.parsed and _expletive(reading, place)):
            continue
        if not (reading.parsed and _has_antecedent(reading, place)):
            yield Ambiguity("it", token.text, token.start, "no noun before it says what it is")


def _expletive_by_words(rest: str) -> bool:
    """Whether what follows from "it" on is a frequent phrase where it stands for nothing."""
    listed = {name: "|".join(map(re.escape, sorted(word_list(name), key=len, reverse=True))) for name in _LISTS}
    asked = rf"it{_ADVERB} (?:{listed['extraposed_adjectives']}) (?:to|that|for|if|when|how|what|why|who)\b"
    known = r"it (?:may|might|will|shall|can|could|should|must) be (?:more |less )?(?:known|said|told|\w+able)\b"
    weather = rf"it{_BE}{_ADVERB} (?:a |the |my |your |about |nearly |\d+ ?)?(?:{listed['weather_and_time']})\b"
    extraposed = (
        rf"it{_BE}{_ADVERB} (?:a |an |the )?(?:{listed['extraposed_adjectives']})(?: idea| thing)?"
        r" (?:to|that|for \w+ to|if|when|how|what|why|who|we|you|he|she|they|i)\b"
    )
    raising = (
        rf"it(?: \w+n['’]t| may| might| will| would)? (?:{listed['raising_verbs']})(?:s|ed)? (?:that|to|as|like|out)\b"
    )
    cleft = rf"it{_BE} (?:\w+ ){{1,3}}(?:who|that)\b"
    weather_verb = rf"it(?:['’]s)? (?:\w+ )?(?:{listed['weather_verbs']})(?:s|ed|ing)?\b"
    return any(
        re.match(one, rest, re.IGNORECASE) for one in (asked, known, weather, extraposed, raising, cleft, weather_verb)
    )


_LISTS = ("weather_and_time", "extraposed_adjectives", "raising_verbs", "weather_verbs")


def _expletive(reading: _Reading, place: int) -> bool:
    """Whether the parse says that this "it" stands for nothing: extraposed clauses, weather, time."""
    token = reading.tokens[place]
    if token.dep == "expl":
        return True
    if not token.dep.startswith("nsubj"):
        return False
    head = reading.tokens[token.head]
    around = [head, *reading.children(token.head)]
    if any(
        one.lemma in word_list("weather_verbs") | word_list("weather_and_time") for one in around if one is not token
    ):
        return head.lemma == "be" or head.lemma in word_list("weather_verbs") | word_list("weather_and_time")
    return _extraposed(reading, token.head)


def _extraposed(reading: _Reading, head: int) -> bool:
    """Whether a clause hangs on a predicate for which "it" holds the place: it is hard to say, it seems that."""
    verb = reading.tokens[head]
    clauses = {"csubj", "ccomp", "xcomp", "advcl", "acl:relcl", "acl"}
    if verb.lemma in word_list("raising_verbs"):
        return any(
            child.dep in {"csubj", "ccomp", "xcomp"} and child.pos in {"VERB", "AUX"}
            for child in reading.children(head)
        )
    if verb.lemma != "be" and verb.pos not in {"ADJ", "NOUN"}:
        return False
    predicates = [
        head,
        *(p for p, one in enumerate(reading.tokens) if one.head == head and one.dep in {"acomp", "attr"}),
    ]
    listed = word_list("extraposed_adjectives")
    named = [p for p in predicates if reading.tokens[p].lemma in listed]
    return any(child.dep in clauses for p in (named and predicates) for child in reading.children(p))


def _has_antecedent(reading: _Reading, place: int) -> bool:
    """Whether a noun in the singular that is no person and no time stands before "it"."""
    excluded = word_list("things_no_antecedent") | word_list("occupations")
    return any(
        token.pos == "NOUN" and token.tag in {"NN", ""} and token.lemma not in excluded and token.dep != "compound"
        for token in reading.tokens[:place]
    )


def _formality(reading: _Reading) -> Iterator[Ambiguity]:
    if _addressed(reading):
        return
    empty = _phrases(reading.text, word_list("empty_you"))
    for token in reading.tokens:
        if token.text.lower() in _YOU and not _covered(token, empty):
            yield Ambiguity("formality", token.text, token.start, "you says nothing of how formal the address is")
    if reading.parsed:
        yield from _imperatives(reading)


_YOU = {"you", "your", "yours", "yourself", "yourselves"}


def _addressed(reading: _Reading) -> bool:
    """Whether a form of address beside a comma, or one that needs none, tells the register."""
    words = "|".join(map(re.escape, sorted(word_list("formal_address") | word_list("familiar_address"), key=len)))
    beside_comma = rf"(?:^|[,.!?–-] ?)(?:{words})\b\.?(?: [A-Z]\w+)?(?:[,.!?]|$)"
    anywhere = r"\b(?:you guys|y'all|your (?:hono|maj|exc)\w+|love you)\b"
    vocative = f"{beside_comma}|{anywhere}"
    return re.search(vocative, reading.text, re.IGNORECASE | re.MULTILINE) is not None


def _imperatives(reading: _Reading) -> Iterator[Ambiguity]:
    for place, token in enumerate(reading.tokens):
        if token.tag != "VB" or token.dep.lower() != "root" or token.lemma == "let":
            continue
        around = reading.children(place)
        bare = not any(child.dep.startswith("nsubj") or child.tag in {"TO", "MD"} for child in around)
        done = any(child.dep.startswith("aux") and child.lemma != "do" for child in around)
        if bare and not done:
            yield Ambiguity("formality", token.text, token.start, "an imperative addresses somebody")


def _name(reading: _Reading) -> Iterator[Ambiguity]:
    if english_gender(reading.text) or english_gender(reading.context):
        return
    for token in reading.tokens:
        named = token.text[:1].isupper() and token.text.lower() in word_list("names")
        if not named or _TITLE.search(reading.text[: token.start]):
            continue
        if _is_first_name(reading, token):
            yield Ambiguity("name", token.text, token.start, "women and men bear this name, and no pronoun tells which")


def _is_first_name(reading: _Reading, token: Token) -> bool:
    """Whether it is no surname (another name or a hyphen stands before it) and no part of a place's name."""
    before, after = reading.text[: token.start], reading.text[token.start + len(token.text) :]
    if re.search(
        r"(?:[\w.]-|(?<!^)(?<![.!?:\"“] )\b[A-Z][\w.]*,? |\b(?:in|at|to the|from the|the|near|of the) )$", before
    ):
        return False
    if re.match(r"-|['’]?s? (?:River|Street|Road|County|University|Park|Hotel|Building|Island|School)\b", after):
        return False
    if not reading.parsed:
        return True
    previous = [one for one in reading.tokens if one.start < token.start][-1:]
    return token.pos == "PROPN" and not any(one.pos == "PROPN" for one in previous)


def _profession(reading: _Reading) -> Iterator[Ambiguity]:
    if english_gender(reading.text) or english_gender(reading.context):
        return
    verbs_too = word_list("occupations_and_verbs")
    for token in reading.tokens:
        if token.text.lower() not in word_list("occupations") | verbs_too:  # of several persons no one is asked
            continue
        if reading.parsed:
            counts = token.pos == "NOUN" and token.dep != "compound"
        else:
            determined = re.search(rf"\b{_DETERMINER} (?:[\w-]+ )?$", reading.text[: token.start], re.IGNORECASE)
            counts = token.lemma not in verbs_too or determined is not None
        if counts:
            yield Ambiguity("profession", token.text, token.start, "an occupation, and no pronoun tells the gender")


def _polysemy(reading: _Reading) -> Iterator[Ambiguity]:
    near = {token.lemma for token in reading.tokens} | {word.lower() for word in _WORD.findall(reading.context)}
    for token in reading.tokens:
        senses = polysemous_words().get(token.text.lower()) or polysemous_words().get(token.lemma)
        if not senses or (reading.language and not _differ(senses, reading.language)) or _is_proper(reading, token):
            continue
        cued = [sense for sense in senses if any(_near(cue, near) for cue in sense.cues)]
        if len(cued) != 1:
            reason = "it has several meanings, and no word near it tells which"
            yield Ambiguity("polysemy", token.text, token.start, reason, tuple(cued or senses))


def _is_proper(reading: _Reading, token: Token) -> bool:
    """Whether a capital inside a sentence says that the word is a name."""
    inside = re.search(r"[\w,;]['’\"”]? $", reading.text[: token.start]) is not None
    return token.text[:1].isupper() and (inside or token.pos == "PROPN")


def _differ(senses: Sequence[Sense], language: str) -> bool:
    """Whether no translation serves all senses."""
    return not frozenset.intersection(*(sense.translations(language) for sense in senses))


def _near(cue: str, words: set[str]) -> bool:
    return cue in words or f"{cue}s" in words or any(len(cue) > 4 and word.startswith(cue) for word in words)


def _phrases(text: str, phrases: frozenset[str]) -> list[tuple[int, int]]:
    """Where any of the phrases stands."""
    joined = "|".join(re.escape(phrase) for phrase in sorted(phrases, key=len, reverse=True))
    return [found.span() for found in re.finditer(rf"(?<!\w)(?:{joined})(?!\w)", text, re.IGNORECASE)]


def _covered(token: Token, spans: Sequence[tuple[int, int]]) -> bool:
    return any(start <= token.start < end for start, end in spans)


_RULES: dict[str, Callable[[_Reading], Iterator[Ambiguity]]] = {
    "it": _it,
    "polysemy": _polysemy,
    "formality": _formality,
    "name": _name,
    "profession": _profession,
}
