"""Equation 1.19, slow and literal, from a joint table of outputs and answers. For tests."""

from __future__ import annotations

import math
from collections.abc import Sequence


def information_gain(prior: Sequence[float], given: Sequence[Sequence[float]]) -> float:
    """E_τ KL(p(u | x, τ) || p(u | x)) in bits; τ is one of the answers, u one of the outputs."""
    joint = {(u, tau): prior[tau] * row[u] for tau, row in enumerate(given) for u in range(len(row))}
    outputs = sorted({u for u, _ in joint})
    before = {u: sum(p for (other, _), p in joint.items() if other == u) for u in outputs}
    expected = 0.0
    for tau in range(len(given)):
        p_tau = sum(p for (_, other), p in joint.items() if other == tau)
        if p_tau == 0:
            continue
        after = {u: joint[u, tau] / p_tau for u in outputs}  # Bayes
        expected += p_tau * sum(after[u] * math.log2(after[u] / before[u]) for u in outputs if after[u] > 0)
    return expected


def mutual_information(prior: Sequence[float], given: Sequence[Sequence[float]]) -> float:
    """The same as Σ p(u, τ) log2 p(u, τ) / (p(u) p(τ))."""
    before = [sum(p * row[u] for p, row in zip(prior, given, strict=True)) for u in range(len(given[0]))]
    total = 0.0
    for p, row in zip(prior, given, strict=True):
        for u, share in enumerate(row):
            if p * share > 0:
                total += p * share * math.log2(p * share / (p * before[u]))
    return total


def entropy(shares: Sequence[float]) -> float:
    """Of a distribution, in bits: the largest gain of a question with this prior."""
    return -math.fsum(p * math.log2(p) for p in shares if p > 0)
