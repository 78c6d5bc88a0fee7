"""Give modules that share a weight a weight each, so that one of them can be changed alone."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from transformers import PreTrainedModel


def untie(model: PreTrainedModel, modules: Iterable[nn.Module]) -> bool:
    """Give each of some modules its own copy of its weight, if another module shares it.

    The config then says that the weights are not tied.

    Args:
        model: the model, which is changed.
        modules: modules of the model.

    Returns:
        Whether one of them shared its weight.
    """
    is_untied = False
    owners: dict[int, int] = {}
    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is not None:
            owners[id(weight)] = owners.get(id(weight), 0) + 1
    for module in modules:
        weight = module._parameters.get("weight")
        if weight is not None and owners[id(weight)] > 1:
            owners[id(weight)] -= 1
            module.weight = nn.Parameter(weight.detach().clone(), weight.requires_grad)
            is_untied = True
    if is_untied:
        _set_tied(model, tied=False)
    return is_untied


def tie_if_equal(model: PreTrainedModel) -> None:
    """Tie the output head to the token embeddings again if their weights are equal.

    Args:
        model: the model, which is changed.
    """
    first = model.get_input_embeddings()
    last = model.get_output_embeddings()
    if first is None or last is None:
        return
    first_weight = first._parameters.get("weight")
    last_weight = last._parameters.get("weight")
    if first_weight is None or last_weight is None:
        return
    if torch.equal(first_weight, last_weight):
        _set_tied(model, tied=True)
        model.tie_weights()


def _set_tied(model: PreTrainedModel, *, tied: bool) -> None:
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = tied
