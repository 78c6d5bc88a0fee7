"""Cache layers that append in place: transformers' copy all that is remembered for every token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from graftlm.backbone.cache import joined_columns
from graftlm.errors import GraftError

_MORE = 64  # tokens that there is room for, at least; or a quarter of those that are there


class _Room:
    """States (B, H, S, d) with room for more behind them.

    Several holders may know a shorter part, as copies of a cache do. Nothing that anybody knows is ever written to: who
    knows all that stands here may append, and anybody else must move to a room of its own.
    """

    def __init__(self, states: Tensor, more: int) -> None:
        *outer, self.length, width = states.shape
        self.space = states.new_empty(*outer, self.length + more + max(_MORE, self.length // 4), width)
        self.space[..., : self.length, :] = states

    def __copy__(self) -> Self:
        return self

    def fits(self, states: Tensor, more: int) -> bool:
        """Whether `states` are all that stands here, and so many tokens more have room."""
        known = self.space[..., : self.length, :]
        whole = states.data_ptr() == known.data_ptr() and states.shape == known.shape
        return whole and self.length + more <= self.space.shape[-2]

    def append(self, new: Tensor) -> Tensor:
        """All states, with new ones behind."""
        end = self.length + new.shape[-2]
        self.space[..., self.length : end, :] = new
        self.length = end
        return self.space[..., :end, :]


class GrowingLayer(DynamicLayer):
    """A `DynamicLayer` for generation: a new token is written behind the others, which stay where they are."""

    _key_room: _Room | None = None
    _value_room: _Room | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append (B, H, T, d) keys and values, and give all of them.

        Raises:
            GraftError: gradients are asked for, which what is written in place has none of.
        """
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            raise GraftError("A GrowingLayer is for generation: use a DynamicLayer where gradients are needed.")
        if self.get_seq_length() == 0:
            return super().update(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        self._key_room = _with_room(self._key_room, self.keys, key_states.shape[-2])
        self._value_room = _with_room(self._value_room, self.values, value_states.shape[-2])
        self.keys, self.values = self._key_room.append(key_states), self._value_room.append(value_states)
        return self.keys, self.values

    def join(self, layers: Sequence[DynamicLayer], paddings: Sequence[int]) -> DynamicLayer:
        """One layer of the rows of several, as `graftlm.backbone.join` has it."""
        return joined_columns(layers, paddings)


def _with_room(room: _Room | None, states: Tensor, more: int) -> _Room:
    return room if room is not None and room.fits(states, more) else _Room(states, more)


def growing(cache: Cache) -> Cache:
    """The same cache, empty, with layers that append in place for those that would copy."""
    if getattr(cache, "layer_class_to_replicate", None) is DynamicLayer:
        cache.layer_class_to_replicate = GrowingLayer
    cache.layers = [GrowingLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache
