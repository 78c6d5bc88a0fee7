"""Pairs of translations that differ in form, what a model is told before them, and conversations to train on.

The forms are formal and informal, or feminine and masculine; a condition such as `answer:1` tells that form 1 is right.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from experiments.ambiguity_checkers.run import read_bible, read_ntrex
from experiments.clarify import datasets
from experiments.clarify.checkers import checker
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
    """Two forms of a translation, which is right by its own context or in turn, and messages by condition."""

    id: str
    group: str
    part: str
    system: str
    forms: tuple[str, ...]
    right: int
    told: dict[str, str]


def tell(text: str, **parts: str) -> str:
    """The user's message: the text, and below it the parts that are not empty, with their names."""
    return "\n".join([f"Text: {text}", *(f"{name.capitalize()}: {part}" for name, part in parts.items() if part)])


def swap_gender(text: str) -> str:
    """An English text with its gendered pronouns swapped; nouns and first names stay."""

    def swapped(match: re.Match[str]) -> str:
        other = TOLD["swapped"].get(match[0].lower()) or ("him" if _NO_NOUN.match(text, match.end()) else "his")
        return str(other.capitalize() if match[0][0].isupper() else other)

    return datasets.GENDERED.sub(swapped, text)


def _read(data: Path, group: str, part: str, *, shown: bool = False) -> Iterator[Pair]:
    """CoCoA-MT's texts with "you", or MT-GenEval's that hide the gender or show it; `told`: text and contexts."""
    kind, _, language = group.partition("_")
    if kind == "formality":
        found = datasets.read_cocoa_mt(data / COCOA, language, "train" if part == "dev" else part)
        found = [each for each in found if each.label == "formal" and each.marks and _YOU.search(each.source)]
    elif shown:
        found = datasets.read_mt_geneval(data / GENEVAL, language, part)
    else:
        found = datasets.mt_geneval_contexts(data / GENEVAL, language, part)
        found = [each for each in found if each.label and not datasets.GENDERED.search(each.source)]
    number = 0
    for each in shuffled(found, language if shown else language + part):
        forms, own = (each.reference.strip(), str(each.contrast).strip()), "".join(each.context)
        fits = len(each.source) <= _SOURCE and len(own) <= _CONTEXT and all(0 < len(form) <= _FORM for form in forms)
        if not fits or forms[0] == forms[1] or (shown and english_gender(each.source) != each.label):
            continue
        right = number % 2 if kind == "formality" else TOLD["labels"][kind].index(each.label)
        order = -1 if kind == "gender" and right else 1
        contexts = TOLD["situations"][number // 2 % 4] if kind == "formality" else (own, swap_gender(own))[::order]
        told = {"text": each.source, "0": contexts[0], "1": contexts[1]}
        yield Pair(each.id, group, part, _system(language), forms[::order], right, told)
        number += 1


def build_pairs(data: Path, counts: Mapping[str, int]) -> Iterator[Pair]:
    """So many pairs of each group in the parts test, clear, dev and dev_clear; no dev text is in any test set.

    Clear are, of formality, the first ambiguous texts with their situation, and of gender sentences that show it.
    """
    tested: set[str] = set()
    for part, clear in (("test", "clear"), ("dev", "dev_clear")):
        for group in GROUPS if part == "test" else [each for each in GROUPS[::-1] if each != "formality_it"]:
            kind = group.partition("_")[0]
            pairs = [pair for pair in _read(data, group, part) if pair.told["text"] not in tested or part == "test"]
            tested |= {pair.told["text"] for pair in pairs} if part == "test" else set()
            shown = list(_read(data, group, part, shown=True)) if kind == "gender" else pairs
            for number, pair in enumerate(pairs[: counts[part]]):
                others = pairs[number - 1].told if part == "test" else {}
                yield pair._replace(told=_conditions(kind, pair.told, others))
            for pair in [each for each in shown if each.told["text"] not in tested or part == "test"][: counts[clear]]:
                told = _conditions(kind, pair.told, {}, context=pair.told[str(pair.right)])
                yield pair._replace(id=f"{pair.id}:clear", part=clear, told=told)


def _conditions(kind: str, told: Mapping[str, str], others: Mapping[str, str], context: str = "") -> dict[str, str]:
    """What is told; with `others`, another text's contexts, also the controls, such as an answer without a question."""
    text, question = told["text"], TOLD["questions"][kind]
    conditions = {"nothing": tell(text, context=context)}
    for form, answer in enumerate(TOLD["answers"][kind]):
        conditions[f"answer:{form}"] = tell(text, context=context, question=question, answer=answer)
    if others:
        conditions["question"] = tell(text, question=question)
        for form, answer in enumerate(TOLD["answers"][kind]):
            conditions[f"context:{form}"] = tell(text, context=told[str(form)])
            conditions[f"word:{form}"] = tell(text, note=answer)
            if kind == "gender":
                conditions[f"other:{form}"] = tell(text, context=others[str(form)])
    return conditions


def _system(language: str) -> str:
    return f"Translate the text into {TOLD['languages'][language]}."


def training_rows(data: Path, known: set[str]) -> dict[str, list[dict[str, Any]]]:
    """Conversations `question` and `plain`, and `validation_` of both; none has a text of `known`.

    Half of the rows tell a question and the answer that the checkers see in the reference; each second one of the
    others tells the sentence before. The plain rows are the same without questions and answers.
    """
    rows: dict[str, list[dict[str, Any]]] = {}
    for part in ("", "validation_"):
        labelled: dict[tuple[str, ...], list[tuple[str, ...]]] = {(): []}
        for corpus, *text in _translations(data, known, validation=bool(part)):
            kind = "formality" if _YOU.search(text[2]) else "gender"
            label = checker(kind, text[0]).check(text[3], text[2] if kind == "formality" else None).label
            usable = kind == "formality" or (corpus == "ntrex" and not datasets.GENDERED.search(text[2]))
            key = (kind, text[0], str(label)) if usable and label in TOLD["labels"][kind] else ()
            if key or corpus == "ntrex":
                labelled.setdefault(key, []).append(tuple(text))
        others, chosen = shuffled(labelled.pop(()), "others"), []
        for (kind, language, label), texts in sorted(labelled.items()):
            labels = TOLD["labels"][kind]
            most = min(_MOST, 2 * min(len(labelled.get((kind, language, each), ())) for each in labels))
            lines = {"question": TOLD["questions"][kind], "answer": TOLD["answers"][kind][labels.index(label)]}
            chosen += [(text, lines) for text in shuffled(texts, kind + language)[:most]]
        chosen += [(text, {"context": text[1] * (n % 2)}) for n, text in enumerate(others[: len(chosen)])]
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
        ntrex = enumerate(read_ntrex(data / NTREX, language))
        more = [each for each in bible if each.id != "Psalms"] if language == "fr" and not validation else []
        for document in (*(each for number, each in ntrex if (number % 10 == 0) == validation), *more):
            before = ""
            for pair in document.pairs:
                source, target = pair.source.strip(), pair.target.strip()
                if 0 < len(source) <= _SOURCE and 0 < len(target) <= _FORM and not known & {source, target}:
                    yield pair.id.partition(":")[0], language, before, source, target
                before = source[:_CONTEXT]
