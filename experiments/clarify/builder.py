"""Builds a set of ambiguous sentences from parallel documents (appendix C.1.6 of the thesis).

| kind | the English sentence has | the label comes from | context |
|---|---|---|---|
| formality | "you", fewer than 20 words | the formality checker | the sentences before |
| it | one "it" with a referent | the gender of the translation's pronouns | the sentences before |
| name | a name of women and men; pronouns become [pr] | English pronouns, here or after | the sentences after |
| profession | an occupation; pronouns become [pr] | English pronouns, else the gender checker | the sentences before |
| polysemy | a word with several meanings; it alone is the query | a translation of one meaning | itself |

A sentence is kept if its label is certain. Otherwise it is rejected, and the reason is counted.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from experiments.clarify.checkers import CheckerKind, CheckerTable, CheckResult, checker, languages
from experiments.clarify.datasets import (
    GENDERED,
    AmbiguityKind,
    AmbiguousExample,
    ParallelDocument,
    SentencePair,
    english_gender,
    read_lines,
)
from graftlm.errors import DataError
from graftlm.pipelines.clarify.ambiguity import (
    Ambiguity,
    Parser,
    Token,
    detect,
    polysemous_words,
    split_words,
    word_list,
    word_pattern,
)

MASK = "[pr]"
CHECKERS: dict[AmbiguityKind, CheckerKind]
CHECKERS = {"formality": "formality", "it": "it", "name": "gender", "profession": "gender"}
_MIN_CONTEXT, _MAX_CONTEXT, _CONTEXT_WORDS = 3, 5, 20  # sentences; three are enough if they have more words than this
_MAX_WORDS = 20  # of a sentence for formality
_PRONOUNS_OF_CLAUSES = {"what", "whatever", "whoever", "this", "that"}
_CLAUSES = {"csubj", "ccomp", "xcomp", "oprd", "prt"}


@dataclass(frozen=True)
class AmbiguitySet:
    """The built examples, and the number of rejected candidates by kind and reason."""

    examples: tuple[AmbiguousExample, ...]
    rejected: dict[str, dict[str, int]]

    def counts(self) -> dict[str, dict[str, int]]:
        """The number of examples by kind and label. Polysemous words have one count."""
        counts: dict[str, Counter[str]] = {}
        for example in self.examples:
            label = "" if example.kind == "polysemy" else example.label or ""
            counts.setdefault(example.kind, Counter())[label] += 1
        return {kind: dict(sorted(labels.items())) for kind, labels in sorted(counts.items())}


@dataclass(frozen=True)
class _Candidate:
    """An ambiguity of one English sentence. Without a parse its tokens have no relations."""

    ambiguity: Ambiguity
    pair: SentencePair
    tokens: Sequence[Token] = field(repr=False)
    parsed: bool

    @cached_property
    def token(self) -> Token:
        """The ambiguous word."""
        return next(token for token in self.tokens if token.start == self.ambiguity.start)

    @property
    def role(self) -> str | None:
        """The word's grammatical role: subject, object or None."""
        return "subject" if self.token.dep.startswith("nsubj") else "object" if self.token.dep == "obj" else None


class _RejectedError(Exception):
    """A candidate gets no example; the message is the reason."""


def _reject_if(condition: object, reason: str) -> None:
    if condition:
        raise _RejectedError(reason)


def build_ambiguity_set(
    documents: Sequence[ParallelDocument],
    language: str,
    *,
    kinds: Sequence[AmbiguityKind] | None = None,
    parser: Parser | None = None,
    quota: int | None = None,
) -> AmbiguitySet:
    """The ambiguous sentences of a corpus, with labels and context.

    Args:
        documents: in corpus order.
        language: of the translations, two letters.
        kinds: the ambiguities to collect; by default all kinds of `buildable`.
        parser: of English; None uses words and their neighbours alone.
        quota: the most examples of a kind, the first ones of the corpus; None for no limit.

    Raises:
        DataError: there is no checker for one of the kinds, or the quota is below one.
    """
    if quota is not None and quota < 1:
        raise DataError(f"The quota of each kind is {quota}: give one example or more, or none for no limit.")
    kinds = buildable(language) if kinds is None else tuple(kinds)
    examples: list[AmbiguousExample] = []
    built: Counter[str] = Counter()
    rejected: dict[str, Counter[str]] = {kind: Counter() for kind in kinds}
    for document in documents:
        labeller = _Labeller(document, language)
        for index, pair in enumerate(document.pairs):
            open_kinds: list[AmbiguityKind] = [kind for kind in kinds if quota is None or built[kind] < quota]
            for candidate in _candidates(pair, language, open_kinds, parser) if open_kinds else ():
                kind = candidate.ambiguity.kind
                try:
                    _reject_if(built[kind] == quota, "above the quota of its kind")
                    examples.append(labeller.example(candidate, index))
                    built[kind] += 1
                except _RejectedError as reason:
                    rejected[kind][str(reason)] += 1
    return AmbiguitySet(tuple(examples), {kind: dict(counts) for kind, counts in rejected.items()})


def buildable(language: str) -> tuple[AmbiguityKind, ...]:
    """The kinds that can be labelled in a language: those with a checker, and polysemy with translations."""
    checked: list[AmbiguityKind] = [kind for kind, name in CHECKERS.items() if language in languages(name)]
    senses = next(iter(polysemous_words().values()))
    return (*checked, "polysemy") if senses[0].translations(language) else tuple(checked)


def mask_pronouns(text: str) -> str:
    """The text with [pr] in place of every gendered English pronoun."""
    return GENDERED.sub(MASK, text)


def _candidates(
    pair: SentencePair, language: str, kinds: Sequence[AmbiguityKind], parser: Parser | None
) -> Iterator[_Candidate]:
    """The ambiguities of a pair's English side: the first of each kind, and all polysemous words."""
    masked = mask_pronouns(pair.source)
    tokens = parser(masked) if parser else split_words(masked)
    detection = detect(masked, language=language, kinds=kinds, parser=(lambda _: tokens) if parser else None)
    seen: set[AmbiguityKind] = set()
    for ambiguity in detection.ambiguities:
        if ambiguity.kind == "formality" and ambiguity.reason.startswith("an imperative"):
            continue  # the paper's recipe requires "you"
        if ambiguity.kind == "polysemy" or ambiguity.kind not in seen:
            seen.add(ambiguity.kind)
            yield _Candidate(ambiguity, pair, tokens, parser is not None)


class _Labeller:
    """Makes labelled examples of one document's sentences.

    Args:
        document: other sentences of it may say what a sentence leaves open.
        language: of the translations, two letters.
    """

    def __init__(self, document: ParallelDocument, language: str) -> None:
        self._document, self._language = document, language

    def example(self, candidate: _Candidate, index: int) -> AmbiguousExample:
        """The example of a candidate in the sentence `index`.

        Raises:
            _RejectedError: the label is uncertain, or there is too little context.
        """
        kind, pair, word = candidate.ambiguity.kind, candidate.pair, candidate.ambiguity.word
        if kind == "polysemy":
            word = word.lower()
            senses = polysemous_words().get(word) or candidate.ambiguity.senses
            matches = [_translation_in(sense.translations(self._language), pair.target) for sense in senses]
            translations = [translation for translation in matches if translation]
            _reject_if(len(translations) != 1, "no listed translation, or of several meanings")
            name, source, context = f"{kind}:{word}", word, (pair.source,)
            reference = label = translations[0]
        else:
            check = {"formality": self._check_formality, "it": self._check_it, "name": self._check_name}
            check.get(kind, self._check_person)(candidate)
            context = self._context(index, after=kind == "name")
            _reject_if(len(context) < _MIN_CONTEXT, "too little context")
            name, source = kind, mask_pronouns(pair.source) if kind in ("name", "profession") else pair.source
            reference, label = pair.target, self._label(candidate, context)
        return AmbiguousExample(f"{pair.id}:{name}", kind, self._language, source, context, reference, label, word=word)

    def _context(self, index: int, *, after: bool) -> tuple[str, ...]:
        """Three sentences, and up to five while they have at most 20 words, in text order."""
        sources = [pair.source for pair in self._document.pairs]
        nearest_first = (sources[index + 1 :] if after else sources[:index][::-1])[:_MAX_CONTEXT]
        context = nearest_first[:_MIN_CONTEXT]
        while len(context) < len(nearest_first) and len(" ".join(context).split()) <= _CONTEXT_WORDS:
            context.append(nearest_first[len(context)])
        return tuple(context if after else context[::-1])

    def _label(self, candidate: _Candidate, context: Sequence[str]) -> str:
        """The label: of persons from English pronouns first, else from the translation's markers, if they agree.

        Few translations show the gender of a name, and their other words have genders of their own. So the label of a
        name comes from the English sentences after it, not from the translation.
        """
        kind, pair = candidate.ambiguity.kind, candidate.pair
        if kind in ("name", "profession") and (gender := english_gender(pair.source)):
            return gender
        if kind == "name":
            gender = english_gender(" ".join(context))
            _reject_if(gender is None, "no pronoun decides, or both genders")
            return str(gender)
        rules = checker(CHECKERS[kind], self._language)
        result = rules.check(pair.target, pair.source)
        _reject_if(result.mixed or result.label is None, "no marker decides, or both labels")
        if kind == "formality":
            self._check_address(result, rules.table)
        elif kind == "it":
            _check_referent(candidate, result, rules.table)
        return str(result.label)

    def _check_formality(self, candidate: _Candidate) -> None:
        source = candidate.pair.source
        _reject_if(len(source.split()) >= _MAX_WORDS, "20 words or more")
        _reject_if(word_pattern("archaic_you").search(source), "thou and ye, which show the form")
        is_generic = word_pattern("generic_you").search(source) and not word_pattern("dialogue").search(source)
        _reject_if(is_generic, "you that may be people in general")
        if checker("formality", self._language).table.address.third_person:
            others = word_pattern("other_persons").search(source)
            _reject_if(others, "pronouns of others, which the polite form may stand for")

    def _check_address(self, result: CheckResult, table: CheckerTable) -> None:
        """Rejects weak markers, and forms shared by one person and several if several may be addressed."""
        markers = [marker for marker in result.markers if marker.weight >= 1]
        _reject_if(not markers, "no marker that decides alone")
        shared = all(re.fullmatch(table.address.shared, marker.text, re.IGNORECASE) for marker in markers)
        if result.label == table.address.label and shared:
            _reject_if(self._may_address_several, "a form that several persons share")

    @cached_property
    def _may_address_several(self) -> bool:
        """Whether the document addresses several persons anywhere, or one person in the other form.

        If a French document uses *tu*, its *vous* may address several persons. If it never does, *vous* is polite.
        """
        rules = checker("formality", self._language)
        address = rules.table.address
        several = re.compile(rf"(?<!\w)(?:{address.several})(?!\w)", re.IGNORECASE)
        return any(
            several.search(pair.target)
            or word_pattern("several_people").search(pair.source)
            or any(m.label != address.label and m.weight > 1 for m in rules.check(pair.target).markers)
            for pair in self._document.pairs
        )

    def _check_it(self, candidate: _Candidate) -> None:
        source = candidate.pair.source
        _reject_if(len(re.findall(r"\bit\b", source, re.IGNORECASE)) > 1, "it more than once")
        _reject_if(GENDERED.search(source), "pronouns of persons, which may be those of the translation")
        _reject_if(candidate.parsed and candidate.role is None, "it that is neither subject nor object")
        _reject_if(candidate.parsed and _has_referent(candidate), "a referent in the sentence itself")

    def _check_name(self, candidate: _Candidate) -> None:
        start = candidate.ambiguity.start

        def is_surname(token: Token) -> bool:
            between = candidate.pair.source[start : token.start]
            return token.start >= start and re.fullmatch(r"(?:[A-Z][\w.'’-]* )*", between) is not None

        others = [token for token in candidate.tokens if token.pos == "PROPN" and not is_surname(token)]
        if candidate.parsed and candidate.role != "subject":
            _reject_if(others, "other names, whose pronouns may be those")
        self._check_person(candidate)

    def _check_person(self, candidate: _Candidate) -> None:
        source = candidate.pair.source
        _reject_if(GENDERED.search(source) and english_gender(source) is None, "persons of both genders")


def _has_referent(candidate: _Candidate) -> bool:
    """Whether "it" may refer to a name or a clause before it, or to the subject of its main clause."""
    token, tokens = candidate.token, candidate.tokens
    before = (word for word in tokens if word.start < token.start)
    if any(word.pos == "PROPN" or word.lemma in _PRONOUNS_OF_CLAUSES for word in before):
        return True
    head = tokens[token.head]
    after = (word for word in tokens if word.head == head.head and word.start > token.start)
    return head.dep == "advcl" and any(w.dep.startswith("nsubj") and w.pos in {"NOUN", "PROPN"} for w in after)


def _check_referent(candidate: _Candidate, result: CheckResult, table: CheckerTable) -> None:
    """Rejects pronouns in another role than "it" has, and those that may refer to a clause or to nothing."""
    roles = (candidate.role, None) if candidate.parsed else ("subject", "object", None)
    _reject_if(any(marker.role not in roles for marker in result.markers), "a pronoun in another role")
    _reject_if(result.label == "neuter", "neuter, which stands for clauses and for nothing as well")
    if result.label != table.clauses:
        return
    tokens, head = candidate.tokens, candidate.token.head
    verbs = {tokens[head].lemma} if candidate.parsed else set(re.findall(r"\w+", candidate.pair.source.lower()))
    _reject_if(verbs & word_list("clausal_verbs"), "a verb of saying or doing: it may stand for a clause")
    if candidate.parsed:
        predicates = {head, *(i for i, word in enumerate(tokens) if word.head == head and word.dep == "acomp")}
        after = tokens[tokens.index(candidate.token) :]
        dependent = any(word.head in predicates and word.dep in _CLAUSES for word in after)
        _reject_if(dependent, "a clause or a particle depends on its verb: it may stand for nothing")
        alone = tokens[head].lemma == "be" and len(predicates) == 1
        _reject_if(alone, "a noun or a place after be: it may stand for nothing")


def _translation_in(translations: frozenset[str], target: str) -> str | None:
    """The translation that occurs in the target, exactly or with an ending of up to two letters."""
    for ending in ("", r"\w{1,2}"):
        for word in sorted(translations, key=lambda word: (-len(word), word)):
            has_borders = word[0] < "\u3000"  # scripts without spaces have none
            pattern = rf"(?<!\w){re.escape(word)}{ending}(?!\w)" if has_borders else re.escape(word)
            if re.search(pattern, target, re.IGNORECASE):
                return word
    return None


def write_examples(examples: Sequence[AmbiguousExample], path: str | Path) -> Path:
    """Write examples as JSON lines."""
    lines = (json.dumps(asdict(example), ensure_ascii=False) for example in examples)
    Path(path).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return Path(path)


def read_examples(path: str | Path) -> list[AmbiguousExample]:
    """Read a file of `write_examples`.

    Raises:
        DataError: a line has another form.
    """
    adapter, examples = TypeAdapter(AmbiguousExample), []
    for number, line in enumerate(read_lines(Path(path)), start=1):
        try:
            examples.append(adapter.validate_json(line))
        except ValidationError:
            raise DataError(f"{path}:{number} is no example: name a file that write_examples wrote.") from None
    return examples
