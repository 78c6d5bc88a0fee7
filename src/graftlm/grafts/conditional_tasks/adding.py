"""Further tasks for a trained graft: what is taken over, and which old task a new one starts from."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from graftlm.backbone import Backbone, Fingerprint
from graftlm.errors import ArtifactError, RecipeError, WrongBackboneError
from graftlm.grafts.conditional_tasks.config import ConditionalTasksConfig
from graftlm.grafts.heads import IGNORED, Pooling, TaskSpec, pooled
from graftlm.grafts.model import GraftedModel

MOST_VECTORS = 512
_RIDGES = (0.01, 0.1, 1.0, 10.0)


@dataclass(frozen=True)
class Trained:
    """A trained graft: its config, and its tensors by name."""

    config: ConditionalTasksConfig
    tensors: dict[str, Tensor]


def read_trained(config: ConditionalTasksConfig, backbone: Backbone) -> Trained:
    """The graft in the folder that a config extends.

    Raises:
        ArtifactError: the folder is no whole graft of this kind.
        WrongBackboneError: it was trained on another backbone.
        RecipeError: a new task is called as an old one.
    """
    folder = Path(str(config.extends))
    try:
        manifest = json.loads((folder / "graft.json").read_text(encoding="utf-8"))
        kind, values = manifest["kind"], manifest["config"]
        tensors = load_file(folder / "graft.safetensors")
        remembered = Fingerprint(**manifest["backbone"]["fingerprint"])
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise ArtifactError(
            f"{folder}, which is to be extended, is not a whole graft ({type(error).__name__}): name a folder that "
            "graft train wrote."
        ) from None
    if kind != config.kind:
        raise ArtifactError(f"{folder}, which is to be extended, is a graft of the kind {kind}: name a {config.kind}.")
    if difference := remembered.difference(backbone.fingerprint):
        raise WrongBackboneError(
            f"{folder}, which is to be extended, was trained on another backbone than {backbone.name}: {difference}."
        )
    old = ConditionalTasksConfig.parse({**values, "kind": kind}, where=str(folder))
    if both := sorted(set(old.tasks) & set(config.tasks)):
        raise RecipeError(f"The graft {folder} has a task {both[0]} already: name the new one another way.")
    return Trained(old, tensors)


def choose(
    model: GraftedModel,
    tasks: Mapping[str, TaskSpec],
    pooling: Pooling,
    name: str,
    old: Sequence[str],
    rows: Mapping[str, Any],
) -> dict[str, Any]:
    """The old task that a new one is nearest to (`like`), and the scores by which it was chosen; less is better.

    Where old tasks say the same (type and labels), it is the one whose embedding and head lose least on the rows before
    training; otherwise the one with whose embedding the features predict the targets best by ridge regression, each
    row left out in turn.

    Args:
        model: carries the graft.
        tasks: all its tasks.
        pooling: how a row is read.
        name: the new task.
        old: those to choose from.
        rows: of the new task, as `GraftedModel.forward` takes them.
    """
    same = [one for one in old if tasks[one] == tasks[name]]
    was_training = model.training
    model.eval()
    scores = {}
    with torch.no_grad():
        for one in same or old:
            asked = _as_task(rows, list(tasks).index(one))
            scores[one] = (
                float(model(**asked, targets=rows["targets"]).loss)
                if same
                else _ridge(model.encode(**asked), tasks[name], pooling, rows)
            )
    model.train(was_training)
    best = min(scores, key=lambda one: scores[one])
    return {"like": best, "by": "zero-shot loss" if same else "left-out error", "scores": scores}


def _as_task(rows: Mapping[str, Any], task: int) -> dict[str, Any]:
    """The rows' inputs as another task's."""
    extras = dict(rows.get("extras") or {}) | {"task": torch.full((len(rows["input_ids"]),), task)}
    return {key: value for key, value in rows.items() if key != "targets"} | {"extras": extras}


def _ridge(hidden_BTD: Tensor, spec: TaskSpec, pooling: Pooling, rows: Mapping[str, Any]) -> float:
    mask = rows.get("attention_mask")
    mask_BT = torch.ones(hidden_BTD.shape[:2]) if mask is None else mask
    pairs = _pairs(spec, pooling, hidden_BTD.float(), mask_BT.to(hidden_BTD.device).bool(), rows["targets"])
    features, targets = (torch.cat(each)[:MOST_VECTORS] for each in zip(*pairs, strict=True))
    return left_out_error(features, targets)


def _pairs(
    spec: TaskSpec, pooling: Pooling, hidden_BTD: Tensor, mask_BT: Tensor, targets: Sequence[Tensor]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Of each row, features (n, D) and what they should say (n, C): one of a row, or one of each labelled token."""
    pooled_BD = pooled(hidden_BTD, mask_BT, pooling)
    for row, target in enumerate(targets):
        target = target.to(hidden_BTD.device)
        if not spec.of_tokens:
            yield pooled_BD[row, None], _numbers(spec, target[None])
            continue
        if spec.type == "span":
            counted = mask_BT[row]
            said = functional.one_hot(target, len(counted)).T.float()
        else:
            counted = target != IGNORED
            said = _numbers(spec, target.clamp(min=0))
        yield hidden_BTD[row, counted], said[counted]


def _numbers(spec: TaskSpec, target: Tensor) -> Tensor:
    """(n, C)."""
    if spec.type == "multi-label":
        return target.float()
    return target.float()[:, None] if spec.type == "regression" else functional.one_hot(target, spec.outputs).float()


def left_out_error(features: Tensor, targets: Tensor) -> float:
    """The share of the targets' variance that ridge regression misses when each vector is left out in turn.

    With H = K (K + l I)^-1 of the centred features' products K, the error of vector i left out is
    (y_i - (H y)_i) / (1 - H_ii - 1/n), since centring takes up one direction. The best of four strengths l counts,
    as shares of K's mean diagonal.

    Args:
        features: (n, D).
        targets: (n, C).
    """
    x, y = features.double() - features.double().mean(0), targets.double() - targets.double().mean(0)
    kernel = x @ x.T
    values, vectors = torch.linalg.eigh(kernel)
    spread = y.square().sum().clamp(min=1e-12)
    errors = []
    for ridge in _RIDGES:
        kept = values / (values + ridge * kernel.diagonal().mean().clamp(min=1e-12))
        hat = (vectors * kept) @ vectors.T
        left = (1 - hat.diagonal() - 1 / len(x)).clamp(min=1e-6)
        errors.append(float(((y - hat @ y) / left[:, None]).square().sum() / spread))
    return min(errors)
