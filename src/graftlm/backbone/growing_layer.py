"""Cache layers that append keys and values in place."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from graftlm.errors import GraftError

_MIN_SPARE_TOKENS = 64


class _SpareBuffer:
    """States (B, H, S, d) in a larger buffer, so that new ones are appended without a copy.

    Copies of a cache share a buffer, and each may hold a prefix of its states. Only a holder of all states may append;
    any other must copy its prefix to a new buffer. States that a holder has are therefore never overwritten.

    Args:
        states: (B, H, S, d), copied to the buffer.
        more: number of tokens that will be appended next.
    """

    def __init__(self, states: Tensor, more: int) -> None:
        *outer, self.length, width = states.shape
        spare = more + max(_MIN_SPARE_TOKENS, self.length // 4)
        self.buffer = states.new_empty(*outer, self.length + spare, width)
        self.buffer[..., : self.length, :] = states

    def __copy__(self) -> Self:
        return self

    def can_append(self, states: Tensor, more: int) -> bool:
        """Return whether `states` are all states of the buffer, and it has space for `more` tokens."""
        held = self.buffer[..., : self.length, :]
        if states.data_ptr() != held.data_ptr() or states.shape != held.shape:
            return False
        capacity = self.buffer.shape[-2]
        return self.length + more <= capacity

    def append(self, new: Tensor) -> Tensor:
        """Write new states (B, H, T, d) after the others, and return all."""
        end = self.length + new.shape[-2]
        self.buffer[..., self.length : end, :] = new
        self.length = end
        return self.buffer[..., :end, :]


class GrowingLayer(DynamicLayer):
    """A `DynamicLayer` for generation that appends in place.

    The layer of transformers copies all states for every new token.
    """

    _key_buffer: _SpareBuffer | None = None
    _value_buffer: _SpareBuffer | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append keys and values in place.

        Args:
            key_states: (B, H, T, d), keys of T new tokens for B rows and H heads.
            value_states: (B, H, T, d), values of these tokens.
            args: not used.
            kwargs: not used.

        Returns:
            All keys and values, (B, H, S + T, d).

        Raises:
            GraftError: gradients are needed.
        """
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            raise GraftError(
                "A GrowingLayer appends in place, but gradients are needed here: use a DynamicLayer or torch.no_grad()."
            )
        if self.get_seq_length() == 0:
            return super().update(key_states, value_states)
        self._key_buffer, self.keys = _append(self._key_buffer, self.keys, key_states)
        self._value_buffer, self.values = _append(self._value_buffer, self.values, value_states)
        return self.keys, self.values


def _append(buffer: _SpareBuffer | None, states: Any, new: Tensor) -> tuple[_SpareBuffer, Tensor]:
    """Append new states, to a new buffer where necessary; return the buffer and all states."""
    more = new.shape[-2]
    if buffer is None or not buffer.can_append(states, more):
        buffer = _SpareBuffer(states, more)
    return buffer, buffer.append(new)


def use_growing_layers(cache: Cache) -> Cache:
    """Replace every `DynamicLayer` of an empty cache by a `GrowingLayer`, and return the same cache."""
    if getattr(cache, "layer_class_to_replicate", None) is DynamicLayer:
        cache.layer_class_to_replicate = GrowingLayer
    for index, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer:
            cache.layers[index] = GrowingLayer()
    return cache
