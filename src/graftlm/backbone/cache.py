"""Layers of grafts in the key-value cache of a generation.

transformers' `generate` makes a `DynamicCache` with as many layers as the backbone has. A graft that needs keys and
values, or a state, appends its own layers, so that beam reordering, cropping and batch selection reach them as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicLayer,
    QuantizedCache,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from graftlm.errors import GraftError
from graftlm.models.state_layer import RecurrentCacheLayer

_SLOTS = "_graft_slots"
"""The attribute of a cache that stores the layer indices of each owner."""


def slots(
    cache: Cache,
    owner: str,
    count: int,
    backbone_layers: int,
    make: Callable[[], CacheLayerMixin] = DynamicLayer,
) -> range:
    """Return the indices of an owner's layers in a cache; the first call appends them.

    Args:
        cache: the cache of one generation.
        owner: a name; the same owner gets the same layers again.
        count: number of layers that the first call appends for the owner.
        backbone_layers: number of layers that the backbone fills; a lazy cache may not have made them yet.
        make: builds one layer.

    Raises:
        GraftError: the cache offloads or quantizes its layers, which would not reach those of a graft.
    """
    _check_in_memory(cache)
    slots_by_owner: dict[str, range] = cache.__dict__.setdefault(_SLOTS, {})
    if owner not in slots_by_owner:
        _add_lazy_layers(cache, backbone_layers)
        start = len(cache.layers)
        is_compileable = cache.is_compileable
        for _ in range(count):
            layer = make()
            # transformers treats a cache as dynamic if one of its layers is not compileable.
            layer.is_compileable = is_compileable
            cache.layers.append(layer)
        slots_by_owner[owner] = range(start, start + count)
    return slots_by_owner[owner]


def _check_in_memory(cache: Cache) -> None:
    """Raise `GraftError` if a cache offloads or quantizes its layers."""
    if isinstance(cache, QuantizedCache):
        action = "quantizes"
    elif getattr(cache, "offloading", False):
        action = "offloads"
    else:
        return
    raise GraftError(
        f"The cache {action} its layers, which is not possible for a graft's own layers in it: generate with a dynamic "
        "or static cache."
    )


def _add_lazy_layers(cache: Cache, count: int) -> None:
    """Append the backbone's layers that a lazy cache has not made yet, up to `count` layers."""
    make_layer = getattr(cache, "layer_class_to_replicate", None)
    if make_layer is None:
        return
    while len(cache.layers) < count:
        cache.layers.append(make_layer())


def slots_of(cache: Cache) -> dict[str, range]:
    """Return the indices of each owner's layers in a cache, by the owner's name."""
    return dict(vars(cache).get(_SLOTS, {}))


def set_slots(cache: Cache, slots_by_owner: Mapping[str, range]) -> None:
    """Set the layer indices of each owner in a cache.

    Args:
        cache: a cache that has these layers.
        slots_by_owner: the layer indices by owner; they replace those of the cache.
    """
    vars(cache)[_SLOTS] = dict(slots_by_owner)


def move_own_layers(source: Cache, target: Cache, backbone_layers: int) -> None:
    """Move the layers of grafts to the end of another cache, with their owners.

    Args:
        source: the cache that loses the layers.
        target: a cache that has exactly the backbone's layers.
        backbone_layers: number of layers of the backbone, after which those of grafts begin.
    """
    target.layers += source.layers[backbone_layers:]
    del source.layers[backbone_layers:]
    set_slots(target, slots_of(source))
    vars(source).pop(_SLOTS, None)


def is_static_layer(layer: object, *, window: bool = True) -> bool:
    """Return whether a cache layer has columns for tokens that are yet to come.

    Args:
        layer: a layer of any cache.
        window: whether static layers with a sliding window count, whose columns cover only the latest tokens.
    """
    if isinstance(layer, StaticSlidingWindowLayer):
        return window
    return isinstance(layer, StaticLayer)


def counted_tokens(cache: Cache) -> int | None:
    """Return the number of tokens in the first filled graft layer whose `counts_tokens` is true; None without one.

    Only the first layer of each graft is considered.
    """
    for indices in slots_of(cache).values():
        layer: Any = cache.layers[indices[0]]
        if getattr(layer, "counts_tokens", False):
            count = layer.get_seq_length()
            if count:
                return count
    return None


class StateLayer(RecurrentCacheLayer):
    """A cache layer for a recurrent state of fixed size, batch first, such as a state-space model's.

    The state is stored in `keys`, and an optional second one in `values`.
    """

    def update(self, key_states: Tensor, value_states: Tensor | None = None, *args: object, **kwargs: object):
        """Replace the states.

        Args:
            key_states: (B, ...), the new state.
            value_states: (B, ...), the new second state; None for an empty one.
            args: not used.
            kwargs: not used.

        Returns:
            Both states.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states)
        if value_states is None:
            value_states = key_states.new_empty((key_states.shape[0], 0))
        self.keys = key_states
        self.values = value_states
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def reset(self) -> None:
        self.keys = None
        self.values = None
        self.is_initialized = False

    def _apply(self, function: Callable[[Tensor], Tensor]) -> None:
        if self.keys is not None and self.values is not None:
            self.keys = function(self.keys)
            self.values = function(self.values)
