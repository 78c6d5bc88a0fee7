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
from graftlm.errors import ArtifactError
from graftlm.grafts.token_routing.mixture import MixedProjection, RouteWeights


@torch.no_grad()
def merge_experts(
    backbone: Backbone,
    mixtures: Iterable[tuple[str, MixedProjection]],
    weights: Sequence[float],
) -> PreTrainedModel:
    """Return a copy of the backbone's model to whose weights the updates of the experts are added.

    Args:
        backbone: the backbone.
        mixtures: module paths, and the mixtures of experts at these modules, whose weights are not quantized.
        weights: weight of each expert.

    Returns:
        The copy, in evaluation mode.

    Raises:
        ArtifactError: an expert changes a module whose weight another module shares.
    """
    model = copy.deepcopy(backbone.model)
    routes = RouteWeights(torch.tensor([[weights]], device=backbone.device))
    for path, mixture in mixtures:
        module: Any = model.get_submodule(path)
        if _is_shared(module.weight, model):
            raise ArtifactError(
                f"An expert changes {path}, whose weight another module of the backbone shares, but a plain model "
                "can't change only one of them: serve the graft with graft serve."
            )
        change = _weight_change(mixture, routes, backbone.device)
        is_input_first = isinstance(module, Conv1D | nn.Embedding)
        module.weight += change if is_input_first else change.T
    return model.eval()


def _is_shared(weight: Tensor, model: nn.Module) -> bool:
    owners = [module for module in model.modules() if getattr(module, "weight", None) is weight]
    return len(owners) > 1


def _weight_change(mixture: MixedProjection, routes: RouteWeights, device: torch.device) -> Tensor:
    """Return the change of a module's weight, (inputs, outputs): the updates for all unit vectors or all token ids."""
    inputs = mixture.target.inputs
    if mixture.target.is_embedding:
        rows = torch.arange(inputs, device=device)
    else:
        rows = torch.eye(inputs, device=device)
    update = mixture(rows[None], routes)
    return update[0] / mixture.target.scale
