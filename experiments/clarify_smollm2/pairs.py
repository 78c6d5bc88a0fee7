"""Pairs of translations in two forms (formal and informal, feminine and masculine), and conversations to train on."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from experiments.ambiguity_checkers.run import read_bible, read_ntrex
from experiments.clarify import datasets
from experiments.clarify.checkers import checker
from experiments.study import shuffled
from graftlm.config import read_yaml
from graftlm.pipelines.clarify.ambiguity import english_gender

COCOA, GENEVAL, NTREX, BIBLE = "ambig/cocoa_mt", "ambig/mt_geneval", "parallel/ntrex", "parallel/bible"
SETTINGS: Mapping[str, Any] = read_yaml(Path(__file__).with_name("told.yaml"))
_YOU = re.compile(r"\byou", re.IGNORECASE)
_NO_NOUN = re.compile(r"\s*(?:$|[^\w\s])|\s+(?:and|as|at|for|from|in|into|of|on|or|that|to|was|when|with)\b")
_SOURCE, _FORM, _CONTEXT = 120, 150, 180  # characters of the longest ones
_MOST = 120  # training rows of a kind, language and label


def tell(text: str, **parts: str) -> str:
    """The user's message: the text, and below it the parts that are not empty, with their names."""
    return "\n".join([f"Text: {text}", *(f"{name.capitalize()}: {part}" for name, part in parts.items() if part)])


def swap_gender(text: str) -> str:
    """An English text with its gendered pronouns swapped; nouns and first names stay."""

    def swapped(match: re.Match[str]) -> str:
        other = SETTINGS["swapped"].get(match[0].lower()) or ("him" if _NO_NOUN.match(text, match.end()) else "his")
        return str(other.capitalize() if match[0][0].isupper() else other)

    return datasets.GENDERED.sub(swapped, text)


def _read(data: Path, group: str, part: str, *, shown: bool = False) -> Iterator[dict[str, Any]]:
    """CoCoA-MT's texts with "you", or MT-GenEval's that hide the gender or show it; `told`: text and contexts."""
    kind, _, language = group.partition("_")
    if kind == "formality":
        examples = datasets.read_cocoa_mt(data / COCOA, language, "train" if part == "dev" else part)
        examples = [each for each in examples if each.label == "formal" and each.marks and _YOU.search(each.source)]
    else:
        read = datasets.read_mt_geneval if shown else datasets.mt_geneval_contexts
        examples = [each for each in read(data / GENEVAL, language, part) if each.label]
        examples = [each for each in examples if shown or not datasets.GENDERED.search(each.source)]
    number = 0
    for each in shuffled(examples, language if shown else language + part):
        forms, own = (each.reference.strip(), str(each.contrast).strip()), "".join(each.context)
        fits = len(each.source) <= _SOURCE and len(own) <= _CONTEXT and all(0 < len(form) <= _FORM for form in forms)
        if fits and forms[0] != forms[1] and (not shown or english_gender(each.source) == each.label):
            right = number % 2 if kind == "formality" else SETTINGS["labels"][kind].index(each.label)
            order = -1 if kind == "gender" and right else 1
            contexts = (
                SETTINGS["situations"][number // 2 % 4] if kind == "formality" else (own, swap_gender(own))[::order]
            )
            pair = {"id": each.id, "group": group, "part": part, "system": SETTINGS["systems"][language]}
            yield pair | {"forms": forms[::order], "right": right, "told": (each.source, *contexts)}
            number += 1


def build_pairs(data: Path, counts: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    """Pairs of the parts test, clear, dev and dev_clear, so many of each group; no dev text is in any test set.

    `forms` are two translations, `right` the one by the pair's own context, or each in turn, and `told` the user's
    messages by condition; `answer:1` tells that form 1 is right. Clear are, of formality, the first ambiguous texts
    with their situation, and of gender sentences that show it.
    """
    tested: set[str] = set()
    for part, group in (pair.split() for pair in SETTINGS["parts"]):
        kind, clear = group.partition("_")[0], "clear" if part == "test" else "dev_clear"
        pairs = [pair for pair in _read(data, group, part) if pair["told"][0] not in tested or part == "test"]
        tested |= {pair["told"][0] for pair in pairs} if part == "test" else set()
        shown = list(_read(data, group, part, shown=True)) if kind == "gender" else pairs
        for number, pair in enumerate(pairs[: counts[part]]):
            others = pairs[number - 1]["told"] if part == "test" else ()
            yield pair | {"told": _conditions(kind, pair["told"], others)}
        for pair in [each for each in shown if each["told"][0] not in tested or part == "test"][: counts[clear]]:
            texts = _conditions(kind, pair["told"], (), context=pair["told"][1 + pair["right"]])
            yield pair | {"id": f"{pair['id']}:clear", "part": clear, "told": texts}


def _conditions(kind: str, texts: tuple[str, ...], others: tuple[str, ...], context: str = "") -> dict[str, str]:
    """What is told; with `others`, another text's contexts, also the controls, such as an answer without a question."""
    text, question, answers = texts[0], SETTINGS["questions"][kind], SETTINGS["answers"][kind]
    told_by = {"nothing": tell(text, context=context)}
    for form, answer in enumerate(answers):
        told_by[f"answer:{form}"] = tell(text, context=context, question=question, answer=answer)
    told_by |= {"question": tell(text, question=question)} if others else {}
    for form, (answer, other) in enumerate(zip(answers, others[1:], strict=False)):
        told_by |= {f"context:{form}": tell(text, context=texts[1 + form]), f"word:{form}": tell(text, note=answer)}
        told_by |= {f"other:{form}": tell(text, context=other)} if kind == "gender" else {}
    return told_by


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
            key = (kind, text[0], str(label)) if usable and label in SETTINGS["labels"][kind] else ()
            if key or corpus == "ntrex":
                labelled.setdefault(key, []).append(tuple(text))
        others, chosen = shuffled(labelled.pop(()), "others"), []
        for (kind, language, label), texts in sorted(labelled.items()):
            labels = SETTINGS["labels"][kind]
            most = min(_MOST, 2 * min(len(labelled.get((kind, language, each), ())) for each in labels))
            lines = {"question": SETTINGS["questions"][kind], "answer": SETTINGS["answers"][kind][labels.index(label)]}
            chosen += [(text, lines) for text in shuffled(texts, kind + language)[:most]]
        chosen += [(text, {"context": text[1] * (n % 2)}) for n, text in enumerate(others[: len(chosen)])]
        for name, kept in (("question", ("context", "question", "answer")), ("plain", ("context",))):
            for (language, _, source, target), lines in shuffled(chosen, "rows"):
                user = tell(source, **{line: lines[line] for line in kept if line in lines})
                turns = {"system": SETTINGS["systems"][language], "user": user, "assistant": target}
                messages = [{"role": role, "content": content} for role, content in turns.items()]
                rows.setdefault(part + name, []).append({"messages": messages})
    return rows


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
