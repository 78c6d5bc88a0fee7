"""Window attention with sinks: the tokens that a frozen attention sees, and a cache of constant size.

Token t sees the last W tokens, including itself, and the first F tokens of its document, the sinks. Keys are cached
after their rotation. From token R ("reach") on, the sinks move forward by M = R - W - F positions at a time, so that
their distance stays below R:

    block(t) = 0 for t < R, floor((t - R) / M) + 1 from R on        a sink i is read at position i + M block(t)

A sink is moved by rotating its key. A pass may cover two blocks, so its keys include the sinks in both blocks.

Shape suffixes: B rows, H heads, T new tokens, S keys, d width of a head.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import functional
from transformers.cache_utils import Cache, DynamicLayer

from graftlm.backbone.growing_layer import GrowingLayer
from graftlm.errors import GraftError

_Index = TypeVar("_Index", int, Tensor)


@dataclass(frozen=True)
class WindowShape:
    """The sizes of a window with sinks, and the rotation that moves the sinks.

    Args:
        window: number of tokens W that a token sees, including itself.
        sinks: number of sinks F.
        reach: number of positions R within which the distance of a sink stays.
        frequencies: the backbone's rotary frequencies (n), with n at most d / 2.
    """

    window: int
    sinks: int
    reach: int
    frequencies: Tensor = field(repr=False)

    def __str__(self) -> str:
        return f"window {self.window}, sinks {self.sinks} and reach {self.reach}"

    @property
    def step(self) -> int:
        """Number of positions M by which the sinks move at a time, which also limits a pass beyond R tokens."""
        return self.reach - self.window - self.sinks

    def block(self, index: _Index) -> _Index:
        """Return block(t) of the module's equations.

        Args:
            index: the position t, as an integer or a tensor of any shape, which is also the form of the result.
        """
        if isinstance(index, int):
            if index < self.reach:
                return 0
            moves = (index - self.reach) // self.step
            return moves + 1
        return torch.where(index < self.reach, 0, (index - self.reach) // self.step + 1)

    def moved(self, keys_BHSd: Tensor, block_B: Tensor) -> Tensor:
        """Rotate keys to M block(t) positions later.

        Args:
            keys_BHSd: rotated keys (B, H, S, d); elements i and i + n of the first 2n form pairs.
            block_B: block (B or 1) of each row.

        Returns:
            Keys (B, H, S, d).
        """
        distance = (block_B * self.step)[:, None].double()
        angle = distance * self.frequencies.to(block_B.device)
        cos = torch.cos(angle)[:, None, None].to(keys_BHSd.dtype)
        sin = torch.sin(angle)[:, None, None].to(keys_BHSd.dtype)
        half = len(self.frequencies)
        unrotated = keys_BHSd.shape[-1] - 2 * half
        a, b, rest = keys_BHSd.split([half, half, unrotated], dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)


class KeyColumns(NamedTuple):
    """How many of the keys of a pass belong to each of three groups of columns, in the order of the columns.

    Attributes:
        older_sinks: the sinks in the block before that of the last new token, if the pass may cover two blocks.
        sinks: the sinks in the block of the last new token.
        others: the tokens of the window, and the new tokens.
    """

    older_sinks: int
    sinks: int
    others: int


class WindowLayer(DynamicLayer):
    """A cache layer with the keys and values of the sinks and of the last W - 1 tokens.

    Its sequence length counts all tokens, including those that it has dropped.

    The first columns, at most F, contain those of a row's first tokens after its padding that have left the window. If
    a row has fewer of them, they are right-aligned, so that the columns remain those of consecutive tokens.

    Args:
        shape: sizes of the window.

    Attributes:
        shape: sizes of the window.
        padding: number of columns before each row's first token (B), set before each pass; None for no padding.
        unpadded: whether a pass has found no padding in any row.
        moved: the sinks' keys as moved for the last pass, if all rows have the same block; reused while the block stays
            the same.
    """

    is_croppable = False

    def __init__(self, shape: WindowShape) -> None:
        super().__init__()
        self.shape = shape
        self.cumulative_length = 0
        self.padding: Tensor | None = None
        self.unpadded = False
        self.moved: Tensor | None = None
        self._moved_block = 0
        # The layer's keys after the pass of `moved`. Other keys mean that rows were reordered or selected since.
        self._keys_then: Tensor | None = None

    def get_seq_length(self) -> int:
        return self.cumulative_length

    def reset(self) -> None:
        super().reset()
        self.padding = None
        self.unpadded = False
        self.moved = None
        self._keys_then = None

    def crop(self, tokens_to_remove: int) -> None:
        """Raise `GraftError` if tokens would have to be removed, since tokens that left the window are lost.

        Args:
            tokens_to_remove: number of tokens to remove from the end.
        """
        if tokens_to_remove and self.cumulative_length:
            raise GraftError(
                "Tokens are to be removed from the cache, as in assisted decoding, but tokens that have left a window "
                "can't be restored: use greedy decoding, beam search or sampling, without an assistant or "
                "prompt_lookup_num_tokens."
            )

    @property
    def dropped(self) -> int:
        """The number of columns that have left the window."""
        return max(0, self.cumulative_length - self.shape.window + 1)

    def columns(self, length: int) -> KeyColumns:
        """Return how many keys of each group a pass of `length` new tokens has, before `update` is called."""
        sinks = min(self.dropped, self.shape.sinks)
        may_cover_two_blocks = length > 1 and self._reaches_beyond(length)
        return KeyColumns(
            older_sinks=sinks if may_cover_two_blocks else 0,
            sinks=sinks,
            others=self.cumulative_length - self.dropped + length,
        )

    def _reaches_beyond(self, length: int) -> bool:
        """Return whether the text exceeds R tokens after a pass of `length` tokens."""
        return self.cumulative_length + length > self.shape.reach

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        columns = sum(self.columns(query_length))
        return columns, self.cumulative_length + query_length - columns

    def last_block(self, length: int) -> Tensor:
        """Return the block (B or 1) of the last of `length` new tokens."""
        padding = self.padding
        if padding is None:
            padding = torch.zeros(1, dtype=torch.long, device=self.device)
        return self.shape.block(self.cumulative_length + length - 1 - padding)

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        *args: object,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor]:
        """Append the keys and values of new tokens.

        Args:
            key_states: rotated keys (B, H, T, d).
            value_states: values (B, H, T, d).
            *args: ignored.
            **kwargs: ignored.

        Returns:
            The keys and values (B, H, S, d) that the new tokens may see.
        """
        keys_before = self.keys if self.is_initialized else None
        keys, values = super().update(key_states, value_states)
        length = key_states.shape[-2]
        seen_keys = keys
        seen_values = values
        columns = self.columns(length)
        if columns.sinks and self._reaches_beyond(length):
            seen_keys = self._keys_with_moved_sinks(keys, columns, length, keys_before)
            if columns.older_sinks:
                seen_values = torch.cat([values[..., : columns.older_sinks, :], values], dim=-2)
        self.keys = self._kept(keys)
        self.values = self._kept(values)
        self._keys_then = self.keys
        self.cumulative_length += length
        return seen_keys, seen_values

    def _keys_with_moved_sinks(
        self,
        keys: Tensor,
        columns: KeyColumns,
        length: int,
        keys_before: Tensor | None,
    ) -> Tensor:
        """Return the keys (B, H, S, d) of a pass of `length` tokens, with the sinks moved to their blocks."""
        first = keys[..., : columns.sinks, :]
        parts = []
        if columns.older_sinks:
            older_block = (self.last_block(length) - 1).clamp(min=0)
            parts.append(self.shape.moved(first, older_block))
        parts.append(self._moved(first, length, keys_before))
        parts.append(keys[..., columns.sinks :, :])
        return torch.cat(parts, dim=-2)

    def _moved(self, first: Tensor, length: int, keys_before: Tensor | None) -> Tensor:
        """Move the sinks' keys to the block of the last new token, or reuse those of the last pass.

        Args:
            first: the sinks' keys (B, H, F, d) as they are cached.
            length: number of new tokens.
            keys_before: the layer's keys before the pass.
        """
        if self.padding is not None:
            self.moved = None
            return self.shape.moved(first, self.last_block(length))
        block = self.shape.block(self.cumulative_length + length - 1)
        if self.moved is not None and self.moved.shape == first.shape:
            same_rows = keys_before is self._keys_then
            if same_rows and block == self._moved_block:
                return self.moved
        self.moved = self.shape.moved(first, torch.full((1,), block, device=first.device))
        self._moved_block = block
        return self.moved

    def _kept(self, states: Tensor) -> Tensor:
        """Select the states to keep from those of the sinks, of the window and of the new tokens (B, H, S, d)."""
        old = min(self.dropped, self.shape.sinks)
        in_window = states.shape[-2] - old
        leaving = max(0, in_window - self.shape.window + 1)
        if not leaving:
            return states
        count = min(self.dropped + leaving, self.shape.sinks)
        candidates = states[..., : old + leaving, :]
        window = states[..., old + leaving :, :]
        if self.padding is None:
            return torch.cat([candidates[..., :count, :], window], dim=-2)
        start = (self.padding - (self.dropped - old)).clamp(0, old + leaving - count)
        index = start[:, None] + torch.arange(count, device=start.device)
        index = index[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[-1])
        return torch.cat([candidates.gather(-2, index), window], dim=-2)


def window_layers(cache: Cache | None, count: int, shape: WindowShape) -> list[WindowLayer]:
    """Return the window layers of a cache. The dynamic layers of an empty cache are first replaced by window layers.

    Args:
        cache: cache of one generation; None without a cache.
        count: number of the backbone's layers, which are the first of the cache.
        shape: sizes of the window.

    Returns:
        The window layers; an empty list without a cache, and for caches of other kinds, such as static ones.

    Raises:
        GraftError: the cache has window layers of another shape.
    """
    if cache is None:
        return []
    first = cache.layers[:count]
    is_empty = all(_is_unused(layer) for layer in first)
    grows_lazily = getattr(cache, "layer_class_to_replicate", None) in (DynamicLayer, GrowingLayer)
    if is_empty and (len(first) == count or grows_lazily):
        layers = [WindowLayer(shape) for _ in range(count)]
        cache.layers[:count] = layers
    else:
        layers = [layer for layer in first if isinstance(layer, WindowLayer)]
    if not layers or len(layers) < len(first):
        return []
    cached = layers[0].shape
    if str(cached) != str(shape):
        raise GraftError(
            f"The layers of the cache belong to a memory with {cached}, but this memory has {shape}: "
            "attach only this memory, or start with an empty cache."
        )
    return layers


def _is_unused(layer: object) -> bool:
    """Return whether a layer is an ordinary one without keys."""
    return isinstance(layer, DynamicLayer) and type(layer) in (DynamicLayer, GrowingLayer) and not layer.is_initialized


def hidden_columns(
    shape: WindowShape,
    columns: int,
    query_T: Tensor,
    padding_B: Tensor | None,
) -> Tensor:
    """Mark the columns of a static cache that are hidden from new tokens.

    It needs no number of tokens on the host. The sinks don't move, so the cache must not exceed the reach.

    Args:
        shape: sizes of the window.
        columns: number S of columns of the cache.
        query_T: columns (T) of the new tokens.
        padding_B: number of columns before each row's first token (B); None for no padding.

    Returns:
        Bool (B or 1, T, S), True at hidden columns, which include those of later tokens.
    """
    column = torch.arange(columns, device=query_T.device)
    distance = query_T[:, None] - column
    position = column[None] if padding_B is None else column - padding_B[:, None]
    is_sink = (position < shape.sinks)[:, None]
    return (distance < 0) | ((distance >= shape.window) & ~is_sink)


def hidden_keys(
    layer: WindowLayer | None,
    shape: WindowShape,
    past: int,
    index_BT: Tensor,
    padding_B: Tensor | None,
) -> Tensor:
    """Mark the keys that are hidden from new tokens.

    Args:
        layer: window layer with the keys before the pass; None for keys of all tokens.
        shape: sizes of the window.
        past: number of columns before the new tokens.
        index_BT: positions (B or 1, T) of the new tokens in their documents.
        padding_B: number of columns before each row's first token (B); None for no padding.

    Returns:
        Bool (B or 1, T, S), True at hidden keys.
    """
    length = index_BT.shape[1]
    total = past + length
    columns = KeyColumns(0, 0, total) if layer is None else layer.columns(length)
    column = torch.arange(total, device=index_BT.device)
    key = column[total - columns.others :]
    if padding_B is not None:
        index = key - padding_B[:, None]
    elif past == 0:
        index = index_BT
    else:
        index = key[None]
    outside_window = column[past:, None] - key >= shape.window
    hidden = outside_window & (index[:, None] >= shape.sinks)
    if not columns.older_sinks:
        return functional.pad(hidden, (columns.sinks, 0))
    assert layer is not None, "only a window layer moves its sinks"
    block_BT1 = shape.block(index_BT)[..., None]
    last = layer.last_block(length)[:, None, None]
    older_hidden = (block_BT1 != last - 1).expand(-1, -1, columns.sinks)
    newer_hidden = (block_BT1 != last).expand(-1, -1, columns.sinks)
    return torch.cat([older_hidden, newer_hidden, hidden.expand(len(index_BT), -1, -1)], dim=-1)
