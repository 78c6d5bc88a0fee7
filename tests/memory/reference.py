"""Memory as the README writes it: one row, one token, one head at a time.

Shape suffixes: T tokens, D the backbone's width, K width of a head.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class StateWeights(NamedTuple):
    """One layer, as matrices that multiply from the right; `mix` (C, 2 heads K), rates (D, heads)."""

    w_qk: Tensor
    u_qk: Tensor
    w_v: Tensor
    w_o: Tensor
    mix: Tensor
    gain: Tensor
    rate_a: Tensor
    rate_b: Tensor
    rate_g: Tensor
    bias_a: Tensor
    bias_b: Tensor
    bias_g: Tensor


def update(x_TD: Tensor, y_TD: Tensor, e_TD: Tensor, weights: StateWeights, heads: int) -> Tensor:
    """(T, D) what is added to the layer's output y, for one document; x is its input, e has the tokens."""
    inner, values = weights.w_qk.shape[1] // 2, weights.w_v.shape[1]
    width, deep = inner // heads, values // heads
    x, e = ([row / rms(row) for row in rows] for rows in (x_TD, e_TD))
    added = []
    states = [x_TD.new_zeros(width, deep) for _ in range(heads)]
    for t in range(len(x)):
        reads = []
        for head in range(heads):
            keys, own = slice(head * width, (head + 1) * width), slice(head * deep, (head + 1) * deep)
            z = torch.zeros(2 * inner, dtype=x_TD.dtype)
            for j in range(min(t + 1, len(weights.mix))):
                z = z + weights.mix[j] * (e[t - j] @ weights.w_qk + x[t - j] @ weights.u_qk)
            q, k = z[:inner][keys], z[inner:][keys]
            q, k = (vector / torch.sqrt(vector @ vector + 0.01) for vector in (q, k))
            v = (e[t] @ weights.w_v)[own]
            a = 1 / (1 + torch.exp(x[t] @ weights.rate_a[:, head] + weights.bias_a[head]))
            b = 1 / (1 + torch.exp(-(x[t] @ weights.rate_b[:, head] + weights.bias_b[head])))
            g = 1 / (1 + torch.exp(-(x[t] @ weights.rate_g[:, head] + weights.bias_g[head])))
            state = a * states[head]
            states[head] = state + b * torch.outer(k, v - k @ state)
            reads.append(weights.gain[own] * g * (q @ states[head]))
        added.append(30 * rms(y_TD[t]) * (torch.cat(reads) @ weights.w_o))
    return torch.stack(added)


def rms(x_D: Tensor) -> Tensor:
    """The root mean square of a vector."""
    return torch.sqrt((x_D * x_D).mean() + 1e-6)


def visible(t: int, window: int, sinks: int) -> list[int]:
    """The tokens that token t of a document sees."""
    return [s for s in range(t + 1) if t - s < window or s < sinks]


def key_position(t: int, s: int, window: int, sinks: int, reach: int) -> int:
    """The position at which token t reads the key of token s."""
    if t - s < window or t < reach:
        return s
    return s + (reach - window - sinks) * math.ceil((t + 1 - reach) / (reach - window - sinks))
