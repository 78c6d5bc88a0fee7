"""Covariance similarity of the inputs of two tasks, equation 3.7."""

from __future__ import annotations

import torch
from torch import Tensor


def covariance_similarity(first: Tensor, second: Tensor, share: float = 0.99) -> float:
    """|F_i^T F_j| / (|F_i| |F_j|) in Frobenius norms, from 0 (orthogonal) to 1 (the same single direction).

    F = U D^(1/2) of X^T X = U D U^T, cut to the fewest directions whose D sum up to `share` of all.

    Args:
        first: (m, d) vectors of one task, such as inputs of the first layer.
        second: (n, d) vectors of another.
        share: of the sum of singular values that is kept.
    """
    a, b = _factor(first, share), _factor(second, share)
    return float((a.T @ b).norm() / (a.norm() * b.norm()).clamp(min=1e-30))


def _factor(vectors: Tensor, share: float) -> Tensor:
    """(d, r): F."""
    _, root, directions = torch.linalg.svd(vectors.double(), full_matrices=False)
    weights = root.square()  # the singular values of X^T X
    reached = weights.cumsum(0) / weights.sum().clamp(min=1e-30)
    kept = int((reached < share).sum()) + 1
    return directions[:kept].T * root[:kept]
