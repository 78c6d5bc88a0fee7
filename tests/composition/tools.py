"""Helpers of the composition tests."""

from __future__ import annotations

from typing import Any

import torch

from graftlm.backbone import Backbone
from graftlm.grafted.model import GraftedModel
from graftlm.grafts.composition import Composition, CompositionConfig
from tiny import TOKENS, tiny_model, tiny_tokenizer

OTHER_TOKENS = 280  # of the second tokenizer


def live(family: str, seed: int = 0, tokens: int = TOKENS, **changes: Any) -> Backbone:
    """A tiny model in memory, with a tokenizer of the given vocabulary size."""
    return Backbone.wrap(tiny_model(family, seed=seed, **changes), tiny_tokenizer(tokens), family)


def composition(anchor: Backbone, models: dict[str, Backbone], *, spread: float = 0.3, **config: Any) -> Composition:
    """A composition with random tensors; `pairs` are used for every model."""
    pairs = config.pop("pairs", None)
    augmenting = {name: {"name": "in memory", "pairs": pairs} for name in models}
    chosen = CompositionConfig.parse({"stride": 1, "augmenting": augmenting} | config)
    graft = Composition(chosen, anchor, models)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in graft.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter.dtype) * spread)
    return graft


def attached(anchor: Backbone, graft: Composition) -> GraftedModel:
    """The graft on its anchor, in evaluation mode."""
    return GraftedModel(anchor, {"graft": graft}).eval()
