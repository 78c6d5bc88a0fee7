"""Token-level routing, slow and literal: one token at a time, as the README defines it. Only tests import it.

Nothing here calls the fast path: centroids, whitening, routes and updates are computed from token ids, token vectors
and factors.
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
    """The tokens that the route of token i depends on, in a document whose first `prompt` tokens are the prompt.

    A generation computes weights for the prompt, and again after every k generated tokens.
    """
    prompt = 1 if config.prompt == "causal" else prompt
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
    """(tokens, d) the bare model's state of each token after n layers, each from a pass over the text up to it only."""
    states = []
    for i in range(len(tokens)):
        output = model(input_ids=torch.tensor([tokens[: i + 1]]), output_hidden_states=True, use_cache=False)
        states.append(output.hidden_states[layers][0, -1])
    return torch.stack(states)


def embed(tokens: Sequence[int], vectors: Sequence[Tensor], special: Sequence[int]) -> Tensor:
    """(d,) the mean of the vectors of tokens that are not special; zero for none."""
    chosen = [vector for token, vector in zip(tokens, vectors, strict=True) if token not in special]
    return sum(chosen[1:], chosen[0]) / len(chosen) if chosen else torch.zeros_like(vectors[0])


def centroids(examples: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Per expert: (d,) the mean of the embeddings of its examples."""
    return [sum(group[1:], group[0]) / len(group) for group in examples]


def clusters(examples: Sequence[Tensor], count: int | str) -> list[Tensor]:
    """The centroids of one expert's examples: their mean, all of them, or Lloyd's k-means.

    K-means starts from the example nearest to the mean, then each time from the one farthest from those chosen.
    """
    if count == "all":
        return list(examples)
    mean = sum(examples[1:], examples[0]) / len(examples)
    chosen = [min(examples, key=lambda x: float((x - mean).norm()))] if count != 1 else [mean]
    while len(chosen) < int(count):
        far = max(examples, key=lambda x: min(float((x - c).norm()) for c in chosen))
        if min(float((far - c).norm()) for c in chosen) < 1e-9:
            return chosen
        chosen.append(far)
    for _ in range(100 if count != 1 else 0):
        groups: list[list[Tensor]] = [[] for _ in chosen]
        for x in examples:
            groups[min(range(len(chosen)), key=lambda k: float((x - chosen[k]).norm()))].append(x)
        chosen = [sum(group[1:], group[0]) / len(group) for group in groups if group]
    return chosen


def whitening(examples: Sequence[Sequence[Tensor]]) -> Tensor:
    """(d, d) C^(-1/2), from the embeddings of each expert's examples; C as in `policy.py`."""
    means = centroids(examples)
    centred = [x - mean for group, mean in zip(examples, means, strict=True) for x in group]
    identity = torch.eye(len(centred[0]), dtype=centred[0].dtype)
    s = torch.stack([torch.outer(x, x) for x in centred]).mean(0)
    t = s.trace() / len(identity)
    b = sum(float((torch.outer(x, x) - s).square().sum()) for x in centred) / len(centred) ** 2
    c = float((s - t * identity).square().sum())
    a = min(1.0, max(MINIMUM_SHRINKAGE, b / c))
    values, directions = torch.linalg.eigh((1 - a) * s + a * t * identity)
    return directions @ torch.diag(values**-0.5) @ directions.T


def weights(
    vector: Tensor,
    centroids: Sequence[Sequence[Tensor]],
    config: TokenRoutingConfig,
    whitening_dd: Tensor | None = None,
) -> list[float]:
    """The experts' weights, then the bare backbone's; each expert has its own list of centroids."""
    is_empty = not vector.any()
    centred = config.embedder.centre is True or (config.embedder.centre is None and config.embedder.name == "backbone")
    if centred and config.policy != "discriminant":
        means = [sum(own[1:], own[0]) / len(own) for own in centroids]
        centre = sum(means[1:], means[0]) / len(means)
        vector, centroids = vector - centre, [[c - centre for c in own] for own in centroids]
    if config.policy == "discriminant":
        assert whitening_dd is not None
        inverse = whitening_dd @ whitening_dd  # of the covariance
        own_scores = [[float(c @ inverse @ vector - c @ inverse @ c / 2) for c in own] for own in centroids]
    else:
        if whitening_dd is not None:
            vector, centroids = whitening_dd @ vector, [[whitening_dd @ c for c in own] for own in centroids]
        own_scores = [[_cosine(vector, c) for c in own] for own in centroids]
    scores = [0.0 if is_empty else max(own) for own in own_scores]
    best = max(range(len(scores)), key=lambda e: scores[e])
    if config.threshold is not None and scores[best] < config.threshold:
        return [0.0] * len(scores) + [1.0]
    if config.policy != "nearest":
        default = 0.03 if config.policy == "softmax" else 1.0
        scores = [score / (config.temperature or default) for score in scores]
    else:
        scores[best] *= config.boost if scores[best] > 0 else 1 / config.boost
    exponentials = [math.exp(score - max(scores)) for score in scores]
    if config.top is not None:
        kept = sorted(range(len(scores)), key=lambda e: -exponentials[e])[: config.top]  # ties: the first
        exponentials = [value if e in kept else 0.0 for e, value in enumerate(exponentials)]
    return [value / sum(exponentials) for value in exponentials] + [0.0]


def update(x: Tensor, expert_weights: Sequence[float], experts: Sequence[Factors]) -> Tensor:
    """(o,) the experts' update for one token with input x: sum of w_e s_e B_e A_e x."""
    parts = [w * e.scale * (e.b.T @ (e.a @ x)) for w, e in zip(expert_weights, experts, strict=True)]
    return sum(parts[1:], parts[0])


def _cosine(first: Tensor, second: Tensor) -> float:
    lengths = float(first.norm() * second.norm())
    return float(first @ second) / lengths if lengths else 0.0
