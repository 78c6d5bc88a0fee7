"""Pairs of translations in two forms (formal and informal, feminine and masculine), and conversations to train on."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.ambiguity_checkers.run import read_bible, read_ntrex
from experiments.clarify import datasets
from experiments.clarify.checkers import checker
from experiments.clarify.datasets import AmbiguousExample, ParallelDocument
from experiments.study import shuffled
from graftlm.config import read_yaml
from graftlm.pipelines.clarify.ambiguity import english_gender

COCOA = "ambig/cocoa_mt"
GENEVAL = "ambig/mt_geneval"
NTREX = "parallel/ntrex"
BIBLE = "parallel/bible"
SETTINGS: Mapping[str, Any] = read_yaml(Path(__file__).with_name("told.yaml"))
_YOU = re.compile(r"\byou", re.IGNORECASE)
# Words after "her" where it is the form of "him" rather than of "his".
_NO_NOUN = re.compile(r"\s*(?:$|[^\w\s])|\s+(?:and|as|at|for|from|in|into|of|on|or|that|to|was|when|with)\b")
_MAX_SOURCE = 120  # in characters
_MAX_FORM = 150
_MAX_CONTEXT = 180
_MAX_ROWS = 120  # training rows of a kind, language and label
_VALIDATION_INTERVAL = 10  # every tenth document of NTREX is for validation

Row = dict[str, Any]


def tell(text: str, **parts: str) -> str:
    """Write the user's message: the text, followed by the named parts that are not empty."""
    lines = [f"Text: {text}"]
    for name, part in parts.items():
        if part:
            lines.append(f"{name.capitalize()}: {part}")
    return "\n".join(lines)


def swap_gender(text: str) -> str:
    """Swap the gendered pronouns of an English text; nouns and first names stay."""

    def swapped(match: re.Match[str]) -> str:
        pronoun = match[0]
        other = SETTINGS["swapped"].get(pronoun.lower())
        if not other:  # "her" is either "him" or "his"
            other = "him" if _NO_NOUN.match(text, match.end()) else "his"
        return str(other.capitalize() if pronoun[0].isupper() else other)

    return datasets.GENDERED.sub(swapped, text)


@dataclass(frozen=True)
class _Candidate:
    """A text with two translations.

    Args:
        id: identifier of the example.
        group: kind and target language, as in `gender_fr`.
        part: the part of the data set.
        text: the English text.
        contexts: a context for each form.
        forms: the two translations.
        right: index of the form that the example's own context requires; for formality, 0 and 1 alternate.
    """

    id: str
    group: str
    part: str
    text: str
    contexts: tuple[str, str]
    forms: tuple[str, str]
    right: int

    def to_pair(self, told: Mapping[str, str]) -> Row:
        """Return the pair with the user's messages by condition."""
        language = self.group.partition("_")[2]
        return {
            "id": self.id,
            "group": self.group,
            "part": self.part,
            "system": SETTINGS["systems"][language],
            "forms": self.forms,
            "right": self.right,
            "told": told,
        }

    def to_clear_pair(self, part: str) -> Row:
        """Return the pair whose text comes with the context of its right form."""
        kind = self.group.partition("_")[0]
        told = _conditions(kind, self.text, context=self.contexts[self.right])
        return self.to_pair(told) | {"id": f"{self.id}:clear", "part": part}


def _formality_examples(data: Path, language: str, part: str) -> list[AmbiguousExample]:
    """Return the formal examples of CoCoA-MT whose source contains "you"."""
    cocoa_part = "train" if part == "dev" else part
    examples = []
    for example in datasets.read_cocoa_mt(data / COCOA, language, cocoa_part):
        is_formal = example.label == "formal" and bool(example.marks)
        if is_formal and _YOU.search(example.source):
            examples.append(example)
    return examples


def _gender_examples(data: Path, language: str, part: str, *, shown: bool) -> list[AmbiguousExample]:
    """Return the examples of MT-GenEval whose source shows the gender, or those whose source hides it."""
    if shown:
        examples = datasets.read_mt_geneval(data / GENEVAL, language, part)
        return [example for example in examples if example.label]
    examples = datasets.mt_geneval_contexts(data / GENEVAL, language, part)
    labelled = [example for example in examples if example.label]
    return [example for example in labelled if not datasets.GENDERED.search(example.source)]


def _read_candidates(data: Path, group: str, part: str, *, shown: bool = False) -> Iterator[_Candidate]:
    """Yield candidates from CoCoA-MT or MT-GenEval in random order.

    Args:
        data: folder of the data sets.
        group: kind and target language.
        part: the part of the data set.
        shown: use the texts of MT-GenEval that show the gender rather than those that hide it.
    """
    kind, _, language = group.partition("_")
    if kind == "formality":
        examples = _formality_examples(data, language, part)
    else:
        examples = _gender_examples(data, language, part, shown=shown)
    number = 0
    for example in shuffled(examples, language if shown else language + part):
        if not _is_usable(example):
            continue
        if shown and english_gender(example.source) != example.label:
            continue
        if kind == "formality":
            yield _formality_candidate(example, group, part, number)
        else:
            yield _gender_candidate(example, group, part)
        number += 1


def _forms(example: AmbiguousExample) -> tuple[str, str]:
    return example.reference.strip(), str(example.contrast).strip()


def _is_usable(example: AmbiguousExample) -> bool:
    """Return whether the translations differ, and all texts are short."""
    first, second = _forms(example)
    if first == second:
        return False
    context_length = sum(len(sentence) for sentence in example.context)
    if len(example.source) > _MAX_SOURCE or context_length > _MAX_CONTEXT:
        return False
    return 0 < len(first) <= _MAX_FORM and 0 < len(second) <= _MAX_FORM


def _formality_candidate(example: AmbiguousExample, group: str, part: str, number: int) -> _Candidate:
    situations = SETTINGS["situations"]
    formal, informal = situations[number // 2 % len(situations)]
    return _Candidate(
        id=example.id,
        group=group,
        part=part,
        text=example.source,
        contexts=(formal, informal),
        forms=_forms(example),
        right=number % 2,
    )


def _gender_candidate(example: AmbiguousExample, group: str, part: str) -> _Candidate:
    """Return a candidate with the feminine context and form first."""
    right = SETTINGS["labels"]["gender"].index(example.label)
    own_form, other_form = _forms(example)
    own_context = "".join(example.context)
    other_context = swap_gender(own_context)
    forms = (own_form, other_form)
    contexts = (own_context, other_context)
    if right == 1:
        forms = (other_form, own_form)
        contexts = (other_context, own_context)
    return _Candidate(
        id=example.id,
        group=group,
        part=part,
        text=example.source,
        contexts=contexts,
        forms=forms,
        right=right,
    )


def build_pairs(data: Path, counts: Mapping[str, int]) -> Iterator[Row]:
    """Yield pairs of the parts test, clear, dev and dev_clear; no dev text is in a test set.

    `forms` are two translations, and `right` is the index of the form that the pair's own context requires, or
    alternates if there is no such context. `told` has the user's messages by condition; `answer:1` has the answer for
    which form 1 is right. Clear texts are, for formality, the first ambiguous texts with their situation, and for
    gender, sentences that show it.

    Args:
        data: folder of the data sets.
        counts: number of pairs of each group, by part.
    """
    tested: set[str] = set()
    for setting in SETTINGS["parts"]:
        part, group = setting.split()
        is_test = part == "test"
        kind = group.partition("_")[0]
        ambiguous = list(_read_candidates(data, group, part))
        clear = ambiguous
        if kind == "gender":
            clear = list(_read_candidates(data, group, part, shown=True))
        if is_test:
            tested.update(candidate.text for candidate in ambiguous)
        else:
            ambiguous = [candidate for candidate in ambiguous if candidate.text not in tested]
            clear = [candidate for candidate in clear if candidate.text not in tested]
        for number, candidate in enumerate(ambiguous[: counts[part]]):
            others = ambiguous[number - 1].contexts if is_test else None
            told = _conditions(kind, candidate.text)
            if others is not None:
                told |= _controls(kind, candidate, others)
            yield candidate.to_pair(told)
        clear_part = "clear" if is_test else "dev_clear"
        for candidate in clear[: counts[clear_part]]:
            yield candidate.to_clear_pair(clear_part)


def _conditions(kind: str, text: str, context: str = "") -> dict[str, str]:
    """Return the user's messages without a question and with either answer to the question."""
    question = SETTINGS["questions"][kind]
    told = {"nothing": tell(text, context=context)}
    for form, answer in enumerate(SETTINGS["answers"][kind]):
        told[f"answer:{form}"] = tell(text, context=context, question=question, answer=answer)
    return told


def _controls(kind: str, candidate: _Candidate, other_contexts: Sequence[str]) -> dict[str, str]:
    """Return the user's messages of the controls.

    They are a question without an answer, contexts, answers without a question, and, for gender, the contexts of
    another text.
    """
    text = candidate.text
    told = {"question": tell(text, question=SETTINGS["questions"][kind])}
    for form, answer in enumerate(SETTINGS["answers"][kind]):
        told[f"context:{form}"] = tell(text, context=candidate.contexts[form])
        told[f"word:{form}"] = tell(text, note=answer)
        if kind == "gender":
            told[f"other:{form}"] = tell(text, context=other_contexts[form])
    return told


@dataclass(frozen=True)
class _Translation:
    """A sentence of a parallel corpus.

    Args:
        corpus: name of the corpus.
        language: target language.
        before: the sentence before, or its beginning.
        source: the English sentence.
        target: its translation.
    """

    corpus: str
    language: str
    before: str
    source: str
    target: str


# A row to train on: a translation and the parts that the user's message may tell.
_Told = tuple[_Translation, dict[str, str]]


def training_rows(data: Path, known: set[str]) -> dict[str, list[Row]]:
    """Build conversations to train on.

    Half of the rows contain a question and the answer that the checkers find in the reference. Every second one of the
    others contains the sentence before. The plain rows are the same without questions and answers.

    Args:
        data: folder of the data sets.
        known: texts that the rows must not contain.

    Returns:
        Rows by file: `question` and `plain`, and `validation_question` and `validation_plain`.
    """
    rows: dict[str, list[Row]] = {}
    for prefix in ("", "validation_"):
        translations = _translations(data, known, validation=bool(prefix))
        chosen = shuffled(_choose(translations), "rows")
        rows[f"{prefix}question"] = [_training_row(*told, parts=("context", "question", "answer")) for told in chosen]
        rows[f"{prefix}plain"] = [_training_row(*told, parts=("context",)) for told in chosen]
    return rows


def _choose(translations: Iterable[_Translation]) -> list[_Told]:
    """Choose labelled translations, balanced over labels, and as many others."""
    labelled: defaultdict[tuple[str, str, str], list[_Translation]] = defaultdict(list)
    others: list[_Translation] = []
    for translation in translations:
        kind = "formality" if _YOU.search(translation.source) else "gender"
        label = _label(kind, translation)
        if label is not None:
            labelled[kind, translation.language, label].append(translation)
        elif translation.corpus == "ntrex":
            others.append(translation)
    chosen: list[_Told] = []
    for kind, language, label in sorted(labelled):
        labels = SETTINGS["labels"][kind]
        rarest = min(len(labelled.get((kind, language, other), ())) for other in labels)
        told = {
            "question": SETTINGS["questions"][kind],
            "answer": SETTINGS["answers"][kind][labels.index(label)],
        }
        texts = shuffled(labelled[kind, language, label], kind + language)
        most = min(_MAX_ROWS, 2 * rarest)
        chosen.extend((translation, told) for translation in texts[:most])
    unasked = shuffled(others, "others")[: len(chosen)]
    for number, translation in enumerate(unasked):
        context = translation.before if number % 2 == 1 else ""
        chosen.append((translation, {"context": context}))
    return chosen


def _label(kind: str, translation: _Translation) -> str | None:
    """Return the label that a checker finds in a translation; None if it finds none that can be asked for."""
    if kind == "gender":
        # The Bible's sentences are about persons of earlier verses.
        if translation.corpus != "ntrex" or datasets.GENDERED.search(translation.source):
            return None
        source = None
    else:
        source = translation.source
    label = checker(kind, translation.language).check(translation.target, source).label
    return label if label in SETTINGS["labels"][kind] else None


def _training_row(translation: _Translation, told: Mapping[str, str], *, parts: Sequence[str]) -> Row:
    """Return a conversation whose user's message contains the given parts."""
    kept = {part: told[part] for part in parts if part in told}
    return {
        "messages": [
            {"role": "system", "content": SETTINGS["systems"][translation.language]},
            {"role": "user", "content": tell(translation.source, **kept)},
            {"role": "assistant", "content": translation.target},
        ]
    }


def _translations(data: Path, known: set[str], *, validation: bool) -> Iterator[_Translation]:
    """Yield the short sentences of NTREX and of the French Bible that are not in `known`."""
    for language in ("de", "es", "fr"):
        for document in _documents(data, language, validation=validation):
            before = ""
            for pair in document.pairs:
                source = pair.source.strip()
                target = pair.target.strip()
                is_short = 0 < len(source) <= _MAX_SOURCE and 0 < len(target) <= _MAX_FORM
                if is_short and source not in known and target not in known:
                    yield _Translation(
                        corpus=pair.id.partition(":")[0],
                        language=language,
                        before=before,
                        source=source,
                        target=target,
                    )
                before = source[:_MAX_CONTEXT]


def _documents(data: Path, language: str, *, validation: bool) -> Iterator[ParallelDocument]:
    """Yield the documents to train on or to validate on."""
    for number, document in enumerate(read_ntrex(data / NTREX, language)):
        is_validation = number % _VALIDATION_INTERVAL == 0
        if is_validation == validation:
            yield document
    if language == "fr" and not validation:
        for document in read_bible(data / BIBLE / "BSB.txt", data / BIBLE / "FreSynodale1921.txt"):
            if document.id != "Psalms":  # the two Bibles number the verses of psalms differently
                yield document
