"""The accuracy of a classifier of sequences, beside that of the commonest class."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from graftlm.data.sequence_batches import sequences_by_length
from graftlm.data.sequences import Sequences
from graftlm.errors import EvaluationError
from graftlm.evaluation.inference import Precision, autocast, device_of, evaluation_mode
from graftlm.evaluation.intervals import share_interval
from graftlm.evaluation.results import Interval

_POINTS = 100


@torch.no_grad()
def predict_classes(
    model: nn.Module,
    sequences: Sequences,
    *,
    batch_size: int = 64,
    precision: Precision = "fp32",
) -> np.ndarray:
    """Return the number of the likeliest class of each sequence, int64 (rows,).

    Args:
        model: a transformers model that classifies sequences.
        sequences: the sequences, at least one.
        batch_size: rows of a pass; it affects speed and memory only.
        precision: see `autocast`.

    Raises:
        EvaluationError: a logit is not finite.
    """
    predicted = np.zeros(len(sequences), dtype=np.int64)
    device = device_of(model)
    with evaluation_mode(model), autocast(model, precision):
        for rows, batch in sequences_by_length(sequences, batch_size):
            moved = batch.to(device)
            logits = model(input_ids=moved.input_ids, attention_mask=moved.attention_mask).logits.float()
            if not bool(logits.isfinite().all()):
                raise EvaluationError(
                    "The classifier predicts NaN or infinity: train it with a lower training.learning_rate."
                )
            predicted[rows] = logits.argmax(-1).cpu().numpy()
    return predicted


def commonest_class(sequences: Sequences) -> int:
    """Return the number of the commonest class; of equally common ones the first."""
    return int(np.bincount(sequences.labels).argmax())


def accuracy_metrics(predicted: np.ndarray, labels: np.ndarray, commonest: int) -> dict[str, Interval]:
    """Return the accuracy of predictions and of one class for all rows, in points with Wilson's 95% intervals.

    Args:
        predicted: predicted classes (rows,).
        labels: true classes (rows,).
        commonest: the commonest class of the training rows.

    Returns:
        `accuracy` and `majority_accuracy`.

    Raises:
        EvaluationError: there are no rows.
    """
    return {
        "accuracy": _share(predicted == labels),
        "majority_accuracy": _share(labels == commonest),
    }


def _share(right: np.ndarray) -> Interval:
    """Return the share of true values in points, with its interval."""
    share = share_interval(int(right.sum()), len(right))
    return Interval(mean=_POINTS * share.mean, low=_POINTS * share.low, high=_POINTS * share.high)
