"""Pairs of translations that differ in form, what a model is told before them, and conversations to train on.

The forms are formal and informal, or feminine and masculine. `told` has the user's message by condition; one such as
`answer:1` tells what makes form 1 right. No function writes files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from experiments.ambiguity_checkers.run import read_bible, read_ntrex
from experiments.clarify.checkers import checker
from experiments.clarify.datasets import (
    GENDERED,
    AmbiguousExample,
    mt_geneval_contexts,
    read_cocoa_mt,
    read_mt_geneval,
)
from experiments.study import shuffled
from graftlm.config import read_yaml
from graftlm.pipelines.clarify.ambiguity import english_gender

COCOA, GENEVAL, NTREX, BIBLE = "ambig/cocoa_mt", "ambig/mt_geneval", "parallel/ntrex", "parallel/bible"
GROUPS = ("formality_de", "formality_it", "gender_de", "gender_es", "gender_fr")
TOLD: Mapping[str, Any] = read_yaml(Path(__file__).with_name("told.yaml"))
_YOU = re.compile(r"\byou", re.IGNORECASE)
_NO_NOUN = re.compile(r"\s*(?:$|[^\w\s])|\s+(?:and|as|at|for|from|in|into|of|on|or|that|to|was|when|with)\b")
_SOURCE, _FORM, _CONTEXT = 120, 150, 180  # characters of the longest ones
_MOST = 120  # training rows of a kind, language and label


class Pair(NamedTuple):
    """Two forms of a translation, and the `right` one by its own context; without one each is, in turn."""

    id: str
    group: str
    part: str
    system: str
    forms: tuple[str, ...]
    right: int
    told: dict[str, str]


class Read(NamedTuple):
    """A text of a data set with the two forms of its translation, and a context for each."""

    id: str
    text: str
    forms: tuple[str, ...]
    contexts: tuple[str, ...]
    right: int


def tell(text: str, **parts: str) -> str:
    """The user's message: the text, and below it the parts that are not empty, with their names."""
    return "\n".join([f"Text: {text}", *(f"{name.capitalize()}: {part}" for name, part in parts.items() if part)])


def swap_gender(text: str) -> str:
    """An English text with its gendered pronouns swapped; nouns and first names stay."""

    def swapped(match: re.Match[str]) -> str:
        other = TOLD["swapped"].get(match[0].lower()) or ("him" if _NO_NOUN.match(text, match.end()) else "his")
        return str(other.capitalize() if match[0][0].isupper() else other)

    return GENDERED.sub(swapped, text)


def _read(data: Path, kind: str, language: str, part: str, *, shown: bool = False) -> Iterator[Read]:
    """Usable texts: CoCoA-MT's with "you"; MT-GenEval's that hide the gender, or those that show it."""
    if kind == "formality":
        found = read_cocoa_mt(data / COCOA, language, "train" if part == "dev" else part)
        found = [each for each in found if each.label == "formal" and each.marks and _YOU.search(each.source)]
    elif shown:
        found = read_mt_geneval(data / GENEVAL, language, part)
    else:
        found = mt_geneval_contexts(data / GENEVAL, language, part)
        found = [each for each in found if each.label and not GENDERED.search(each.source)]
    usable = (each for each in shuffled(found, language if shown else language + part) if _fits(each))
    for number, each in enumerate(usable):
        label, own = str(each.label), each.context[0] if each.context else ""
        right = number % 2 if kind == "formality" else TOLD["labels"][kind].index(label)
        flipped = -1 if kind == "gender" and right else 1
        forms = (each.reference.strip(), str(each.contrast).strip())[::flipped]
        contexts = TOLD["situations"][number // 2 % 4] if kind == "formality" else (own, swap_gender(own))[::flipped]
        if not shown or english_gender(each.source) == label:
            yield Read(each.id, each.source, forms, tuple(contexts), right)


def _fits(example: AmbiguousExample) -> bool:
    forms = {example.reference.strip(), str(example.contrast).strip()}
    short = len(example.source) <= _SOURCE and all(len(context) <= _CONTEXT for context in example.context)
    return short and len(forms) == 2 and all(0 < len(form) <= _FORM for form in forms)


def build_pairs(data: Path, counts: Mapping[str, int]) -> Iterator[Pair]:
    """So many pairs of each group in the parts test, clear, dev and dev_clear; no dev text is in any test set.

    Clear texts of formality are the first ambiguous ones with their situation; of gender English sentences that show it.
    """
    tested: set[str] = set()
    for part, clear in (("test", "clear"), ("dev", "dev_clear")):
        for group in GROUPS if part == "test" else [each for each in GROUPS[::-1] if each != "formality_it"]:
            kind, _, language = group.partition("_")
            reads = [each for each in _read(data, kind, language, part) if each.text not in tested or part == "test"]
            tested |= {each.text for each in reads} if part == "test" else set()
            shown = list(_read(data, kind, language, part, shown=True)) if kind == "gender" else reads
            shown = [each for each in shown if each.text not in tested or part == "test"][: counts[clear]]
            for name, texts in ((part, reads[: counts[part]]), (clear, shown)):
                for number, each in enumerate(texts):
                    context = each.contexts[each.right] if name == clear and kind == "formality" else ""
                    told = _conditions(kind, each, reads[number - 1].contexts if name == "test" else (), context)
                    key = f"{each.id}:clear" if name == clear else each.id
                    yield Pair(key, group, name, _system(language), each.forms, each.right, told)


def _conditions(kind: str, read: Read, others: tuple[str, ...], context: str) -> dict[str, str]:
    """What is told; with `others`, another text's contexts, also the controls, such as an answer without a question."""
    question, told = TOLD["questions"][kind], {"nothing": tell(read.text, context=context)}
    for form, answer in enumerate(TOLD["answers"][kind]):
        told[f"answer:{form}"] = tell(read.text, context=context, question=question, answer=answer)
    if others:
        told["question"] = tell(read.text, question=question)
    for form, other in enumerate(others):
        told[f"context:{form}"] = tell(read.text, context=read.contexts[form])
        told[f"word:{form}"] = tell(read.text, note=TOLD["answers"][kind][form])
        if kind == "gender":
            told[f"other:{form}"] = tell(read.text, context=other)
    return told


def _system(language: str) -> str:
    return f"Translate the text into {TOLD['languages'][language]}."


def training_rows(data: Path, known: set[str]) -> dict[str, list[dict[str, Any]]]:
    """Conversations `question` and `plain`, and `validation_` of both; none has a text of `known`.

    Half of the rows tell a question and the answer that the checkers see in the reference; each second one of the
    others tells the sentence before. The plain rows are the same without questions and answers.
    """
    rows: dict[str, list[dict[str, Any]]] = {}
    for part in ("", "validation_"):
        labelled: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
        for name, *text in _translations(data, known, validation=bool(part)):
            language, _, source, target = text
            kind = "formality" if _YOU.search(source) else "gender"
            label = checker(kind, language).check(target, source if kind == "formality" else None).label
            known_label = label in TOLD["labels"][kind] and (name == "ntrex" or kind == "formality")
            if known_label and (kind == "formality" or not GENDERED.search(source)):
                labelled.setdefault((kind, language, str(label)), []).append(tuple(text))
            elif name == "ntrex":
                labelled.setdefault((), []).append(tuple(text))
        others, chosen = labelled.pop((), []), []
        for (kind, language, label), texts in sorted(labelled.items()):
            labels = TOLD["labels"][kind]
            most = min(_MOST, 2 * min(len(labelled.get((kind, language, each), ())) for each in labels))
            lines = {"question": TOLD["questions"][kind], "answer": TOLD["answers"][kind][labels.index(label)]}
            chosen += [(text, lines) for text in shuffled(texts, kind + language)[:most]]
        for number, text in enumerate(shuffled(others, "others")[: len(chosen)]):
            chosen.append((text, {"context": text[1]} if number % 2 else {}))
        for name, kept in (("question", {"context", "question", "answer"}), ("plain", {"context"})):
            rows[part + name] = [_conversation(text, lines, kept) for text, lines in shuffled(chosen, "rows")]
    return rows


def _conversation(text: tuple[str, ...], lines: Mapping[str, str], kept: set[str]) -> dict[str, Any]:
    user = tell(text[2], **{name: line for name, line in lines.items() if name in kept})
    contents = {"system": _system(text[0]), "user": user, "assistant": text[3]}
    return {"messages": [{"role": role, "content": content} for role, content in contents.items()]}


def _translations(data: Path, known: set[str], *, validation: bool) -> Iterator[tuple[str, ...]]:
    """Corpus, language, sentence before, English, translation; each tenth document of NTREX is for validation."""
    bible = read_bible(data / BIBLE / "BSB.txt", data / BIBLE / "FreSynodale1921.txt")
    for language in ("de", "es", "fr"):
        ntrex = read_ntrex(data / NTREX, language)
        documents = [each for number, each in enumerate(ntrex) if (number % 10 == 0) == validation]
        more = [each for each in bible if each.id != "Psalms"] if language == "fr" and not validation else []
        for document in (*documents, *more):
            before = ""
            for pair in document.pairs:
                source, target = pair.source.strip(), pair.target.strip()
                if 0 < len(source) <= _SOURCE and 0 < len(target) <= _FORM and not known & {source, target}:
                    yield pair.id.partition(":")[0], language, before, source, target
                before = source[:_CONTEXT]
