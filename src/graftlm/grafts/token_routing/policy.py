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
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from graftlm.errors import GraftError
from graftlm.grafts.token_routing.config import TokenRoutingConfig

MINIMUM_SHRINKAGE = 1e-3
"""Lower bound of a. Without it, the weight of directions that are absent from the examples would be unbounded."""
TEMPERATURES = {"softmax": 0.03, "discriminant": 1.0}
"""Default temperature of each policy."""
_K_MEANS_STEPS = 100  # maximum


def expert_weights(cosines: Tensor, config: TokenRoutingConfig) -> Tensor:
    """Turn the scores of the experts into weights.

    `softmax` and `discriminant`: w = softmax(c / temperature). `nearest`: the largest cosine is multiplied by `boost`
    before a softmax; a negative one is divided by it, so that the nearest expert remains the nearest. With `top`, only
    that many largest weights are kept and normalized; among equal weights, experts with lower numbers come first. With
    `threshold`, the bare backbone has the whole weight if all cosines are smaller.

    Args:
        cosines: (..., E) scores, see `scores_of`; linear discriminant scores for `discriminant`.
        config: configuration of the routing.

    Returns:
        (..., E + 1) weights that sum to one; the last weight is that of the bare backbone.
    """
    best = cosines.amax(-1, keepdim=True)
    if config.policy == "nearest":
        weights = _boost_nearest(cosines, config.boost).softmax(-1)
    else:
        scores = cosines / (config.temperature or TEMPERATURES[config.policy])
        weights = scores.softmax(-1)
    if config.top is not None and config.top < weights.shape[-1]:
        weights = _keep_largest(weights, config.top)
    bare = torch.zeros_like(best)
    if config.threshold is not None:
        bare = (best < config.threshold).to(weights.dtype)
    weights = weights * (1 - bare)
    return torch.cat([weights, bare], dim=-1)


def _boost_nearest(cosines: Tensor, boost: float) -> Tensor:
    best = cosines.amax(-1, keepdim=True)
    boosted = torch.where(best > 0, best * boost, best / boost)
    nearest = cosines.argmax(-1, keepdim=True)
    none = torch.zeros_like(cosines, dtype=torch.bool)
    is_nearest = none.scatter(-1, nearest, True)
    return torch.where(is_nearest, boosted, cosines)


def _keep_largest(weights: Tensor, count: int) -> Tensor:
    """Set all but the largest weights to zero, and normalize the others."""
    ordered = weights.sort(dim=-1, descending=True, stable=True)
    values = ordered.values[..., :count]
    indices = ordered.indices[..., :count]
    normalized = values / values.sum(-1, keepdim=True)
    return torch.zeros_like(weights).scatter(-1, indices, normalized)


@dataclass(frozen=True)
class ScoredCentroids:
    """Centroids, with all that scores need of them: they stay the same, while every decoded token has a new vector.

    Args:
        centre: (d,) subtracted from the vectors.
        whitener: the matrix V (K, d), with which the vectors are whitened; None for no whitening.
        matrix: (d, M) the centred and whitened centroids; of length 1 for cosines.
        biases: (M,) subtracted from the products with the centroids; None for cosines.
        variance: the number a t of the module's equations; None for cosines.
    """

    centre: Tensor
    whitener: Tensor | None
    matrix: Tensor
    biases: Tensor | None = None
    variance: Tensor | float | None = None

    @classmethod
    def of(
        cls,
        centroids_Md: Tensor,
        centre_d: Tensor,
        whitener_Kd: Tensor | None,
        variance: Tensor | float | None,
    ) -> ScoredCentroids:
        """Prepare centroids. The arguments are those of `scores_of`."""
        centroids_Md = centroids_Md - centre_d
        if whitener_Kd is not None:
            centroids_Md = whiten(centroids_Md, whitener_Kd)
        if variance is None:
            directions_Md = functional.normalize(centroids_Md, dim=-1)
            return cls(centre_d, whitener_Kd, directions_Md.T)
        biases_M = centroids_Md.square().sum(-1) / 2
        return cls(centre_d, whitener_Kd, centroids_Md.T, biases_M, variance)

    def scores(self, vectors: Tensor) -> Tensor:
        """Return the scores (..., M) of vectors (..., d), as `scores_of` does."""
        empty = (vectors == 0).all(-1, keepdim=True)
        vectors = vectors - self.centre
        if self.whitener is not None:
            vectors = whiten(vectors, self.whitener)
        if self.biases is None or self.variance is None:
            scores = functional.normalize(vectors, dim=-1) @ self.matrix
        else:
            scores = (vectors @ self.matrix - self.biases) / self.variance
        return scores.masked_fill(empty, 0.0)


def scores_of(
    centroids_Md: Tensor,
    vectors: Tensor,
    centre_d: Tensor,
    whitener_Kd: Tensor | None = None,
    variance: Tensor | float | None = None,
) -> Tensor:
    """Compute the score of each centroid for each vector: cosines, or with a variance linear discriminant scores.

    A zero vector, which is the embedding of an empty text, has the score 0.

    Args:
        centroids_Md: the centroids.
        vectors: (..., d) embeddings.
        centre_d: subtracted from the centroids and the vectors; it shifts all discriminant scores equally.
        whitener_Kd: the matrix V, with which the centroids and the vectors are whitened; None for no whitening.
        variance: the number a t of the module's equations; None for cosines.

    Returns:
        (..., M) scores.
    """
    return ScoredCentroids.of(centroids_Md, centre_d, whitener_Kd, variance).scores(vectors)


def best_scores(scores: Tensor, owners_M: Tensor, experts: int) -> Tensor:
    """Return the largest score of each expert.

    Args:
        scores: (..., M) scores of the centroids.
        owners_M: (M,) long, number of the expert of each centroid.
        experts: E, the number of experts.

    Returns:
        (..., E) scores; -inf for an expert without centroids.
    """
    shape = (*scores.shape[:-1], experts)
    lowest = scores.new_full(shape, -torch.inf)
    owners = owners_M.expand_as(scores)
    return lowest.scatter_reduce(-1, owners, scores, "amax")


def cluster(vectors_Nd: Tensor, count: int | str) -> Tensor:
    """Compute centroids by k-means, without random numbers.

    The first initial centroid is the vector that is nearest to the mean; each following one is the vector that is
    farthest from those that are already chosen. Equal vectors give one centroid.

    Args:
        vectors_Nd: (N, d) vectors of the examples, at least one.
        count: number of centroids, at least 1, or `all` for the vectors themselves.

    Returns:
        (M, d) centroids. M is `count`, or less if fewer vectors differ.
    """
    if not isinstance(count, int):
        return vectors_Nd
    points = vectors_Nd.double()
    mean = points.mean(0, keepdim=True)
    if count == 1:
        return mean.to(vectors_Nd.dtype)
    centroids = _initial_centroids(points, mean, count)
    for _ in range(_K_MEANS_STEPS):
        nearest = torch.cdist(points, centroids).argmin(1)
        clusters = [points[nearest == k] for k in nearest.unique()]
        means = torch.stack([own.mean(0) for own in clusters])
        if torch.equal(means, centroids):
            break
        centroids = means
    return centroids.to(vectors_Nd.dtype)


def _initial_centroids(points: Tensor, mean: Tensor, count: int) -> Tensor:
    """Choose at most `count` different points, far from each other."""
    first = (points - mean).norm(dim=1).argmin()
    centroids = points[first][None]
    while len(centroids) < count:
        distances = torch.cdist(points, centroids).amin(1)
        if not distances.max() > 1e-9:
            break
        farthest = int(distances.argmax())
        centroids = torch.cat([centroids, points[farthest][None]])
    return centroids


def whiten(vectors: Tensor, whitener_Kd: Tensor) -> Tensor:
    """Whiten vectors: v - V^T V v.

    Args:
        vectors: (..., d) vectors.
        whitener_Kd: the matrix V.

    Returns:
        (..., d) whitened vectors.
    """
    return vectors - (vectors @ whitener_Kd.T) @ whitener_Kd


def fit_whitener(groups: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Estimate the within-domain covariance of examples, and return what whitening needs of it.

    Args:
        groups: (n, d) example vectors of each domain, at least one.

    Returns:
        The matrix V (K, d) and the number a t of the module's equations, both in float32.

    Raises:
        GraftError: no domain has examples that differ from each other.
    """
    from sklearn.covariance import ledoit_wolf_shrinkage  # imported here because it takes seconds

    centred = [group - group.mean(0) for group in groups]
    centred_Nd = torch.cat(centred).double()
    count, width = centred_Nd.shape
    _, singular_K, u_Kd = torch.linalg.svd(centred_Nd, full_matrices=False)
    s_K = singular_K.square() / count
    t = s_K.sum() / width
    if not t > 1e-12:
        raise GraftError(
            "The examples of each expert are equal, but whitening needs examples that differ from each other: give "
            "each expert several examples, or set embedder.whiten to false and policy to softmax or nearest."
        )
    shrinkage = ledoit_wolf_shrinkage(centred_Nd.cpu().numpy(), assume_centered=True)
    a = max(MINIMUM_SHRINKAGE, shrinkage)
    f_K = (a * t / (a * t + (1 - a) * s_K)).sqrt()
    lengths_K = (1 - f_K).sqrt()
    whitener_Kd = lengths_K[:, None] * u_Kd
    return whitener_Kd.float().contiguous(), (a * t).float()
