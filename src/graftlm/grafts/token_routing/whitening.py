"""Vectors divided by the spread of examples within their domains, so that what tells domains apart counts.

With x_m the examples' vectors, each without its own domain's mean, N of them in d dimensions,

    S = (1 / N) sum over m of x_m x_m^T        C = (1 - a) S + a t I,   t = tr(S) / d
    whitened v = sqrt(a t) C^(-1/2) v = v - V^T V v

a is how far S is shrunk to a ball, by the rule of Ledoit and Wolf (2004):

    a = min(1, b / c)     b = (1 / N^2) sum over m of |x_m x_m^T - S|^2      c = |S - t I|^2

V has a row sqrt(1 - f_k) u_k for each direction u_k in which examples differ, s_k being the variance there and
f_k = sqrt(a t / (a t + (1 - a) s_k)). So only what the examples span is kept, however wide the vectors are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from graftlm.errors import GraftError

# A little of the ball is always left: without any, what no example has would count without bounds.
LEAST_SHRINKAGE = 1e-3


def spread_of(groups: Sequence[Tensor]) -> Tensor:
    """(K, d) float32: V, from the vectors (n, d) of the examples of each domain.

    Raises:
        GraftError: no two examples of a domain differ.
    """
    apart_Nd = torch.cat([group - group.mean(0) for group in groups]).double()
    count, width = apart_Nd.shape
    _, singular_K, u_Kd = torch.linalg.svd(apart_Nd, full_matrices=False)
    s_K = singular_K.square() / count
    t = s_K.sum() / width
    if not t > 1e-12:
        raise GraftError(
            "embedder.whiten divides by how examples of one expert differ from each other, and none do: give experts "
            "several examples each, or set whiten to false."
        )
    a = _shrinkage(apart_Nd, s_K)
    f_K = (a * t / (a * t + (1 - a) * s_K)).sqrt()
    return ((1 - f_K).sqrt()[:, None] * u_Kd).float().contiguous()


def whiten(vectors: Tensor, spread_Kd: Tensor) -> Tensor:
    """(..., d) vectors, whitened."""
    return vectors - (vectors @ spread_Kd.T) @ spread_Kd


def _shrinkage(apart_Nd: Tensor, s_K: Tensor) -> float:
    """a: |x x^T|^2 = |x|^4, and |S|^2 is the sum of squares of its eigenvalues."""
    count, width = apart_Nd.shape
    square = s_K.square().sum()
    b = apart_Nd.square().sum(1).square().sum() / count**2 - square / count
    c = square - s_K.sum().square() / width
    return min(1.0, max(LEAST_SHRINKAGE, float(b / c))) if c > 0 else 1.0
