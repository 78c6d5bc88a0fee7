"""Selection of the backbone weights that train together with a graft of conditional tasks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from torch import nn

from graftlm.backbone import Sites

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def share_of(share: float, layers: int) -> int:
    """Return the number of layers in a share of all layers, rounded to the nearest integer and halves up.

    Args:
        share: the share, from 0 to 1.
        layers: number of all layers.
    """
    return math.floor(share * layers + 0.5)


def trained_roots(model: PreTrainedModel, frozen: float) -> list[nn.Module]:
    """Return the modules of a model that train.

    These are the upper layers and the norm after them, or the whole base model if `frozen` is 0. The output head never
    trains.

    Args:
        model: the backbone's model, or a copy of it.
        frozen: share of the layers, from the first, that stay frozen.
    """
    if frozen == 0:
        return [model.base_model]
    sites = Sites(model)
    first = share_of(frozen, sites.n_layers)
    roots: list[nn.Module] = list(sites.layers)[first:]
    if roots and sites.family.norm:
        roots.append(model.base_model.get_submodule(sites.family.norm))
    return roots


def trained_names(model: PreTrainedModel, frozen: float) -> list[str]:
    """Return the names of the model's weights that train.

    The weights of a pooler are excluded, since its output is not used.

    Args:
        model: the backbone's model, or a copy of it.
        frozen: share of the layers, from the first, that stay frozen.
    """
    trained = {id(parameter) for root in trained_roots(model, frozen) for parameter in root.parameters()}
    pooler = getattr(model.base_model, "pooler", None)
    if isinstance(pooler, nn.Module):
        trained -= {id(parameter) for parameter in pooler.parameters()}
    return [name for name, parameter in model.named_parameters() if id(parameter) in trained]


def modules_outside(model: nn.Module, roots: Sequence[nn.Module]) -> Iterator[nn.Module]:
    """Yield the largest modules of a model that neither contain one of some modules nor lie inside one.

    Args:
        model: the model.
        roots: submodules of `model`.
    """
    for child in model.children():
        if set(roots).isdisjoint(child.modules()):
            yield child
        elif child not in roots:
            yield from modules_outside(child, roots)
