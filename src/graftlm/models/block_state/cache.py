"""The cache of a block-state model: the last window of keys and values, and states. Its size is constant.

Unstructured kernels are the exception: they have no state, so the cache keeps all of their inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from graftlm.errors import GraftError


class LayerCache(CacheLayerMixin):
    """Named tensors of one layer, batch first, and the number of columns read so far.

    Beam reordering and batch selection apply to every tensor. With `detach`, stored tensors have no gradients.
    """

    is_croppable = False
    is_sliding = False

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

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object):
        """Raise `GraftError`: this layer stores named tensors."""
        raise GraftError("A block-state model keeps states, not keys and values for others: give each model a cache.")

    def get_seq_length(self) -> int:
        return self.num_columns

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.num_columns + query_length, 0

    def reset(self) -> None:
        self.tensors, self.num_columns, self.is_initialized = {}, 0, False

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens, which a state can't.

        Raises:
            GraftError: there is a token to remove.
        """
        if tokens_to_remove and self.is_initialized:
            raise GraftError(
                "A block-state model can't take tokens back, as assisted decoding asks: decode greedily, with beams or "
                "by sampling, without an assistant or prompt_lookup_num_tokens."
            )

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self._apply(lambda value: value.index_select(0, beam_idx.to(value.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._apply(lambda value: value.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._apply(lambda value: value[indices.to(value.device), ...])

    def _apply(self, function: Callable[[Tensor], Tensor]) -> None:
        self.tensors = {name: function(value) for name, value in self.tensors.items()}


def cache_layers(cache: Cache, count: int, detach: bool) -> list[LayerCache]:
    """The first `count` layers of a cache, with `detach` set; those of an empty cache are replaced by our own.

    Raises:
        GraftError: the cache belongs to another model.
    """
    layers = cache.layers[:count]
    if not (len(layers) == count and all(isinstance(layer, LayerCache) for layer in layers)):
        if any(getattr(layer, "is_initialized", False) for layer in layers):
            raise GraftError(
                "This cache holds keys and values of another model: pass past_key_values as this model returned them, "
                "or a new DynamicCache()."
            )
        cache.layers[:count] = [LayerCache() for _ in range(count)]
    layers = cast("list[LayerCache]", cache.layers[:count])
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
    layers: dict[int, LayerCache] = {}
    for key, value in tensors.items():
        number, name = key.split(".", 1)
        layer = layers.setdefault(int(number), LayerCache())
        if name == "columns":
            layer.num_columns = int(value)
        else:
            layer.store(name, value)
    cache = DynamicCache()
    cache.layers[:] = [layers[number] for number in sorted(layers)]
    return cache
