"""How well a model with heads does on labelled rows: what it answers, and the metrics of each type of task, in points.

    classification   accuracy; macro_f1, the mean of the classes' F1; matthews, the correlation of a confusion matrix
    regression       pearson, spearman; 0 where all predictions are alike
    multi-label      micro_f1 over all labels of all rows; macro_f1
    tagging          entity_f1: entities whose words and type are both right; accuracy of words
    span             token_f1 and exact_match as SQuAD has them: the best of a row's answers, case and articles aside

A point is a hundredth: 91.5 is an accuracy of 0.915. A task's score is one of its metrics; `average` is the mean of the
tasks' scores, and `task_sigma` their standard deviation over these tasks (divided by their number), also in points.
"""

from __future__ import annotations

import re
import statistics
import string
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from graftlm.backbone import padding_id
from graftlm.data.encoding import EncodedRow, RowEncoder
from graftlm.data.labelled import METRICS, OUTSIDE, LabelledRow, Metric, Span, TaskRows
from graftlm.data.labelled_batches import TaskBatch, batches_by_length
from graftlm.errors import EvaluationError
from graftlm.grafts.heads import TaskSpec

Predict = Callable[[TaskBatch], Sequence[Tensor]]
"""The prediction of each row of a batch, as `grafts.heads` gives it."""
MAX_ANSWER_TOKENS = 30  # tokens
_AVERAGE, _SIGMA = "average", "task_sigma"


@dataclass(frozen=True)
class Prediction:
    """What a model says to one row.

    Attributes:
        value: a label, a number, several labels, a tag for each word, or a `Span` with its text.
        probability: of the label or of the span's ends; None for the others.
        probabilities: of each label, of multi-label.
    """

    value: Any
    probability: float | None = None
    probabilities: Mapping[str, float] | None = None

    def to_json(self, spec: TaskSpec, row: LabelledRow) -> dict[str, Any]:
        """As `graft predict` prints it."""
        if spec.type == "classification":
            return {"label": self.value, "probability": self.probability}
        if spec.type == "regression":
            return {"value": self.value}
        if spec.type == "multi-label":
            return {"labels": list(self.value), "probabilities": self.probabilities}
        if spec.type == "span":
            return {
                "answer": self.value.answers[0],
                "start": self.value.start,
                "end": self.value.end,
                "probability": self.probability,
            }
        found = [
            {"type": kind, "text": " ".join(row.texts[start:end]), "start": start, "end": end}
            for start, end, kind in entities(self.value)
        ]
        return {"words": list(row.texts), "tags": list(self.value), "entities": found}


@dataclass(frozen=True)
class TaskTestSet:
    """Rows to measure a task on: its number in the model, and which metric is its score."""

    number: int
    rows: TaskRows
    metric: Metric


@dataclass(frozen=True)
class TaskScore:
    """How a model did on one task, in points."""

    metric: Metric
    metrics: dict[str, float]
    rows: int

    @property
    def value(self) -> float:
        """The task's score."""
        return self.metrics[self.metric]

    def to_json(self) -> dict[str, Any]:
        """As the details of `results.json` have it."""
        return {"score": self.metric, "rows": self.rows, "metrics": self.metrics}


def predictor(model: Any, precision: Literal["fp32", "bf16"] = "fp32") -> Predict:
    """A model's predictions in evaluation mode, without gradients; its mode is then what it was before."""

    @torch.no_grad()
    def predict(batch: TaskBatch) -> Sequence[Tensor]:
        training, device = model.training, model.device
        model.eval()
        try:
            with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=precision == "bf16"):
                return model.predict(**batch.to(device).asked())
        finally:
            model.train(training)

    return predict


def predict_labelled(
    predict: Predict, encoder: RowEncoder, task: TaskRows, number: int = 0, *, batch_size: int = 64
) -> list[Prediction]:
    """What a model says to the rows of one task, in their order.

    Args:
        predict: the model, see `predictor`.
        encoder: how rows become tokens, as in training.
        task: the rows, with or without labels.
        number: the task's number in the model.
        batch_size: rows of a pass.
    """
    encoded = encoder.encode(task)
    found: list[Prediction | None] = [None] * len(encoded)
    pad_id = padding_id(encoder.tokenizer)
    for places, batch in batches_by_length([(row, task.spec, number) for row in encoded.rows], batch_size, pad_id):
        for place, prediction in zip(places, predict(batch), strict=True):
            found[place] = decode_prediction(task.spec, task.rows[place], encoded.rows[place], prediction)
    return [answer for answer in found if answer is not None]


def measure_labelled(
    predict: Predict, encoder: RowEncoder, tests: Mapping[str, TaskTestSet], *, batch_size: int = 64
) -> dict[str, TaskScore]:
    """The metrics of each task."""
    found = {}
    for name, test in tests.items():
        answers = predict_labelled(predict, encoder, test.rows, test.number, batch_size=batch_size)
        metrics = task_metrics(test.rows.spec, test.rows.rows, answers)
        found[name] = TaskScore(test.metric, metrics, len(test.rows))
    return found


def summary_metrics(scores: Mapping[str, TaskScore]) -> dict[str, float]:
    """The score of each task under its name, `average` and `task_sigma`, in points."""
    values = {name: score.value for name, score in scores.items()}
    if not values:
        return {}
    return values | {_AVERAGE: statistics.fmean(values.values()), _SIGMA: statistics.pstdev(values.values())}


def decode_prediction(spec: TaskSpec, row: LabelledRow, encoded: EncodedRow, prediction: Tensor) -> Prediction:
    """What a prediction says.

    Of multi-label every label of at least one half; of tagging a word without a token of its own, or behind the cut, is
    outside; of span the likeliest pair of a first and a last token of the context, at most 30 tokens apart.
    """
    logits = prediction.float().cpu()
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
        each = dict(zip(spec.labels, logits.sigmoid().tolist(), strict=True))
        return Prediction(tuple(label for label, value in each.items() if value >= 0.5), probabilities=each)
    assert encoded.places is not None, "tags and spans have places"
    if spec.type == "span":
        return _best_span(logits[: len(encoded)], encoded.places, row.texts[1])
    outside = OUTSIDE if OUTSIDE in spec.labels else spec.labels[0]
    best = logits.argmax(-1).tolist()
    return Prediction(tuple(spec.labels[best[place]] if place >= 0 else outside for place in encoded.places))


def _best_span(logits: Tensor, places: np.ndarray, context: str) -> Prediction:
    tokens = np.flatnonzero(places[:, 1] > 0)
    if not len(tokens):
        return Prediction(Span(0, 0, ("",)), 0.0)
    start, end = logits[tokens].log_softmax(0).double().numpy().T
    apart = np.arange(len(tokens))[None, :] - np.arange(len(tokens))[:, None]
    sums = np.where((apart >= 0) & (apart < MAX_ANSWER_TOKENS), start[:, None] + end[None, :], -np.inf)
    first, last = np.unravel_index(int(sums.argmax()), sums.shape)
    left, right = int(places[tokens[first], 0]), int(places[tokens[last], 1])
    probability = float(np.exp(start[first] + end[last]))
    return Prediction(Span(left, right, (context[left:right],)), probability)


def task_metrics(spec: TaskSpec, rows: Sequence[LabelledRow], answers: Sequence[Prediction]) -> dict[str, float]:
    """Every metric of a task's type, in points."""
    truth = [row.target for row in rows]
    said = [answer.value for answer in answers]
    return {name: 100 * float(_METRICS[spec.type, name](truth, said)) for name in METRICS[spec.type]}


def entities(tags: Sequence[str]) -> list[tuple[int, int, str]]:
    """First word, the word behind the last, and type of each entity in tags such as B-PLACE, I-PLACE, O.

    An I that follows nothing of its type begins an entity; S and U stand for B, E and L for I.
    """
    found: list[tuple[int, int, str]] = []
    for place, tag in enumerate(tags):
        mark, dash, kind = tag.partition("-")
        if not dash:
            continue
        last = found[-1] if found else None
        if mark in ("I", "E", "L") and last and last[1] == place and last[2] == kind:
            found[-1] = (last[0], place + 1, kind)
        else:
            found.append((place, place + 1, kind))
    return found


def _accuracy(truth: Sequence[str], said: Sequence[str]) -> float:
    return sum(a == b for a, b in zip(truth, said, strict=True)) / len(truth)


def _macro_f1(truth: Sequence[str], said: Sequence[str]) -> float:
    from sklearn.metrics import f1_score  # these packages take a second that only metrics should wait for

    return float(f1_score(truth, said, average="macro", zero_division=0))  # type: ignore[arg-type]  # its stubs know a word alone


def _matthews(truth: Sequence[str], said: Sequence[str]) -> float:
    from sklearn.metrics import matthews_corrcoef

    return float(matthews_corrcoef(truth, said))


def _correlation(kind: Literal["pearsonr", "spearmanr"]) -> Callable[..., float]:
    def correlation(truth: Sequence[float], said: Sequence[float]) -> float:
        import scipy.stats

        if len(set(truth)) < 2 or len(set(said)) < 2:
            return 0.0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of predictions that are almost alike
            found = float(getattr(scipy.stats, kind)(truth, said).statistic)
        return found if np.isfinite(found) else 0.0

    return correlation


def _several_f1(average: Literal["micro", "macro"]) -> Callable[..., float]:
    def several_f1(truth: Sequence[Iterable[str]], said: Sequence[Iterable[str]]) -> float:
        from sklearn.metrics import f1_score
        from sklearn.preprocessing import MultiLabelBinarizer

        marks = MultiLabelBinarizer().fit([*truth, *said])
        if not len(marks.classes_):
            return 1.0  # no row has a label, and none was said
        return float(f1_score(marks.transform(truth), marks.transform(said), average=average, zero_division=0))  # type: ignore[arg-type]  # its stubs know a word alone

    return several_f1


def _entity_f1(truth: Sequence[Sequence[str]], said: Sequence[Sequence[str]]) -> float:
    right = found = wanted = 0
    for true, given in zip(truth, said, strict=True):
        ours, theirs = set(entities(given)), set(entities(true))
        right, found, wanted = right + len(ours & theirs), found + len(ours), wanted + len(theirs)
    return 2 * right / (found + wanted) if found + wanted else 1.0


def _word_accuracy(truth: Sequence[Sequence[str]], said: Sequence[Sequence[str]]) -> float:
    return _accuracy([tag for tags in truth for tag in tags], [tag for tags in said for tag in tags])


def _of_best_answer(score: Callable[[list[str], list[str]], float]) -> Callable[..., float]:
    def best(truth: Sequence[Span], said: Sequence[Span]) -> float:
        return statistics.fmean(
            max(score(_bare_words(right), _bare_words(given.answers[0])) for right in true.answers)
            for true, given in zip(truth, said, strict=True)
        )

    return best


def _bare_words(text: str) -> list[str]:
    """The words of an answer without case, punctuation and English articles."""
    text = "".join(character for character in text.lower() if character not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def _words_f1(right: list[str], given: list[str]) -> float:
    shared = sum((Counter(right) & Counter(given)).values())
    if not right or not given:
        return float(right == given)
    return 2 * shared / (len(right) + len(given))


_METRICS: dict[tuple[str, str], Callable[..., float]] = {
    ("classification", "accuracy"): _accuracy,
    ("classification", "macro_f1"): _macro_f1,
    ("classification", "matthews"): _matthews,
    ("regression", "pearson"): _correlation("pearsonr"),
    ("regression", "spearman"): _correlation("spearmanr"),
    ("multi-label", "micro_f1"): _several_f1("micro"),
    ("multi-label", "macro_f1"): _several_f1("macro"),
    ("tagging", "entity_f1"): _entity_f1,
    ("tagging", "accuracy"): _word_accuracy,
    ("span", "token_f1"): _of_best_answer(_words_f1),
    ("span", "exact_match"): _of_best_answer(lambda right, given: float(right == given)),
}
