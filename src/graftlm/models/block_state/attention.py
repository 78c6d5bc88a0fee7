"""Self-attention within windows: each token attends to the last W tokens, in blocks that suit the device.

Shape suffixes: B rows, T columns of a pass, G slots of its grid, c slots of a block, H heads, K width of a head,
d = H K.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from graftlm.models.block_state.banded import BandedAttention
from graftlm.models.block_state.cache import LayerCache, SlidingBuffer
from graftlm.models.block_state.config import BlockStateConfig
from graftlm.models.block_state.grid import Grid, StepGrid, WindowGrid
from graftlm.models.block_state.layout import (
    ChunkedTensor,
    merge_heads,
    overlapping_windows,
    split_heads,
    split_windows,
)
from graftlm.models.block_state.multi_head import MASKED, multi_head_attention

QUERY_BLOCK = 64
"""Queries in a block on a CPU, at most 1.1 times as slow as the best size for windows of 128 and of 512 tokens."""


class RelativePositionBias(nn.Module):
    """T5's bias of attention scores: a number for each head and bucket of distances.

    The first half of the buckets are exact distances; the rest grow logarithmically. In bidirectional attention, each
    direction has half of the buckets.

    Args:
        config: config of the model.
    """

    def __init__(self, config: BlockStateConfig) -> None:
        super().__init__()
        self.bidirectional = config.bidirectional
        self.num_buckets = config.relative_buckets
        self.max_distance = config.relative_distance
        self.table = nn.Embedding(self.num_buckets, config.num_attention_heads)

    def forward(self, distance: Tensor) -> Tensor:
        """Return the biases (H, *distance.shape).

        Args:
            distance: position of the query minus position of the key.
        """
        return self.table(self._bucket(distance)).movedim(-1, 0)

    def _bucket(self, distance: Tensor) -> Tensor:
        if not self.bidirectional:
            return self._one_sided_bucket(distance.clamp(min=0), self.num_buckets)
        buckets = self.num_buckets // 2
        offset = (distance < 0) * buckets
        return self._one_sided_bucket(distance.abs(), buckets) + offset

    def _one_sided_bucket(self, distance: Tensor, buckets: int) -> Tensor:
        exact = buckets // 2
        ratio = torch.log(distance.clamp(min=1) / exact) / math.log(self.max_distance / exact)
        far = exact + ratio * (buckets - exact)
        far = far.long().clamp(max=buckets - 1)
        return torch.where(distance < exact, distance, far)


class _WindowKeys(NamedTuple):
    """Keys and values of one pass.

    Attributes:
        past: (B, span, 2d) of the slots before the grid.
        current: (B, G, 2d) of the slots on the grid.
        far: (B, G, 2d) that later windows see instead of `current`; the same object if they see `current`.
    """

    past: Tensor
    current: Tensor
    far: Tensor

    @property
    def is_detached(self) -> bool:
        """Whether later windows see other keys and values, without gradients."""
        return self.far is not self.current


class WindowAttention(nn.Module):
    """Self-attention of each token to the last `span` tokens, including itself (Transformer-XL's windows).

    Keys and values of earlier windows of the same pass have gradients, unless the config's mixer is `memory`.

    Args:
        config: config of the model.
    """

    def __init__(self, config: BlockStateConfig) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.window = config.window
        self.span = config.span
        self.bidirectional = config.bidirectional
        self.detach_past = config.mixer == "memory"
        self.q = nn.Linear(config.hidden_size, config.attention_width, bias=False)
        self.kv = nn.Linear(config.hidden_size, 2 * config.attention_width, bias=False)
        self.buffer = SlidingBuffer("tokens", config.span)
        self.bias = RelativePositionBias(config)

    def forward(self, x_BTd: Tensor, grid: Grid, cache: LayerCache | None) -> tuple[ChunkedTensor, Tensor]:
        """Attend to the windows of a pass.

        Args:
            x_BTd: hidden states (B, T, d).
            grid: grid of the pass.
            cache: the layer's cache, which is updated; None without a cache.

        Returns:
            The outputs (B, blocks, c, d); and the keys and values (B, G, 2d) of all slots, including cached tokens.
        """
        q = grid.to_grid(self.q(x_BTd))
        kv = grid.to_grid(self.kv(x_BTd))
        if isinstance(grid, StepGrid):
            assert cache is not None, "a decode step continues a text"
            keys = self.buffer.append(kv, grid, cache)
            return self._step(q, keys, grid), keys[:, -grid.window :]
        past, current = self.buffer.extend(kv, grid, cache)
        far = current
        if self.detach_past and torch.is_grad_enabled():
            far = self._detached_keys(x_BTd, current, grid)
        keys = _WindowKeys(past, current, far)
        return self._attend_windows(q, keys, grid), current

    def _step(self, q_B1d: Tensor, kv: Tensor, grid: StepGrid) -> ChunkedTensor:
        """Attend from one token to the keys and values (B, span, 2d) of the last tokens; returns (B, 1, 1, d)."""
        distance = torch.arange(self.span - 1, -1, -1, device=q_B1d.device)
        present = distance <= grid.past_counts[:, None]  # (B, span)
        mask = torch.where(present, 0.0, MASKED)
        bias = self.bias(distance)[None, :, None] + mask[:, None, None]
        out = multi_head_attention(q_B1d, kv, self.num_heads, bias)
        return ChunkedTensor([out[:, None]])

    def _detached_keys(self, x_BTd: Tensor, current: Tensor, grid: WindowGrid) -> Tensor:
        """Return keys and values (B, G, 2d) of hidden states without gradients."""
        far = grid.to_grid(functional.linear(x_BTd.detach(), self.kv.weight))
        if any(grid.offsets):
            # The first window also contains cached tokens.
            far = torch.where(grid.occupied[..., None], far, current)
        return far

    def _attend_windows(self, q_BGd: Tensor, keys: _WindowKeys, grid: WindowGrid) -> ChunkedTensor:
        """Attend from all slots of the grid; returns (B, blocks, c, d)."""
        banded = self._uses_banded_kernel(grid)
        width = min(grid.window, grid.slots)
        size = _block_size(grid)
        if keys.is_detached and not banded:
            size = width
        after = width if self.bidirectional else 0
        key = torch.arange(-self.span, size + after, device=grid.device)
        shared = self._shared_bias(key, size, after)
        edge = self._edge_mask(key, grid, size, after)
        if banded:
            out = self._attend_banded(q_BGd, keys, shared, edge)
            return ChunkedTensor([out[:, None]])
        q = split_windows(q_BGd, size)  # (B, blocks, c, d)
        first = edge.shape[1]
        kv, other_kv = self._block_keys(keys, size, first, after)
        edge_bias = shared + edge[:, :, None, None]
        chunks = [multi_head_attention(q[:, :first], kv, self.num_heads, edge_bias)]
        if other_kv is not None:
            chunks.append(multi_head_attention(q[:, first:], other_kv, self.num_heads, shared))
        return ChunkedTensor(chunks)

    def _block_keys(
        self,
        keys: _WindowKeys,
        size: int,
        first: int,
        after: int,
    ) -> tuple[Tensor, Tensor | None]:
        """Collect the keys and values that each block sees.

        Args:
            keys: keys and values of the pass.
            size: slots c of a block.
            first: number of blocks that may see slots outside the grid.
            after: number of slots after the block that it sees.

        Returns:
            Keys and values (B, blocks, keys, 2d) of the first blocks; and of the others, if any.
        """
        past, current, _ = keys
        if keys.is_detached:
            kv = self._detached_block_keys(keys, size)
            others = kv[:, first:] if kv.shape[1] > first else None
            return kv[:, :first], others
        others = None
        if current.shape[1] > first * size:
            others = overlapping_windows(current, size, self.span)
        begin = torch.cat([past, current[:, : first * size]], dim=1)
        begin = functional.pad(begin, (0, 0, 0, after))
        return overlapping_windows(begin, size, self.span, after), others

    def _detached_block_keys(self, keys: _WindowKeys, size: int) -> Tensor:
        """Return (B, blocks, span + c, 2d): keys and values of earlier windows without gradients, then of the block."""
        current = torch.cat([keys.past, keys.current], dim=1)
        far = torch.cat([keys.past, keys.far], dim=1)
        current = overlapping_windows(current, size, self.span)
        far = overlapping_windows(far, size, self.span)
        return torch.cat([far[:, :, : self.span], current[:, :, self.span :]], dim=2)

    def _uses_banded_kernel(self, grid: WindowGrid) -> bool:
        trains_bias = self.bias.table.weight.requires_grad and torch.is_grad_enabled()
        on_cpu = grid.device.type == "cpu" and not torch.compiler.is_compiling()
        return trains_bias and on_cpu and not self.bidirectional

    def _attend_banded(
        self,
        q_BGd: Tensor,
        keys: _WindowKeys,
        shared: Tensor,
        edge: Tensor,
    ) -> Tensor:
        """Attend by `BandedAttention`; returns (B, G, d)."""
        rows = q_BGd.shape[0]
        scale = math.sqrt(q_BGd.shape[-1] / self.num_heads)
        q = split_heads(q_BGd / scale, self.num_heads)
        near = self._split_keys(torch.cat([keys.past, keys.current], dim=1))
        if keys.is_detached:
            window = self.window
            far = self._split_keys(torch.cat([keys.past, keys.far], dim=1))
        else:
            window = 0
            far = near[:, :, :0]
        bias = shared.to(q.dtype).expand(rows, -1, -1, -1)
        if len(edge) > 1:
            edge = edge.repeat_interleave(self.num_heads, dim=0)
        out: Tensor = BandedAttention.apply(
            q.flatten(0, 1),
            near,
            far,
            bias.flatten(0, 1),
            edge.to(q.dtype),
            window,
        )
        return merge_heads(out.unflatten(0, (rows, self.num_heads)))

    def _split_keys(self, kv_BSd: Tensor) -> Tensor:
        """Split keys and values (B, S, 2d) into (2, B H, S, K)."""
        kv_BS2HK = kv_BSd.unflatten(-1, (2, self.num_heads, -1))
        return kv_BS2HK.permute(2, 0, 3, 1, 4).flatten(1, 2)

    def _shared_bias(self, key: Tensor, size: int, after: int) -> Tensor:
        """Return the bias (H, c, keys) of all blocks, which masks keys out of reach; `key` is that of `_edge_mask`."""
        query = torch.arange(size, device=key.device)[:, None]
        distance = query - key
        visible = (distance < self.span) & ((distance > -self.span) if after else (distance >= 0))
        return self.bias(distance) + torch.where(visible, 0.0, MASKED)

    def _edge_mask(
        self,
        key: Tensor,
        grid: WindowGrid,
        size: int,
        after: int,
    ) -> Tensor:
        """Compute the addend of the bias of the first E blocks, which masks slots without a token.

        Args:
            key: slots (keys) that a block sees, relative to its first slot.
            grid: grid of the pass.
            size: slots c of a block.
            after: number of slots after its own that a block sees.

        Returns:
            Addends (B or 1, E, keys).
        """
        blocks = grid.slots // size
        count = blocks if after else min(blocks, -(-self.span // size))
        block_start = torch.arange(count, device=grid.device)[:, None] * size
        slot = block_start + key  # (blocks, keys)
        first_position = grid.per_row(grid.first_positions)[:, None, None]
        present = slot + first_position >= 0
        rows_are_equal = len(set(grid.first_positions)) == 1
        if after:
            present = present & (slot < grid.per_row(grid.ends)[:, None, None])
            rows_are_equal = rows_are_equal and len(set(grid.ends)) == 1
        if rows_are_equal:
            present = present[:1]
        return torch.where(present, 0.0, MASKED)


def _block_size(grid: WindowGrid) -> int:
    """Return the number of queries in a block: small blocks waste fewer masked scores, large ones overlap less."""
    if grid.slots < grid.window or grid.device.type != "cpu":
        return min(grid.window, grid.slots)
    divisors = [size for size in range(1, QUERY_BLOCK + 1) if grid.window % size == 0]
    size = max(divisors)
    return size if 4 * size >= QUERY_BLOCK else grid.window
