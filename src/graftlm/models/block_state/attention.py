"""Attention within windows: to the last W tokens, and to the context states of a token's window.

Shape suffixes: B rows, T columns of a pass, G slots of its grid, w slots of a window, c of a block within it, H heads,
K width of a head, d = H K.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from graftlm.models.block_state.banded import BandedAttention, Blocks
from graftlm.models.block_state.config import BlockStateConfig
from graftlm.models.block_state.memory import LayerMemory
from graftlm.models.block_state.passes import Pass, put, take

NEVER = -1e30  # finite, so that a row without any key has no NaN
BLOCK = 64  # queries of a block on a CPU: within a factor of 1.1 of the best at windows of 128 and of 512


class Norm(nn.RMSNorm):
    """Divides by the root of the mean square, in the dtype of its weights."""

    def __init__(self, width: int, config: BlockStateConfig) -> None:
        super().__init__(width, eps=config.rms_norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        """(..., width)."""
        return super().forward(x.to(self.weight.dtype))


class RelativeBias(nn.Module):
    """T5's bias on attention scores: one number for each head and bucket of distances.

    The first half of the buckets are exact distances, the rest grow with their logarithm; where tokens see both ways,
    each way has half of all.
    """

    def __init__(self, config: BlockStateConfig) -> None:
        super().__init__()
        self.bidirectional = config.bidirectional
        self.buckets, self.distance = config.relative_buckets, config.relative_distance
        self.table = nn.Embedding(self.buckets, config.num_attention_heads)

    def forward(self, back: Tensor) -> Tensor:
        """(H, *back.shape) for `back`, how many tokens a key stands before its query."""
        return self.table(self._bucket(back)).movedim(-1, 0)

    def _bucket(self, back: Tensor) -> Tensor:
        buckets, offset = self.buckets, 0
        if self.bidirectional:
            buckets //= 2
            offset = (back < 0) * buckets
        back = back.abs() if self.bidirectional else back.clamp(min=0)
        exact = buckets // 2
        ratio = torch.log(back.clamp(min=1) / exact) / math.log(self.distance / exact)
        far = (exact + ratio * (buckets - exact)).long().clamp(max=buckets - 1)
        return torch.where(back < exact, back, far) + offset


@dataclass(frozen=True)
class Remembered:
    """Something said of each token, kept for the last `span` tokens under a name, from pass to pass."""

    name: str
    span: int

    def extend(self, new_BGE: Tensor, now: Pass, memory: LayerMemory | None, detach: bool) -> Tensor:
        """(B, span + G, ...): behind `span` slots before the grid, and where earlier tokens stand, those of the cache.

        In a step (B, span, ...): the last tokens, the new one among them.
        """
        old = None if memory is None else memory.tensors.get(self.name)
        if now.step and old is not None:
            everything = torch.cat([old[:, 1:], new_BGE], dim=1)
            kept = everything
        else:
            blank = new_BGE.new_zeros(new_BGE.shape[0], self.span, *new_BGE.shape[2:])
            everything = torch.cat([blank, new_BGE], dim=1)
            if old is not None:
                everything = put(everything, now.phases, old.to(new_BGE.dtype))
            ends = tuple(phase + count for phase, count in zip(now.phases, now.new, strict=True))
            kept = None if memory is None else take(everything, ends, self.span)
        if memory is not None and kept is not None:
            memory.keep(self.name, kept, detach=detach)
        return everything


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
    """Softmax(q k^T / sqrt(K) + bias) v: (..., H, queries, K) of (..., H, queries, K) and (..., H, keys, K).

    `bias` has the leading dimensions or none of them. Fused kernels give no gradients for it: where it needs some, the
    product is written out.
    """
    if bias is not None and bias.requires_grad:
        scores = (q / math.sqrt(q.shape[-1])) @ k.transpose(-1, -2) + bias.to(q.dtype)
        return scores.softmax(-1) @ v
    lead = q.shape[:-3]
    if bias is not None:
        bias = bias.to(q.dtype)
        whole = bias.dim() > 3
        bias = bias.expand(*lead, *bias.shape[-3:]).flatten(0, -4) if whole else bias[(None,) * (4 - bias.dim())]
    flat = (one.flatten(0, -4) for one in (q, k, v))  # fused kernels know one batch dimension
    return functional.scaled_dot_product_attention(*flat, attn_mask=bias).unflatten(0, lead)


def heads(x: Tensor, count: int) -> Tensor:
    """(..., slots, d) to (..., H, slots, K)."""
    return x.unflatten(-1, (count, -1)).transpose(-2, -3)


def merge(x: Tensor) -> Tensor:
    """(..., H, slots, K) to (..., slots, d)."""
    return x.transpose(-2, -3).flatten(-2)


def windowed(x_BG: Tensor, width: int) -> Tensor:
    """(B, G, ...) to (B, windows, w, ...)."""
    return x_BG.unflatten(1, (-1, width))


def spans(x_BS: Tensor, width: int, before: int, after: int = 0) -> Tensor:
    """(B, windows, before + w + after, ...): each window of (B, before + G + after, ...) with what stands around it."""
    found = x_BS.unfold(1, before + width + after, width)  # (B, windows, ..., size)
    return found.movedim(-1, 2)


class WindowAttention(nn.Module):
    """Self-attention of each token to the last `span` tokens, itself among them (Transformer-XL's windows).

    Keys and values of earlier windows of the same pass have gradients, unless the config's mixer is `memory`.
    """

    def __init__(self, config: BlockStateConfig) -> None:
        super().__init__()
        self.count, self.window, self.span = config.num_attention_heads, config.window, config.span
        self.bidirectional = config.bidirectional
        self.frozen_past = config.mixer == "memory"
        self.q = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.kv = nn.Linear(config.hidden_size, 2 * config.hidden_size, bias=False)
        self.remembered = Remembered("tokens", config.span)
        self.bias = RelativeBias(config)

    def forward(self, x_BTd: Tensor, now: Pass, memory: LayerMemory | None) -> tuple[Tensor, Tensor]:
        """(B, G, d), and keys with values of every slot of the grid (B, G, 2d), also of those before the pass."""
        q = now.onto_grid(self.q(x_BTd))
        every = self.remembered.extend(now.onto_grid(self.kv(x_BTd)), now, memory, self.training)
        if now.step:
            return self._step(q, every, now), every[:, -now.window :]
        far = self._frozen(x_BTd, every, now) if self.frozen_past and torch.is_grad_enabled() else every
        return self._windows(q, every, far, now), every[:, self.span :]

    def _frozen(self, x_BTd: Tensor, every: Tensor, now: Pass) -> Tensor:
        """Keys and values of earlier windows once more, of hidden states without gradients."""
        again = now.onto_grid(functional.linear(x_BTd.detach(), self.kv.weight))
        if any(now.phases):  # the first window has earlier tokens too
            again = torch.where(now.holds[..., None], again, every[:, self.span :])
        return torch.cat([every[:, : self.span], again], dim=1)

    def _step(self, q_B1d: Tensor, every: Tensor, now: Pass) -> Tensor:
        back = torch.arange(self.span - 1, -1, -1, device=q_B1d.device)
        there = back <= now.row_numbers(now.past)[:, None]  # (B, span)
        bias = self.bias(back)[None, :, None] + torch.where(there, 0.0, NEVER)[:, None, None]
        k, v = every.chunk(2, dim=-1)
        return merge(attend(heads(q_B1d, self.count), heads(k, self.count), heads(v, self.count), bias))

    def _windows(self, q_BGd: Tensor, every: Tensor, far: Tensor, now: Pass) -> Tensor:
        width = min(now.window, now.slots)
        banded = self._learns_bias_on_cpu(now)
        size = width if far is not every and not banded else _block(now)
        after = width if self.bidirectional else 0
        shared, edge = self._biases(now, size, after)
        if banded:
            return self._banded(q_BGd, every, far, shared, edge)
        if after:
            every = functional.pad(every, (0, 0, 0, after))
        kv = spans(every, size, self.span, after)
        if far is not every:
            kv = torch.cat([spans(far, size, self.span)[:, :, : self.span], kv[:, :, self.span :]], dim=2)
        q = heads(windowed(q_BGd, size), self.count)  # (B, blocks, H, c, K)
        k, v = (heads(one, self.count) for one in kv.chunk(2, dim=-1))
        first = edge.shape[1]
        out = [attend(q[:, :first], k[:, :first], v[:, :first], shared + edge[:, :, None, None])]
        if q.shape[1] > first:
            out.append(attend(q[:, first:], k[:, first:], v[:, first:], shared))
        return merge(torch.cat(out, dim=1)).flatten(1, 2)

    def _learns_bias_on_cpu(self, now: Pass) -> bool:
        learns = self.bias.table.weight.requires_grad and torch.is_grad_enabled()
        return learns and not self.bidirectional and now.device.type == "cpu" and not torch.compiler.is_compiling()

    def _banded(self, q_BGd: Tensor, every: Tensor, far: Tensor, shared: Tensor, edge: Tensor) -> Tensor:
        rows = q_BGd.shape[0]
        at = Blocks(shared.shape[1], shared.shape[2], self.window if far is not every else None)
        q = heads(q_BGd / math.sqrt(q_BGd.shape[-1] / self.count), self.count)
        k, v, far_k, far_v = (heads(one, self.count) for both in (every, far) for one in both.chunk(2, dim=-1))
        if far is every:
            far_k, far_v = k[:, :, :0], v[:, :, :0]
        bias = shared.to(q.dtype).expand(rows, -1, -1, -1)
        if len(edge) > 1:
            edge = edge.repeat_interleave(self.count, dim=0)
        flat = [one.flatten(0, 1) for one in (q, k, v, far_k, far_v, bias)]
        out: Tensor = BandedAttention.apply(*flat, edge.to(q.dtype), at)
        return merge(out.unflatten(0, (rows, self.count)))

    def _biases(self, now: Pass, size: int, after: int) -> tuple[Tensor, Tensor]:
        """Of all blocks (H, c, keys); and what the first add to it, as keys may be missing (B or 1, blocks, keys)."""
        device = now.device
        query = torch.arange(size, device=device)[:, None]
        key = torch.arange(-self.span, size + after, device=device)
        back = query - key
        seen = (back < self.span) & ((back > -self.span) if after else (back >= 0))
        shared = self.bias(back) + torch.where(seen, 0.0, NEVER)
        blocks = now.slots // size
        count = blocks if after else min(blocks, -(-self.span // size))
        starts = torch.arange(count, device=device) * size
        begin = [n - phase for n, phase in zip(now.past, now.phases, strict=True)]
        ends = [phase + new for phase, new in zip(now.phases, now.new, strict=True)]
        slot = starts[:, None] + key  # (blocks, keys), slots of the grid
        there = (slot + now.row_numbers(begin)[:, None, None]) >= 0
        if after:
            there = there & (slot < now.row_numbers(ends)[:, None, None])
        if len(set(begin)) == 1 and (not after or len(set(ends)) == 1):
            there = there[:1]
        return shared, torch.where(there, 0.0, NEVER)


def _block(now: Pass) -> int:
    """How many queries attend together: the fewer, the fewer keys that none of them sees, and the more overlap."""
    if now.slots < now.window or now.device.type != "cpu":
        return min(now.window, now.slots)
    part = max(size for size in range(1, BLOCK + 1) if now.window % size == 0)
    return part if 4 * part >= BLOCK else now.window
