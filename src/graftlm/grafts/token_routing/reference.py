"""Token-level routing, slow and literal: one token after the other, as the README says it. For tests alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from graftlm.grafts.token_routing.config import TokenRoutingConfig
from graftlm.grafts.token_routing.experts import Factors
from graftlm.grafts.token_routing.whitening import LEAST_SHRINKAGE


def columns_of_route(i: int, given: int, config: TokenRoutingConfig) -> slice:
    """Which tokens the route of token i reads, of a document whose first `given` tokens are the prompt.

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
    return slice(start, read)


def hidden_states(tokens: Sequence[int], layers: int, model: Any) -> Tensor:
    """(tokens, d) the bare model's state of each token after so many layers, of a pass over the text up to it alone."""
    found = []
    for i in range(len(tokens)):
        output = model(input_ids=torch.tensor([tokens[: i + 1]]), output_hidden_states=True, use_cache=False)
        found.append(output.hidden_states[layers][0, -1])
    return torch.stack(found)


def embed(tokens: Sequence[int], vectors: Sequence[Tensor], special: Sequence[int]) -> Tensor:
    """(d,) the mean of the vectors of tokens that are not special; zero for none."""
    chosen = [vector for token, vector in zip(tokens, vectors, strict=True) if token not in special]
    return sum(chosen[1:], chosen[0]) / len(chosen) if chosen else torch.zeros_like(vectors[0])


def whitening(examples: Sequence[Tensor]) -> Tensor:
    """(d, d) C^(-1/2), from the examples (n, d) of each expert; C as in `whitening.py`."""
    apart = [one - group.mean(0) for group in examples for one in group]
    identity = torch.eye(len(apart[0]), dtype=apart[0].dtype)
    s = torch.stack([torch.outer(x, x) for x in apart]).mean(0)
    t = s.trace() / len(identity)
    b = sum(float((torch.outer(x, x) - s).square().sum()) for x in apart) / len(apart) ** 2
    c = float((s - t * identity).square().sum())
    a = min(1.0, max(LEAST_SHRINKAGE, b / c))
    values, directions = torch.linalg.eigh((1 - a) * s + a * t * identity)
    return directions @ torch.diag(values**-0.5) @ directions.T


def weights(
    vector: Tensor, centroids_Ed: Tensor, config: TokenRoutingConfig, root_dd: Tensor | None = None
) -> list[float]:
    """The experts' weights, and the bare backbone's; `root_dd` is what whitens."""
    centre = sum(centroids_Ed) / len(centroids_Ed) if config.embedder.centres else 0 * centroids_Ed[0]
    vector, centroids, empty = vector - centre, [one - centre for one in centroids_Ed], not vector.any()
    if root_dd is not None:
        vector, centroids = root_dd @ vector, [root_dd @ one for one in centroids]
    scores = [0.0 if empty else _cosine(vector, one) for one in centroids]
    best = max(range(len(scores)), key=lambda e: scores[e])
    if config.threshold is not None and scores[best] < config.threshold:
        return [0.0] * len(scores) + [1.0]
    if config.policy == "softmax":
        scores = [score / config.temperature for score in scores]
    else:
        scores[best] *= config.boost if scores[best] > 0 else 1 / config.boost
    exponentials = [math.exp(score - max(scores)) for score in scores]
    if config.top is not None:
        kept = sorted(range(len(scores)), key=lambda e: -exponentials[e])[: config.top]  # of equal ones the first
        exponentials = [one if e in kept else 0.0 for e, one in enumerate(exponentials)]
    return [one / sum(exponentials) for one in exponentials] + [0.0]


def update(x: Tensor, expert_weights: Sequence[float], experts: Sequence[Factors]) -> Tensor:
    """(o,) what the experts add for one token with the input x: sum of w_e s_e B_e A_e x."""
    parts = [w * one.scale * (one.b.T @ (one.a @ x)) for w, one in zip(expert_weights, experts, strict=True)]
    return sum(parts[1:], parts[0])


def _cosine(first: Tensor, second: Tensor) -> float:
    lengths = float(first.norm() * second.norm())
    return float(first @ second) / lengths if lengths else 0.0
