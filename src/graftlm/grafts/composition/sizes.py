"""The sizes of a composition: the number of its pairs of layers, which the stride sets."""

from __future__ import annotations

import torch
from torch import nn

from graftlm.backbone import Backbone
from graftlm.errors import GraftError, RecipeError
from graftlm.grafts.composition.attention import CrossAttention
from graftlm.grafts.composition.augmenting import load_augmenting
from graftlm.grafts.composition.config import CompositionConfig
from graftlm.grafts.composition.pairs import resolve_pairs
from graftlm.grafts.composition.readout import MixtureGate, output_width
from graftlm.grafts.sizes import Sizes


def number_of_heads(config: CompositionConfig, anchor: Backbone) -> int:
    """Return the number of heads of each cross-attention."""
    return config.heads or int(anchor.sites.config.num_attention_heads)


def new_attention(config: CompositionConfig, augmenting_width: int, width: int, heads: int) -> CrossAttention:
    """Return an untrained cross-attention on torch's default device.

    Args:
        config: configuration of the composition.
        augmenting_width: A, the width of the augmenting model.
        width: D, the width of the anchor.
        heads: the number of heads.
    """
    return CrossAttention(
        width=width,
        augmenting_width=augmenting_width,
        heads=heads,
        norm=config.norm,
        init=config.init,
        positions=config.positions,
        qk_norm=config.qk_norm,
    )


def stride_sizes(config: CompositionConfig, anchor: Backbone) -> Sizes:
    """Return the sizes of a composition, by the stride of all augmenting models that have none of their own.

    Args:
        config: configuration of the composition, whose stride does not count.
        anchor: the backbone of the composition.

    Raises:
        RecipeError: there are no cross-attentions, or every augmenting model sets its stride or pairs.
        GraftError: an augmenting model can't be loaded, or no stride gives pairs with it.
    """
    free = [name for name, model in config.augmenting.items() if model.stride is None and not model.pairs]
    if not config.cross or not free:
        reason = "every augmenting model has a stride or pairs" if config.cross else "cross is false"
        raise RecipeError(
            f"capacity is match, but {reason}, so that the stride sets no size: leave capacity out, or these keys."
        )
    models = {name: load_augmenting(name, model, anchor) for name, model in config.augmenting.items()}
    heads = number_of_heads(config, anchor)
    gate = 0
    if config.readout == "mixture":
        gate = _count(MixtureGate([output_width("a model", model) for model in (anchor, *models.values())]))
    per_pair = {}
    for name, model in models.items():
        with torch.device("meta"):
            per_pair[name] = _count(new_attention(config, model.sites.width, anchor.sites.width, heads))

    def with_stride(stride: int) -> CompositionConfig:
        return config.model_copy(update={"stride": stride})

    def parameters(stride: int) -> int:
        pairs = {name: len(resolve_pairs(with_stride(stride), name, model, anchor)) for name, model in models.items()}
        return gate + sum(per_pair[name] * count for name, count in pairs.items())

    def fits(stride: int) -> bool:
        try:
            return parameters(stride) > 0
        except GraftError:
            return False

    longest = max(models[name].sites.n_layers for name in free)
    strides = [stride for stride in range(longest, 0, -1) if fits(stride)]
    if not strides:
        parameters(longest)  # raises what is wrong
    return Sizes(key="stride", values=strides, parameters=parameters, config=with_stride)


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
