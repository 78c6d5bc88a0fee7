"""Equation 1.19, slow and literal, from a joint table of outputs and answers."""

from __future__ import annotations

import math
from collections.abc import Sequence


def information_gain(prior: Sequence[float], given: Sequence[Sequence[float]]) -> float:
    """Compute E_τ KL(p(u | x, τ) || p(u | x)) in bits for answers τ and outputs u."""
    answers = range(len(given))
    outputs = range(len(given[0]))
    joint = {}
    for tau in answers:
        for u in outputs:
            joint[u, tau] = prior[tau] * given[tau][u]
    before = [sum(joint[u, tau] for tau in answers) for u in outputs]
    expected = 0.0
    for tau in answers:
        p_tau = sum(joint[u, tau] for u in outputs)
        if p_tau == 0:
            continue
        divergence = 0.0
        for u in outputs:
            after = joint[u, tau] / p_tau  # Bayes' rule
            if after > 0:
                divergence += after * math.log2(after / before[u])
        expected += p_tau * divergence
    return expected


def mutual_information(prior: Sequence[float], given: Sequence[Sequence[float]]) -> float:
    """Compute the same as Σ p(u, τ) log2 p(u, τ) / (p(u) p(τ))."""
    outputs = range(len(given[0]))
    before = [0.0 for _ in outputs]
    for p, row in zip(prior, given, strict=True):
        for u in outputs:
            before[u] += p * row[u]
    total = 0.0
    for p, row in zip(prior, given, strict=True):
        for u in outputs:
            joint = p * row[u]
            if joint > 0:
                total += joint * math.log2(joint / (p * before[u]))
    return total


def entropy(shares: Sequence[float]) -> float:
    """Compute the entropy of a distribution in bits: the largest gain of a question with this prior."""
    terms = [p * math.log2(p) for p in shares if p > 0]
    return -math.fsum(terms)
