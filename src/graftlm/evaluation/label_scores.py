"""A model's scores on labelled tasks.

A task's score is one of its metrics, in points. `average` is the mean of the tasks' scores and `task_sigma` their
population standard deviation.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field

from graftlm.data.labelled import Metric, TaskRows
from graftlm.data.labelled_batches import RowEncoder
from graftlm.evaluation.label_diagnostics import task_diagnostics
from graftlm.evaluation.label_metrics import task_metrics
from graftlm.evaluation.label_predictions import PredictFn, predict_labelled


@dataclass(frozen=True)
class TaskTestSet:
    """Held-out rows of a task.

    Attributes:
        number: the number of the task's head in the model.
        rows: the rows, with the task's specification.
        metric: the metric that is the task's score.
    """

    number: int
    rows: TaskRows
    metric: Metric


@dataclass(frozen=True)
class TaskScore:
    """A model's metrics on one task.

    Attributes:
        metric: the metric that is the task's score.
        metrics: every metric of the task, in points.
        rows: the number of rows.
        diagnostics: see `task_diagnostics`.
    """

    metric: Metric
    metrics: dict[str, float]
    rows: int
    diagnostics: dict[str, object] = field(default_factory=dict)

    @property
    def value(self) -> float:
        """The task's score."""
        return self.metrics[self.metric]

    def to_json(self) -> dict[str, object]:
        """Return plain values for the details of `results.json`."""
        return {"score": self.metric, "rows": self.rows, "metrics": self.metrics, **self.diagnostics}


def measure_labelled(
    predict: PredictFn, encoder: RowEncoder, tests: Mapping[str, TaskTestSet], *, batch_size: int = 64
) -> dict[str, TaskScore]:
    """Measure a model on the test rows of tasks.

    Args:
        predict: a function that `predictor` returned.
        encoder: turns rows into tokens.
        tests: test rows by the name of the task, at least one row each.
        batch_size: rows per batch; it affects speed and memory only.

    Returns:
        The scores by the name of the task.

    Raises:
        EvaluationError: a prediction is not finite.
    """
    scores = {}
    for name, test in tests.items():
        rows = test.rows
        predictions = predict_labelled(predict, encoder, rows, test.number, batch_size=batch_size)
        scores[name] = TaskScore(
            metric=test.metric,
            metrics=task_metrics(rows.spec, rows.rows, predictions),
            rows=len(rows),
            diagnostics=task_diagnostics(rows.spec, rows.rows, predictions),
        )
    return scores


def summary_metrics(scores: Mapping[str, TaskScore]) -> dict[str, float]:
    """Summarize the scores of tasks.

    Returns:
        In points: each task's score by its name, their mean as `average`, and their population standard deviation as
        `task_sigma`; empty without tasks.
    """
    if not scores:
        return {}
    metrics = {name: score.value for name, score in scores.items()}
    values = list(metrics.values())
    metrics["average"] = statistics.fmean(values)
    metrics["task_sigma"] = statistics.pstdev(values)
    return metrics
