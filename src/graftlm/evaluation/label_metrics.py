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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from graftlm.backbone import padding_id
from graftlm.data.labelled import METRICS, OUTSIDE, AnswerSpan, LabelledRow, Metric, TaskRows
from graftlm.data.labelled_batches import TaskBatch, batches_by_length
from graftlm.data.row_encoder import EncodedRow, RowEncoder
from graftlm.errors import EvaluationError
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
        truncated: whether the row had more tokens than the model read.
    """

    value: Any
    probability: Any = None
    probabilities: Mapping[str, float] | None = None
    truncated: bool = False

    def to_json(self, spec: TaskSpec, row: LabelledRow) -> dict[str, Any]:
        """The plain values that `graft predict` prints, with `truncated` where it is true."""
        return self._values(spec, row) | ({"truncated": True} if self.truncated else {})

    def _values(self, spec: TaskSpec, row: LabelledRow) -> dict[str, Any]:
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
    return replace(_decode(spec, row, encoded, logits), truncated=encoded.truncated)


def _decode(spec: TaskSpec, row: LabelledRow, encoded: EncodedRow, logits: Tensor) -> Prediction:
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
    """Beside the metrics: errors of numbers in their unit; of other types what is confused, and calibration.

    `confusion_matrix`: true label, predicted label, count; zeros are left out. A label of multi-label counts for
    itself, as x or not x, and so does a word of tagging. A span is exact or other.
    """
    if spec.type == "regression":
        truth, predicted = [row.target for row in rows], [prediction.value for prediction in predictions]
        names = ("mean_absolute_error", "root_mean_squared_error", "max_error")
        return {name: _sklearn(name, truth, predicted) for name in names}
    pairs = zip(rows, predictions, strict=True)
    decisions = [decision for row, prediction in pairs for decision in _decisions(spec, row.target, prediction)]
    counts = Counter((true, label) for true, label, _ in decisions).most_common()
    matrix: dict[str, dict[str, int]] = {true: {} for (true, _), _ in counts}
    for (true, label), count in counts:
        matrix[true][label] = count
    confused = [[true, label, count] for (true, label), count in counts if true != label]
    right = calibration([p for *_, p in decisions], [true == label for true, label, _ in decisions])
    return {"confusion_matrix": matrix, "most_confused": confused[:3]} | right


def _decisions(spec: TaskSpec, target: Any, prediction: Prediction) -> Iterator[tuple[str, str, float]]:
    """What is true, what is predicted, and the probability of that, for each part of a row."""
    if spec.type == "multi-label":
        for label, p in (prediction.probabilities or {}).items():
            yield label if label in target else f"not {label}", label if p >= 0.5 else f"not {label}", max(p, 1 - p)
    elif spec.type == "tagging":
        yield from zip(target, prediction.value, prediction.probability, strict=True)
    elif spec.type == "span":
        exact = _best_over_answers(operator.eq, [target], [prediction.value])
        yield "exact", "exact" if exact else "other", prediction.probability
    else:
        yield target, prediction.value, prediction.probability


def calibration(probabilities: Sequence[float], right: Any) -> dict[str, Any]:
    """How far probabilities are from shares that are right, over ten bins ((m - 1) / 10, m / 10] of the probability.

    With n_m of n predictions in bin m, a mean probability of p_m, and a share of t_m that is right (scikit-learn's
    `calibration_curve`), expected_calibration_error = Σ n_m / n |t_m - p_m|, in points (Guo et al., 2017).
    """
    p, hits = np.asarray(probabilities, np.float64), np.asarray(right, np.float64)
    p, hits = p[known := ~np.isnan(p)], hits[known]  # a word without a token has no probability
    bins = np.searchsorted(np.linspace(0, 1, 11)[1:-1], p)
    count, sums, right_ones = (np.bincount(bins, weights) for weights in (None, p, hits))
    error, used = 100 * float(np.abs(sums - right_ones).sum()) / max(1, len(p)), count > 0
    curve = {"prob_pred": sums[used] / count[used], "prob_true": right_ones[used] / count[used], "count": count[used]}
    curve = {name: values.tolist() for name, values in curve.items()}
    return {"expected_calibration_error": error, "calibration_curve": curve}


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
    ("classification", "accuracy"): partial(_sklearn, "accuracy_score"),
    ("classification", "macro_f1"): partial(_sklearn, "f1_score", average="macro", zero_division=0),
    ("classification", "matthews"): partial(_sklearn, "matthews_corrcoef"),
    ("regression", "pearson"): partial(_correlation, "pearsonr"),
    ("regression", "spearman"): partial(_correlation, "spearmanr"),
    ("multi-label", "micro_f1"): partial(_multi_label_f1, "micro"),
    ("multi-label", "macro_f1"): partial(_multi_label_f1, "macro"),
    ("tagging", "entity_f1"): _entity_f1,
    ("tagging", "accuracy"): lambda *both: _sklearn("accuracy_score", *([*chain(*tags)] for tags in both)),
    ("span", "token_f1"): partial(_best_over_answers, _token_f1),
    ("span", "exact_match"): partial(_best_over_answers, operator.eq),
}
