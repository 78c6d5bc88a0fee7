"""Merging experts with fixed weights into a plain model."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from graftlm.backbone import Backbone
from graftlm.grafts.token_routing.mixture import Projection, RouteWeights
from graftlm.grafts.untying import untie


@torch.no_grad()
def merge_experts(
    backbone: Backbone,
    mixtures: Iterable[tuple[str, Projection]],
    weights: Sequence[float],
) -> PreTrainedModel:
    """Return a copy of the backbone's model to whose weights the updates of the experts are added.

    Args:
        backbone: the backbone.
        mixtures: module paths, and the mixtures of experts at these modules, whose weights are not quantized.
        weights: weight of each expert.

    Returns:
        The copy, in evaluation mode.
    """
    model = copy.deepcopy(backbone.model)
    routes = RouteWeights(torch.tensor([[weights]], device=backbone.device))
    for path, mixture in mixtures:
        module: Any = model.get_submodule(path)
        untie(model, [module])
        change = _weight_change(mixture, routes, backbone.device)
        is_input_first = isinstance(module, Conv1D | nn.Embedding)
        module.weight += change if is_input_first else change.T
    return model.eval()


def _weight_change(mixture: Projection, routes: RouteWeights, device: torch.device) -> Tensor:
    """Return the change of a module's weight, (inputs, outputs): the updates for all unit vectors or all token ids."""
    inputs = mixture.target.inputs
    if mixture.target.is_embedding:
        rows = torch.arange(inputs, device=device)
    else:
        rows = torch.eye(inputs, device=device)
    update = mixture(rows[None], routes)
    return update[0] / mixture.target.scale
