"""From cosines to weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from graftlm.grafts.token_routing.config import TokenRoutingConfig
from graftlm.grafts.token_routing.whitening import whiten


def weigh(cosines: Tensor, config: TokenRoutingConfig) -> Tensor:
    """(..., E) cosines to (..., E + 1) weights that add up to one; the last one is the bare backbone's.

    `softmax`: w = softmax(c / temperature). `nearest`: the largest cosine is multiplied by `boost` before a plain
    softmax; one below zero is divided, so that the nearest is never put last. Of equal weights, `top` keeps the first.
    """
    best = cosines.amax(-1, keepdim=True)
    if config.policy == "softmax":
        scores = cosines / config.temperature
    else:
        boosted = torch.where(best > 0, best * config.boost, best / config.boost)
        first = torch.zeros_like(cosines, dtype=torch.bool).scatter(-1, cosines.argmax(-1, keepdim=True), True)
        scores = torch.where(first, boosted, cosines)
    weights = scores.softmax(-1)
    if config.top is not None and config.top < weights.shape[-1]:
        kept, places = (one[..., : config.top] for one in weights.sort(dim=-1, descending=True, stable=True))
        weights = torch.zeros_like(weights).scatter(-1, places, kept / kept.sum(-1, keepdim=True))
    bare = torch.zeros_like(best)
    if config.threshold is not None:
        bare = (best < config.threshold).to(weights.dtype)
    return torch.cat([weights * (1 - bare), bare], dim=-1)


def cosines(vectors: Tensor, centroids_Ed: Tensor, centre_d: Tensor, spread_Kd: Tensor | None = None) -> Tensor:
    """(..., d) to (..., E), after `centre_d` was taken off; 0 for a vector that is zero, of a text without words.

    With a spread both sides are whitened by it.
    """
    empty = (vectors == 0).all(-1, keepdim=True)
    vectors, centroids_Ed = vectors - centre_d, centroids_Ed - centre_d
    if spread_Kd is not None:
        vectors, centroids_Ed = whiten(vectors, spread_Kd), whiten(centroids_Ed, spread_Kd)
    found = nn.functional.normalize(vectors, dim=-1) @ nn.functional.normalize(centroids_Ed, dim=-1).T
    return found.masked_fill(empty, 0.0)
