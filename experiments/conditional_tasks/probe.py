"""A rival that trains no encoder: ridge regression on its states, and for the relatedness of two texts their cosine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.linear_model import Ridge, RidgeClassifier

from experiments.conditional_tasks.corpora import SPLITS, TASKS
from experiments.conditional_tasks.study import ConditionalTasksStudy
from graftlm.data.table_files import read_values

PENALTIES = tuple(10.0**power for power in range(-3, 3))


def probe_scores(study: ConditionalTasksStudy, seed: int) -> dict[str, float]:
    """The test score of each task but tagging, whose penalty the validation rows choose; and that of the cosine."""
    embed, scores = TextEmbedder(study), {}
    for task, source in TASKS.items():
        if source.type == "tagging":
            continue
        files = study.task(task, seed)
        columns: Any = dict(enumerate([*files.texts, files.label_column]))
        rows = {split: [row for row, _ in read_values(Path(getattr(files, split)), columns)] for split in SPLITS}
        *texts, labels = ({split: [row[n] for row in rows[split]] for split in SPLITS} for n in columns)
        x = {split: _features([embed(column[split]) for column in texts]) for split in SPLITS}
        kind: Any = Ridge if source.type == "regression" else RidgeClassifier
        models = [kind(alpha=penalty).fit(x["train"], labels["train"]) for penalty in PENALTIES]
        best = max(models, key=lambda model: _score(model.predict(x["validation"]), labels["validation"]))
        scores[task] = _score(best.predict(x["test"]), labels["test"])
        if task == "sick_relatedness":
            scores["sick_relatedness_cosine"] = _score(x["test"][:, -1], labels["test"])
    return scores


class TextEmbedder:
    """The mean of a text's last states in the encoder as it is, of length 1."""

    def __init__(self, study: ConditionalTasksStudy) -> None:
        backbone = study.backbone.load(kind="encoder")
        self._model, self._tokenizer, self._length = backbone.model, backbone.need_tokenizer(), study.size.length

    @torch.inference_mode()
    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        means = []
        for first in range(0, len(texts), 64):
            options: Any = {"padding": True, "truncation": True, "max_length": self._length, "return_tensors": "pt"}
            inputs = self._tokenizer(list(texts[first : first + 64]), **options).to(self._model.device)
            states = self._model(**inputs, output_hidden_states=True).hidden_states[-1]
            mask = inputs["attention_mask"][..., None].to(states.dtype)
            means.append(torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1))
        return torch.cat(means).cpu().numpy()


def _features(texts: Sequence[np.ndarray]) -> np.ndarray:
    """A text's vector; of two |u - v|, u * v and, last, u . v."""
    if len(texts) == 1:
        return texts[0]
    u, v = texts
    return np.concatenate([abs(u - v), u * v, (u * v).sum(1, keepdims=True)], axis=1)


def _score(predicted: np.ndarray, labels: Sequence[Any]) -> float:
    """Accuracy in percent; of numbers Pearson's correlation."""
    if isinstance(labels[0], float):
        return 100 * float(np.corrcoef(predicted, labels)[0, 1])
    return 100 * float(np.mean(predicted == np.array(labels)))
