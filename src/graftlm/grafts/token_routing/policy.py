"""From embeddings to expert weights: centroids, whitening, scores, policy.

Shape suffixes: E experts, M centroids, d embedding width, N examples, K directions that the examples span.

Whitening divides vectors by the within-domain covariance of the examples. x_m are the N example vectors, each minus the
mean of its own domain:

    S = (1 / N) sum over m of x_m x_m^T        C = (1 - a) S + a t I,   t = tr(S) / d
    whitened v = sqrt(a t) C^(-1/2) v = v - V^T V v

a is the shrinkage coefficient of Ledoit and Wolf (2004), with a lower bound:

    a = min(1, b / c)     b = (1 / N^2) sum over m of |x_m x_m^T - S|^2      c = |S - t I|^2

V has one row sqrt(1 - f_k) u_k per direction u_k that the examples span. s_k is the variance along u_k, and
f_k = sqrt(a t / (a t + (1 - a) s_k)). So only K x d numbers are stored, not d x d.

Linear discriminant scores of centroids c_j, with equal priors, are products of whitened vectors:

    c_j^T C^-1 v - 1/2 c_j^T C^-1 c_j = (w_j . w - 1/2 w_j . w_j) / (a t)   for whitened c_j and v
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from graftlm.errors import GraftError
from graftlm.grafts.token_routing.config import TokenRoutingConfig

MINIMUM_SHRINKAGE = 1e-3
"""Lower bound of a. Without it, directions absent from the examples would count without bound."""
TEMPERATURES = {"softmax": 0.03, "discriminant": 1.0}  # where the config has none


def expert_weights(cosines: Tensor, config: TokenRoutingConfig) -> Tensor:
    """(..., E) scores to (..., E + 1) weights that sum to one; the last weight is the bare backbone's.

    `softmax` and `discriminant`: w = softmax(c / temperature). `nearest`: the largest cosine is multiplied by `boost`
    before a softmax; a negative one is divided by it, so that the nearest expert stays so. `top` breaks ties by order.
    """
    best = cosines.amax(-1, keepdim=True)
    if config.policy != "nearest":
        scores = cosines / (config.temperature or TEMPERATURES[config.policy])
    else:
        boosted = torch.where(best > 0, best * config.boost, best / config.boost)
        nearest = torch.zeros_like(cosines, dtype=torch.bool).scatter(-1, cosines.argmax(-1, keepdim=True), True)
        scores = torch.where(nearest, boosted, cosines)
    weights = scores.softmax(-1)
    if config.top is not None and config.top < weights.shape[-1]:
        values, indices = (x[..., : config.top] for x in weights.sort(dim=-1, descending=True, stable=True))
        weights = torch.zeros_like(weights).scatter(-1, indices, values / values.sum(-1, keepdim=True))
    bare = torch.zeros_like(best) if config.threshold is None else (best < config.threshold).to(weights.dtype)
    return torch.cat([weights * (1 - bare), bare], dim=-1)


def scores_of(
    centroids_Md: Tensor, vectors: Tensor, centre_d: Tensor, whitener_Kd: Tensor | None = None, variance: Any = None
) -> Tensor:
    """(..., M) cosines of vectors (..., d) to the centroids, or with a variance a t their linear discriminant scores.

    A zero vector, which stands for an empty text, has the score 0. `centre_d` is subtracted from both sides, which
    shifts all discriminant scores alike. With a whitener, both sides are whitened.
    """
    empty = (vectors == 0).all(-1, keepdim=True)
    vectors, centroids_Md = vectors - centre_d, centroids_Md - centre_d
    if whitener_Kd is not None:
        vectors, centroids_Md = whiten(vectors, whitener_Kd), whiten(centroids_Md, whitener_Kd)
    if variance is None:
        scores = nn.functional.normalize(vectors, dim=-1) @ nn.functional.normalize(centroids_Md, dim=-1).T
    else:
        scores = (vectors @ centroids_Md.T - centroids_Md.square().sum(-1) / 2) / variance
    return scores.masked_fill(empty, 0.0)


def best_scores(scores: Tensor, owners_M: Tensor, experts: int) -> Tensor:
    """(..., E) the largest of each expert's scores, from (..., M); `owners_M` are the centroids' experts."""
    least = scores.new_full((*scores.shape[:-1], experts), -torch.inf)
    return least.scatter_reduce(-1, owners_M.expand_as(scores), scores, "amax")


def cluster(vectors_Nd: Tensor, count: int | str) -> Tensor:
    """(at most count, d) centroids by k-means; for `all` the vectors themselves.

    It starts from the vector that is nearest to the mean, and then each time from the one that is farthest from all
    chosen ones, so that it needs no random numbers. Equal vectors give one centroid.
    """
    if not isinstance(count, int):
        return vectors_Nd
    points = vectors_Nd.double()
    centroids = points.mean(0, keepdim=True)
    if count > 1:
        centroids = points[(points - centroids).norm(dim=1).argmin()][None]
    while len(centroids) < count and (distances := torch.cdist(points, centroids).amin(1)).max() > 1e-9:
        centroids = torch.cat([centroids, points[int(distances.argmax())][None]])
    for _ in range(100 if count > 1 else 0):
        nearest = torch.cdist(points, centroids).argmin(1)
        means = torch.stack([points[nearest == k].mean(0) for k in nearest.unique()])
        if torch.equal(means, centroids):
            break
        centroids = means
    return centroids.to(vectors_Nd.dtype)


def whiten(vectors: Tensor, whitener_Kd: Tensor) -> Tensor:
    """(..., d) vectors, whitened: v - V^T V v."""
    return vectors - (vectors @ whitener_Kd.T) @ whitener_Kd


def fit_whitener(groups: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """(K, d) float32 matrix V and the number a t, from the example vectors (n, d) of each domain."""
    from sklearn.covariance import ledoit_wolf_shrinkage  # takes seconds to import

    centred_Nd = torch.cat([group - group.mean(0) for group in groups]).double()
    count, width = centred_Nd.shape
    _, singular_K, u_Kd = torch.linalg.svd(centred_Nd, full_matrices=False)
    s_K = singular_K.square() / count
    t = s_K.sum() / width
    if not t > 1e-12:
        raise GraftError(
            "embedder.whiten needs examples of one expert that differ from each other, and none do: give each expert "
            "several examples, or set whiten to false."
        )
    a = max(MINIMUM_SHRINKAGE, ledoit_wolf_shrinkage(centred_Nd.cpu().numpy(), assume_centered=True))
    f_K = (a * t / (a * t + (1 - a) * s_K)).sqrt()
    return ((1 - f_K).sqrt()[:, None] * u_Kd).float().contiguous(), (a * t).float()
