"""What the tests of composition share."""

from __future__ import annotations

from typing import Any

import torch

from graftlm.backbone import Backbone
from graftlm.grafts import GraftedModel
from graftlm.grafts.composition import AugmentingConfig, Composition, CompositionConfig
from tiny import tiny_model, tiny_tokenizer

OTHER_TOKENS = 280  # of the second tokenizer


def live(family: str, seed: int = 0, tokens: int | None = None, **changes: Any) -> Backbone:
    """A tiny model in memory; with the usual tokenizer, or one of so many tokens."""
    tokenizer = tiny_tokenizer() if tokens is None else tiny_tokenizer(tokens)
    return Backbone.wrap(tiny_model(family, seed=seed, **changes), tokenizer, family)


def composition(anchor: Backbone, models: dict[str, Backbone], *, spread: float = 0.3, **config: Any) -> Composition:
    """A composition whose every tensor is random; `pairs` are those of every model."""
    pairs = config.pop("pairs", None)
    augmenting = {name: AugmentingConfig(name="in memory", pairs=pairs) for name in models}
    graft = Composition(CompositionConfig(augmenting=augmenting, **({"stride": 1} | config)), anchor, models)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in graft.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter.dtype) * spread)
    return graft


def attached(anchor: Backbone, graft: Composition) -> GraftedModel:
    """The graft on its anchor, in evaluation mode."""
    return GraftedModel(anchor, {"graft": graft}).eval()
