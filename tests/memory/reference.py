"""Memory as the README writes it: one row, one token, one head at a time.

Shape suffixes: T tokens, D the backbone's width, K width of a head.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class StateWeights(NamedTuple):
    """One layer, as matrices that multiply from the right; `mix` (C, 3 heads K), `rate_a` and `rate_b` (D, heads)."""

    w_qkv: Tensor
    mix: Tensor
    w_o: Tensor
    rate_a: Tensor
    bias_a: Tensor
    rate_b: Tensor
    bias_b: Tensor
    gain: Tensor


def update(x_TD: Tensor, weights: StateWeights, heads: int) -> Tensor:
    """(T, D) what is added to the attention's output, for one document."""
    inner = weights.w_qkv.shape[1] // 3
    width = inner // heads
    outputs: list[list[Tensor]] = [[] for _ in x_TD]
    for head in range(heads):
        part = slice(head * width, (head + 1) * width)
        state = x_TD.new_zeros(width, width)
        for t, x_D in enumerate(x_TD):
            before = range(min(t + 1, len(weights.mix)))
            z = sum((weights.mix[j] * (x_TD[t - j] @ weights.w_qkv) for j in before), torch.zeros(3 * inner))
            q, k, v = (z[n * inner : (n + 1) * inner][part] for n in range(3))
            q, k = q / q.norm(), k / k.norm()
            a = 1 / (1 + torch.exp(x_D @ weights.rate_a[:, head] + weights.bias_a[head]))
            b = 1 / (1 + torch.exp(-(x_D @ weights.rate_b[:, head] + weights.bias_b[head])))
            state = a * state
            state = state + b * torch.outer(k, v - k @ state)
            read = q @ state
            outputs[t].append(read / torch.sqrt((read * read).mean() + 1e-6) * weights.gain)
    return torch.stack([torch.cat(reads) @ weights.w_o for reads in outputs])


def visible(t: int, window: int, sinks: int) -> list[int]:
    """The tokens that token t of a document sees."""
    return [s for s in range(t + 1) if t - s < window or s < sinks]


def key_position(t: int, s: int, window: int, sinks: int, reach: int) -> int:
    """The position at which token t reads the key of token s."""
    if t - s < window or t < reach:
        return s
    return s + (reach - window - sinks) * math.ceil((t + 1 - reach) / (reach - window - sinks))
