"""Metrics of Tables 4.2 and 4.3: BLEU and chrF by sacrebleu, labels by the checkers, words of polysemy, mistakes.

Metrics of the user, such as COMET and BLEURT, are commands: their packages conflict with this project's.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.significance import PairedTest
from scipy.stats import binomtest

from experiments.clarify.builder import CHECKERS
from experiments.clarify.checkers import checker, languages
from experiments.clarify.datasets import AmbiguousExample
from graftlm.errors import EvaluationError, RecipeError
from graftlm.evaluation import Interval, Metric, bootstrap
from graftlm.pipelines.clarify.ambiguity import detect

RESAMPLES = 300
_GENDERS = {
    "feminine": r"\b(?:feminine|female|woman|women|girl|she|her)\b",
    "masculine": r"\b(?:masculine|male|man|men|boy|he|his|him)\b",
}
_FORMS = {"informal": r"\b(?:informal|friend|relative|famil)", "formal": r"\b(?:formal|polite|politely|stranger)\b"}
_ANSWER_WORDS = {"formality": _FORMS, "name": _GENDERS, "profession": _GENDERS}
_SCORER_NAME = re.compile(r"[a-z][a-z_]*")
_BUILT_IN = {"bleu", "chrf", "accuracy", "coverage", "share", "hit", "calls", "questions", "examples"}
_QUESTION_WORDS = {"formality": r"\byou|\bformal|\bpolite|address", "it": r"\bit\b|\bthis\b|\bthat\b"}

Translation = tuple[str, str, str]  # a text, a model's translation, the reference


def text_metrics(outputs: Sequence[str], examples: Sequence[AmbiguousExample], language: str) -> dict[str, Metric]:
    """Corpus BLEU and chrF, with 95% bootstrap intervals over sentences."""
    references = [[example.reference for example in examples]]
    values: dict[str, Metric] = {}
    for name, metric in (("bleu", bleu(language)), ("chrf", CHRF())):
        score: Any = metric.corpus_score(list(outputs), references, n_bootstrap=RESAMPLES)
        low, high = (min(100.0, max(0.0, score._mean + side * score._ci)) for side in (-1, 1))
        values[name] = Interval(mean=score.score, low=low, high=high)
    return values


def bleu(language: str) -> BLEU:
    """BLEU. Japanese is tokenised into characters, since this project has no Japanese word tokeniser."""
    return BLEU(tokenize="char") if language == "ja" else BLEU()


def significance(
    systems: Mapping[str, Sequence[str]], examples: Sequence[AmbiguousExample], language: str
) -> dict[str, dict[str, float]]:
    """The p-values of each system's difference from the first: sacrebleu's paired bootstrap.

    Systems with equal outputs get p = 1. Sacrebleu's count would give them the smallest possible p.
    """
    (first, best), *others = ((name, list(outputs)) for name, outputs in systems.items())
    metrics = {"BLEU": bleu(language), "chrF": CHRF()}
    equal = {name: dict.fromkeys(metrics, 1.0) for name, outputs in others if outputs == best}
    unequal: list[tuple[str, Sequence[str]]] = [(name, outputs) for name, outputs in others if name not in equal]
    if not unequal or len(examples) < 2:
        return equal
    references = [[example.reference for example in examples]]
    _, scores = PairedTest([(first, best), *unequal], metrics, references, test_type="bs", n_samples=RESAMPLES)()
    values: dict[str, Any] = {name: next(scores[key] for key in scores if key.startswith(name)) for name in metrics}
    return equal | {
        name: {metric: float(values[metric][index].p_value) for metric in metrics}
        for index, (name, _) in enumerate(unequal, start=1)
    }


def labels_of(
    outputs: Sequence[str], examples: Sequence[AmbiguousExample], kind: str, language: str
) -> list[str | None] | None:
    """The checkers' labels of outputs; None if there is no checker for the language.

    The checkers of formality and "it" read the English source as well: it shows who is addressed. The checker of gender
    must not, since the source may show the gender.
    """
    name = next((name for checked, name in CHECKERS.items() if checked == kind), None)
    if name is None or language not in languages(name):
        return None
    rules = checker(name, language)
    pairs = zip(outputs, examples, strict=True)
    return [rules.check(output, None if name == "gender" else example.source).label for output, example in pairs]


def label_metrics(labels: Sequence[str | None], examples: Sequence[AmbiguousExample]) -> dict[str, Metric]:
    """Accuracy over labelled examples (an undecided output is wrong), coverage, and shares of labels in percent.

    A share such as `share_formal` is of decided outputs: the bias of Figure 4.6.
    """
    pairs = [(label, ex.label) for label, ex in zip(labels, examples, strict=True) if ex.label is not None]
    decided = [label for label, _ in pairs if label is not None]
    values: dict[str, Metric] = {
        "accuracy": share(sum(label == right for label, right in pairs), len(pairs)),
        "coverage": share(len(decided), len(pairs)),
    }
    shown = {right for _, right in pairs} & {"formal", "masculine"}
    return values | {f"share_{label}": share(decided.count(label), len(decided)) for label in shown if decided}


def split_list(output: str) -> list[str]:
    """The words or phrases of an output that lists them."""
    return [word.strip() for word in re.split(r"[,;、，]", output) if word.strip()]


def polysemy_metrics(outputs: Sequence[str], examples: Sequence[AmbiguousExample]) -> dict[str, Metric]:
    """hit@n: the reference is among the first n words or phrases. chrf@n: their best chrF, on average."""
    lists = [split_list(output) for output in outputs]
    values: dict[str, Metric] = {}
    for n in (3, 10):
        pairs = [(words[:n], example.reference.strip()) for words, example in zip(lists, examples, strict=True)]
        hits = sum(right.casefold() in {word.casefold() for word in words} for words, right in pairs)
        values[f"hit{n}"] = share(hits, len(pairs))
        scores = [[CHRF().sentence_score(word, [right]).score for word in words] for words, right in pairs]
        values[f"chrf{n}"] = sum(max(row, default=0.0) for row in scores) / len(scores)
    return values


def mistakes(
    labels: Sequence[str | None],
    examples: Sequence[AmbiguousExample],
    conversations: Sequence[Mapping[str, Any]],
    kind: str,
) -> dict[str, int]:
    """Counts of conversations without the right label, by the first class of Figure 4.7 that fits.

    no-question: nothing was asked. wrong-question: the question misses the ambiguity. limited-context: the user did not
    know. wrong-answer: the answer says another label. many-ambiguities: rules detect several kinds in the text.
    style-or-other: none of these. The thesis sorted 50 conversations by hand; these rules are coarser.
    """
    counts: Counter[str] = Counter()
    for label, example, conversation in zip(labels, examples, conversations, strict=True):
        if example.label is not None and label != example.label:
            counts[_mistake(example, conversation["question"], conversation["answer"], kind)] += 1
    return dict(sorted(counts.items()))


def _mistake(example: AmbiguousExample, question: str | None, answer: str | None, kind: str) -> str:
    if question is None:
        return "no-question"
    person = r"\b(?:man|woman|he|she|male|female|gender)\b"
    default = re.escape(example.word or example.source) if kind == "polysemy" else person
    if not re.search(_QUESTION_WORDS.get(kind, default), question, re.IGNORECASE):
        return "wrong-question"
    if answer is None:
        return "limited-context"
    label = label_in_answer(answer, kind)
    if label is not None and label != example.label:
        return "wrong-answer"
    return "many-ambiguities" if len(detect(example.source, language=example.language).kinds) > 1 else "style-or-other"


def label_in_answer(answer: str, kind: str) -> str | None:
    """The label that the words of an answer name, or None."""
    patterns = _ANSWER_WORDS.get(kind, {})
    labels = [label for label, words in patterns.items() if re.search(words, answer, re.IGNORECASE)]
    return labels[0] if len(labels) == 1 else None


def share(count: int, total: int) -> Interval:
    """A share in percent, with Wilson's 95% interval."""
    if total == 0:
        return Interval(mean=0.0, low=0.0, high=100.0)
    mean, ends = 100 * count / total, binomtest(count, total).proportion_ci(method="wilson")
    return Interval(mean=mean, low=min(mean, 100 * ends.low), high=max(mean, 100 * ends.high))


class Scorer:
    """A command that gives each translation a number, larger for better ones.

    It reads translations from its standard input, one JSON object per line with `src`, `mt` and `ref`, and writes a
    number for each, in order, one per line.

    Args:
        argument: `NAME=COMMAND`; no shell reads the command.

    Raises:
        RecipeError: the argument has another form, or the name is taken.
    """

    def __init__(self, argument: str) -> None:
        self.name, sign, command = argument.partition("=")
        if not sign or not command.strip() or not _SCORER_NAME.fullmatch(self.name):
            raise RecipeError(f"A scorer is written NAME=COMMAND, such as comet='python comet.py', not {argument!r}.")
        if self.name in _BUILT_IN:
            raise RecipeError(f"The name {self.name} is taken by a metric that is always there: give it another one.")
        self._command = shlex.split(command)

    def __call__(self, translations: Sequence[Translation]) -> list[float]:
        """A number for each translation.

        Raises:
            EvaluationError: the command can't be run, fails, or writes something else.
        """
        rows = (dict(zip(("src", "mt", "ref"), translation, strict=True)) for translation in translations)
        lines = "".join(f"{json.dumps(row)}\n" for row in rows)
        try:
            process = subprocess.run(self._command, input=lines, capture_output=True, encoding="utf-8", check=False)
        except OSError as error:
            raise EvaluationError(
                f"The scorer {self.name} can't be run ({error.strerror}: {self._command[0]}): check its command."
            ) from None
        if process.returncode:
            last = (process.stderr.strip().splitlines() or ["no message"])[-1][:100]
            raise EvaluationError(f"The scorer {self.name} ended with {process.returncode} ({last}): try it by itself.")
        try:
            numbers = [float(line) for line in process.stdout.split()]
        except ValueError:
            wrote = f"The scorer {self.name} wrote {process.stdout.strip()[:40]!r}"
            raise EvaluationError(f"{wrote}, where a number a line is expected.") from None
        if len(numbers) != len(translations) or not np.isfinite(numbers).all():
            counts = f"{len(numbers)} numbers for {len(translations)} translations"
            raise EvaluationError(f"The scorer {self.name} wrote {counts}, not a finite one each.")
        return numbers


def score_rows(
    scorer: Scorer, kind: str, examples: Sequence[AmbiguousExample], outputs: Sequence[str]
) -> dict[str, Metric]:
    """A scorer's mean with a 95% bootstrap interval over translations (seed 0).

    For polysemy: the best number of the first 3 and 10 words or phrases of each output, on average, as in BLEURT@n. An
    output without a word counts as the scorer rates the empty text.
    """
    if kind == "polysemy":
        lists = [split_list(output)[:10] or [""] for output in outputs]
        words = [(ex.source, word, ex.reference) for ex, row in zip(examples, lists, strict=True) for word in row]
        numbers = iter(scorer(words))
        scores = [[next(numbers) for _ in row] for row in lists]
        return {f"{scorer.name}{n}": float(np.mean([max(row[:n]) for row in scores])) for n in (3, 10)}
    translations = [(ex.source, output, ex.reference) for ex, output in zip(examples, outputs, strict=True)]
    return {scorer.name: bootstrap(scorer(translations))}
