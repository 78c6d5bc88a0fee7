"""The choice of the trained task that a new task starts from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from graftlm.grafts.heads import IGNORED, Pooling, TaskSpec, pooled
from graftlm.grafts.model import GraftedModel

MAX_VECTORS = 512
_RIDGES = (0.01, 0.1, 1.0, 10.0)


@torch.no_grad()
def choose_start(
    model: GraftedModel,
    tasks: Mapping[str, TaskSpec],
    pooling: Pooling,
    name: str,
    trained: Sequence[str],
    rows: Mapping[str, Any],
) -> dict[str, Any]:
    """The trained task that a new one starts from (`like`), and the score of each candidate; lower is better.

    Where trained tasks have the new one's type and labels, the score is the loss of their embedding and head on the
    rows. Otherwise it is the leave-one-out error of a ridge regression from the features under their embedding.

    Args:
        trained: the candidates.
        rows: of the new task, as `GraftedModel.forward` takes them.
    """
    same = [task for task in trained if tasks[task].is_like(tasks[name])]
    was_training = model.training
    model.eval()
    scores = {}
    for task in same or trained:
        number = torch.full((len(rows["input_ids"]),), list(tasks).index(task))
        inputs = {**rows, "extras": {**(rows.get("extras") or {}), "task": number}}
        scores[task] = float(model(**inputs).loss) if same else _ridge_error(model, tasks[name], pooling, **inputs)
    model.train(was_training)
    best = min(scores, key=lambda task: scores[task])
    return {"like": best, "by": "zero-shot loss" if same else "leave-one-out error", "scores": scores}


def _ridge_error(
    model: GraftedModel, spec: TaskSpec, pooling: Pooling, *, targets: Sequence[Tensor], **inputs: Any
) -> float:
    hidden_BTD, mask = model.encode(**inputs).float(), inputs.get("attention_mask")
    mask_BT = torch.ones(hidden_BTD.shape[:2]) if mask is None else mask
    pairs = _pairs(spec, pooling, hidden_BTD, mask_BT.to(hidden_BTD.device).bool(), targets)
    x, y = (torch.cat(parts)[:MAX_VECTORS] for parts in zip(*pairs, strict=True))
    return leave_one_out_error(x, y)


def _pairs(
    spec: TaskSpec, pooling: Pooling, hidden_BTD: Tensor, mask_BT: Tensor, targets: Sequence[Tensor]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Features (n, D) and targets (n, C) of each row: n is 1, or the number of labelled tokens."""
    pooled_BD = pooled(hidden_BTD, mask_BT, pooling)
    for row, target in enumerate(targets):
        target = target.to(hidden_BTD.device)
        if not spec.of_tokens:
            yield pooled_BD[row, None], _as_numbers(spec, target[None])
            continue
        if spec.type == "span":
            counted = mask_BT[row]
            numbers = functional.one_hot(target, len(counted)).T.float()
        else:
            counted = target != IGNORED
            numbers = _as_numbers(spec, target.clamp(min=0))
        yield hidden_BTD[row, counted], numbers[counted]


def _as_numbers(spec: TaskSpec, target: Tensor) -> Tensor:
    if spec.type == "multi-label":
        return target.float()
    return target.float()[:, None] if spec.type == "regression" else functional.one_hot(target, spec.outputs).float()


def leave_one_out_error(features: Tensor, targets: Tensor) -> float:
    """The share of the targets' variance that ridge regression misses when each vector is left out in turn.

    With H = K (K + l I)^-1 of the centred features' products K, the error of vector i is
    (y_i - (H y)_i) / (1 - H_ii - 1/n); the 1/n is due to centring. The result is that of the best of four strengths l,
    which are multiples of K's mean diagonal.

    Args:
        features: (n, D).
        targets: (n, C).
    """
    from sklearn.linear_model import RidgeCV

    x, y = (values.double().cpu().numpy() for values in (features, targets))
    mean = max(float(x.var(0).sum()), 1e-12)  # of the diagonal of K
    ridge = RidgeCV([strength * mean for strength in _RIDGES], store_cv_results=True).fit(x, y)
    return float(ridge.cv_results_.sum(axis=(0, 1)).min() / max(len(y) * y.var(0).sum(), 1e-12))
