"""The cache of a block-state model: the keys and values of the last window, and states. Its size is constant.

Unstructured kernels are an exception: they have no state, so the cache keeps all of their inputs.

Shape suffixes: B rows, G slots of the grid.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NoReturn, cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from graftlm.errors import GraftError
from graftlm.models.block_state.grid import StepGrid, WindowGrid, slice_rows, write_rows
from graftlm.models.state_layer import RecurrentCacheLayer


class LayerCache(RecurrentCacheLayer):
    """The cache of one layer.

    Args:
        compileable: whether `generate` may compile decode steps with this layer.

    Attributes:
        tensors: named tensors (B, ...).
        num_columns: number of columns read so far, including padding.
        detach: whether tensors are detached from the graph when they are stored.
    """

    def __init__(self, *, compileable: bool = False) -> None:
        super().__init__()
        self.is_compileable = compileable
        self.tensors: dict[str, Tensor] = {}
        self.num_columns = 0
        self.detach = False

    def store(self, name: str, value: Tensor) -> None:
        """Store a tensor under a name, at which it replaces an earlier one.

        A view of a larger storage is copied, because it would keep the whole storage in memory.

        Args:
            name: name of the tensor in `tensors`.
            value: tensor (B, ...).
        """
        if self.detach:
            value = value.detach()
        is_compiling = torch.compiler.is_compiling()
        if not is_compiling and value.untyped_storage().nbytes() > value.nbytes:
            value = value.clone()
        self.tensors[name] = value
        if not self.is_initialized:
            self.lazy_initialization(value)

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        *args: object,
        **kwargs: object,
    ) -> NoReturn:
        """Raise `GraftError`, since this layer stores named tensors rather than keys and values."""
        raise GraftError(
            "Another model appends keys and values to the cache of a block-state model, which can't store them: pass "
            "each model its own cache."
        )

    def get_seq_length(self) -> int:
        return self.num_columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.num_columns + query_length, 0

    def reset(self) -> None:
        self.tensors = {}
        self.num_columns = 0
        self.is_initialized = False

    def _apply(self, function: Callable[[Tensor], Tensor]) -> None:
        self.tensors = {name: function(value) for name, value in self.tensors.items()}


@dataclass(frozen=True)
class SlidingBuffer:
    """The last entries of a tensor with one entry for each token, which are kept in the cache.

    Args:
        name: name of the entries in the cache.
        span: number of entries.
    """

    name: str
    span: int

    def extend(self, new_BG: Tensor, grid: WindowGrid, cache: LayerCache | None) -> tuple[Tensor, Tensor]:
        """Add the entries of a pass.

        Args:
            new_BG: new entries on the grid (B, G, ...).
            grid: grid of the pass.
            cache: the layer's cache, which is updated; None without a cache.

        Returns:
            The `span` entries before the grid (B, span, ...) and those on it (B, G, ...), both with cached entries.
        """
        past = new_BG.new_zeros(new_BG.shape[0], self.span, *new_BG.shape[2:])
        if cache is None:
            return past, new_BG
        entries = torch.cat([past, new_BG], dim=1)
        if self.name in cache.tensors:
            cached = cache.tensors[self.name].to(new_BG.dtype)
            entries = write_rows(entries, grid.offsets, cached)
        cache.store(self.name, slice_rows(entries, grid.ends, self.span))
        return entries[:, : self.span], entries[:, self.span :]

    def append(self, new_B1: Tensor, grid: StepGrid, cache: LayerCache) -> Tensor:
        """Add the entries of a decode step, and return the last entries (B, span, ...).

        Args:
            new_B1: new entries (B, 1, ...).
            grid: grid of the step.
            cache: the layer's cache, which has entries of earlier passes and is updated.
        """
        cached = cache.tensors[self.name]
        entries = grid.kept(torch.cat([cached[:, 1:], new_B1], dim=1), cached)
        cache.store(self.name, entries)
        return entries


def cache_layers(cache: Cache, count: int, detach: bool) -> list[LayerCache]:
    """Return the first layers of a cache. The layers of an empty cache are first replaced by layers of this module.

    Args:
        cache: cache of one generation.
        count: number of the model's layers.
        detach: whether the layers detach the tensors that they store.

    Raises:
        GraftError: the cache belongs to another model.
    """
    first = cache.layers[:count]
    layers = [layer for layer in first if isinstance(layer, LayerCache)]
    if len(layers) < count:
        if any(getattr(layer, "is_initialized", False) for layer in first):
            raise GraftError(
                "past_key_values contains keys and values of another model, but the cache of a block-state model is "
                "expected: pass past_key_values as this model returned them, or a new DynamicCache()."
            )
        layers = [LayerCache() for _ in range(count)]
        cache.layers[:count] = layers
    for layer in layers:
        layer.detach = detach
    return layers


def compileable_cache(count: int) -> Cache:
    """Return an empty cache with which `generate` compiles decode steps, as with a static cache.

    Args:
        count: number of the model's layers.
    """
    return Cache(layers=[LayerCache(compileable=True) for _ in range(count)])


def cache_tensors(cache: Cache) -> dict[str, Tensor]:
    """Return the contents of a cache as named tensors, for a checkpoint in the middle of a text.

    Args:
        cache: the cache of a block-state model; layers of other models are omitted.

    Returns:
        The tensors of each layer by "LAYER.NAME", and the number of columns that it has read by "LAYER.columns".
    """
    tensors: dict[str, Tensor] = {}
    for number, layer in enumerate(cache.layers):
        if not isinstance(layer, LayerCache):
            continue
        for name, value in layer.tensors.items():
            tensors[f"{number}.{name}"] = value
        tensors[f"{number}.columns"] = torch.tensor(layer.num_columns)
    return tensors


def cache_from_tensors(tensors: Mapping[str, Tensor]) -> Cache:
    """Restore the cache that `cache_tensors` converted to named tensors.

    Args:
        tensors: the result of `cache_tensors`, whose layers are numbered consecutively from 0.

    Returns:
        A new cache with the given tensors.
    """
    cache = DynamicCache()
    numbers = {key.partition(".")[0] for key in tensors}
    cache.layers[:] = [LayerCache() for _ in numbers]
    for key, value in tensors.items():
        number, _, name = key.partition(".")
        layer = cast("LayerCache", cache.layers[int(number)])
        if name == "columns":
            layer.num_columns = int(value)
        else:
            layer.store(name, value)
    return cache
