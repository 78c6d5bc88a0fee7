"""A model with some of its layers twice, which shares all tensors with the original."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from graftlm.backbone import Sites
from graftlm.backbone.modules import RUNTIME_FIELDS
from graftlm.errors import BackboneError, TapConflictError, first_line


def deeper_model(model: PreTrainedModel, sites: Sites, copied: Sequence[int]) -> PreTrainedModel:
    """Return a model of the same class in which a second copy of some layers follows the original.

    transformers builds it from a config with more layers, so everything that depends on a layer's number is correct:
    its index in the cache, its window, its scale. The model has no hooks, and its tensors are those of `model`.

    Args:
        model: the original.
        sites: the sites of `model`.
        copied: indices of the layers that occur twice; without any, the result has the layers of `model`.

    Raises:
        BackboneError: the config can't describe the additional layers, or the model can't be built from it.
        TapConflictError: the model has an adapter of PEFT.
    """
    if any(isinstance(module, BaseTunerLayer) for module in model.modules()):
        raise TapConflictError(
            "A PEFT adapter is attached to the backbone, and new blocks would copy it: merge or unload that adapter "
            "first, and attach no graft that uses PEFT before the new blocks."
        )
    order: list[int] = []
    for layer in range(sites.n_layers):
        order.append(layer)
        if layer in copied:
            order.append(layer)
    try:
        with torch.device("meta"):
            deeper = type(model)(_deeper_config(model.config, sites, order))
        _share_all(deeper, model, sites, order)
    except Exception as error:  # the code of a model may raise anything
        layers = ", ".join(str(layer) for layer in copied) or "none"
        raise BackboneError(
            f"This {sites.model_type} model can't be built from its config with copies of some layers (copied: "
            f"{layers}; {first_line(error)}): choose another number of blocks, or another kind of graft."
        ) from error
    generation_config: Any = getattr(model, "generation_config", None)
    deeper.generation_config = copy.deepcopy(generation_config)
    return deeper.eval()


def _deeper_config(config: PreTrainedConfig, sites: Sites, order: Sequence[int]) -> PreTrainedConfig:
    """Return a config with a layer for each number of `order`; lists with an item per layer follow that order."""
    config = copy.deepcopy(config)
    text: Any = getattr(config, sites.family.text_config or "", config)
    for name, value in list(vars(text).items()):
        is_list = isinstance(value, list | tuple) and len(value) == sites.n_layers
        if is_list and name not in RUNTIME_FIELDS:
            setattr(text, name, [value[layer] for layer in order])
    text.num_hidden_layers = len(order)
    return config


def _share_all(deeper: PreTrainedModel, model: PreTrainedModel, sites: Sites, order: Sequence[int]) -> None:
    """Make every module of the deeper model use the tensors of the module that it copies."""
    modules = dict(model.named_modules())
    path = next(name for name, module in modules.items() if module is sites.layers)
    depth = path.count(".") + 1
    for name, module in deeper.named_modules():
        parts = name.split(".")
        if name.startswith(f"{path}."):
            position = int(parts[depth])
            parts[depth] = str(order[position])
        _share(module, modules[".".join(parts)])


def _share(module: nn.Module, source: nn.Module) -> None:
    """Make a module without values use the tensors of another module; raise `ValueError` if they differ in form."""
    if type(module) is not type(source) or _shapes(module) != _shapes(source):
        raise ValueError(f"{type(source).__name__} would be {type(module).__name__} of other sizes")
    module._parameters.update(source._parameters)
    module._buffers.update(source._buffers)
    # Some models keep tensors as plain attributes.
    tensors = {name: value for name, value in vars(source).items() if isinstance(value, Tensor)}
    vars(module).update(tensors)


def _shapes(module: nn.Module) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in module.named_parameters(recurse=False)}
