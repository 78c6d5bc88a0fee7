"""Build a set of ambiguous sentences from parallel documents (appendix C.1.6 of the thesis).

| kind | the English sentence has | the label comes from | context |
|---|---|---|---|
| formality | "you", fewer than 20 words | the formality checker | the sentences before |
| it | one "it" with a referent | the gender of the translation's pronouns | the sentences before |
| name | a name of women and men; pronouns become [pr] | English pronouns, here or after | the sentences after |
| profession | an occupation; pronouns masked | English pronouns, the corpus or the checker | the sentences before |
| polysemy | a word with several meanings; it alone is the query | a translation of one meaning | itself |

A sentence is kept if its label is certain. Otherwise it is rejected, and the reason is counted.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
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
CHECKERS: dict[AmbiguityKind, CheckerKind] = {
    "formality": "formality",
    "it": "it",
    "name": "gender",
    "profession": "gender",
}
_MIN_CONTEXT = 3  # sentences of a context
_MAX_CONTEXT = 5  # sentences of a context
_CONTEXT_WORDS = 20  # words above which a context has fewer sentences than the maximum
_MAX_WORDS = 20  # words of a sentence for formality
_PRONOUNS_OF_CLAUSES = {"what", "whatever", "whoever", "this", "that"}
_CLAUSES = {"csubj", "ccomp", "xcomp", "oprd", "prt"}


@dataclass(frozen=True)
class AmbiguitySet:
    """The result of `build_ambiguity_set`.

    Args:
        examples: the built examples.
        rejected: number of rejected candidates by kind and reason.
    """

    examples: tuple[AmbiguousExample, ...]
    rejected: dict[str, dict[str, int]]

    def counts(self) -> dict[str, dict[str, int]]:
        """Count the examples by kind and label; polysemous words have a single count."""
        counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for example in self.examples:
            label = example.label or ""
            if example.kind == "polysemy":
                label = ""
            counts[example.kind][label] += 1
        return {kind: dict(sorted(counts[kind].items())) for kind in sorted(counts)}


@dataclass(frozen=True)
class _Candidate:
    """An ambiguity of an English sentence. If it is not parsed, its tokens have no grammar."""

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
        if self.token.dep.startswith("nsubj"):
            return "subject"
        if self.token.dep == "obj":
            return "object"
        return None


class _RejectedError(Exception):
    """A candidate is rejected; the message is the reason."""


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
    """Collect the ambiguous sentences of a corpus, with labels and context.

    Args:
        documents: the documents in corpus order.
        language: language code of the translations, two letters.
        kinds: the ambiguities to collect; all kinds of `buildable` by default.
        parser: a parser of English; None uses only words and their neighbours.
        quota: maximum number of examples of a kind, the first ones of the corpus; None for no limit.

    Raises:
        DataError: a kind has no checker, or the quota is less than 1.
    """
    if quota is not None and quota < 1:
        raise DataError(f"The quota of each kind is {quota}, but at least 1 is expected; None sets no limit.")
    builder = _Builder(language, buildable(language) if kinds is None else kinds, parser, quota)
    for document in documents:
        builder.add(document)
    return builder.result()


class _Builder:
    """Collects examples and counts rejections over the documents of a corpus."""

    def __init__(
        self,
        language: str,
        kinds: Sequence[AmbiguityKind],
        parser: Parser | None,
        quota: int | None,
    ) -> None:
        self._language = language
        self._kinds = kinds
        self._parser = parser
        self._quota = quota
        self._examples: list[AmbiguousExample] = []
        self._built: Counter[str] = Counter()
        self._rejected: dict[str, Counter[str]] = {kind: Counter() for kind in kinds}

    def add(self, document: ParallelDocument) -> None:
        """Collect the examples of a document."""
        labeller = _Labeller(document, self._language)
        for index, pair in enumerate(document.pairs):
            kinds: list[AmbiguityKind] = [
                kind for kind in self._kinds if self._quota is None or self._built[kind] < self._quota
            ]
            if not kinds:
                return
            for candidate in _candidates(pair, self._language, kinds, self._parser):
                self._add_candidate(candidate, index, labeller)

    def _add_candidate(self, candidate: _Candidate, index: int, labeller: _Labeller) -> None:
        kind = candidate.ambiguity.kind
        try:
            _reject_if(self._built[kind] == self._quota, "above the quota of its kind")
            example = labeller.example(candidate, index)
        except _RejectedError as reason:
            self._rejected[kind][str(reason)] += 1
        else:
            self._examples.append(example)
            self._built[kind] += 1

    def result(self) -> AmbiguitySet:
        """Return the collected examples and the counts of rejections."""
        return AmbiguitySet(
            examples=tuple(self._examples),
            rejected={kind: dict(counts) for kind, counts in self._rejected.items()},
        )


def buildable(language: str) -> tuple[AmbiguityKind, ...]:
    """Return the kinds that can be labelled in a language: those with a checker, and polysemy with translations."""
    kinds: list[AmbiguityKind] = [kind for kind, name in CHECKERS.items() if language in languages(name)]
    senses = next(iter(polysemous_words().values()))
    if senses[0].translations(language):
        kinds.append("polysemy")
    return tuple(kinds)


def mask_pronouns(text: str) -> str:
    """Replace every gendered English pronoun by [pr]."""
    return GENDERED.sub(MASK, text)


def _candidates(
    pair: SentencePair, language: str, kinds: Sequence[AmbiguityKind], parser: Parser | None
) -> Iterator[_Candidate]:
    """Yield the ambiguities of a pair's English side: the first of each kind, and all polysemous words."""
    masked = mask_pronouns(pair.source)
    if parser is None:
        tokens = split_words(masked)
        detection = detect(masked, language=language, kinds=kinds)
    else:
        tokens = parser(masked)
        detection = detect(masked, language=language, kinds=kinds, parser=lambda _: tokens)
    seen: set[AmbiguityKind] = set()
    for ambiguity in detection.ambiguities:
        if ambiguity.kind == "formality" and ambiguity.reason.startswith("an imperative"):
            continue  # the paper's recipe requires "you"
        if ambiguity.kind == "polysemy" or ambiguity.kind not in seen:
            seen.add(ambiguity.kind)
            yield _Candidate(ambiguity, pair, tokens, parser is not None)


class _Labeller:
    """Labels the examples of a document.

    Args:
        document: the document, whose other sentences may resolve an ambiguity.
        language: language code of the translations, two letters.
    """

    def __init__(self, document: ParallelDocument, language: str) -> None:
        self._document = document
        self._language = language

    def example(self, candidate: _Candidate, index: int) -> AmbiguousExample:
        """Return the example of a candidate in the sentence `index`.

        Raises:
            _RejectedError: the label is uncertain, or there is too little context.
        """
        if candidate.ambiguity.kind == "polysemy":
            return self._word_example(candidate)
        return self._sentence_example(candidate, index)

    def _word_example(self, candidate: _Candidate) -> AmbiguousExample:
        """Return the example of a polysemous word, whose context is the sentence."""
        pair = candidate.pair
        word = candidate.ambiguity.word.lower()
        senses = polysemous_words().get(word) or candidate.ambiguity.senses
        matches = [translation_in(sense.translations(self._language), pair.target) for sense in senses]
        translations = [translation for translation in matches if translation]
        _reject_if(len(translations) != 1, "no listed translation, or of several meanings")
        return AmbiguousExample(
            id=f"{pair.id}:polysemy:{word}",
            kind="polysemy",
            language=self._language,
            source=word,
            context=(pair.source,),
            reference=translations[0],
            label=translations[0],
            word=word,
        )

    def _sentence_example(self, candidate: _Candidate, index: int) -> AmbiguousExample:
        """Return the example of an ambiguous sentence."""
        kind = candidate.ambiguity.kind
        pair = candidate.pair
        self._check(candidate)
        context = self._context(index, after=kind == "name")
        _reject_if(len(context) < _MIN_CONTEXT, "too little context")
        label = self._label(candidate, context)
        source = pair.source
        if kind in ("name", "profession"):
            source = mask_pronouns(source)
        return AmbiguousExample(
            id=f"{pair.id}:{kind}",
            kind=kind,
            language=self._language,
            source=source,
            context=context,
            reference=pair.target,
            label=label,
            word=candidate.ambiguity.word,
        )

    def _check(self, candidate: _Candidate) -> None:
        """Reject a candidate whose English sentence makes the label uncertain."""
        kind = candidate.ambiguity.kind
        if kind == "formality":
            self._check_formality(candidate)
        elif kind == "it":
            self._check_it(candidate)
        elif kind == "name":
            self._check_name(candidate)
        else:
            self._check_person(candidate)

    def _context(self, index: int, *, after: bool) -> tuple[str, ...]:
        """Return three sentences, and up to five while they have at most 20 words, in text order."""
        sources = [pair.source for pair in self._document.pairs]
        neighbours = sources[index + 1 :] if after else sources[:index][::-1]
        nearest_first = neighbours[:_MAX_CONTEXT]
        context = nearest_first[:_MIN_CONTEXT]
        while len(context) < len(nearest_first) and len(" ".join(context).split()) <= _CONTEXT_WORDS:
            context.append(nearest_first[len(context)])
        if not after:
            context.reverse()
        return tuple(context)

    def _label(self, candidate: _Candidate, context: Sequence[str]) -> str:
        """Return the label of a sentence.

        The label of a person comes from English pronouns, or else from the gender that the corpus states. Other labels
        come from the markers of the translation, if they agree. Few translations show the gender of a name, and their
        other words have their own genders, so the label of a name never comes from the translation, but from the
        English sentences after it.
        """
        kind = candidate.ambiguity.kind
        pair = candidate.pair
        if kind in ("name", "profession"):
            gender = english_gender(pair.source)
            if gender is not None:
                return gender
        if kind == "name":
            gender = english_gender(" ".join(context))
            _reject_if(gender is None, "no pronoun decides, or both genders")
            return str(gender)
        if kind == "profession" and self._document.gender is not None:
            return self._document.gender
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
        """Reject weak markers, and forms shared by one person and several if several may be addressed."""
        address = table.address
        markers = [marker for marker in result.markers if marker.weight >= 1]
        _reject_if(not markers, "no marker that decides alone")
        if result.label != address.label:
            return
        if all(re.fullmatch(address.shared, marker.text, re.IGNORECASE) for marker in markers):
            _reject_if(self._may_address_several, "a form that several persons share")

    @cached_property
    def _may_address_several(self) -> bool:
        """Whether the document addresses several persons anywhere, or one person in the other form.

        If a French document uses *tu*, its *vous* may address several persons. If it never does, *vous* is polite.
        """
        rules = checker("formality", self._language)
        address = rules.table.address
        several = re.compile(rf"(?<!\w)(?:{address.several})(?!\w)", re.IGNORECASE)
        for pair in self._document.pairs:
            if several.search(pair.target) or word_pattern("several_people").search(pair.source):
                return True
            markers = rules.check(pair.target).markers
            if any(marker.label != address.label and marker.weight > 1 for marker in markers):
                return True
        return False

    def _check_it(self, candidate: _Candidate) -> None:
        source = candidate.pair.source
        _reject_if(len(re.findall(r"\bit\b", source, re.IGNORECASE)) > 1, "it more than once")
        _reject_if(GENDERED.search(source), "pronouns of persons, which may be those of the translation")
        _reject_if(candidate.parsed and candidate.role is None, "it that is neither subject nor object")
        _reject_if(candidate.parsed and _has_referent(candidate), "a referent in the sentence itself")

    def _check_name(self, candidate: _Candidate) -> None:
        if candidate.parsed and candidate.role != "subject":
            names = [token for token in candidate.tokens if token.pos == "PROPN"]
            others = [name for name in names if not _is_part_of_name(name, candidate)]
            _reject_if(others, "other names, whose pronouns may be those")
        self._check_person(candidate)

    def _check_person(self, candidate: _Candidate) -> None:
        source = candidate.pair.source
        _reject_if(GENDERED.search(source) and english_gender(source) is None, "persons of both genders")


def _is_part_of_name(token: Token, candidate: _Candidate) -> bool:
    """Return whether a token is the ambiguous name or follows it as a surname."""
    start = candidate.ambiguity.start
    between = candidate.pair.source[start : token.start]
    return token.start >= start and re.fullmatch(r"(?:[A-Z][\w.'’-]* )*", between) is not None


def _has_referent(candidate: _Candidate) -> bool:
    """Return whether "it" may refer to a name or a clause before it, or to the subject of its main clause."""
    token = candidate.token
    for word in candidate.tokens:
        if word.start < token.start and (word.pos == "PROPN" or word.lemma in _PRONOUNS_OF_CLAUSES):
            return True
    head = candidate.tokens[token.head]
    if head.dep != "advcl":
        return False
    for word in candidate.tokens:
        is_in_main_clause = word.head == head.head and word.start > token.start
        if is_in_main_clause and word.dep.startswith("nsubj") and word.pos in {"NOUN", "PROPN"}:
            return True
    return False


def _check_referent(candidate: _Candidate, result: CheckResult, table: CheckerTable) -> None:
    """Reject pronouns in another role than that of "it", and those that may refer to a clause or to nothing."""
    roles = (candidate.role, None) if candidate.parsed else ("subject", "object", None)
    _reject_if(any(marker.role not in roles for marker in result.markers), "a pronoun in another role")
    _reject_if(result.label == "neuter", "neuter, which stands for clauses and for nothing as well")
    if result.label != table.clauses:
        return
    if candidate.parsed:
        verbs = {candidate.tokens[candidate.token.head].lemma}
    else:
        verbs = set(re.findall(r"\w+", candidate.pair.source.lower()))
    _reject_if(verbs & word_list("clausal_verbs"), "a verb of saying or doing: it may stand for a clause")
    if candidate.parsed:
        _check_predicate(candidate)


def _check_predicate(candidate: _Candidate) -> None:
    """Reject "it" that may refer to nothing, by the words that depend on its verb."""
    tokens = candidate.tokens
    head = candidate.token.head
    predicates = {head}
    for index, word in enumerate(tokens):
        if word.head == head and word.dep == "acomp":
            predicates.add(index)
    after = tokens[tokens.index(candidate.token) :]
    dependent = any(word.head in predicates and word.dep in _CLAUSES for word in after)
    _reject_if(dependent, "a clause or a particle depends on its verb: it may stand for nothing")
    alone = tokens[head].lemma == "be" and len(predicates) == 1
    _reject_if(alone, "a noun or a place after be: it may stand for nothing")


def translation_in(translations: frozenset[str], target: str) -> str | None:
    """Return the translation that occurs in a sentence, exactly or with an ending of up to two letters.

    Args:
        translations: the translations of a word.
        target: the sentence. If it contains several, the longest one is returned.
    """
    longest_first = sorted(translations, key=lambda word: (-len(word), word))
    for ending in ("", r"\w{1,2}"):
        for word in longest_first:
            pattern = re.escape(word)
            if word[0] < "\u3000":  # other scripts have no spaces between words
                pattern = rf"(?<!\w){pattern}{ending}(?!\w)"
            if re.search(pattern, target, re.IGNORECASE):
                return word
    return None


def write_examples(examples: Sequence[AmbiguousExample], path: str | Path) -> Path:
    """Write examples as JSON lines.

    Args:
        examples: the examples.
        path: the file.
    """
    lines = [json.dumps(asdict(example), ensure_ascii=False) for example in examples]
    text = "".join(f"{line}\n" for line in lines)
    Path(path).write_text(text, encoding="utf-8")
    return Path(path)


def read_examples(path: str | Path) -> list[AmbiguousExample]:
    """Read a file of `write_examples`.

    Args:
        path: the file.

    Raises:
        DataError: a line is not an example.
    """
    adapter = TypeAdapter(AmbiguousExample)
    examples = []
    for number, line in enumerate(read_lines(Path(path)), start=1):
        try:
            example = adapter.validate_json(line)
        except ValidationError:
            raise DataError(f"{path}:{number} is not an example: name a file that write_examples wrote.") from None
        examples.append(example)
    return examples
