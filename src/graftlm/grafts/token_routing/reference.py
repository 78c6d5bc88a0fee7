"""Token-level routing, slow and literal: one token after the other, as the README says it. For tests alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from graftlm.grafts.token_routing.config import TokenRoutingConfig
from graftlm.grafts.token_routing.experts import Factors


def text_of_route(tokens: Sequence[int], i: int, given: int, config: TokenRoutingConfig) -> Sequence[int]:
    """The tokens that the route of token i reads, of a document whose first `given` tokens are the prompt.

    A generation computes weights when the prompt is there, and again after every k tokens that it wrote.
    """
    given = 1 if config.prompt == "causal" else given
    if i < given:
        read = given
    else:
        written = i + 1 - given  # tokens that the model has written when it reads token i
        read = given + written // config.every * config.every
    if config.reads == "prompt" and given > 1 and i >= given:
        read = given
    start = 0 if config.window is None else max(0, read - config.window)
    return tokens[start:read]


def embed(tokens: Sequence[int], embedding_Vd: Tensor, special: Sequence[int]) -> Tensor:
    """(d,) the mean of the embeddings of tokens that are not special; zero for none."""
    chosen = [embedding_Vd[token] for token in tokens if token not in special]
    return sum(chosen[1:], chosen[0]) / len(chosen) if chosen else torch.zeros_like(embedding_Vd[0])


def weights(vector: Tensor, centroids_Ed: Tensor, config: TokenRoutingConfig) -> list[float]:
    """The experts' weights, and the bare backbone's."""
    centre = sum(centroids_Ed) / len(centroids_Ed) if config.embedder.centres else 0 * centroids_Ed[0]
    scores = [_cosine(vector - centre, one - centre) if vector.any() else 0.0 for one in centroids_Ed]
    best = max(range(len(scores)), key=lambda e: scores[e])
    if config.threshold is not None and scores[best] < config.threshold:
        return [0.0] * len(scores) + [1.0]
    if config.policy == "softmax":
        scores = [score / config.temperature for score in scores]
    else:
        scores[best] *= config.boost if scores[best] > 0 else 1 / config.boost
    exponentials = [math.exp(score - max(scores)) for score in scores]
    if config.top is not None:
        least = sorted(exponentials)[-config.top] if config.top < len(scores) else 0.0
        exponentials = [one if one >= least else 0.0 for one in exponentials]
    return [one / sum(exponentials) for one in exponentials] + [0.0]


def update(x: Tensor, expert_weights: Sequence[float], experts: Sequence[Factors]) -> Tensor:
    """(o,) what the experts add for one token with the input x: sum of w_e s_e B_e A_e x."""
    parts = [w * one.scale * (one.b.T @ (one.a @ x)) for w, one in zip(expert_weights, experts, strict=True)]
    return sum(parts[1:], parts[0])


def _cosine(first: Tensor, second: Tensor) -> float:
    lengths = float(first.norm() * second.norm())
    return float(first @ second) / lengths if lengths else 0.0
