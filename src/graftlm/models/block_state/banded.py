"""Window attention with a trained bias on a CPU, with a backward pass that recomputes the scores.

Shape suffixes: N = B H rows and heads, G slots of the grid, c queries of a block, s keys of a block, S = s - c + G keys
of the grid, K width of a head.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor


class BandedAttention(torch.autograd.Function):
    """Window attention computed block by block, without storing the scores, which fit the CPU's cache.

        P = softmax(Q K^T + bias)       O = P V
        dP = dO V^T       dS = P * (dP - rowsum(P * dP))
        dQ = dS K       dK = dS^T Q       dV = P^T dO       dbias = sum of dS over blocks

    Fused kernels compute no gradients for a bias. Computing all scores at once takes 1.4 to 2.5 times as long, since
    they are read from and written to memory six times.
    """

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(
        ctx: Any,
        q: Tensor,
        near: Tensor,
        far: Tensor,
        bias: Tensor,
        edge: Tensor,
        window: int,
    ) -> Tensor:
        """Compute the outputs (N, G, K).

        Args:
            ctx: autograd's context.
            q: queries (N, G, K), already divided by the square root of K.
            near: keys and values (2, N, S, K).
            far: keys and values (2, N, S, K) that later windows see; (2, N, 0, K) if they see `near`.
            bias: addend of the scores (N, c, s), the same for all blocks.
            edge: further addend (N or 1, E, s) of the first E blocks, which masks missing keys.
            window: queries in a window, a whole number of blocks; 0 if `far` is empty.
        """
        out = torch.empty_like(q)
        for block in _blocks(q.shape[1], bias, window):
            keys, values = _visible_keys_and_values(near, far, block)
            scores = _scores(q[:, block.queries], keys, bias, edge, block.number)
            out[:, block.queries] = torch.bmm(scores.softmax(-1), values)
        ctx.save_for_backward(q, near, far, bias, edge)
        ctx.window = window
        return out

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients of the inputs of `forward` from recomputed probabilities.

        Args:
            ctx: autograd's context.
            d_out: gradient of the outputs (N, G, K).

        Returns:
            The gradients of q, near, far and bias; None for edge and window.
        """
        q, near, far, bias, edge = ctx.saved_tensors
        d_q = torch.empty_like(q)
        d_near = torch.zeros_like(near)
        d_far = torch.zeros_like(far)
        d_bias = torch.zeros_like(bias)
        for block in _blocks(q.shape[1], bias, ctx.window):
            queries = q[:, block.queries]
            d_block = d_out[:, block.queries]
            keys, values = _visible_keys_and_values(near, far, block)
            p = _scores(queries, keys, bias, edge, block.number).softmax(-1)
            weighted = torch.bmm(d_block, values.transpose(1, 2)).mul_(p)  # P * dP
            d_scores = torch.addcmul(weighted, p, weighted.sum(-1, keepdim=True), value=-1)
            d_bias += d_scores
            d_q[:, block.queries] = torch.bmm(d_scores, keys)
            d_keys = torch.bmm(d_scores.transpose(1, 2), queries)
            d_values = torch.bmm(p.transpose(1, 2), d_block)
            _accumulate(d_near[0], d_far[0], d_keys, block)
            _accumulate(d_near[1], d_far[1], d_values, block)
        return d_q, d_near, d_far, d_bias, None, None


class _Block(NamedTuple):
    """A block of queries.

    Attributes:
        number: index of the block.
        queries: its queries.
        earlier: its keys of earlier windows, which are read from `far`.
        own: its other keys, which are read from `near`.
    """

    number: int
    queries: slice
    earlier: slice
    own: slice


def _blocks(total: int, bias: Tensor, window: int) -> Iterator[_Block]:
    """Yield the blocks of `total` queries; the shape of the bias (N, c, s) gives the sizes of a block."""
    block_queries, block_keys = bias.shape[1:]
    for number, first in enumerate(range(0, total, block_queries)):
        own_start = first
        if window:
            window_start = first // window * window
            columns_before = block_keys - block_queries  # those of the bias before the block's own queries
            own_start = window_start + columns_before
        yield _Block(
            number=number,
            queries=slice(first, first + block_queries),
            earlier=slice(first, own_start),
            own=slice(own_start, first + block_keys),
        )


def _visible_keys_and_values(near: Tensor, far: Tensor, block: _Block) -> tuple[Tensor, Tensor]:
    """Return the keys (N, s, K) and values (N, s, K) that a block sees."""
    keys, values = torch.cat([far[:, :, block.earlier], near[:, :, block.own]], dim=2)
    return keys, values


def _scores(
    q: Tensor,
    k: Tensor,
    bias: Tensor,
    edge: Tensor,
    number: int,
) -> Tensor:
    """Compute the scores (N, c, s) of one block."""
    scores = torch.baddbmm(bias, q, k.transpose(1, 2))
    if number < edge.shape[1]:
        scores.add_(edge[:, number, None])
    return scores


def _accumulate(
    d_near: Tensor,
    d_far: Tensor,
    gradient: Tensor,
    block: _Block,
) -> None:
    """Add a block's gradient (N, s, K) to the gradients of the keys or values that it saw."""
    earlier = block.earlier.stop - block.earlier.start
    d_far[:, block.earlier] += gradient[:, :earlier]
    d_near[:, block.own] += gradient[:, earlier:]
