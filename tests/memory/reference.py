"""Memory by its equations, slow and literal: a single row, token by token and head by head.

Shape suffixes: T tokens, D the backbone's width, K width of a head's keys, V of its values, C mixed tokens.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class StateWeights(NamedTuple):
    """The weights of one layer, as matrices that multiply from the right; `mix` (C, 2 heads K), rates (D, heads)."""

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
    """Compute the addend (T, D) of a layer's output y for one document; x is the layer's input, e has the tokens."""
    keys = weights.w_qk.shape[1] // 2
    values = weights.w_v.shape[1]
    key_width = keys // heads
    value_width = values // heads
    x = [row / rms(row) for row in x_TD]
    e = [row / rms(row) for row in e_TD]
    states = [x_TD.new_zeros(key_width, value_width) for _ in range(heads)]
    added = []
    for t in range(len(x)):
        z = mixed(x, e, t, weights)
        v = e[t] @ weights.w_v
        a = 1 / (1 + torch.exp(x[t] @ weights.rate_a + weights.bias_a))
        b = 1 / (1 + torch.exp(-(x[t] @ weights.rate_b + weights.bias_b)))
        g = 1 / (1 + torch.exp(-(x[t] @ weights.rate_g + weights.bias_g)))
        reads = []
        for head in range(heads):
            of_keys = slice(head * key_width, (head + 1) * key_width)
            of_values = slice(head * value_width, (head + 1) * value_width)
            q = shortened(z[:keys][of_keys])
            k = shortened(z[keys:][of_keys])
            state = a[head] * states[head]
            states[head] = state + b[head] * torch.outer(k, v[of_values] - k @ state)
            reads.append(weights.gain[of_values] * g[head] * (q @ states[head]))
        added.append(30 * rms(y_TD[t]) * (torch.cat(reads) @ weights.w_o))
    return torch.stack(added)


def mixed(x: list[Tensor], e: list[Tensor], t: int, weights: StateWeights) -> Tensor:
    """(2 heads K): queries and keys of all heads, mixed from token t and the tokens before it."""
    z = torch.zeros(weights.w_qk.shape[1], dtype=x[0].dtype)
    for j in range(min(t + 1, len(weights.mix))):
        z = z + weights.mix[j] * (e[t - j] @ weights.w_qk + x[t - j] @ weights.u_qk)
    return z


def shortened(vector: Tensor) -> Tensor:
    """Divide a vector by about its length."""
    return vector / torch.sqrt(vector @ vector + 0.01)


def rms(x_D: Tensor) -> Tensor:
    """Return the root mean square of a vector."""
    return torch.sqrt((x_D * x_D).mean() + 1e-6)


def visible(t: int, window: int, sinks: int) -> list[int]:
    """Return the tokens that token t of a document sees."""
    return [s for s in range(t + 1) if t - s < window or s < sinks]


def key_position(t: int, s: int, window: int, sinks: int, reach: int) -> int:
    """Return the position at which token t reads the key of token s."""
    if t - s < window or t < reach:
        return s
    step = reach - window - sinks
    return s + step * math.ceil((t + 1 - reach) / step)
