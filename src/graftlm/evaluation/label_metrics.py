"""Metrics of predictions on labelled rows.

    classification   accuracy; macro_f1; matthews (Matthews correlation coefficient)
    marked           the same
    choice           accuracy
    regression       pearson, spearman; 0 where all predictions or all labels are equal
    multi-label      micro_f1 and macro_f1 over labels
    tagging          entity_f1 (an entity counts when its words and type match); accuracy of words
    span             token_f1 and exact_match as in SQuAD: the best over a row's answers, without case and articles

All metrics are in points: 91.5 is an accuracy of 0.915.
"""

from __future__ import annotations

import operator
import re
import statistics
import string
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain

import numpy as np

from graftlm.data.labelled import METRICS, AnswerSpan, LabelledRow
from graftlm.evaluation.entities import entities
from graftlm.evaluation.label_predictions import Prediction
from graftlm.grafts.heads import TaskSpec

_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def task_metrics(spec: TaskSpec, rows: Sequence[LabelledRow], predictions: Sequence[Prediction]) -> dict[str, float]:
    """Return every metric of a task's type, in points.

    Args:
        spec: the specification of the task.
        rows: labelled rows, at least one.
        predictions: the predictions for these rows, in their order.

    Returns:
        The metrics by the names in the documentation of this module.
    """
    truth = [row.target for row in rows]
    predicted = [prediction.value for prediction in predictions]
    metrics = {}
    for name in METRICS[spec.type]:
        metric = _METRICS[spec.type, name]
        metrics[name] = 100 * float(metric(truth, predicted))
    return metrics


def is_exact(reference: AnswerSpan, predicted: AnswerSpan) -> bool:
    """Return whether a predicted span equals one of a row's answers, as SQuAD compares them.

    Args:
        reference: the row's answers.
        predicted: the predicted span, whose first answer is its text.
    """
    words = _normalized_words(predicted.answers[0])
    return any(words == _normalized_words(answer) for answer in reference.answers)


# scikit-learn and scipy take a second to import, so functions import them.
def sklearn_metric(name: str, truth: object, predicted: object, **options: object) -> float:
    """Compute a metric of scikit-learn.

    Args:
        name: name of a function of `sklearn.metrics`.
        truth: the true values, in a form that the function takes.
        predicted: the predicted values, in the same form.
        options: further arguments of the function.
    """
    import sklearn.metrics

    metric = getattr(sklearn.metrics, name)
    return metric(truth, predicted, **options)


def _correlation(name: str, truth: Sequence[float], predicted: Sequence[float]) -> float:
    """Return a correlation coefficient of scipy; 0 where it is not defined."""
    import scipy.stats

    if len(set(truth)) < 2 or len(set(predicted)) < 2:
        return 0.0
    correlation = getattr(scipy.stats, name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scipy warns where predictions are almost equal
        value = float(correlation(truth, predicted).statistic)
    return value if np.isfinite(value) else 0.0


def _multi_label_f1(average: str, truth: Sequence[Iterable[str]], predicted: Sequence[Iterable[str]]) -> float:
    """Return the F1 score over the labels of all rows, with an averaging of scikit-learn."""
    from sklearn.preprocessing import MultiLabelBinarizer

    binarizer = MultiLabelBinarizer().fit([*truth, *predicted])
    if not len(binarizer.classes_):
        return 1.0  # no row has a label, and no label was predicted
    return sklearn_metric(
        "f1_score",
        binarizer.transform(truth),
        binarizer.transform(predicted),
        average=average,
        zero_division=0,
    )


def _entity_f1(truth: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> float:
    """Return the micro-averaged F1 score of entities, which count if their words and type match."""
    total = 0
    shared = 0
    for true_tags, predicted_tags in zip(truth, predicted, strict=True):
        true_entities = set(entities(true_tags))
        predicted_entities = set(entities(predicted_tags))
        total += len(true_entities) + len(predicted_entities)
        shared += len(true_entities & predicted_entities)
    return 2 * shared / total if total else 1.0


def _word_accuracy(truth: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> float:
    true_tags = list(chain.from_iterable(truth))
    predicted_tags = list(chain.from_iterable(predicted))
    return sklearn_metric("accuracy_score", true_tags, predicted_tags)


def _best_over_answers(
    score: Callable[[list[str], list[str]], float], truth: Sequence[AnswerSpan], predicted: Sequence[AnswerSpan]
) -> float:
    """Return the mean over rows of the best score over a row's answers."""
    best = []
    for reference, span in zip(truth, predicted, strict=True):
        words = _normalized_words(span.answers[0])
        best.append(max(score(_normalized_words(answer), words) for answer in reference.answers))
    return statistics.fmean(best)


def _normalized_words(text: str) -> list[str]:
    """Return words without case, punctuation and English articles, as SQuAD's evaluation normalizes them."""
    text = text.lower().translate(_NO_PUNCTUATION)
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def _token_f1(reference: list[str], predicted: list[str]) -> float:
    if not reference or not predicted:
        return float(reference == predicted)
    shared = Counter(reference) & Counter(predicted)
    return 2 * sum(shared.values()) / (len(reference) + len(predicted))


_METRICS: dict[tuple[str, str], Callable[..., float]] = {
    ("classification", "accuracy"): partial(sklearn_metric, "accuracy_score"),
    ("classification", "macro_f1"): partial(sklearn_metric, "f1_score", average="macro", zero_division=0),
    ("classification", "matthews"): partial(sklearn_metric, "matthews_corrcoef"),
    ("marked", "accuracy"): partial(sklearn_metric, "accuracy_score"),
    ("marked", "macro_f1"): partial(sklearn_metric, "f1_score", average="macro", zero_division=0),
    ("marked", "matthews"): partial(sklearn_metric, "matthews_corrcoef"),
    ("choice", "accuracy"): partial(sklearn_metric, "accuracy_score"),
    ("regression", "pearson"): partial(_correlation, "pearsonr"),
    ("regression", "spearman"): partial(_correlation, "spearmanr"),
    ("multi-label", "micro_f1"): partial(_multi_label_f1, "micro"),
    ("multi-label", "macro_f1"): partial(_multi_label_f1, "macro"),
    ("tagging", "entity_f1"): _entity_f1,
    ("tagging", "accuracy"): _word_accuracy,
    ("span", "token_f1"): partial(_best_over_answers, _token_f1),
    ("span", "exact_match"): partial(_best_over_answers, operator.eq),
}
