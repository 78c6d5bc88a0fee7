"""A copy of a backbone that shares every frozen weight with it, and owns those that train."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from graftlm.backbone import Sites
from graftlm.errors import BackboneError


def share(part: float, layers: int) -> int:
    """How many of so many layers a share is, halves rounded up."""
    return math.floor(part * layers + 0.5)


def trained_roots(model: PreTrainedModel, frozen: float) -> list[nn.Module]:
    """The modules that train as wholes: the upper layers and the norm after them, or the base model; never a head."""
    if frozen == 0:
        return [model.base_model]
    sites = Sites(model)
    layers = list(sites.layers)[share(frozen, sites.n_layers) :]
    norm = [model.base_model.get_submodule(sites.family.norm)] if sites.family.norm and layers else []
    return [*layers, *norm]


def trained_names(model: PreTrainedModel, frozen: float) -> list[str]:
    """The names, in `model`, of the weights that train; a pooler is none, as nothing reads it."""
    roots = trained_roots(model, frozen)
    pooler = getattr(model.base_model, "pooler", None)
    unread = {id(p) for p in pooler.parameters()} if isinstance(pooler, nn.Module) else set()
    wanted = {id(parameter) for root in roots for parameter in root.parameters()} - unread
    return [name for name, parameter in model.named_parameters() if id(parameter) in wanted]


def sharing_copy(model: PreTrainedModel, names: list[str]) -> PreTrainedModel:
    """A copy of `model` that owns the parameters `names`, trainable; all other tensors are the model's own."""
    own = set(names)
    memo: dict[int, Any] = {id(p): p for name, p in model.named_parameters() if name not in own}
    memo |= {id(buffer): buffer for buffer in model.buffers()}
    made = copy.deepcopy(model, memo)
    for name, parameter in made.named_parameters():
        if name in own:
            _refuse_packed(name, parameter)
            parameter.requires_grad_(True)
    return made


def outside(model: nn.Module, roots: list[nn.Module]) -> Iterator[nn.Module]:
    """The largest modules of `model` that neither hold one of `roots` nor lie in one."""
    for child in model.children():
        if any(child is root for root in roots):
            continue
        if any(module is root for module in child.modules() for root in roots):
            yield from outside(child, roots)
        else:
            yield child


def _refuse_packed(name: str, parameter: nn.Parameter) -> None:
    if type(parameter) is not nn.Parameter or not parameter.is_floating_point():
        raise BackboneError(
            f"The weight {name} is quantised ({type(parameter).__name__}), and upper layers train as plain numbers: "
            "load the backbone without quantisation, or set frozen to 1."
        )
