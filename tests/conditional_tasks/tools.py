"""Grafts for many tasks on tiny encoders, random everywhere."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graftlm.backbone import Backbone
from graftlm.grafted.model import GraftedModel
from graftlm.grafts.conditional_tasks import ConditionalTasks, ConditionalTasksConfig
from graftlm.grafts.heads import TaskSpec
from tiny import tiny_ids, tiny_model, tiny_tokenizer

TASKS: dict[str, TaskSpec] = {
    "topics": TaskSpec(type="classification", labels=["sport", "politics", "weather"]),
    "quality": TaskSpec(type="regression"),
    "names": TaskSpec(type="tagging", labels=["O", "B-person", "I-person", "B-place"]),
    "answers": TaskSpec(type="span"),
    "moods": TaskSpec(type="multi-label", labels=["glad", "angry"]),
}
ALL: dict[str, Any] = {"attention": "blocks", "alignment": True, "norm": True, "bottleneck": "base"}
SMALL: dict[str, Any] = {
    **ALL,
    "lora_rank": 2,
    "frozen": 0.5,
    "modulated": 0.5,
    "module_rate": 1.0,
    "head_rate": 1.0,
    "scaled_losses": False,
    "block": 4,
    "task_width": 3,
    "bottleneck_width": 5,
    "max_length": 30,
}
OFF: dict[str, Any] = {"attention": "none", "alignment": False, "norm": False, "bottleneck": "none", "lora_rank": 0}
TASK = torch.tensor([2, 0, 1, 4, 3, 0])
LENGTHS = (9, 13, 5, 7, 11, 13)


def host(family: str = "bert", *, double: bool = False, **changes: Any) -> Backbone:
    live = tiny_model(family, **changes)
    return Backbone.wrap(live.double() if double else live, tiny_tokenizer(), family)


def build(backbone: Backbone, tasks: dict[str, TaskSpec] | None = None, **config: Any) -> ConditionalTasks:
    torch.manual_seed(0)
    return ConditionalTasks(ConditionalTasksConfig(tasks=tasks or TASKS, **(SMALL | config)), backbone)


@torch.no_grad()
def randomise(graft: ConditionalTasks, spread: float = 0.3) -> ConditionalTasks:
    chance = torch.Generator().manual_seed(5)
    for parameter in graft.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=chance) * spread)
    return graft


def random_model(backbone: Backbone, **config: Any) -> GraftedModel:
    """Attached, in evaluation mode; copied weights are a little off the backbone's."""
    graft = randomise(build(backbone, **config).to(backbone.model.dtype))
    model = GraftedModel(backbone, {"graft": graft}).eval()
    with torch.no_grad():
        for name, parameter in model.trainable_parameters().items():
            if not name.startswith("grafts."):
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.05)
    return model


def batch(side: str = "right", length: int = 13, pad: int = 0) -> tuple[Tensor, Tensor]:
    """Ids and mask of a row for each of `LENGTHS`."""
    ids = torch.full((len(LENGTHS), length), pad)
    mask = torch.zeros(len(LENGTHS), length, dtype=torch.long)
    for row, size in enumerate(LENGTHS):
        columns = slice(length - size, None) if side == "left" else slice(None, size)
        ids[row, columns] = tiny_ids(1, size, seed=row)[0]
        mask[row, columns] = 1
    return ids, mask


def targets(length: int = 13) -> list[Tensor]:
    """Of `TASK`, for rows padded on the right."""
    tags = torch.full((length,), -100)
    tags[1:6] = torch.tensor([0, 1, 2, 3, 0])
    moods = torch.tensor([1.0, 0.0])
    return [tags, torch.tensor(2), torch.tensor(0.7), moods, torch.tensor([3, 6]), torch.tensor(0)]


def real(predictions: list[Tensor], mask: Tensor) -> list[Tensor]:
    """Predictions without those of padding."""
    length = mask.shape[1]
    without_padding = []
    for prediction, row_mask in zip(predictions, mask, strict=True):
        of_tokens = prediction.dim() == 2 and len(prediction) == length
        without_padding.append(prediction[row_mask.bool()] if of_tokens else prediction)
    return without_padding
