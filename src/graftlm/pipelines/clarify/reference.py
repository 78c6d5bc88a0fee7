"""Equation 1.19 once more, slow and literal: a joint table of what is wanted and what is said. Only tests use it."""

from __future__ import annotations

import math
from collections.abc import Sequence


def information_gain(prior: Sequence[float], given: Sequence[Sequence[float]]) -> float:
    """E_τ KL(p(u | x, τ) || p(u | x)) in bits; τ is one of the answers, u one of the outputs."""
    joint = {(u, tau): prior[tau] * row[u] for tau, row in enumerate(given) for u in range(len(row))}
    wanted = sorted({u for u, _ in joint})
    before = {u: sum(p for (other, _), p in joint.items() if other == u) for u in wanted}
    expected = 0.0
    for tau in range(len(given)):
        said = sum(p for (_, other), p in joint.items() if other == tau)
        if said == 0:
            continue
        after = {u: joint[u, tau] / said for u in wanted}  # Bayes
        expected += said * sum(after[u] * math.log2(after[u] / before[u]) for u in wanted if after[u] > 0)
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
