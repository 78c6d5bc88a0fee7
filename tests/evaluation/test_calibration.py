"""Confusion, calibration and residuals of task heads against slow definitions and scikit-learn's."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import sklearn.metrics
from hypothesis import given
from hypothesis import strategies as st
from sklearn.calibration import calibration_curve

from graftlm.data.labelled import AnswerSpan, LabelledRow
from graftlm.evaluation import Results, Row
from graftlm.evaluation.label_diagnostics import calibration, task_diagnostics
from graftlm.evaluation.label_predictions import Prediction
from graftlm.evaluation.label_scores import TaskScore
from graftlm.evaluation.report import write_report
from graftlm.grafts.heads import TaskSpec

SHARES = st.floats(0, 1) | st.sampled_from([0.0, 0.1, 0.3, 0.7, 1.0])


def rows(truth: list[Any]) -> list[LabelledRow]:
    return [LabelledRow(("text",), target, f"row {n}") for n, target in enumerate(truth)]


def slow_calibration_error(probabilities: list[float], right: list[bool]) -> float:
    """Bin by bin, as the definition has it, in points; a probability of 0 is in the first bin."""
    error = 0.0
    for m in range(10):
        inside = [i for i, p in enumerate(probabilities) if m / 10 < p <= (m + 1) / 10 or (p == 0 and m == 0)]
        if inside:
            mean, share = (sum(values[i] for i in inside) / len(inside) for values in (probabilities, right))
            error += len(inside) / len(probabilities) * abs(share - mean)
    return 100 * error


@given(st.lists(st.tuples(SHARES, st.booleans()), min_size=1, max_size=40))
def test_calibration(pairs: list[tuple[float, bool]]) -> None:
    # Tenths themselves differ by rounding between m / 10 and linspace; values half an ulp off would change the bin.
    probabilities, right = [round(p, 3) + 1e-4 * (p < 0.9) for p, _ in pairs], [hit for _, hit in pairs]
    result = calibration(probabilities, right)
    assert result["expected_calibration_error"] == pytest.approx(slow_calibration_error(probabilities, right), abs=1e-9)
    true, mean = calibration_curve(right, probabilities, n_bins=10) if len(set(right)) == 2 else (None, None)
    curve = result["calibration_curve"]
    assert sum(curve["count"]) == len(pairs)
    if true is not None:
        assert curve["prob_true"] == pytest.approx(true.tolist())
        assert curve["prob_pred"] == pytest.approx(mean.tolist())


def test_calibration_of_what_is_known() -> None:
    assert calibration([0.75] * 4, [True] * 3 + [False])["expected_calibration_error"] == pytest.approx(0)
    assert calibration([1.0] * 4, [True] * 3 + [False])["expected_calibration_error"] == pytest.approx(25)
    assert calibration([0.25, math.nan], [True, False])["calibration_curve"]["count"] == [1]
    assert calibration([0.5, 0.55], [True, True])["calibration_curve"]["count"] == [1, 1], "an edge is in the lower bin"
    assert calibration([0.0, 0.1, 1.0], [True] * 3)["calibration_curve"]["count"] == [2, 1]
    assert calibration([math.nan], [True])["calibration_curve"]["count"] == []


def test_confusion() -> None:
    draw = random.Random(0)
    labels = ["x", "y", "z", "never"]
    truth, predicted = ([draw.choice(labels[:3]) for _ in range(60)] for _ in range(2))
    spec = TaskSpec(type="classification", labels=labels)
    result = task_diagnostics(spec, rows(truth), [Prediction(label, 0.5) for label in predicted])
    matrix = result["confusion_matrix"]
    dense = [[matrix.get(true, {}).get(label, 0) for label in labels] for true in labels]
    assert dense == sklearn.metrics.confusion_matrix(truth, predicted, labels=labels).tolist()
    worst = max(matrix[a].get(b, 0) for a in "xyz" for b in "xyz" if a != b)
    assert next(count for *_, count in result["most_confused"]) == worst
    assert all(true != label and matrix[true][label] == count for true, label, count in result["most_confused"])
    assert all(count for row in matrix.values() for count in row.values())


def test_errors_of_numbers() -> None:
    draw = np.random.default_rng(0)
    truth = draw.normal(size=50)
    predicted = truth + draw.normal(0.3, 0.5, size=50)
    predictions = [Prediction(float(value)) for value in predicted]
    result = task_diagnostics(TaskSpec(type="regression"), rows(truth.tolist()), predictions)
    ordered = sorted(predicted - truth)
    assert result["mean_absolute_error"] == pytest.approx(sum(map(abs, ordered)) / 50)
    assert result["root_mean_squared_error"] == pytest.approx(math.sqrt(sum(x * x for x in ordered) / 50))
    assert result["max_error"] == pytest.approx(max(map(abs, ordered)))


def test_what_a_prediction_of_each_type_is_compared_by() -> None:
    tags = TaskSpec(type="tagging", labels=["O", "P"])
    result = task_diagnostics(tags, rows([["O", "P", "O"]]), [Prediction(("O", "O", "O"), (0.9, 0.6, math.nan))])
    assert result["confusion_matrix"] == {"O": {"O": 2}, "P": {"O": 1}}
    assert result["calibration_curve"]["count"] == [1, 1], "a word without a token has no probability"
    assert result["expected_calibration_error"] == pytest.approx(100 * (0.1 + 0.6) / 2)

    several = TaskSpec(type="multi-label", labels=["x", "y"])
    predictions = [
        Prediction(("x",), probabilities={"x": 0.75, "y": 0.35}),
        Prediction((), probabilities={"x": 0.45, "y": 0.05}),
    ]
    result = task_diagnostics(several, rows([("x", "y"), ("x",)]), predictions)
    assert result["confusion_matrix"] == {"x": {"x": 1, "not x": 1}, "y": {"not y": 1}, "not y": {"not y": 1}}
    assert result["expected_calibration_error"] == pytest.approx(100 * (0.25 + 0.65 + 0.55 + 0.05) / 4)

    spans = [AnswerSpan(0, 1, (text,)) for text in ("The moon!", "the sun")]
    result = task_diagnostics(
        TaskSpec(type="span"), rows([AnswerSpan(0, 1, ("moon",))] * 2), [Prediction(span, 0.5) for span in spans]
    )
    assert result["calibration_curve"] == {"prob_pred": [0.5], "prob_true": [0.5], "count": [2]}
    assert result["confusion_matrix"] == {"exact": {"exact": 1, "other": 1}}


def test_the_report_has_them(tmp_path: Any) -> None:
    classes, number = TaskSpec(type="classification", labels=["a|b", "c"]), TaskSpec(type="regression")
    predictions = [Prediction(label, 0.8) for label in ("a|b", "c", "c", "c")]
    sound = TaskScore(
        "accuracy", {"accuracy": 50.0}, 4, task_diagnostics(classes, rows(["a|b", "a|b", "a|b", "c"]), predictions)
    )
    length = TaskScore(
        "pearson", {"pearson": 90.0}, 2, task_diagnostics(number, rows([1.0, 2.0]), [Prediction(1.0), Prediction(3.0)])
    )
    tasks: dict[str, Any] = {"ca": {"test": {"kind": sound.to_json(), "length": length.to_json()}}}
    tasks["other"] = {"test": {"examples": 4, "samples": []}}  # a task of text may have this name
    results = Results.here(
        "tasks",
        [Row(id="ca", label="CA", metrics={"average": 70.0}), Row(id="other", label="O", metrics={})],
        details={"tasks": tasks},
    )
    text = write_report(results, tmp_path).read_text(encoding="utf-8")
    assert r"| CA | kind | 4 | accuracy | 50 | 30 | a\|b as c (2) |" in text
    assert "| CA | length | 2 | pearson | 90 | – | – |" in text
    assert Results.read(tmp_path) == results
