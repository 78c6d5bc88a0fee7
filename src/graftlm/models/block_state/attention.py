"""Attention within windows: each token to the last W tokens, in parts and kernels that suit the device.

Shape suffixes: B rows, T columns of a pass, G slots of its grid, w slots of a window, c of a block within it, H heads,
K width of a head, d = H K. In `BandedAttention`: N = B H, S = s - c + G keys, c queries and s keys of a block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from graftlm.models.block_state.cache import LayerCache
from graftlm.models.block_state.config import BlockStateConfig
from graftlm.models.block_state.grid import WindowGrid, slice_rows, write_rows

MASKED = -1e30  # finite, so that a row without any key has no NaN
QUERY_BLOCK = 64  # queries of a block on a CPU: within a factor of 1.1 of the best at windows of 128 and of 512
CAUSAL_CHUNK = 32  # fewest queries of a chunk of causal attention on a CPU


class RMSNorm(nn.RMSNorm):
    """Root-mean-square norm, in the dtype of its weights.

    Torch has no CPU kernel for it and reads the input five times; this form reads it three times.
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
        normed = (x * torch.rsqrt(square + self.eps)).to(x.dtype)
        return normed * self.weight if torch.is_grad_enabled() else normed.mul_(self.weight)


class RelativePositionBias(nn.Module):
    """T5's bias on attention scores: one number for each head and bucket of distances.

    The first half of the buckets are exact distances; the rest grow logarithmically. In bidirectional attention, each
    direction has half of the buckets.
    """

    def __init__(self, config: BlockStateConfig) -> None:
        super().__init__()
        self.bidirectional = config.bidirectional
        self.num_buckets, self.max_distance = config.relative_buckets, config.relative_distance
        self.table = nn.Embedding(self.num_buckets, config.num_attention_heads)

    def forward(self, distance: Tensor) -> Tensor:
        """(H, *distance.shape), where `distance` is the query's position minus the key's."""
        return self.table(self._bucket(distance)).movedim(-1, 0)

    def _bucket(self, distance: Tensor) -> Tensor:
        buckets, offset = self.num_buckets, 0
        if self.bidirectional:
            buckets //= 2
            offset, distance = (distance < 0) * buckets, distance.abs()
        distance = distance.clamp(min=0)
        exact = buckets // 2
        ratio = torch.log(distance.clamp(min=1) / exact) / math.log(self.max_distance / exact)
        far = (exact + ratio * (buckets - exact)).long().clamp(max=buckets - 1)
        return torch.where(distance < exact, distance, far) + offset


@dataclass(frozen=True)
class SlidingBuffer:
    """The last `span` entries of a tensor with one entry a token, kept in the cache under `name`."""

    name: str
    span: int

    def extend(self, new_BGE: Tensor, grid: WindowGrid, cache: LayerCache | None) -> tuple[Tensor, Tensor]:
        """The `span` entries before the grid (B, span, ...) and those on it (B, G, ...), both with cached entries."""
        past = new_BGE.new_zeros(new_BGE.shape[0], self.span, *new_BGE.shape[2:])
        if cache is None:
            return past, new_BGE
        entries = torch.cat([past, new_BGE], dim=1)
        if self.name in cache.tensors:
            entries = write_rows(entries, grid.offsets, cache.tensors[self.name].to(new_BGE.dtype))
        cache.store(self.name, slice_rows(entries, grid.ends, self.span))
        return entries[:, : self.span], entries[:, self.span :]

    def append(self, new_B1E: Tensor, cache: LayerCache) -> Tensor:
        """The last entries (B, span, ...), including the new one."""
        entries = torch.cat([cache.tensors[self.name][:, 1:], new_B1E], dim=1)
        cache.store(self.name, entries)
        return entries


@dataclass(frozen=True)
class ChunkedTensor:
    """(B, I, w, d) in chunks along `dim`, which are copied only once: to where they are needed."""

    chunks: list[Tensor]
    dim: int = 1

    def concatenate(self) -> Tensor:
        """(B, G, d)."""
        return (self.chunks[0] if len(self.chunks) == 1 else torch.cat(self.chunks, dim=self.dim)).flatten(1, 2)

    def copy_into(self, out_BGd: Tensor) -> None:
        """Copy all chunks into `out`."""
        width = sum(chunk.shape[2] for chunk in self.chunks) if self.dim == 2 else self.chunks[0].shape[2]
        sizes = [chunk.shape[self.dim] for chunk in self.chunks]
        for target, chunk in zip(split_windows(out_BGd, width).split(sizes, dim=self.dim), self.chunks, strict=True):
            target.copy_(chunk)


def concat_features(*tensors: ChunkedTensor) -> Tensor:
    """(B, G, n d): n chunked tensors concatenated along features, with one copy if there are no gradients."""
    if torch.is_grad_enabled() or len(tensors) == 1:
        joined = [tensor.concatenate() for tensor in tensors]
        return joined[0] if len(joined) == 1 else torch.cat(joined, dim=-1)
    first = tensors[0].chunks[0]
    slots = sum(chunk.shape[1] * chunk.shape[2] for chunk in tensors[0].chunks)
    out = first.new_empty(first.shape[0], slots, len(tensors) * first.shape[-1])
    for tensor, target in zip(tensors, out.chunk(len(tensors), dim=-1), strict=True):
        tensor.copy_into(target)
    return out


def scaled_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
    """softmax(q k^T / sqrt(K) + bias) v: (..., H, queries, K) of (..., H, queries, K) and (..., H, keys, K).

    `bias` has all leading dimensions or none. Fused kernels give no gradients for it, so the product is written out if
    it needs gradients.
    """
    if bias is not None and bias.requires_grad:
        scores = (q / math.sqrt(q.shape[-1])) @ k.transpose(-1, -2) + bias.to(q.dtype)
        return scores.softmax(-1) @ v
    lead = q.shape[:-3]
    if bias is not None and bias.dim() > 3:
        bias = bias.expand(*lead, *bias.shape[-3:]).flatten(0, -4)
    bias = None if bias is None else bias.to(q.dtype)[(None,) * (4 - bias.dim())]
    flat = (tensor.flatten(0, -4) for tensor in (q, k, v))  # fused kernels have one batch dimension
    return functional.scaled_dot_product_attention(*flat, attn_mask=bias).unflatten(0, lead)


def multi_head_attention(q: Tensor, kv: Tensor, num_heads: int, bias: Tensor | None = None) -> Tensor:
    """(..., c, d) of queries (..., c, d) to keys and values (..., keys, 2d)."""
    q, k, v = (split_heads(tensor, num_heads) for tensor in (q, *kv.chunk(2, dim=-1)))
    return merge_heads(scaled_attention(q, k, v, bias))


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> ChunkedTensor:
    """(B, I, w, d): causal attention within each window, of queries (B, I, H, w, K).

    On a CPU it runs in at most four chunks, each of which reads no keys behind its last query: 5/8 of all scores.
    """
    count = q.shape[-2]
    size = max(CAUSAL_CHUNK, -(-count // 4)) if q.device.type == "cpu" else count
    position = torch.arange(count, device=q.device)
    bias = torch.where(position <= position[:, None], 0.0, MASKED)
    chunks = []
    for start in range(0, count, size):
        queries, keys = slice(start, start + size), slice(min(count, start + size))
        out = scaled_attention(q[..., queries, :], k[..., keys, :], v[..., keys, :], bias[queries, keys])
        chunks.append(merge_heads(out))
    return ChunkedTensor(chunks, dim=2)


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """(..., slots, d) to (..., H, slots, K)."""
    return x.unflatten(-1, (num_heads, -1)).transpose(-2, -3)


def merge_heads(x: Tensor) -> Tensor:
    """(..., H, slots, K) to (..., slots, d)."""
    return x.transpose(-2, -3).flatten(-2)


def split_windows(x_BG: Tensor, width: int) -> Tensor:
    """(B, G, ...) to (B, windows, w, ...)."""
    return x_BG.unflatten(1, (-1, width))


def overlapping_windows(x_BS: Tensor, width: int, before: int, after: int = 0) -> Tensor:
    """(B, windows, before + w + after, ...): each window of (B, before + G + after, ...) with its surroundings."""
    return x_BS.unfold(1, before + width + after, width).movedim(-1, 2)


class WindowAttention(nn.Module):
    """Self-attention of each token to the last `span` tokens, including itself (Transformer-XL's windows).

    Keys and values of earlier windows of the same pass have gradients, unless the config's mixer is `memory`.
    """

    def __init__(self, config: BlockStateConfig) -> None:
        super().__init__()
        self.num_heads, self.window, self.span = config.num_attention_heads, config.window, config.span
        self.bidirectional = config.bidirectional
        self.detach_past = config.mixer == "memory"
        self.q = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.kv = nn.Linear(config.hidden_size, 2 * config.hidden_size, bias=False)
        self.buffer = SlidingBuffer("tokens", config.span)
        self.bias = RelativePositionBias(config)

    def forward(self, x_BTd: Tensor, grid: WindowGrid, cache: LayerCache | None) -> tuple[ChunkedTensor, Tensor]:
        """The output (B, blocks, c, d); keys and values of all slots (B, G, 2d), including cached ones."""
        q, kv = grid.to_grid(self.q(x_BTd)), grid.to_grid(self.kv(x_BTd))
        if grid.decoding and cache is not None:
            keys = self.buffer.append(kv, cache)
            return self._step(q, keys, grid), keys[:, -grid.window :]
        past, current = self.buffer.extend(kv, grid, cache)
        far = current
        if self.detach_past and torch.is_grad_enabled():  # keys and values of hidden states without gradients
            far = grid.to_grid(functional.linear(x_BTd.detach(), self.kv.weight))
            if any(grid.offsets):  # the first window also holds cached tokens
                far = torch.where(grid.occupied[..., None], far, current)
        return self._attend_windows(q, past, current, far, grid), current

    def _step(self, q_B1d: Tensor, kv: Tensor, grid: WindowGrid) -> ChunkedTensor:
        distance = torch.arange(self.span - 1, -1, -1, device=q_B1d.device)
        present = distance <= grid.per_row(grid.past_lengths)[:, None]  # (B, span)
        bias = self.bias(distance)[None, :, None] + torch.where(present, 0.0, MASKED)[:, None, None]
        return ChunkedTensor([multi_head_attention(q_B1d, kv, self.num_heads, bias)[:, None]])

    def _attend_windows(
        self, q_BGd: Tensor, past: Tensor, current: Tensor, far: Tensor, grid: WindowGrid
    ) -> ChunkedTensor:
        """(B, blocks, c, d) for keys and values before the grid and on it; later windows see `far` for `current`."""
        banded = self._uses_banded_kernel(grid)
        size = min(grid.window, grid.slots) if far is not current and not banded else _block_size(grid)
        after = min(grid.window, grid.slots) if self.bidirectional else 0
        shared, edge = self._biases(grid, size, after)
        if banded:
            near = torch.cat([past, current], dim=1)
            far = near if far is current else torch.cat([past, far], dim=1)
            return ChunkedTensor([self._attend_banded(q_BGd, near, far, shared, edge)[:, None]])
        q = split_windows(q_BGd, size)  # (B, blocks, c, d)
        first = edge.shape[1]
        kv, other_kv = self._block_keys(past, current, far, size, first, after)
        chunks = [multi_head_attention(q[:, :first], kv, self.num_heads, shared + edge[:, :, None, None])]
        if other_kv is not None:
            chunks.append(multi_head_attention(q[:, first:], other_kv, self.num_heads, shared))
        return ChunkedTensor(chunks)

    def _block_keys(
        self, past: Tensor, current: Tensor, far: Tensor, size: int, first: int, after: int
    ) -> tuple[Tensor, Tensor | None]:
        """(B, blocks, keys, 2d) of the `first` blocks; and of the others, if any, whose keys are all on the grid."""
        if far is not current:
            near, old = (
                overlapping_windows(torch.cat([past, tensor], dim=1), size, self.span) for tensor in (current, far)
            )
            kv = torch.cat([old[:, :, : self.span], near[:, :, self.span :]], dim=2)
            return kv[:, :first], kv[:, first:] if kv.shape[1] > first else None
        begin = torch.cat([past, current[:, : first * size]], dim=1)
        others = overlapping_windows(current, size, self.span) if current.shape[1] > first * size else None
        begin = functional.pad(begin, (0, 0, 0, after))
        return overlapping_windows(begin, size, self.span, after), others

    def _uses_banded_kernel(self, grid: WindowGrid) -> bool:
        trains_bias = self.bias.table.weight.requires_grad and torch.is_grad_enabled()
        on_cpu = grid.device.type == "cpu" and not torch.compiler.is_compiling()
        return trains_bias and on_cpu and not self.bidirectional

    def _attend_banded(self, q_BGd: Tensor, near: Tensor, far: Tensor, shared: Tensor, edge: Tensor) -> Tensor:
        rows = q_BGd.shape[0]
        q = split_heads(q_BGd / math.sqrt(q_BGd.shape[-1] / self.num_heads), self.num_heads)
        k, v, far_k, far_v = (split_heads(x, self.num_heads) for kv in (near, far) for x in kv.chunk(2, dim=-1))
        window = 0 if far is near else self.window
        if not window:
            far_k, far_v = k[:, :, :0], v[:, :, :0]
        bias = shared.to(q.dtype).expand(rows, -1, -1, -1)
        if len(edge) > 1:
            edge = edge.repeat_interleave(self.num_heads, dim=0)
        flat = [tensor.flatten(0, 1) for tensor in (q, k, v, far_k, far_v, bias)]
        out: Tensor = BandedAttention.apply(*flat, edge.to(q.dtype), window)
        return merge_heads(out.unflatten(0, (rows, self.num_heads)))

    def _biases(self, grid: WindowGrid, size: int, after: int) -> tuple[Tensor, Tensor]:
        """Of all blocks (H, c, keys); and an addend for the first ones, which masks missing keys (B or 1, E, keys)."""
        device = grid.device
        query = torch.arange(size, device=device)[:, None]
        key = torch.arange(-self.span, size + after, device=device)
        distance = query - key
        visible = (distance < self.span) & ((distance > -self.span) if after else (distance >= 0))
        shared = self.bias(distance) + torch.where(visible, 0.0, MASKED)
        blocks = grid.slots // size
        count = blocks if after else min(blocks, -(-self.span // size))
        slot = torch.arange(count, device=device)[:, None] * size + key  # (blocks, keys)
        present = (slot + grid.per_row(grid.first_positions)[:, None, None]) >= 0
        if after:
            present = present & (slot < grid.per_row(grid.ends)[:, None, None])
        if len(set(grid.first_positions)) == 1 and (not after or len(set(grid.ends)) == 1):
            present = present[:1]
        return shared, torch.where(present, 0.0, MASKED)


def _block_size(grid: WindowGrid) -> int:
    """Queries of a block: small blocks waste fewer masked scores, large ones overlap less."""
    if grid.slots < grid.window or grid.device.type != "cpu":
        return min(grid.window, grid.slots)
    size = max(size for size in range(1, QUERY_BLOCK + 1) if grid.window % size == 0)
    return size if 4 * size >= QUERY_BLOCK else grid.window


class BandedAttention(torch.autograd.Function):
    """Window attention with a trained bias on a CPU: block by block, so that scores fit its cache and are not kept.

        P = softmax(Q K^T + bias)       O = P V
        dP = dO V^T       dS = P * (dP - rowsum(P * dP))
        dQ = dS K       dK = dS^T Q       dV = P^T dO       dbias = sum of dS over blocks

    Fused kernels give no gradients for a bias. All scores at once take 1.4 to 2.5 times as long, as they are read from
    and written to memory six times.
    """

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, far_k: Tensor, far_v: Tensor, bias: Tensor, edge: Tensor, window: int
    ) -> Tensor:
        """(N, G, K).

        Args:
            q: (N, G, K), already divided by the root of K.
            k, v: (N, S, K).
            far_k, far_v: (N, S, K), which later windows see; (N, 0, K) if they see `k` and `v`.
            bias: (N, c, s), the same for all blocks.
            edge: (N or 1, E, s), added to the first E blocks: masks missing keys.
            window: queries of a window, a whole number of blocks; 0 if there are no `far_k` and `far_v`.
        """
        out = torch.empty_like(q)
        for number, queries, before, own in _band_slices(q.shape[1], bias, window):
            scores = _scores(q[:, queries], torch.cat([far_k[:, before], k[:, own]], 1), bias, edge, number)
            out[:, queries] = torch.bmm(scores.softmax(-1), torch.cat([far_v[:, before], v[:, own]], 1))
        ctx.save_for_backward(q, k, v, far_k, far_v, bias, edge)
        ctx.window = window
        return out

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the inputs of `forward`; the probabilities are computed again."""
        q, k, v, far_k, far_v, bias, edge = ctx.saved_tensors
        d_q = torch.empty_like(q)
        d_k, d_v, d_far_k, d_far_v, d_bias = (torch.zeros_like(tensor) for tensor in (k, v, far_k, far_v, bias))
        for number, queries, before, own in _band_slices(q.shape[1], bias, ctx.window):
            keys = torch.cat([far_k[:, before], k[:, own]], 1)
            values = torch.cat([far_v[:, before], v[:, own]], 1)
            p = _scores(q[:, queries], keys, bias, edge, number).softmax(-1)
            weighted = torch.bmm(d_out[:, queries], values.transpose(1, 2)).mul_(p)  # P * dP
            d_scores = torch.addcmul(weighted, p, weighted.sum(-1, keepdim=True), value=-1)
            d_bias += d_scores
            d_q[:, queries] = torch.bmm(d_scores, keys)
            earlier = before.stop - before.start
            for d_near, d_far, gradient in (
                (d_k, d_far_k, torch.bmm(d_scores.transpose(1, 2), q[:, queries])),
                (d_v, d_far_v, torch.bmm(p.transpose(1, 2), d_out[:, queries])),
            ):
                d_far[:, before] += gradient[:, :earlier]
                d_near[:, own] += gradient[:, earlier:]
        return d_q, d_k, d_v, d_far_k, d_far_v, d_bias, None, None


def _band_slices(total: int, bias: Tensor, window: int) -> Iterator[tuple[int, slice, slice, slice]]:
    """For each block of `total` queries: its number, queries, keys of earlier windows, and keys of its own."""
    queries, keys = bias.shape[1:]
    for number, first in enumerate(range(0, total, queries)):
        own = first // window * window + keys - queries if window else first
        yield number, slice(first, first + queries), slice(first, own), slice(own, first + keys)


def _scores(q: Tensor, k: Tensor, bias: Tensor, edge: Tensor, number: int) -> Tensor:
    """(N, c, s): the scores of one block."""
    scores = torch.baddbmm(bias, q, k.transpose(1, 2))
    return scores.add_(edge[:, number, None]) if number < edge.shape[1] else scores
