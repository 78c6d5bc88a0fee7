"""Predictions and metrics of task heads on labelled rows.

    classification   accuracy; macro_f1; matthews (Matthews correlation coefficient)
    regression       pearson, spearman; 0 where all predictions or all labels are equal
    multi-label      micro_f1 and macro_f1 over labels
    tagging          entity_f1 (an entity counts when its words and type match); accuracy of words
    span             token_f1 and exact_match as in SQuAD: the best over a row's answers, without case and articles

All metrics are in points: 91.5 is an accuracy of 0.915. A task's score is one of its metrics. `average` is the mean of
the tasks' scores and `task_sigma` their population standard deviation.
"""

from __future__ import annotations

import math
import operator
import re
import statistics
import string
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from graftlm.backbone import padding_id
from graftlm.data.labelled import METRICS, OUTSIDE, AnswerSpan, LabelledRow, Metric, TaskRows
from graftlm.data.labelled_batches import EncodedRow, RowEncoder, TaskBatch, batches_by_length
from graftlm.errors import EvaluationError
from graftlm.evaluation.calibration import calibration, confusion_matrix, residuals
from graftlm.evaluation.metrics import evaluation_mode
from graftlm.grafts.heads import TaskSpec

PredictFn = Callable[[TaskBatch], Sequence[Tensor]]
"""Maps a batch to one prediction per row; `grafts.heads` defines their shapes."""
MAX_ANSWER_TOKENS = 30


@dataclass(frozen=True)
class Prediction:
    """A model's prediction for one row.

    Attributes:
        value: a label, a number, a tuple of labels, a tag per word, or a `AnswerSpan` with its text.
        probability: of the label, of the span's two ends, or of each word's tag, NaN where a word has no token of its
            own; None for other types.
        probabilities: probability of each label, for multi-label.
    """

    value: Any
    probability: Any = None
    probabilities: Mapping[str, float] | None = None

    def to_json(self, spec: TaskSpec, row: LabelledRow) -> dict[str, Any]:
        """The plain values that `graft predict` prints."""
        if spec.type == "classification":
            return {"label": self.value, "probability": self.probability}
        if spec.type == "regression":
            return {"value": self.value}
        if spec.type == "multi-label":
            return {"labels": list(self.value), "probabilities": self.probabilities}
        if spec.type == "span":
            ends = {"start": self.value.start, "end": self.value.end}
            return {"answer": self.value.answers[0], **ends, "probability": self.probability}
        spans = [
            {"type": kind, "text": " ".join(row.texts[start:end]), "start": start, "end": end}
            for start, end, kind in entities(self.value)
        ]
        return {"words": list(row.texts), "tags": list(self.value), "entities": spans}


@dataclass(frozen=True)
class TaskTestSet:
    """Held-out rows of a task, the number of its head in the model, and the metric that is its score."""

    number: int
    rows: TaskRows
    metric: Metric


@dataclass(frozen=True)
class TaskScore:
    """A model's metrics on one task, in points, and its `task_diagnostics`."""

    metric: Metric
    metrics: dict[str, float]
    rows: int
    diagnostics: dict[str, Any] = field(default_factory=dict)

    @property
    def value(self) -> float:
        """The task's score."""
        return self.metrics[self.metric]

    def to_json(self) -> dict[str, Any]:
        """Plain values for the details of `results.json`."""
        return {"score": self.metric, "rows": self.rows, "metrics": self.metrics} | self.diagnostics


def predictor(model: Any, precision: Literal["fp32", "bf16"] = "fp32") -> PredictFn:
    """A function that predicts in evaluation mode, without gradients; the model's mode is restored."""

    @torch.no_grad()
    def predict(batch: TaskBatch) -> Sequence[Tensor]:
        device = torch.device(model.device)
        with evaluation_mode(model), torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
            return model.predict(**batch.to(device).prediction_inputs())

    return predict


def predict_labelled(
    predict: PredictFn, encoder: RowEncoder, task: TaskRows, number: int = 0, *, batch_size: int = 64
) -> list[Prediction]:
    """Predictions of a `predictor` for the rows of one task, in order; `number` is that of the task's head."""
    encoded = encoder.encode(task)
    predictions: dict[int, Prediction] = {}
    rows = [(row, task.spec, number) for row in encoded.rows]
    for indices, batch in batches_by_length(rows, batch_size, padding_id(encoder.tokenizer)):
        outputs = torch.stack(list(predict(batch))).float().cpu()  # of one task, so of one shape: one wait for a device
        for i, output in zip(indices, outputs, strict=True):
            predictions[i] = decode_prediction(task.spec, task.rows[i], encoded.rows[i], output)
    return [predictions[i] for i in range(len(encoded))]


def measure_labelled(
    predict: PredictFn, encoder: RowEncoder, tests: Mapping[str, TaskTestSet], *, batch_size: int = 64
) -> dict[str, TaskScore]:
    """The metrics of each task."""
    scores = {}
    for name, test in tests.items():
        predictions = predict_labelled(predict, encoder, test.rows, test.number, batch_size=batch_size)
        metrics, diagnostics = (
            f(test.rows.spec, test.rows.rows, predictions) for f in (task_metrics, task_diagnostics)
        )
        scores[name] = TaskScore(test.metric, metrics, len(test.rows), diagnostics)
    return scores


def summary_metrics(scores: Mapping[str, TaskScore]) -> dict[str, float]:
    """Each task's score by name, their `average` and `task_sigma`, in points."""
    values = {name: score.value for name, score in scores.items()}
    if not values:
        return {}
    return values | {"average": statistics.fmean(values.values()), "task_sigma": statistics.pstdev(values.values())}


def decode_prediction(spec: TaskSpec, row: LabelledRow, encoded: EncodedRow, output: Tensor) -> Prediction:
    """A model's output for one row as a prediction.

    Multi-label: every label with a probability of at least one half. Tagging: a word without a token of its own, or
    beyond the truncation, is outside. Span: the likeliest pair of ends in the context, at most 30 tokens apart.

    Raises EvaluationError if the output is not finite.
    """
    logits = output.float().cpu()
    if not torch.isfinite(logits[: len(encoded)] if spec.of_tokens else logits).all():
        raise EvaluationError(
            f"The model's prediction for {row.where} is not a number: its weights or activations overflowed; train "
            "with a lower learning rate."
        )
    if spec.type == "classification":
        probabilities = logits.softmax(-1)
        best = int(probabilities.argmax())
        return Prediction(spec.labels[best], float(probabilities[best]))
    if spec.type == "regression":
        return Prediction(float(logits))
    if spec.type == "multi-label":
        by_label = dict(zip(spec.labels, logits.sigmoid().tolist(), strict=True))
        return Prediction(tuple(label for label, value in by_label.items() if value >= 0.5), probabilities=by_label)
    assert encoded.alignment is not None, "rows of tags and spans are encoded with positions"
    if spec.type == "span":
        return _best_span(logits[: len(encoded)], encoded.alignment, row.texts[1])
    outside = OUTSIDE if OUTSIDE in spec.labels else spec.labels[0]
    best = [(float(p), spec.labels[i]) for p, i in zip(*map(Tensor.tolist, logits.softmax(-1).max(-1)), strict=True)]
    words = [best[token] if token >= 0 else (math.nan, outside) for token in encoded.alignment]
    return Prediction(tuple(tag for _, tag in words), tuple(probability for probability, _ in words))


def _best_span(logits: Tensor, offsets: np.ndarray, context: str) -> Prediction:
    """The likeliest span from logits (tokens, 2) and the tokens' character offsets (tokens, 2) in the context."""
    tokens = np.flatnonzero(offsets[:, 1] > 0)
    if not len(tokens):
        return Prediction(AnswerSpan(0, 0, ("",)), 0.0)
    start, end = logits[tokens].log_softmax(0).double().numpy().T
    distance = np.arange(len(tokens))[None, :] - np.arange(len(tokens))[:, None]
    sums = np.where((distance >= 0) & (distance < MAX_ANSWER_TOKENS), start[:, None] + end[None, :], -np.inf)
    first, last = np.unravel_index(int(sums.argmax()), sums.shape)
    left, right = int(offsets[tokens[first], 0]), int(offsets[tokens[last], 1])
    probability = float(np.exp(start[first] + end[last]))
    return Prediction(AnswerSpan(left, right, (context[left:right],)), probability)


def task_metrics(spec: TaskSpec, rows: Sequence[LabelledRow], predictions: Sequence[Prediction]) -> dict[str, float]:
    """Every metric of a task's type, in points."""
    truth = [row.target for row in rows]
    predicted = [prediction.value for prediction in predictions]
    return {name: 100 * float(_METRICS[spec.type, name](truth, predicted)) for name in METRICS[spec.type]}


def task_diagnostics(spec: TaskSpec, rows: Sequence[LabelledRow], predictions: Sequence[Prediction]) -> dict[str, Any]:
    """Beside the metrics: residuals of numbers; of other types calibration, and what is confused.

    A label of multi-label counts as a prediction of its own, a word of tagging too; a span is right if it matches
    exactly. `multilabel_confusion_matrix` has [[true negatives, false positives], [false negatives, true positives]].
    """
    truth: list[Any] = [row.target for row in rows]
    predicted, p = [each.value for each in predictions], [each.probability for each in predictions]
    if spec.type == "regression":
        return residuals(truth, predicted)
    if spec.type == "span":
        pairs = zip(truth, predicted, strict=True)
        return calibration(p, [_best_over_answers(operator.eq, [a], [b]) == 1 for a, b in pairs])
    if spec.type == "multi-label":
        has = np.array([[label in of for label in spec.labels] for of in truth])
        says = np.array([[label in of for label in spec.labels] for of in predicted])
        cells = [[(a & b).sum(0).tolist() for b in (~says, says)] for a in (~has, has)]
        p = [(each.probabilities or {}).get(label, math.nan) for each in predictions for label in spec.labels]
        named = {label: [[cell[i] for cell in row] for row in cells] for i, label in enumerate(spec.labels)}
        return {"multilabel_confusion_matrix": named} | calibration(p, has.ravel().tolist())
    if spec.type == "tagging":
        truth, predicted, p = ([*chain(*of)] for of in (truth, predicted, p))
    right = [a == b for a, b in zip(truth, predicted, strict=True)]
    return {"confusion_matrix": confusion_matrix(truth, predicted)} | calibration(p, right)


def entities(tags: Sequence[str]) -> list[tuple[int, int, str]]:
    """(first word, last word + 1, type) of each entity in tags such as B-PLACE, I-PLACE, O.

    An I tag without a predecessor of its type begins an entity. S and U count as B; E and L count as I.
    """
    spans: list[tuple[int, int, str]] = []
    for i, tag in enumerate(tags):
        mark, dash, kind = tag.partition("-")
        if dash and mark in ("I", "E", "L") and spans and spans[-1][1:] == (i, kind):
            spans[-1] = (spans[-1][0], i + 1, kind)
        elif dash:
            spans.append((i, i + 1, kind))
    return spans


# scikit-learn and scipy take a second to import, so the metrics import them.


def _accuracy(truth: Sequence[str], predicted: Sequence[str]) -> float:
    return sum(a == b for a, b in zip(truth, predicted, strict=True)) / len(truth)


def _sklearn(name: str, truth: Any, predicted: Any, **options: Any) -> float:
    import sklearn.metrics

    return getattr(sklearn.metrics, name)(truth, predicted, **options)


def _correlation(kind: str, truth: Sequence[float], predicted: Sequence[float]) -> float:
    import scipy.stats

    if len(set(truth)) < 2 or len(set(predicted)) < 2:
        return 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scipy warns where predictions are almost equal
        value = float(getattr(scipy.stats, kind)(truth, predicted).statistic)
    return value if np.isfinite(value) else 0.0


def _multi_label_f1(average: str, truth: Sequence[Iterable[str]], predicted: Sequence[Iterable[str]]) -> float:
    from sklearn.preprocessing import MultiLabelBinarizer

    binarizer = MultiLabelBinarizer().fit([*truth, *predicted])
    if not len(binarizer.classes_):
        return 1.0  # no row has a label, and no label was predicted
    labels = binarizer.transform(truth), binarizer.transform(predicted)
    return _sklearn("f1_score", *labels, average=average, zero_division=0)


def _entity_f1(truth: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> float:
    pairs = [(set(entities(a)), set(entities(b))) for a, b in zip(truth, predicted, strict=True)]
    total = sum(len(a) + len(b) for a, b in pairs)
    return 2 * sum(len(a & b) for a, b in pairs) / total if total else 1.0


def _best_over_answers(
    score: Callable[[list[str], list[str]], float], truth: Sequence[AnswerSpan], predicted: Sequence[AnswerSpan]
) -> float:
    return statistics.fmean(
        max(score(_normalised_words(reference), _normalised_words(span.answers[0])) for reference in row.answers)
        for row, span in zip(truth, predicted, strict=True)
    )


def _normalised_words(text: str) -> list[str]:
    """Words without case, punctuation and English articles, as SQuAD's evaluation normalises them."""
    text = text.lower().translate(dict.fromkeys(map(ord, string.punctuation)))
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def _token_f1(reference: list[str], predicted: list[str]) -> float:
    if not reference or not predicted:
        return float(reference == predicted)
    return 2 * sum((Counter(reference) & Counter(predicted)).values()) / (len(reference) + len(predicted))


_METRICS: dict[tuple[str, str], Callable[..., float]] = {
    ("classification", "accuracy"): _accuracy,
    ("classification", "macro_f1"): partial(_sklearn, "f1_score", average="macro", zero_division=0),
    ("classification", "matthews"): partial(_sklearn, "matthews_corrcoef"),
    ("regression", "pearson"): partial(_correlation, "pearsonr"),
    ("regression", "spearman"): partial(_correlation, "spearmanr"),
    ("multi-label", "micro_f1"): partial(_multi_label_f1, "micro"),
    ("multi-label", "macro_f1"): partial(_multi_label_f1, "macro"),
    ("tagging", "entity_f1"): _entity_f1,
    ("tagging", "accuracy"): lambda truth, predicted: _accuracy([*chain(*truth)], [*chain(*predicted)]),
    ("span", "token_f1"): partial(_best_over_answers, _token_f1),
    ("span", "exact_match"): partial(_best_over_answers, operator.eq),
}
