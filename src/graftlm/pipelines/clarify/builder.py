"""A set of ambiguous sentences from any parallel corpus in the order of its documents (appendix C.1.6 of the thesis).

| kind | the English sentence has | the translation decides by | context |
|---|---|---|---|
| formality | "you", fewer than 20 words | the formality checker | the sentences before |
| it | one "it" that stands for something | the gender of its pronouns | the sentences before |
| name | a name of women and men; pronouns become [pr] | English pronouns, here or after | the sentences after |
| profession | an occupation; pronouns become [pr] | English pronouns, else the checker | the sentences before |
| polysemy | a word of several meanings; it alone is the query | a translation of one meaning and of no other | itself |

A sentence is kept where what decides says one label alone, and no doubt of `labelling` speaks against it.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from graftlm.errors import DataError
from graftlm.pipelines.clarify.ambiguity import Ambiguity, detect, words
from graftlm.pipelines.clarify.checkers import languages
from graftlm.pipelines.clarify.examples import GENDERED, KINDS, AmbiguityKind, Example, read_lines
from graftlm.pipelines.clarify.labelling import CHECKERS, Candidate, Labeller
from graftlm.pipelines.clarify.parallel import Document, Pair
from graftlm.pipelines.clarify.parsing import Parser
from graftlm.pipelines.clarify.vocabulary import polysemous_words

MASK = "[pr]"
_FEWEST, _MOST, _ENOUGH_WORDS = 3, 5, 20  # sentences of context, and the words that make three of them enough


@dataclass(frozen=True)
class Built:
    """What was made of a corpus: the examples, and how many candidates were left out for which reason, by kind."""

    examples: tuple[Example, ...]
    left_out: dict[str, dict[str, int]]

    def counts(self) -> dict[str, dict[str, int]]:
        """How many examples of each kind bear each label."""
        found: dict[str, Counter[str]] = {}
        for example in self.examples:
            label = "" if example.kind == "polysemy" else example.label or ""
            found.setdefault(example.kind, Counter())[label] += 1
        return {kind: dict(sorted(labels.items())) for kind, labels in sorted(found.items())}


def build(
    documents: Sequence[Document],
    language: str,
    *,
    kinds: Sequence[AmbiguityKind] | None = None,
    parser: Parser | None = None,
) -> Built:
    """The ambiguous sentences of a corpus, with labels and context.

    Args:
        documents: in their order.
        language: of the translations, two letters.
        kinds: which ambiguities; without, all for which there is a checker or a list of words in the language.
        parser: of English; without one the cheap rules have to do.

    Raises:
        DataError: there is no checker for one of the kinds asked for.
    """
    kinds = tuple(kinds) if kinds is not None else buildable(language)
    examples: list[Example] = []
    left_out: dict[str, Counter[str]] = {kind: Counter() for kind in kinds}
    for document in documents:
        labeller = Labeller(document, language)
        for place, pair in enumerate(document.pairs):
            for candidate in _candidates(pair, language, kinds, parser):
                made = _make(candidate, document, place, labeller, language)
                if isinstance(made, Example):
                    examples.append(made)
                else:
                    left_out[candidate.found.kind][made] += 1
    return Built(tuple(examples), {kind: dict(counts) for kind, counts in left_out.items()})


def buildable(language: str) -> tuple[AmbiguityKind, ...]:
    """The kinds for which sentences of a language can be labelled."""
    checked: list[AmbiguityKind] = [kind for kind, name in CHECKERS.items() if language in languages(name)]
    senses = next(iter(polysemous_words().values()))
    return (*checked, "polysemy") if senses[0].translations(language) else tuple(checked)


def _candidates(
    pair: Pair, language: str, kinds: Sequence[AmbiguityKind], parser: Parser | None
) -> Iterator[Candidate]:
    """The ambiguities of a pair's English side, the first of each kind; polysemous words one by one."""
    masked = mask_pronouns(pair.source)
    tokens = parser(masked) if parser else words(masked)
    found = detect(masked, language=language, kinds=kinds, parser=(lambda _: tokens) if parser else None).found
    seen: set[AmbiguityKind] = set()
    for ambiguity in found:
        if ambiguity.kind == "formality" and ambiguity.reason.startswith("an imperative"):
            continue  # the recipe goes by "you"
        if ambiguity.kind == "polysemy" or ambiguity.kind not in seen:
            seen.add(ambiguity.kind)
            yield Candidate(ambiguity, pair, tokens, parser is not None)


def _make(candidate: Candidate, document: Document, place: int, labeller: Labeller, language: str) -> Example | str:
    """The example, or why there is none."""
    kind, pair, found = candidate.found.kind, candidate.pair, candidate.found
    if kind == "polysemy":
        return _polysemous(found, pair, language)
    if problem := labeller.problem(candidate):
        return problem
    context = _context(document, place, after=kind == "name")
    if len(context) < _FEWEST:
        return "too little context"
    label, reason = labeller.label(candidate, context)
    if label is None:
        return reason
    masked = kind in ("name", "profession")
    return Example(
        id=f"{pair.id}:{kind}",
        kind=kind,
        language=language,
        source=mask_pronouns(pair.source) if masked else pair.source,
        context=context,
        reference=pair.target,
        label=label,
        word=found.word,
    )


def _context(document: Document, place: int, *, after: bool) -> tuple[str, ...]:
    """Three sentences, and up to five as long as they have no more than 20 words, in the order of the text."""
    sources = [pair.source for pair in document.pairs]
    nearest_first = sources[place + 1 :] if after else sources[:place][::-1]
    taken: list[str] = []
    for sentence in nearest_first[:_MOST]:
        if len(taken) >= _FEWEST and len(" ".join(taken).split()) > _ENOUGH_WORDS:
            break
        taken.append(sentence)
    return tuple(taken if after else taken[::-1])


def _polysemous(found: Ambiguity, pair: Pair, language: str) -> Example | str:
    word = found.word.lower()
    senses = polysemous_words().get(word) or found.senses
    said = [(sense, _said(sense.translations(language), pair.target)) for sense in senses]
    said = [(sense, spoken) for sense, spoken in said if spoken]
    if len(said) != 1:
        return "no listed translation, or of several meanings"
    translation = said[0][1]
    return Example(
        id=f"{pair.id}:polysemy:{word}",
        kind="polysemy",
        language=language,
        source=word,
        context=(pair.source,),
        reference=translation,
        label=translation,
        word=word,
    )


def _said(translations: frozenset[str], target: str) -> str | None:
    """The translation that stands in the target; endings of up to two letters are another form of it."""
    for ending in ("", r"\w{1,2}"):
        for word in sorted(translations, key=lambda one: (-len(one), one)):
            borders = (r"(?<!\w)", rf"{ending}(?!\w)") if word[0] < "\u3000" else ("", "")
            if re.search(borders[0] + re.escape(word) + borders[1], target, re.IGNORECASE):
                return word
    return None


def mask_pronouns(text: str) -> str:
    """The text with [pr] for every English pronoun that tells a gender."""
    return GENDERED.sub(MASK, text)


def write_examples(examples: Sequence[Example], path: str | Path) -> Path:
    """Write examples as JSON lines."""
    path = Path(path)
    lines = (json.dumps(asdict(example), ensure_ascii=False) for example in examples)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def read_examples(path: str | Path) -> list[Example]:
    """Read what `write_examples` wrote.

    Raises:
        DataError: a line is of another form.
    """
    examples: list[Example] = []
    for number, line in enumerate(read_lines(Path(path)), start=1):
        try:
            example = Example(**json.loads(line))
        except (ValueError, TypeError):
            raise DataError(f"{path}:{number} is no example: name a file that write_examples wrote.") from None
        if example.kind not in KINDS:
            raise DataError(f"{path}:{number} has the unknown kind {example.kind!r}: name a file of examples.")
        lists = {name: tuple(getattr(example, name)) for name in ("context", "marks", "reference_context")}
        examples.append(replace(example, **lists))
    return examples
