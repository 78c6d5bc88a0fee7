"""Predictions of task heads for labelled rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from graftlm.backbone import padding_id
from graftlm.data.labelled import OUTSIDE, AnswerSpan, LabelledRow, TaskRows
from graftlm.data.labelled_batches import EncodedRow, RowEncoder, TaskBatch, batches_by_length
from graftlm.errors import EvaluationError
from graftlm.evaluation.entities import entities
from graftlm.evaluation.inference import Precision, evaluation_mode
from graftlm.grafted.model import GraftedModel
from graftlm.grafts.heads import TaskSpec

PredictFn = Callable[[TaskBatch], Sequence[Tensor]]
"""Maps a batch to one prediction per row; `grafts.heads` defines their shapes."""
MAX_ANSWER_TOKENS = 30


@dataclass(frozen=True)
class Prediction:
    """A model's prediction for one row.

    Attributes:
        value: a label, a number, the number of a choice, a tuple of labels, a tag per word, or an `AnswerSpan` with its
            text.
        probability: the probability of the label, the choice, or the span's two ends; for tagging that of each word's
            tag, NaN for a word without a token; None for other types.
        probabilities: the probability of each label, for multi-label.
        truncated: whether the row had more tokens than the model read.
    """

    value: Any
    probability: Any = None
    probabilities: Mapping[str, float] | None = None
    truncated: bool = False

    def to_json(self, spec: TaskSpec, row: LabelledRow) -> dict[str, object]:
        """Return the plain values that `graft predict` prints, with `truncated` only if it is true.

        Args:
            spec: the specification of the task.
            row: the row that was predicted, whose words are part of the values in tagging.
        """
        values = self._values(spec, row)
        if self.truncated:
            values["truncated"] = True
        return values

    def _values(self, spec: TaskSpec, row: LabelledRow) -> dict[str, object]:
        if spec.type in ("classification", "marked"):
            return {"label": self.value, "probability": self.probability}
        if spec.type == "choice":
            return {"choice": self.value, "text": row.choices[self.value], "probability": self.probability}
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
        found = []
        for start, end, kind in entities(self.value):
            text = " ".join(row.texts[start:end])
            found.append({"type": kind, "text": text, "start": start, "end": end})
        return {"words": list(row.texts), "tags": list(self.value), "entities": found}


def predictor(model: GraftedModel, precision: Precision = "fp32") -> PredictFn:
    """Return a function from a batch to one prediction per row; see `PredictFn`.

    The function runs the model in evaluation mode, without gradients, and restores the model's mode.

    Args:
        model: a model with a graft that has heads.
        precision: `bf16` computes under autocast; `fp32` leaves the model in its own dtype.
    """

    @torch.no_grad()
    def predict(batch: TaskBatch) -> Sequence[Tensor]:
        device = torch.device(model.device)
        is_bf16 = precision == "bf16"
        with evaluation_mode(model), torch.autocast(device.type, torch.bfloat16, enabled=is_bf16):
            return model.predict(**batch.to(device).prediction_inputs())

    return predict


def predict_labelled(
    predict: PredictFn, encoder: RowEncoder, task: TaskRows, number: int = 0, *, batch_size: int = 64
) -> list[Prediction]:
    """Return predictions for the rows of one task, in order.

    Args:
        predict: a function that `predictor` returned.
        encoder: turns rows into tokens.
        task: the task's rows and specification.
        number: the number of the task's head in the model.
        batch_size: sequences per batch, of which most rows have one; it affects speed and memory only.

    Raises:
        EvaluationError: a prediction is not finite.
    """
    encoded = encoder.encode(task)
    rows = [(row, task.spec, number) for row in encoded.rows]
    predictions: dict[int, Prediction] = {}
    for indices, batch in batches_by_length(rows, batch_size, padding_id(encoder.tokenizer)):
        for index, output in zip(indices, _on_cpu(predict(batch)), strict=True):
            predictions[index] = decode_prediction(task.spec, task.rows[index], encoded.rows[index], output)
    return [predictions[index] for index in range(len(encoded))]


def _on_cpu(outputs: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return outputs on the CPU, by one transfer if they have one shape."""
    if len({output.shape for output in outputs}) == 1:
        return torch.stack(list(outputs)).float().cpu().unbind(0)
    return [output.float().cpu() for output in outputs]


def decode_prediction(spec: TaskSpec, row: LabelledRow, encoded: EncodedRow, output: Tensor) -> Prediction:
    """Turn a model's output for one row into a prediction.

    For multi-label, every label with a probability of at least one half is predicted. For tagging, a word without a
    token, or after the truncation, is outside. For span, the likeliest pair of ends in the context is predicted, at
    most 30 tokens apart. Of several windows the one with the largest probability of its pair is taken, in a softmax
    over all tokens of the window, in which the first one stands for no answer.

    Args:
        spec: the specification of the task.
        row: the labelled row, which names its place in messages and has the text of spans.
        encoded: the row's tokens, with the positions of its words.
        output: the model's output, with the shape of the table in `graftlm.grafts.heads`.

    Raises:
        EvaluationError: the output is not finite.
    """
    logits = output.float().cpu()
    if not all(bool(torch.isfinite(used).all()) for used in _used(spec, encoded, logits)):
        raise EvaluationError(
            f"The model's prediction for {row.where} is NaN or infinite, because weights are damaged or activations "
            "overflow: load the model in float32 or bfloat16 (dtype), restore its weights, or train with a lower "
            "learning rate."
        )
    prediction = _decode(spec, row, encoded, logits)
    return replace(prediction, truncated=encoded.truncated)


def _used(spec: TaskSpec, encoded: EncodedRow, logits: Tensor) -> list[Tensor]:
    """Return the logits of a row without those of padding, for each of its windows."""
    if not spec.of_tokens:
        return [logits]
    if not encoded.more:
        return [logits[: len(encoded)]]
    return [window[: len(sequence.ids)] for window, sequence in zip(logits, encoded.sequences, strict=True)]


def _decode(spec: TaskSpec, row: LabelledRow, encoded: EncodedRow, logits: Tensor) -> Prediction:
    """Return the prediction of finite logits, without its field `truncated`."""
    if spec.type in ("classification", "marked", "choice"):
        probabilities = logits.softmax(-1)
        best = int(probabilities.argmax())
        value = best if spec.type == "choice" else spec.labels[best]
        return Prediction(value, float(probabilities[best]))
    if spec.type == "regression":
        return Prediction(float(logits))
    if spec.type == "multi-label":
        by_label = dict(zip(spec.labels, logits.sigmoid().tolist(), strict=True))
        chosen = tuple(label for label, probability in by_label.items() if probability >= 0.5)
        return Prediction(chosen, probabilities=by_label)
    assert encoded.alignment is not None, "rows of tags and spans are encoded with positions"
    if spec.type == "span":
        return _best_window(_used(spec, encoded, logits), encoded.sequences, row.texts[1])
    return _best_tags(spec, logits, encoded.alignment)


def _best_tags(spec: TaskSpec, logits: Tensor, first_tokens: np.ndarray) -> Prediction:
    """Return the likeliest tag of each word.

    Args:
        spec: the specification of the task.
        logits: (tokens, tags).
        first_tokens: the first token of each word, or -1, (words,).
    """
    outside = OUTSIDE if OUTSIDE in spec.labels else spec.labels[0]
    best = logits.softmax(-1).max(-1)
    probabilities = best.values.tolist()
    numbers = best.indices.tolist()
    tags = []
    tag_probabilities = []
    for token in first_tokens:
        if token < 0:
            tags.append(outside)
            tag_probabilities.append(math.nan)
        else:
            tags.append(spec.labels[numbers[token]])
            tag_probabilities.append(probabilities[token])
    return Prediction(tuple(tags), tuple(tag_probabilities))


def _best_window(logits: Sequence[Tensor], windows: Sequence[EncodedRow], context: str) -> Prediction:
    """Return the likeliest span of all windows; the first of equal ones.

    Args:
        logits: of the start and the end at each token, (tokens, 2) for each window.
        windows: the tokens of each window.
        context: the text.
    """
    candidates = []
    for values, window in zip(logits, windows, strict=True):
        assert window.alignment is not None, "rows of span tasks are aligned"
        in_context = window.alignment[:, 1] > 0
        # A single window must have the answer, so that its other tokens do not count.
        counted = np.flatnonzero(in_context) if len(windows) == 1 else np.arange(len(window.ids))
        candidates.append(_best_span(values, window.alignment, counted, context))
    return max(candidates, key=lambda candidate: candidate.probability)


def _best_span(logits: Tensor, offsets: np.ndarray, counted: np.ndarray, context: str) -> Prediction:
    """Return the likeliest span of a window.

    Args:
        logits: of the start and the end at each token, (tokens, 2).
        offsets: range of characters of each token in the context, (tokens, 2).
        counted: numbers of the tokens over which the softmax is taken, which include all of the context.
        context: the text.
    """
    tokens = np.flatnonzero(offsets[:, 1] > 0)
    count = len(tokens)
    if not count:
        return Prediction(AnswerSpan(0, 0, ("",)), 0.0)
    is_context = np.isin(counted, tokens)
    start, end = logits[counted].log_softmax(0).double().numpy()[is_context].T
    positions = np.arange(count)
    distance = positions[None, :] - positions[:, None]
    allowed = (distance >= 0) & (distance < MAX_ANSWER_TOKENS)
    sums = np.where(allowed, start[:, None] + end[None, :], -np.inf)
    first, last = np.unravel_index(int(sums.argmax()), sums.shape)
    left = int(offsets[tokens[first], 0])
    right = int(offsets[tokens[last], 1])
    probability = float(np.exp(start[first] + end[last]))
    return Prediction(AnswerSpan(left, right, (context[left:right],)), probability)
