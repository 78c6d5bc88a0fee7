"""The cache of a block-state model: the last window of keys and values, and states. Its size is constant.

Unstructured kernels are the exception: they have no state, so the cache keeps all of their inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from graftlm.errors import GraftError
from graftlm.models.state_layer import RecurrentCacheLayer


class LayerCache(RecurrentCacheLayer):
    """Named tensors of one layer, batch first, and the number of columns read so far.

    With `detach`, stored tensors have no gradients.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tensors: dict[str, Tensor] = {}
        self.num_columns = 0
        self.detach = False

    def store(self, name: str, value: Tensor) -> None:
        """Store a tensor (B, ...), without the larger storage that it may be a view of."""
        value = value.detach() if self.detach else value
        if not torch.compiler.is_compiling() and value.untyped_storage().nbytes() > value.nbytes:
            value = value.clone()
        self.tensors[name] = value
        if not self.is_initialized:
            self.lazy_initialization(value)

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object):
        """Raise `GraftError`: this layer stores named tensors."""
        raise GraftError("A block-state model keeps states, not keys and values for others: give each model a cache.")

    def get_seq_length(self) -> int:
        return self.num_columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.num_columns + query_length, 0

    def reset(self) -> None:
        self.tensors, self.num_columns, self.is_initialized = {}, 0, False

    def _apply(self, function: Callable[[Tensor], Tensor]) -> None:
        self.tensors = {name: function(value) for name, value in self.tensors.items()}


def cache_layers(cache: Cache, count: int, detach: bool) -> list[LayerCache]:
    """The first `count` layers of a cache, with `detach` set; those of an empty cache are replaced by our own.

    Raises GraftError if the cache belongs to another model.
    """
    layers = [layer for layer in cache.layers[:count] if isinstance(layer, LayerCache)]
    if len(layers) < count:
        if any(getattr(layer, "is_initialized", False) for layer in cache.layers[:count]):
            raise GraftError(
                "This cache holds keys and values of another model: pass past_key_values as this model returned them, "
                "or a new DynamicCache()."
            )
        cache.layers[:count] = layers = [LayerCache() for _ in range(count)]
    for layer in layers:
        layer.detach = detach
    return layers


def cache_tensors(cache: Cache) -> dict[str, Tensor]:
    """All contents of a cache as named tensors, for a checkpoint in the middle of a text."""
    tensors: dict[str, Tensor] = {}
    for number, layer in enumerate(cache.layers):
        if isinstance(layer, LayerCache):
            tensors |= {f"{number}.{name}": value for name, value in layer.tensors.items()}
            tensors[f"{number}.columns"] = torch.tensor(layer.num_columns)
    return tensors


def cache_from_tensors(tensors: dict[str, Tensor]) -> Cache:
    """The cache that `cache_tensors` converted to tensors."""
    cache = DynamicCache()
    cache.layers[:] = [LayerCache() for _ in {key.partition(".")[0] for key in tensors}]
    for key, value in tensors.items():
        number, _, name = key.partition(".")
        layer = cast("LayerCache", cache.layers[int(number)])
        if name == "columns":
            layer.num_columns = int(value)
        else:
            layer.store(name, value)
    return cache
