"""Figures of Tables 4.2 and 4.3: BLEU and chrF by sacrebleu, labels by the checkers, words of polysemy, mistakes."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.significance import PairedTest

from graftlm.evaluation import Interval, Metric
from graftlm.pipelines.clarify.ambiguity import detect
from graftlm.pipelines.clarify.checkers import CheckerKind, checker, languages
from graftlm.pipelines.clarify.examples import Example

RESAMPLES = 300
_CHECKERS: dict[str, CheckerKind] = {"formality": "formality", "it": "it", "name": "gender", "profession": "gender"}
_SAID = {  # what an answer says, by the words in it
    "formality": {
        "informal": r"\b(?:informal|friend|relative|famil)",
        "formal": r"\b(?:formal|polite|politely|stranger)\b",
    },
    "person": {
        "feminine": r"\b(?:feminine|female|woman|women|girl|she|her)\b",
        "masculine": r"\b(?:masculine|male|man|men|boy|he|his|him)\b",
    },
}


def text_metrics(outputs: Sequence[str], examples: Sequence[Example], language: str) -> dict[str, Metric]:
    """BLEU and chrF of all outputs together, with 95% bootstrap intervals over sentences."""
    references = [[one.reference for one in examples]]
    found: dict[str, Metric] = {}
    for name, metric in (("bleu", bleu(language)), ("chrf", CHRF())):
        score: Any = metric.corpus_score(list(outputs), references, n_bootstrap=RESAMPLES)
        low, high = (min(100.0, max(0.0, score._mean + side * score._ci)) for side in (-1, 1))
        found[name] = Interval(mean=score.score, low=low, high=high)
    return found


def bleu(language: str) -> BLEU:
    """BLEU; Japanese is cut into characters, since a cutter into words is no dependency of this project."""
    return BLEU(tokenize="char") if language == "ja" else BLEU()


def significance(
    systems: Mapping[str, Sequence[str]], examples: Sequence[Example], language: str
) -> dict[str, dict[str, float]]:
    """Of each system but the first, the p-values of its differences from the first: sacrebleu's paired bootstrap.

    Systems with the same outputs have a p of 1, where sacrebleu's count would give the smallest there is.
    """
    (first, best), *others = systems.items()
    same = {name: {"BLEU": 1.0, "chrF": 1.0} for name, outputs in others if list(outputs) == list(best)}
    named: list[tuple[str, Sequence[str]]] = [(first, list(best))]
    named += [(name, list(outputs)) for name, outputs in others if name not in same]
    if len(named) < 2 or len(examples) < 2:
        return same
    metrics = {"BLEU": bleu(language), "chrF": CHRF()}
    references = [[one.reference for one in examples]]
    _, found = PairedTest(named, metrics, references, test_type="bs", n_samples=RESAMPLES)()
    values: dict[str, Any] = {metric: next(found[key] for key in found if key.startswith(metric)) for metric in metrics}
    tested = {
        name: {metric: float(values[metric][place].p_value) for metric in metrics}
        for place, (name, _) in enumerate(named)
        if place
    }
    return same | tested


def labels_of(outputs: Sequence[str], kind: str, language: str) -> list[str | None] | None:
    """What the checkers say of outputs; None where there is no checker for the language."""
    name = _CHECKERS.get(kind)
    if name is None or language not in languages(name):
        return None
    rules = checker(name, language)
    return [rules.check(output).label for output in outputs]


def label_metrics(found: Sequence[str | None], examples: Sequence[Example]) -> dict[str, Metric]:
    """Accuracy over examples with a label, where an output without a marker is not right; coverage; shares of labels.

    A share, such as `share_formal`, is of outputs that bear a marker: the bias of Figure 4.6.
    """
    pairs = [(said, one.label) for said, one in zip(found, examples, strict=True) if one.label is not None]
    decided = [said for said, _ in pairs if said is not None]
    values: dict[str, Metric] = {
        "accuracy": share(sum(said == label for said, label in pairs), len(pairs)),
        "coverage": share(len(decided), len(pairs)),
    }
    first = {label for _, label in pairs} & {"formal", "masculine"}
    return values | {f"share_{label}": share(decided.count(label), len(decided)) for label in first if decided}


def listed(output: str) -> list[str]:
    """The words or phrases of an output that lists them."""
    return [word.strip() for word in re.split(r"[,;、，]", output) if word.strip()]


def polysemy_metrics(outputs: Sequence[str], examples: Sequence[Example]) -> dict[str, Metric]:
    """hit@n: the reference is among the first n words or phrases; chrf@n: the best chrF of those."""
    lists = [listed(output) for output in outputs]
    found: dict[str, Metric] = {}
    for n in (3, 10):
        pairs = [(words[:n], one.reference.strip()) for words, one in zip(lists, examples, strict=True)]
        hits = sum(right.casefold() in {word.casefold() for word in words} for words, right in pairs)
        found[f"hit{n}"] = share(hits, len(pairs))
        best = [
            max((CHRF().sentence_score(word, [right]).score for word in words), default=0.0) for words, right in pairs
        ]
        found[f"chrf{n}"] = sum(best) / len(best)
    return found


def mistakes(
    found: Sequence[str | None], examples: Sequence[Example], talks: Sequence[Mapping[str, Any]], kind: str
) -> dict[str, int]:
    """Conversations that did not end with the right label, by the first class of Figure 4.7 that fits by rule.

    no-question: nothing was asked. wrong-question: it does not name what is ambiguous. limited-context: the user did
    not know. wrong-answer: it says another label. many-ambiguities: rules find several kinds in the text.
    style-or-other: none of these. The thesis sorted 50 by hand; these rules are coarser.
    """
    counted: Counter[str] = Counter()
    for said, one, talk in zip(found, examples, talks, strict=True):
        if one.label is not None and said != one.label:
            counted[_mistake(one, talk, kind)] += 1
    return dict(sorted(counted.items()))


def _mistake(one: Example, talk: Mapping[str, Any], kind: str) -> str:
    question, answer = talk["question"], talk["answer"]
    if question is None:
        return "no-question"
    if not names_ambiguity(question, one, kind):
        return "wrong-question"
    if answer is None:
        return "limited-context"
    said = said_by(answer, kind)
    if said is not None and said != one.label:
        return "wrong-answer"
    return "many-ambiguities" if len(detect(one.source, language=one.language).kinds) > 1 else "style-or-other"


def names_ambiguity(question: str, one: Example, kind: str) -> bool:
    """Whether a question is about what is ambiguous of that kind."""
    words = {
        "formality": r"\byou|\bformal|\bpolite|address",
        "it": r"\bit\b|\bthis\b|\bthat\b",
        "polysemy": re.escape(one.word or one.source),
    }
    return (
        re.search(words.get(kind, r"\b(?:man|woman|he|she|male|female|gender)\b"), question, re.IGNORECASE) is not None
    )


def said_by(answer: str, kind: str) -> str | None:
    """The label that an answer says in so many words, or None."""
    known = _SAID["formality"] if kind == "formality" else _SAID["person"] if kind in {"name", "profession"} else {}
    said = [label for label, words in known.items() if re.search(words, answer, re.IGNORECASE)]
    return said[0] if len(said) == 1 else None


def share(count: int, total: int) -> Interval:
    """A share in percent, with Wilson's 95% interval."""
    if total == 0:
        return Interval(mean=0.0, low=0.0, high=100.0)
    z, p = 1.959964, count / total
    middle = (p + z * z / (2 * total)) / (1 + z * z / total)
    half = z / (1 + z * z / total) * math.sqrt(p * (1 - p) / total + z * z / (4 * total * total))
    return Interval(mean=100 * p, low=100 * max(0.0, min(p, middle - half)), high=100 * min(1.0, max(p, middle + half)))
