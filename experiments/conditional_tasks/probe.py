"""A baseline without training of the encoder: ridge regression on its states, and the cosine of two texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.linear_model import Ridge, RidgeClassifier

from experiments.conditional_tasks.corpora import SPLITS, TASKS
from experiments.conditional_tasks.study import ConditionalTasksStudy
from graftlm.data.labelled import LabelledConfig
from graftlm.data.table_files import read_values

PENALTIES = tuple(10.0**power for power in range(-3, 3))


def probe_scores(study: ConditionalTasksStudy, seed: int, embed: TextEmbedder) -> dict[str, float]:
    """Return the test score of every task except tagging, and the score of the cosine for relatedness.

    The penalty of the regression is the best on the validation rows.

    Args:
        study: the study with the tasks.
        seed: the seed of the training rows.
        embed: returns the vectors of texts.
    """
    scores: dict[str, float] = {}
    for task, source in TASKS.items():
        if source.type == "tagging":
            continue
        files = study.task(task, seed)
        features: dict[str, np.ndarray] = {}
        labels: dict[str, list[Any]] = {}
        for split in SPLITS:
            texts, labels[split] = _read_columns(files, split)
            features[split] = _features([embed(column) for column in texts])
        best = _best_model(source.type == "regression", features, labels)
        scores[task] = _score(np.asarray(best.predict(features["test"])), labels["test"])
        if task == "sick_relatedness":
            cosine = features["test"][:, -1]
            scores["sick_relatedness_cosine"] = _score(cosine, labels["test"])
    return scores


def _read_columns(files: LabelledConfig, split: str) -> tuple[list[list[str]], list[Any]]:
    """Return the columns of texts, and the labels, of a split."""
    path = Path(getattr(files, split))
    columns: Any = dict(enumerate([*files.texts, files.label_column]))
    rows = [row for row, _ in read_values(path, columns)]
    values = []
    for number in columns:
        column = [row[number] for row in rows]
        values.append(column)
    return values[:-1], values[-1]


def _best_model(
    is_regression: bool,
    features: Mapping[str, np.ndarray],
    labels: Mapping[str, Sequence[Any]],
) -> Ridge | RidgeClassifier:
    """Return the model with the penalty that is best on the validation rows."""
    kind: Any = Ridge if is_regression else RidgeClassifier
    models = [kind(alpha=penalty).fit(features["train"], labels["train"]) for penalty in PENALTIES]

    def validation_score(model: Any) -> float:
        return _score(model.predict(features["validation"]), labels["validation"])

    return max(models, key=validation_score)


class TextEmbedder:
    """The mean of a text's last hidden states in the untrained encoder, at length 1. Each text is read once.

    Args:
        study: the study with the encoder.
    """

    def __init__(self, study: ConditionalTasksStudy) -> None:
        backbone = study.backbone.load(kind="encoder")
        self._model = backbone.model
        self._tokenizer = backbone.need_tokenizer()
        self._length = study.size.length
        self._vectors: dict[str, np.ndarray] = {}

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        """Return the vectors of texts: float32, (texts, width)."""
        unread = sorted({text for text in texts if text not in self._vectors}, key=len)
        for first in range(0, len(unread), 64):
            batch = unread[first : first + 64]
            self._vectors.update(zip(batch, self._read(batch), strict=True))
        return np.stack([self._vectors[text] for text in texts])

    @torch.inference_mode()
    def _read(self, texts: list[str]) -> np.ndarray:
        inputs = self._tokenizer(
            texts,
            padding=True,
            padding_side="right",  # encoders have absolute positions
            truncation=True,
            max_length=self._length,
            return_tensors="pt",
        ).to(self._model.device)
        states = self._model(**inputs, output_hidden_states=True).hidden_states[-1]
        mask = inputs["attention_mask"][..., None].to(states.dtype)
        mean = (states * mask).sum(1) / mask.sum(1)
        return torch.nn.functional.normalize(mean, dim=-1).cpu().numpy()


def _features(texts: Sequence[np.ndarray]) -> np.ndarray:
    """Return the vector of a text; for two texts |u - v|, u * v and, in the last column, u . v."""
    if len(texts) == 1:
        return texts[0]
    u, v = texts
    product = u * v
    cosine = product.sum(1, keepdims=True)
    return np.concatenate([abs(u - v), product, cosine], axis=1)


def _score(predicted: np.ndarray, labels: Sequence[Any]) -> float:
    """Return the accuracy, or for numbers Pearson's correlation, in percent."""
    if isinstance(labels[0], float):
        return 100 * float(np.corrcoef(predicted, labels)[0, 1])
    return 100 * float(np.mean(predicted == np.array(labels)))
