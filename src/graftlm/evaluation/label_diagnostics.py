"""Diagnostics of predictions on labelled rows: residuals of numbers; confusion and calibration of labels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from graftlm.data.labelled import LabelledRow
from graftlm.evaluation.label_metrics import is_exact, sklearn_metric
from graftlm.evaluation.label_predictions import Prediction
from graftlm.grafts.heads import TaskSpec

_BINS = 10
_CONFUSIONS = 3
_RESIDUALS = ("mean_absolute_error", "root_mean_squared_error", "max_error")


class _Decision(NamedTuple):
    """The true and the predicted label of one part of a row, and the probability of the predicted one."""

    true: str
    predicted: str
    probability: float


def task_diagnostics(
    spec: TaskSpec, rows: Sequence[LabelledRow], predictions: Sequence[Prediction]
) -> dict[str, object]:
    """Return the errors of predicted numbers, or the confusion and the calibration of predicted labels.

    With multi-label, each label counts as x or not x. With tagging, each word counts. A span is exact or other. The
    label of a choice is its number.

    Args:
        spec: the specification of the task.
        rows: labelled rows, at least one.
        predictions: the predictions for these rows, in their order.

    Returns:
        Plain JSON values. For regression, `mean_absolute_error`, `root_mean_squared_error` and `max_error` in the unit
        of the numbers. For other types, `confusion_matrix` as {true label: {predicted label: count}} without zeros,
        the three most frequent confusions `most_confused` as [true label, predicted label, count], and the values of
        `calibration`.
    """
    if spec.type == "regression":
        truth = [row.target for row in rows]
        predicted = [prediction.value for prediction in predictions]
        return {name: sklearn_metric(name, truth, predicted) for name in _RESIDUALS}
    decisions: list[_Decision] = []
    for row, prediction in zip(rows, predictions, strict=True):
        decisions += _decisions(spec, row.target, prediction)
    counts = Counter((decision.true, decision.predicted) for decision in decisions)
    matrix: dict[str, dict[str, int]] = {}
    confused = []
    for (true, predicted), count in counts.most_common():
        matrix.setdefault(true, {})[predicted] = count
        if true != predicted:
            confused.append([true, predicted, count])
    probabilities = [decision.probability for decision in decisions]
    right = [decision.true == decision.predicted for decision in decisions]
    return {
        "confusion_matrix": matrix,
        "most_confused": confused[:_CONFUSIONS],
        **calibration(probabilities, right),
    }


def _decisions(spec: TaskSpec, target: Any, prediction: Prediction) -> Iterator[_Decision]:
    """Yield the labels that were decided in a row: one, one per word, or one per possible label."""
    if spec.type == "multi-label":
        for label, probability in (prediction.probabilities or {}).items():
            yield _Decision(
                true=label if label in target else f"not {label}",
                predicted=label if probability >= 0.5 else f"not {label}",
                probability=max(probability, 1 - probability),
            )
    elif spec.type == "tagging":
        for true, predicted, probability in zip(target, prediction.value, prediction.probability, strict=True):
            yield _Decision(true, predicted, probability)
    elif spec.type == "span":
        predicted = "exact" if is_exact(target, prediction.value) else "other"
        yield _Decision("exact", predicted, prediction.probability)
    else:
        yield _Decision(str(target), str(prediction.value), prediction.probability)


def calibration(probabilities: Sequence[float], right: Sequence[bool]) -> dict[str, object]:
    """Compare probabilities with the shares that are right, in ten bins ((m - 1) / 10, m / 10] of the probability.

    With n_m of n predictions in bin m, a mean probability of p_m, and a share of t_m that is right (scikit-learn's
    `calibration_curve`), expected_calibration_error = Σ n_m / n |t_m - p_m|, in points (Guo et al., 2017).

    Args:
        probabilities: probability of each prediction; NaN for a word without a token, which does not count.
        right: whether each prediction is right.

    Returns:
        `expected_calibration_error`, and `calibration_curve` with p_m, t_m and n_m of the bins that are not empty.
    """
    all_probabilities = np.asarray(probabilities, np.float64)
    is_known = ~np.isnan(all_probabilities)
    known = all_probabilities[is_known]
    hits = np.asarray(right, np.float64)[is_known]
    inner_edges = np.linspace(0, 1, _BINS + 1)[1:-1]
    bins = np.searchsorted(inner_edges, known)
    count = np.bincount(bins)
    probability_sums = np.bincount(bins, known)
    hit_sums = np.bincount(bins, hits)
    distances = np.abs(probability_sums - hit_sums)
    used = count > 0
    return {
        "expected_calibration_error": 100 * float(distances.sum()) / max(1, len(known)),
        "calibration_curve": {
            "prob_pred": (probability_sums[used] / count[used]).tolist(),
            "prob_true": (hit_sums[used] / count[used]).tolist(),
            "count": count[used].tolist(),
        },
    }
