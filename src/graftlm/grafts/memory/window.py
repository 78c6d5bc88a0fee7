"""Window attention with sinks: which tokens a frozen attention sees, and a cache of constant size.

Token t sees the last W tokens, itself included, and the first F tokens of its document, the sinks. Keys are cached
after their rotation. From token R on ("reach"), sinks move on by M = R - W - F positions at a time, so that their
distance stays below R:

    block(t) = 0 for t < R, floor((t - R) / M) + 1 from R on        a sink i is read at position i + M block(t)

A sink is moved by a rotation of its key. A pass may cover two blocks, so both forms of the sinks are among its keys.

Shape suffixes: B rows, H heads, T new tokens, S keys, d width of a head.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.cache_utils import Cache, DynamicLayer

from graftlm.backbone.cache import GrowingLayer
from graftlm.errors import GraftError


@dataclass(frozen=True)
class WindowShape:
    """W, F and R of the module's equations, and the backbone's rotary frequencies (at most d / 2,)."""

    window: int
    sinks: int
    reach: int
    frequencies: Tensor = field(repr=False)

    @property
    def step(self) -> int:
        """M: how far the sinks move at a time, and the largest pass beyond R tokens."""
        return self.reach - self.window - self.sinks

    def block(self, index: Any) -> Any:
        """block(t) of the module's equations, of a number or a tensor."""
        if isinstance(index, int):
            return 0 if index < self.reach else (index - self.reach) // self.step + 1
        return torch.where(index < self.reach, 0, (index - self.reach) // self.step + 1)

    def moved(self, keys_BHSd: Tensor, block_B: Tensor) -> Tensor:
        """Keys as they would be M block(t) positions later; elements i and i + n of the first 2n form pairs."""
        angle = (block_B * self.step)[:, None].double() * self.frequencies.to(block_B.device)
        cos, sin = (f(angle)[:, None, None].to(keys_BHSd.dtype) for f in (torch.cos, torch.sin))
        half = len(self.frequencies)
        a, b, rest = keys_BHSd.split([half, half, keys_BHSd.shape[-1] - 2 * half], dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)


class WindowLayer(DynamicLayer):
    """The keys and values of the sinks and of the last W - 1 tokens; it counts all tokens.

    The first columns, at most F, hold a row's first tokens behind its padding, as far as they have left the window. A
    row with fewer of them has them on the right, so that the columns stay those of consecutive tokens.

    Attributes:
        padding: (B,) number of columns before a row's first token, set before each pass; None for none.
        unpadded: whether a pass has shown that no row has any.
        moved: the sinks' keys as the last pass had them, if all rows have the same block; the next may need no others.
    """

    is_croppable = False

    def __init__(self, shape: WindowShape) -> None:
        super().__init__()
        self.shape, self.cumulative_length = shape, 0
        self.padding: Tensor | None = None
        self.unpadded = False
        self.moved: Tensor | None = None
        self._moved_block = 0
        self._keys_then: Tensor | None = None  # the keys after the pass of `moved`

    def get_seq_length(self) -> int:
        return self.cumulative_length

    def reset(self) -> None:
        super().reset()
        self.padding, self.unpadded, self.moved, self._keys_then = None, False, None, None

    def crop(self, tokens_to_remove: int) -> None:
        """Raise `GraftError` if there is a token to remove."""
        if tokens_to_remove and self.cumulative_length:
            raise GraftError(
                "Tokens that have left a window can't come back, as assisted decoding needs: decode greedily, with "
                "beams or by sampling, without an assistant or prompt_lookup_num_tokens."
            )

    @property
    def dropped(self) -> int:
        """The number of columns that have left the window."""
        return max(0, self.cumulative_length - self.shape.window + 1)

    def columns(self, length: int) -> tuple[int, int, int]:
        """Columns of older sinks, of sinks, and of other tokens, among the keys of a pass of `length` tokens."""
        sinks = min(self.dropped, self.shape.sinks)
        two_blocks = length > 1 and self.cumulative_length + length > self.shape.reach
        return sinks * two_blocks, sinks, self.cumulative_length - self.dropped + length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        columns = sum(self.columns(query_length))
        return columns, self.cumulative_length + query_length - columns

    def last_block(self, length: int) -> Tensor:
        """(B or 1,) the block of the last of `length` new tokens."""
        padding = torch.zeros(1, dtype=torch.long, device=self.device) if self.padding is None else self.padding
        return self.shape.block(self.cumulative_length + length - 1 - padding)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append keys and values (B, H, T, d); returns those that the new tokens may see."""
        held = self.keys if self.is_initialized else None
        keys, values = seen = super().update(key_states, value_states)
        length = key_states.shape[-2]
        older, sinks, _ = self.columns(length)
        if sinks and self.cumulative_length + length > self.shape.reach:
            first, before = keys[..., :sinks, :], []
            if older:
                before = [self.shape.moved(first, (self.last_block(length) - 1).clamp(min=0))]
                values = torch.cat([values[..., :older, :], values], -2)
            seen = torch.cat([*before, self._moved(first, length, held), keys[..., sinks:, :]], -2), values
        self.keys, self.values = self._kept(keys), self._kept(seen[1][..., older:, :])
        self._keys_then = self.keys
        self.cumulative_length += length
        return seen

    def _moved(self, first: Tensor, length: int, held: Tensor | None) -> Tensor:
        """The sinks' keys in the block of the last of `length` new tokens; those of the pass before, if it had that.

        `held` has the layer's keys before the pass. Others than the pass before left mean other rows.
        """
        if self.padding is not None:
            self.moved = None
            return self.shape.moved(first, self.last_block(length))
        block = self.shape.block(self.cumulative_length + length - 1)
        known = self.moved is not None and held is self._keys_then and self.moved.shape == first.shape
        if not known or block != self._moved_block:
            self.moved = self.shape.moved(first, torch.full((1,), block, device=first.device))
            self._moved_block = block
        assert self.moved is not None
        return self.moved

    def _kept(self, states: Tensor) -> Tensor:
        """The states to keep, given those of the sinks, of the window and of the new tokens."""
        old = min(self.dropped, self.shape.sinks)
        leaving = max(0, states.shape[-2] - old - self.shape.window + 1)
        if not leaving:
            return states
        count = min(self.dropped + leaving, self.shape.sinks)
        candidates, window = states[..., : old + leaving, :], states[..., old + leaving :, :]
        if self.padding is None:
            return torch.cat([candidates[..., :count, :], window], -2)
        start = (self.padding - (self.dropped - old)).clamp(0, old + leaving - count)
        index = (start[:, None] + torch.arange(count, device=start.device))[:, None, :, None]
        kept = candidates.gather(-2, index.expand(-1, states.shape[1], -1, states.shape[-1]))
        return torch.cat([kept, window], -2)


def window_layers(cache: Cache | None, count: int, shape: WindowShape) -> list[Any]:
    """The window layers of a cache, in place of the `count` dynamic layers of an empty one; none in other caches."""
    if cache is None:
        return []
    first: list[Any] = cache.layers[:count]
    replicate = getattr(cache, "layer_class_to_replicate", None)
    empty = all(type(layer) in (DynamicLayer, GrowingLayer) and not layer.is_initialized for layer in first)
    if empty and (len(first) == count or replicate in (DynamicLayer, GrowingLayer)):
        cache.layers[:count] = first = [WindowLayer(shape) for _ in range(count)]
    if not first or not all(isinstance(layer, WindowLayer) for layer in first):
        return []
    if repr(held := first[0].shape) != repr(shape):
        raise GraftError(f"The cache has {held}, but this memory has {shape}: attach one of the two.")
    return first


def hidden_keys(
    layer: WindowLayer | None, shape: WindowShape, past: int, index_BT: Tensor, padding_B: Tensor | None
) -> Tensor:
    """(B or 1, T, S) True at the keys that are hidden from T new tokens behind `past` columns.

    Args:
        layer: a window layer before the pass, whose keys they are; None for keys of all tokens.
        index_BT: (B or 1, T) positions of the new tokens in their documents.
        padding_B: columns before each row's first token, if there are any.
    """
    length, total = index_BT.shape[1], past + index_BT.shape[1]
    older, sinks, rest = (0, 0, total) if layer is None else layer.columns(length)
    column = torch.arange(total, device=index_BT.device)
    key = column[total - rest :]
    index = index_BT if past == 0 else key[None]
    index = index if padding_B is None else key - padding_B[:, None]
    hidden = (column[past:, None] - key >= shape.window) & (index[:, None] >= shape.sinks)
    if not older:
        return functional.pad(hidden, (sinks, 0))
    assert layer is not None, "its sinks move"
    block_BT1, last = shape.block(index_BT)[..., None], layer.last_block(length)[:, None, None]
    moved = [(block_BT1 != last - n).expand(-1, -1, sinks) for n in (1, 0)]
    return torch.cat([*moved, hidden.expand(len(index_BT), -1, -1)], -1)
