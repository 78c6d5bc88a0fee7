"""A slow and literal reference of token-level routing: one token at a time, as the README defines it.

It does not call the fast implementation: centroids, whitening, routes and updates are computed from token ids, token
vectors and factors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from graftlm.grafts.token_routing.config import TokenRoutingConfig
from graftlm.grafts.token_routing.experts import Factors

MINIMUM_SHRINKAGE = 1e-3


def route_columns(i: int, prompt: int, config: TokenRoutingConfig) -> slice:
    """Return the tokens on which the route of token i depends; the first `prompt` tokens are the prompt.

    A generation computes weights for the prompt, and again after every k generated tokens.
    """
    if config.prompt == "causal":
        prompt = 1
    if i < prompt:
        length = prompt
    else:
        generated = i + 1 - prompt  # number of generated tokens up to token i
        length = prompt + generated // config.every * config.every
    if config.reads == "prompt" and prompt > 1 and i >= prompt:
        length = prompt
    start = 0 if config.window is None else max(0, length - config.window)
    return slice(start, length)


def hidden_states(tokens: Sequence[int], layers: int, model: Any) -> Tensor:
    """Return the bare model's states (tokens, d) after n layers, each from a pass over the text up to its token."""
    states = []
    for i in range(len(tokens)):
        prefix = torch.tensor([tokens[: i + 1]])
        output = model(input_ids=prefix, output_hidden_states=True, use_cache=False)
        states.append(output.hidden_states[layers][0, -1])
    return torch.stack(states)


def embed(tokens: Sequence[int], vectors: Sequence[Tensor], special: Sequence[int]) -> Tensor:
    """Return the mean (d,) of the vectors of tokens that are not special; zero if there are none."""
    chosen = [vector for token, vector in zip(tokens, vectors, strict=True) if token not in special]
    if not chosen:
        return torch.zeros_like(vectors[0])
    return _mean(chosen)


def centroids(examples: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Return the mean (d,) of the embeddings of the examples of each expert."""
    return [_mean(group) for group in examples]


def clusters(examples: Sequence[Tensor], count: int | str) -> list[Tensor]:
    """Return the centroids of one expert's examples: their mean, all of them, or those of Lloyd's k-means.

    K-means starts from the example nearest to the mean. Each further one is the farthest from those chosen before.
    """
    if count == "all":
        return list(examples)
    mean = _mean(examples)
    if count == 1:
        return [mean]
    chosen = [min(examples, key=lambda x: _distance(x, mean))]
    while len(chosen) < int(count):
        farthest = max(examples, key=lambda x: _distance_to_nearest(x, chosen))
        if _distance_to_nearest(farthest, chosen) < 1e-9:
            return chosen
        chosen.append(farthest)
    for _ in range(100):
        groups: list[list[Tensor]] = [[] for _ in chosen]
        for x in examples:
            distances = [_distance(x, centroid) for centroid in chosen]
            groups[distances.index(min(distances))].append(x)
        chosen = [_mean(group) for group in groups if group]
    return chosen


def whitening(examples: Sequence[Sequence[Tensor]]) -> Tensor:
    """Return C^(-1/2) (d, d) from the embeddings of the examples of each expert; `policy.py` defines C."""
    centred = []
    for group in examples:
        mean = _mean(group)
        centred += [x - mean for x in group]
    products = [torch.outer(x, x) for x in centred]
    identity = torch.eye(len(centred[0]), dtype=centred[0].dtype)
    s = torch.stack(products).mean(0)
    t = s.trace() / len(identity)
    b = sum(float((product - s).square().sum()) for product in products) / len(centred) ** 2
    c = float((s - t * identity).square().sum())
    a = min(1.0, max(MINIMUM_SHRINKAGE, b / c))
    covariance = (1 - a) * s + a * t * identity
    values, directions = torch.linalg.eigh(covariance)
    return directions @ torch.diag(values**-0.5) @ directions.T


def weights(
    vector: Tensor,
    centroids: Sequence[Sequence[Tensor]],
    config: TokenRoutingConfig,
    whitening_dd: Tensor | None = None,
) -> list[float]:
    """Return the weights of the experts, and that of the bare backbone at the end.

    Args:
        vector: embedding (d,) of the text.
        centroids: centroids (d,) of each expert.
        config: configuration of the routing.
        whitening_dd: C^(-1/2); None for no whitening.
    """
    scores = _scores(vector, centroids, config, whitening_dd)
    if not vector.any():
        scores = [0.0] * len(scores)
    best = scores.index(max(scores))
    if config.threshold is not None and scores[best] < config.threshold:
        return [0.0] * len(scores) + [1.0]
    if config.policy == "nearest":
        scores[best] *= config.boost if scores[best] > 0 else 1 / config.boost
    else:
        default = 0.03 if config.policy == "softmax" else 1.0
        scores = [score / (config.temperature or default) for score in scores]
    largest = max(scores)
    exponentials = [math.exp(score - largest) for score in scores]
    if config.top is not None:
        order = sorted(range(len(scores)), key=lambda e: -exponentials[e])  # equal ones by number
        for e in order[config.top :]:
            exponentials[e] = 0.0
    total = sum(exponentials)
    return [value / total for value in exponentials] + [0.0]


def _scores(
    vector: Tensor,
    centroids: Sequence[Sequence[Tensor]],
    config: TokenRoutingConfig,
    whitening_dd: Tensor | None,
) -> list[float]:
    """Return the score of the best centroid of each expert."""
    if config.policy == "discriminant":
        assert whitening_dd is not None
        inverse = whitening_dd @ whitening_dd  # of the covariance

        def score(c: Tensor) -> float:
            return float(c @ inverse @ vector - c @ inverse @ c / 2)

        return [max(score(c) for c in own) for own in centroids]

    centre = torch.zeros_like(vector)
    is_centred = config.embedder.name == "backbone" if config.embedder.centre is None else config.embedder.centre
    if is_centred:
        centre = _mean([_mean(own) for own in centroids])

    def transform(x: Tensor) -> Tensor:
        return x - centre if whitening_dd is None else whitening_dd @ (x - centre)

    return [max(_cosine(transform(vector), transform(c)) for c in own) for own in centroids]


def update(x: Tensor, expert_weights: Sequence[float], experts: Sequence[Factors]) -> Tensor:
    """Return the update (o,) of the experts for one token with input x: the sum of w_e s_e B_e A_e x."""
    parts = []
    for weight, expert in zip(expert_weights, experts, strict=True):
        parts.append(weight * expert.scale * (expert.b.T @ (expert.a @ x)))
    return _sum(parts)


def merged_update(x: Tensor, expert_weights: Sequence[float], experts: Sequence[Factors]) -> Tensor:
    """Return the update (o,) of one expert merged of all: (the sum of w_e s_e B_e A_e) x, the weights mixed first."""
    parts = []
    for weight, expert in zip(expert_weights, experts, strict=True):
        parts.append(weight * expert.scale * (expert.b.T @ expert.a))
    return _sum(parts) @ x


def linear_update(x: Tensor, expert_weights: Sequence[float], experts: Sequence[Factors]) -> Tensor:
    """Return the update (o,) of factors that are mixed first, as published: B A x.

    B is the sum of sqrt(w_e s_e) B_e, and A the sum of sqrt(w_e s_e) A_e.
    """
    a_parts = []
    b_parts = []
    for weight, expert in zip(expert_weights, experts, strict=True):
        root = math.sqrt(weight * expert.scale)
        a_parts.append(root * expert.a)
        b_parts.append(root * expert.b.T)
    return _sum(b_parts) @ (_sum(a_parts) @ x)


def cross_terms(x: Tensor, expert_weights: Sequence[float], experts: Sequence[Factors]) -> Tensor:
    """Return the sum (o,) of sqrt(w_i s_i w_j s_j) B_i A_j x over all pairs of different experts."""
    total = torch.zeros(experts[0].b.shape[1], dtype=x.dtype)
    for i, first in enumerate(experts):
        for j, second in enumerate(experts):
            if i != j:
                root = math.sqrt(expert_weights[i] * first.scale * expert_weights[j] * second.scale)
                total = total + root * (first.b.T @ (second.a @ x))
    return total


def _sum(vectors: Sequence[Tensor]) -> Tensor:
    total = vectors[0]
    for vector in vectors[1:]:
        total = total + vector
    return total


def _mean(vectors: Sequence[Tensor]) -> Tensor:
    return _sum(vectors) / len(vectors)


def _distance(first: Tensor, second: Tensor) -> float:
    return float((first - second).norm())


def _distance_to_nearest(x: Tensor, centroids: Sequence[Tensor]) -> float:
    return min(_distance(x, centroid) for centroid in centroids)


def _cosine(first: Tensor, second: Tensor) -> float:
    lengths = float(first.norm() * second.norm())
    if lengths == 0:
        return 0.0
    return float(first @ second) / lengths
