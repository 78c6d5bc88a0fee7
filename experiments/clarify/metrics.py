"""Metrics of Tables 4.2 and 4.3: BLEU and chrF by sacrebleu, labels by the checkers, words of polysemy, mistakes.

Metrics of the user, such as COMET and BLEURT, are external commands, since their packages conflict with this project's.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.significance import PairedTest
from scipy.stats import binomtest

from experiments.clarify.builder import CHECKERS
from experiments.clarify.checkers import CheckerKind, checker, languages
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
_PERSON = r"\b(?:man|woman|he|she|male|female|gender)\b"
_QUESTION_WORDS = {"formality": r"\byou|\bformal|\bpolite|address", "it": r"\bit\b|\bthis\b|\bthat\b"}

Translation = tuple[str, str, str]  # source, a model's translation, reference
PValues = dict[str, float]  # values by metric


def text_metrics(outputs: Sequence[str], examples: Sequence[AmbiguousExample], language: str) -> dict[str, Metric]:
    """Compute corpus BLEU and chrF.

    Args:
        outputs: the outputs, one per example.
        examples: the examples with their references.
        language: language code of the outputs.

    Returns:
        `bleu` and `chrf` with 95% bootstrap intervals over sentences.
    """
    references = [[example.reference for example in examples]]
    values: dict[str, Metric] = {}
    for name, metric in (("bleu", bleu(language)), ("chrf", CHRF())):
        score: Any = metric.corpus_score(list(outputs), references, n_bootstrap=RESAMPLES)
        low = score._mean - score._ci
        high = score._mean + score._ci
        values[name] = Interval(
            mean=score.score,
            low=min(100.0, max(0.0, low)),
            high=min(100.0, max(0.0, high)),
        )
    return values


def bleu(language: str) -> BLEU:
    """Return BLEU. Japanese is tokenised into characters, since this project has no Japanese word tokeniser."""
    if language == "ja":
        return BLEU(tokenize="char")
    return BLEU()


def significance(
    systems: Mapping[str, Sequence[str]], examples: Sequence[AmbiguousExample], language: str
) -> dict[str, dict[str, float]]:
    """Compute p-values of each system's difference from the first by sacrebleu's paired bootstrap.

    Systems with the same outputs as the first get p = 1; sacrebleu's count would give them the smallest possible p.

    Args:
        systems: the outputs by system; the first system is the baseline.
        examples: the examples with their references.
        language: language code of the outputs.

    Returns:
        p-values by system and metric.
    """
    named = [(name, list(outputs)) for name, outputs in systems.items()]
    baseline = named[0]
    metrics = {"BLEU": bleu(language), "chrF": CHRF()}
    values: dict[str, PValues] = {}
    different: list[tuple[str, Sequence[str]]] = []
    for name, outputs in named[1:]:
        if outputs == baseline[1]:
            values[name] = dict.fromkeys(metrics, 1.0)
        else:
            different.append((name, outputs))
    if not different or len(examples) < 2:
        return values
    references = [[example.reference for example in examples]]
    test = PairedTest([baseline, *different], metrics, references, test_type="bs", n_samples=RESAMPLES)
    _, scores = test()
    for index, (name, _) in enumerate(different, start=1):
        values[name] = {metric: _p_value(scores, metric, index) for metric in metrics}
    return values


def _p_value(scores: Mapping[str, Any], metric: str, index: int) -> float:
    """Return the p-value of a system; keys of the scores begin with the name of the metric."""
    key = next(key for key in scores if key.startswith(metric))
    return float(scores[key][index].p_value)


def labels_of(
    outputs: Sequence[str], examples: Sequence[AmbiguousExample], kind: str, language: str
) -> list[str | None] | None:
    """Label outputs by the checkers.

    The checkers of formality and "it" also read the English source, which shows who is addressed. The checker of gender
    must not, since the source may show the gender.

    Args:
        outputs: the outputs, one per example.
        examples: the examples.
        kind: the kind of ambiguity.
        language: language code of the outputs.

    Returns:
        A label per output, None for an undecided one; or None if there is no checker for the language.
    """
    names: dict[str, CheckerKind] = {**CHECKERS}
    name = names.get(kind)
    if name is None or language not in languages(name):
        return None
    rules = checker(name, language)
    labels = []
    for output, example in zip(outputs, examples, strict=True):
        source = None if name == "gender" else example.source
        labels.append(rules.check(output, source).label)
    return labels


def label_metrics(labels: Sequence[str | None], examples: Sequence[AmbiguousExample]) -> dict[str, Metric]:
    """Compute metrics of labels, in percent.

    Args:
        labels: the checkers' labels of the outputs; None if undecided.
        examples: the examples; those without a label are left out.

    Returns:
        `accuracy`, where an undecided output is wrong; `coverage`, the share of decided outputs; and a share of the
        decided outputs such as `share_formal`, the bias of Figure 4.6.
    """
    pairs = [(label, ex.label) for label, ex in zip(labels, examples, strict=True) if ex.label is not None]
    correct = [label for label, right in pairs if label == right]
    decided = [label for label, _ in pairs if label is not None]
    values: dict[str, Metric] = {
        "accuracy": share(len(correct), len(pairs)),
        "coverage": share(len(decided), len(pairs)),
    }
    known = {right for _, right in pairs}
    for label in ("formal", "masculine"):
        if decided and label in known:
            values[f"share_{label}"] = share(decided.count(label), len(decided))
    return values


def split_list(output: str) -> list[str]:
    """Split an output into the words or phrases that it lists."""
    words = [word.strip() for word in re.split(r"[,;、，]", output)]
    return [word for word in words if word]


def polysemy_metrics(outputs: Sequence[str], examples: Sequence[AmbiguousExample]) -> dict[str, Metric]:
    """Compute metrics of lists of translations, for the first n = 3 and 10 words or phrases.

    Args:
        outputs: the outputs, one per example.
        examples: the examples with their references.

    Returns:
        `hit<n>`, the share of outputs with the reference among these words, and `chrf<n>`, the mean of their best chrF.
    """
    values: dict[str, Metric] = {}
    for n in (3, 10):
        hits = 0
        best_scores = []
        for output, example in zip(outputs, examples, strict=True):
            words = split_list(output)[:n]
            reference = example.reference.strip()
            if reference.casefold() in [word.casefold() for word in words]:
                hits += 1
            scores = [CHRF().sentence_score(word, [reference]).score for word in words]
            best_scores.append(max(scores, default=0.0))
        values[f"hit{n}"] = share(hits, len(best_scores))
        values[f"chrf{n}"] = sum(best_scores) / len(best_scores)
    return values


def mistakes(
    labels: Sequence[str | None],
    examples: Sequence[AmbiguousExample],
    conversations: Sequence[Mapping[str, Any]],
    kind: str,
) -> dict[str, int]:
    """Count conversations without the right label by the first class of Figure 4.7 that applies.

    | class | condition |
    |---|---|
    | no-question | no question was asked |
    | wrong-question | the question misses the ambiguity |
    | limited-context | the user gave no answer |
    | wrong-answer | the answer names another label |
    | many-ambiguities | rules detect several kinds of ambiguity in the text |
    | style-or-other | none of these |

    The thesis classified 50 conversations by hand; these rules are coarser.

    Args:
        labels: the checkers' labels of the outputs.
        examples: the examples.
        conversations: mappings with the question and the answer of each conversation.
        kind: the kind of ambiguity.
    """
    counts: Counter[str] = Counter()
    for label, example, conversation in zip(labels, examples, conversations, strict=True):
        if example.label is not None and label != example.label:
            counts[_mistake(example, conversation["question"], conversation["answer"], kind)] += 1
    return dict(sorted(counts.items()))


def _mistake(example: AmbiguousExample, question: str | None, answer: str | None, kind: str) -> str:
    if question is None:
        return "no-question"
    if kind == "polysemy":
        expected = re.escape(example.word or example.source)
    else:
        expected = _QUESTION_WORDS.get(kind, _PERSON)
    if not re.search(expected, question, re.IGNORECASE):
        return "wrong-question"
    if answer is None:
        return "limited-context"
    label = label_in_answer(answer, kind)
    if label is not None and label != example.label:
        return "wrong-answer"
    detection = detect(example.source, language=example.language)
    return "many-ambiguities" if len(detection.kinds) > 1 else "style-or-other"


def label_in_answer(answer: str, kind: str) -> str | None:
    """Return the label that the words of an answer name; None if they name no label or several."""
    patterns = _ANSWER_WORDS.get(kind, {})
    labels = [label for label, words in patterns.items() if re.search(words, answer, re.IGNORECASE)]
    return labels[0] if len(labels) == 1 else None


def share(count: int, total: int) -> Interval:
    """Return a share in percent with Wilson's 95% interval; 0 to 100 if the total is 0."""
    if total == 0:
        return Interval(mean=0.0, low=0.0, high=100.0)
    mean = 100 * count / total
    ends = binomtest(count, total).proportion_ci(method="wilson")
    return Interval(
        mean=mean,
        low=min(mean, 100 * ends.low),
        high=max(mean, 100 * ends.high),
    )


class Scorer:
    """A command that scores translations; larger scores are better.

    The command reads translations from its standard input, one JSON object per line with `src`, `mt` and `ref`, and
    writes a number per translation, in order, one per line.

    Args:
        argument: `NAME=COMMAND`. The command is not run by a shell.

    Raises:
        RecipeError: the argument has another form, or the name is reserved.
    """

    def __init__(self, argument: str) -> None:
        self.name, sign, command = argument.partition("=")
        if not sign or not command.strip() or not _SCORER_NAME.fullmatch(self.name):
            raise RecipeError(
                f"The scorer {argument!r} is not of the form NAME=COMMAND: write it as in comet='python comet.py'."
            )
        if self.name in _BUILT_IN:
            raise RecipeError(f"The name {self.name} belongs to a built-in metric: give the scorer another name.")
        self._command = shlex.split(command)

    def __call__(self, translations: Sequence[Translation]) -> list[float]:
        """Score translations.

        Args:
            translations: the translations.

        Returns:
            A score per translation.

        Raises:
            EvaluationError: the command can't be run, fails, or writes something else than a number per line.
        """
        lines = []
        for source, output, reference in translations:
            row = {"src": source, "mt": output, "ref": reference}
            lines.append(f"{json.dumps(row)}\n")
        written = self._run("".join(lines))
        try:
            scores = [float(line) for line in written.split()]
        except ValueError:
            raise EvaluationError(
                f"The scorer {self.name} wrote {written.strip()[:40]!r}, but a number per line is expected: correct it."
            ) from None
        if len(scores) != len(translations) or not np.isfinite(scores).all():
            raise EvaluationError(
                f"The scorer {self.name} wrote {len(scores)} numbers for {len(translations)} translations, but a "
                "finite number per translation is expected: correct it."
            )
        return scores

    def _run(self, lines: str) -> str:
        """Run the command and return its standard output."""
        try:
            process = subprocess.run(self._command, input=lines, capture_output=True, encoding="utf-8", check=False)
        except OSError as error:
            raise EvaluationError(
                f"The scorer {self.name} can't be run ({error.strerror}: {self._command[0]}): check its command."
            ) from None
        if process.returncode:
            messages = process.stderr.strip().splitlines() or ["no message"]
            raise EvaluationError(
                f"The scorer {self.name} ended with {process.returncode} ({messages[-1][:100]}): run its command alone "
                "to find the error."
            )
        return process.stdout


def score_rows(
    scorer: Scorer, kind: str, examples: Sequence[AmbiguousExample], outputs: Sequence[str]
) -> dict[str, Metric]:
    """Compute a scorer's mean over outputs.

    Args:
        scorer: the scorer.
        kind: the kind of ambiguity.
        examples: the examples with their references.
        outputs: the outputs, one per example.

    Returns:
        The mean with a 95% bootstrap interval (seed 0). For polysemy, as in BLEURT@n, the mean of the best score of the
        first 3 and 10 words or phrases of each output; an output without words is scored as the empty text.
    """
    if kind == "polysemy":
        return _score_lists(scorer, examples, outputs)
    translations = [(ex.source, output, ex.reference) for ex, output in zip(examples, outputs, strict=True)]
    return {scorer.name: bootstrap(scorer(translations))}


def _score_lists(scorer: Scorer, examples: Sequence[AmbiguousExample], outputs: Sequence[str]) -> dict[str, Metric]:
    lists = [split_list(output)[:10] or [""] for output in outputs]
    translations = []
    for example, words in zip(examples, lists, strict=True):
        translations.extend((example.source, word, example.reference) for word in words)
    remaining = iter(scorer(translations))
    scores = [list(islice(remaining, len(words))) for words in lists]
    values: dict[str, Metric] = {}
    for n in (3, 10):
        best = [max(of_output[:n]) for of_output in scores]
        values[f"{scorer.name}{n}"] = float(np.mean(best))
    return values
