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
PIECE = 32  # queries, at least, that attend together on a CPU to keys of which each sees one more than the one before


class Norm(nn.RMSNorm):
    """Divides by the root of the mean square, in the dtype of its weights.

    Torch has no kernel of it for a CPU and reads its input five times; here that is three times.
    """

    def __init__(self, width: int, config: BlockStateConfig) -> None:
        super().__init__(width, eps=config.rms_norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        """(..., width)."""
        x = x.to(self.weight.dtype)
        if x.device.type != "cpu":
            return super().forward(x)
        dtype = torch.promote_types(x.dtype, torch.float32)
        square = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=dtype).square() / x.shape[-1]
        found = (x * torch.rsqrt(square + self.eps)).to(x.dtype)
        return found * self.weight if torch.is_grad_enabled() else found.mul_(self.weight)


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

    def extend(self, new_BGE: Tensor, now: Pass, memory: LayerMemory | None, detach: bool) -> tuple[Tensor, Tensor]:
        """(B, span, ...) what stands before the grid, and (B, G, ...) the grid, with the cache's tokens in both."""
        old = None if memory is None else memory.tensors.get(self.name)
        ends = tuple(phase + count for phase, count in zip(now.phases, now.new, strict=True))
        before, grid = new_BGE.new_zeros(new_BGE.shape[0], self.span, *new_BGE.shape[2:]), new_BGE
        if old is not None:
            everything = put(torch.cat([before, grid], dim=1), now.phases, old.to(new_BGE.dtype))
            before, grid = everything[:, : self.span], everything[:, self.span :]
            kept = take(everything, ends, self.span)
        else:
            kept = take(grid, tuple(end - self.span for end in ends), self.span)
        if memory is not None:
            memory.keep(self.name, kept, detach=detach)
        return before, grid

    def step(self, new_B1E: Tensor, memory: LayerMemory, detach: bool) -> Tensor:
        """(B, span, ...): the last tokens, the new one among them."""
        everything = torch.cat([memory.tensors[self.name][:, 1:], new_B1E], dim=1)
        memory.keep(self.name, everything, detach=detach)
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


def attend_so_far(q: Tensor, k: Tensor, v: Tensor) -> Pieces:
    """(B, I, w, d): attention of each of a window's queries (B, I, H, w, K) to the keys up to its own place.

    On a CPU in at most four pieces, each of which reads no more keys than its last query sees: 5/8 of all scores.
    """
    count = q.shape[-2]
    piece = max(PIECE, -(-count // 4)) if q.device.type == "cpu" else count
    place = torch.arange(count, device=q.device)
    bias = torch.where(place <= place[:, None], 0.0, NEVER)
    out = []
    for start in range(0, count, piece):
        some, seen = slice(start, start + piece), slice(min(count, start + piece))
        out.append(merge(attend(q[..., some, :], k[..., seen, :], v[..., seen, :], bias[some, seen])))
    return Pieces(out, dim=2)


@dataclass(frozen=True)
class Pieces:
    """(B, I, w, d) in parts that stand side by side along `dim`: not joined before it is known where they belong."""

    parts: list[Tensor]
    dim: int = 1

    def joined(self) -> Tensor:
        """(B, G, d)."""
        return (self.parts[0] if len(self.parts) == 1 else torch.cat(self.parts, dim=self.dim)).flatten(1, 2)

    def write(self, out_BGd: Tensor) -> None:
        """Copy all parts to their places."""
        width = sum(part.shape[2] for part in self.parts) if self.dim == 2 else self.parts[0].shape[2]
        sizes = [part.shape[self.dim] for part in self.parts]
        for place, part in zip(windowed(out_BGd, width).split(sizes, dim=self.dim), self.parts, strict=True):
            place.copy_(part)


def beside(*each: Pieces) -> Tensor:
    """(B, G, n d): n outputs beside each other, copied once where nothing has gradients."""
    if torch.is_grad_enabled() or len(each) == 1:
        found = [one.joined() for one in each]
        return found[0] if len(found) == 1 else torch.cat(found, dim=-1)
    first = each[0].parts[0]
    slots = sum(part.shape[1] * part.shape[2] for part in each[0].parts)
    out = first.new_empty(first.shape[0], slots, len(each) * first.shape[-1])
    for one, place in zip(each, out.chunk(len(each), dim=-1), strict=True):
        one.write(place)
    return out


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

    def forward(self, x_BTd: Tensor, now: Pass, memory: LayerMemory | None) -> tuple[Pieces, Tensor]:
        """(B, blocks, c, d); and keys with values of all slots of the grid (B, G, 2d), those before the pass too."""
        q, kv = now.onto_grid(self.q(x_BTd)), now.onto_grid(self.kv(x_BTd))
        if now.step and memory is not None:
            every = self.remembered.step(kv, memory, self.training)
            return self._step(q, every, now), every[:, -now.window :]
        before, grid = self.remembered.extend(kv, now, memory, self.training)
        far = self._frozen(x_BTd, grid, now) if self.frozen_past and torch.is_grad_enabled() else grid
        return self._windows(q, before, grid, far, now), grid

    def _frozen(self, x_BTd: Tensor, grid: Tensor, now: Pass) -> Tensor:
        """(B, G, 2d): keys and values once more, of hidden states without gradients."""
        again = now.onto_grid(functional.linear(x_BTd.detach(), self.kv.weight))
        if any(now.phases):  # the first window has earlier tokens too
            again = torch.where(now.holds[..., None], again, grid)
        return again

    def _step(self, q_B1d: Tensor, every: Tensor, now: Pass) -> Pieces:
        back = torch.arange(self.span - 1, -1, -1, device=q_B1d.device)
        there = back <= now.row_numbers(now.past)[:, None]  # (B, span)
        bias = self.bias(back)[None, :, None] + torch.where(there, 0.0, NEVER)[:, None, None]
        return Pieces([self._attend(q_B1d, every, bias)[:, None]])

    def _windows(self, q_BGd: Tensor, before: Tensor, grid: Tensor, far: Tensor, now: Pass) -> Pieces:
        """(B, blocks, c, d) for keys and values before the grid and on it; those of `far` are seen by later windows."""
        banded = self._learns_bias_on_cpu(now)
        size = min(now.window, now.slots) if far is not grid and not banded else _block(now)
        after = min(now.window, now.slots) if self.bidirectional else 0
        shared, edge = self._biases(now, size, after)
        if banded:
            every = torch.cat([before, grid], dim=1)
            far = every if far is grid else torch.cat([before, far], dim=1)
            return Pieces([self._banded(q_BGd, every, far, shared, edge)[:, None]])
        q = windowed(q_BGd, size)  # (B, blocks, c, d)
        first = edge.shape[1]
        kv, others = self._seen(before, grid, far, size, first, after)
        out = [self._attend(q[:, :first], kv, shared + edge[:, :, None, None])]
        if others is not None:
            out.append(self._attend(q[:, first:], others, shared))
        return Pieces(out)

    def _seen(
        self, before: Tensor, grid: Tensor, far: Tensor, size: int, first: int, after: int
    ) -> tuple[Tensor, Tensor | None]:
        """(B, blocks, keys, 2d): what the first blocks see; and the others, if any, whose keys are all on the grid."""
        if far is not grid:
            near, past = (spans(torch.cat([before, one], dim=1), size, self.span) for one in (grid, far))
            kv = torch.cat([past[:, :, : self.span], near[:, :, self.span :]], dim=2)
            return kv[:, :first], kv[:, first:] if kv.shape[1] > first else None
        begin = torch.cat([before, grid[:, : first * size]], dim=1)
        others = spans(grid, size, self.span) if grid.shape[1] > first * size else None
        return spans(functional.pad(begin, (0, 0, 0, after)), size, self.span, after), others

    def _attend(self, q: Tensor, kv: Tensor, bias: Tensor) -> Tensor:
        """(..., c, d) of queries (..., c, d) to keys and values (..., keys, 2d)."""
        k, v = kv.chunk(2, dim=-1)
        return merge(attend(heads(q, self.count), heads(k, self.count), heads(v, self.count), bias))

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
