"""Training's window attention on a CPU: block by block, so that scores stay in its cache and are never kept.

    P = softmax(Q K^T + bias)       O = P V
    dP = dO V^T       dS = P * (dP - rowsum(P * dP))
    dQ = dS K       dK = dS^T Q       dV = P^T dO       dbias = sum of dS over blocks

A block of c queries sees its own c keys and the s - c before them. Fused kernels give no gradients for a bias, and all
scores at once are read and written from memory six times: that takes 1.4 to 2.5 times as long.

Shape suffixes: N rows times heads, G queries, S = s - c + G keys, c queries of a block, s keys of a block, K width of a
head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Blocks:
    """Which keys the blocks of queries see.

    Args:
        queries: c, of a block.
        keys: s, that a block sees.
        window: where keys of earlier windows are others, how many queries a window has: a whole number of blocks.
    """

    queries: int
    keys: int
    window: int | None

    def slices(self, total: int) -> Iterator[tuple[int, slice, slice, slice]]:
        """Of `total` queries, for each block: its number, its queries, its keys of earlier windows, and of its own."""
        reach = self.keys - self.queries
        for number, first in enumerate(range(0, total, self.queries)):
            own = first if self.window is None else first // self.window * self.window + reach
            last = first + self.keys
            yield number, slice(first, first + self.queries), slice(first, own), slice(own, last)


class BandedAttention(torch.autograd.Function):
    """Softmax(q k^T + bias) v of every block, with gradients for q, k, v and the bias."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, far_k: Tensor, far_v: Tensor, bias: Tensor, edge: Tensor, at: Blocks
    ) -> Tensor:
        """(N, G, K).

        Args:
            ctx: of autograd.
            q: (N, G, K), already over the root of K.
            k, v: (N, S, K).
            far_k, far_v: (N, S, K), those that queries of later windows see; (N, 0, K) where they see `k` and `v`.
            bias: (N, c, s), the same for all blocks.
            edge: (N or 1, E, s), added to the first E blocks: hides keys that are not there.
            at: what stands where.
        """
        out = torch.empty_like(q)
        for number, mine, before, own in at.slices(q.shape[1]):
            scores = _scores(q[:, mine], torch.cat([far_k[:, before], k[:, own]], 1), bias, edge, number)
            out[:, mine] = torch.bmm(scores.softmax(-1), torch.cat([far_v[:, before], v[:, own]], 1))
        ctx.save_for_backward(q, k, v, far_k, far_v, bias, edge)
        ctx.at = at
        return out

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of what `forward` takes; its probabilities are computed again."""
        q, k, v, far_k, far_v, bias, edge = ctx.saved_tensors
        d_q = torch.empty_like(q)
        d_k, d_v, d_far_k, d_far_v, d_bias = (torch.zeros_like(one) for one in (k, v, far_k, far_v, bias))
        for number, mine, before, own in ctx.at.slices(q.shape[1]):
            keys = torch.cat([far_k[:, before], k[:, own]], 1)
            values = torch.cat([far_v[:, before], v[:, own]], 1)
            p = _scores(q[:, mine], keys, bias, edge, number).softmax(-1)
            weighted = torch.bmm(d_out[:, mine], values.transpose(1, 2)).mul_(p)  # P * dP
            d_scores = torch.addcmul(weighted, p, weighted.sum(-1, keepdim=True), value=-1)
            d_bias += d_scores
            d_q[:, mine] = torch.bmm(d_scores, keys)
            earlier = before.stop - before.start
            for whole, far, part in (
                (d_k, d_far_k, torch.bmm(d_scores.transpose(1, 2), q[:, mine])),
                (d_v, d_far_v, torch.bmm(p.transpose(1, 2), d_out[:, mine])),
            ):
                far[:, before] += part[:, :earlier]
                whole[:, own] += part[:, earlier:]
        return d_q, d_k, d_v, d_far_k, d_far_v, d_bias, None, None


def _scores(q: Tensor, k: Tensor, bias: Tensor, edge: Tensor, number: int) -> Tensor:
    """(N, c, s) of one block."""
    scores = torch.baddbmm(bias, q, k.transpose(1, 2))
    return scores.add_(edge[:, number, None]) if number < edge.shape[1] else scores
