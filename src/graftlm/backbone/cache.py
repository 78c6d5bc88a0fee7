"""Cache layers for grafts and generation.

transformers' `generate` makes a `DynamicCache` with as many layers as the backbone has. A graft that needs keys and
values, or a state, appends layers of its own, so beam reordering, cropping and batch selection reach them as well.
Caches of several batches can be joined into one.
"""

from __future__ import annotations

import copy
import itertools
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    QuantizedCache,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from graftlm.errors import GraftError
from graftlm.models.state_layer import RecurrentCacheLayer

_SLOTS = "_graft_slots"
_MIN_SPARE_TOKENS = 64
BLOCK_TOKENS = 32  # of the prefix cache
Block = list[tuple[Tensor, Tensor]]  # keys and values (1, H, 32, d) of each layer, the backbone's first


def slots(
    cache: Cache, owner: str, count: int, backbone_layers: int, make: Callable[[], CacheLayerMixin] = DynamicLayer
) -> range:
    """Indices of `owner`'s layers in `cache`; the first call appends them.

    Args:
        cache: the cache of one generation.
        owner: a name; the same owner gets the same layers again.
        count: number of layers that the owner needs.
        backbone_layers: number of layers that the backbone fills; a lazy cache may not have made them yet.
        make: builds one layer.

    Raises GraftError if the cache moves or rounds its layers, which would not reach those of a graft.
    """
    if getattr(cache, "offloading", False) or isinstance(cache, QuantizedCache):
        way = "quantises" if isinstance(cache, QuantizedCache) else "offloads"
        raise GraftError(
            f"The cache {way} its layers, and a graft's own layers in it can't follow: generate with a dynamic or "
            "static cache."
        )
    slots_by_owner: dict[str, range] = cache.__dict__.setdefault(_SLOTS, {})
    if owner not in slots_by_owner:
        replicate = getattr(cache, "layer_class_to_replicate", None)
        while len(cache.layers) < backbone_layers and replicate is not None:
            cache.layers.append(replicate())
        start, compileable = len(cache.layers), cache.is_compileable
        cache.layers.extend(make() for _ in range(count))
        for layer in cache.layers[start:]:
            layer.is_compileable = compileable  # else transformers would take a static cache for a dynamic one
        slots_by_owner[owner] = range(start, start + count)
    return slots_by_owner[owner]


def slots_of(cache: Cache) -> dict[str, range]:
    """The layers of each owner in a cache; `as_cache` takes them for another cache."""
    return dict(vars(cache).get(_SLOTS, {}))


def move_own_layers(source: Cache, target: Cache, backbone_layers: int) -> None:
    """Move all layers behind the backbone's to the end of another cache, with their owners."""
    target.layers += source.layers[backbone_layers:]
    del source.layers[backbone_layers:]
    vars(target)[_SLOTS] = vars(source).pop(_SLOTS, {})


def is_static_layer(layer: Any, *, window: bool = True) -> bool:
    """Whether a cache layer has columns for tokens that are yet to come; with `window=False`, for all tokens."""
    return isinstance(layer, StaticLayer) and (window or not isinstance(layer, StaticSlidingWindowLayer))


def counted_tokens(cache: Cache) -> int | None:
    """The number of tokens in the first filled layer of a graft that `counts_tokens`; None without one."""
    layers: list[Any] = [cache.layers[indices[0]] for indices in slots_of(cache).values()]
    counts = (layer.get_seq_length() for layer in layers if getattr(layer, "counts_tokens", False))
    return next((count for count in counts if count), None)


class StateLayer(RecurrentCacheLayer):
    """A cache layer for a recurrent state of fixed size, batch first, such as a state-space model's.

    The state is stored in `keys`, and an optional second one in `values`.
    """

    def update(self, key_states: Tensor, value_states: Tensor | None = None, *args: object, **kwargs: object):
        """Replace the state by `key_states` (B, ...), and the second one by `value_states` (B, ...)."""
        if not self.is_initialized:
            self.lazy_initialization(key_states)
        self.keys = key_states
        self.values = key_states.new_empty((key_states.shape[0], 0)) if value_states is None else value_states
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def reset(self) -> None:
        self.keys = self.values = None
        self.is_initialized = False

    def _apply(self, function: Callable[[Tensor], Tensor]) -> None:
        if self.keys is not None and self.values is not None:
            self.keys, self.values = function(self.keys), function(self.values)


class _SpareBuffer:
    """States (B, H, S, d) in a larger buffer, so that new ones are appended without a copy.

    Copies of a cache share a buffer, and each may hold a prefix of its states. Only a holder of all states may append;
    any other must copy its prefix to a new buffer. States that a holder has are therefore never overwritten.
    """

    def __init__(self, states: Tensor, more: int) -> None:
        *outer, self.length, width = states.shape
        spare = more + max(_MIN_SPARE_TOKENS, self.length // 4)
        self.buffer = states.new_empty(*outer, self.length + spare, width)
        self.buffer[..., : self.length, :] = states

    def __copy__(self) -> Self:
        return self

    def can_append(self, states: Tensor, more: int) -> bool:
        """Whether `states` are all states of the buffer, and `more` tokens fit behind them."""
        held = self.buffer[..., : self.length, :]
        complete = states.data_ptr() == held.data_ptr() and states.shape == held.shape
        return complete and self.length + more <= self.buffer.shape[-2]

    def append(self, new: Tensor) -> Tensor:
        """Write new states behind the others, and return all."""
        end = self.length + new.shape[-2]
        self.buffer[..., self.length : end, :] = new
        self.length = end
        return self.buffer[..., :end, :]


class GrowingLayer(DynamicLayer):
    """A `DynamicLayer` for generation that appends in place, where transformers' copies all states for every token."""

    _key_buffer: _SpareBuffer | None = None
    _value_buffer: _SpareBuffer | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append keys and values (B, H, T, d) in place, and return all; GraftError where gradients are needed."""
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            raise GraftError("A GrowingLayer is for generation: use a DynamicLayer where gradients are needed.")
        if self.get_seq_length() == 0:
            return super().update(key_states, value_states)
        self._key_buffer, self.keys = _append(self._key_buffer, self.keys, key_states)
        self._value_buffer, self.values = _append(self._value_buffer, self.values, value_states)
        return self.keys, self.values


def _append(buffer: _SpareBuffer | None, states: Any, new: Tensor) -> tuple[_SpareBuffer, Tensor]:
    if buffer is None or not buffer.can_append(states, new.shape[-2]):
        buffer = _SpareBuffer(states, new.shape[-2])
    return buffer, buffer.append(new)


def use_growing_layers(cache: Cache) -> Cache:
    """Make every `DynamicLayer` of an empty cache a `GrowingLayer`; returns the same cache."""
    if getattr(cache, "layer_class_to_replicate", None) is DynamicLayer:
        cache.layer_class_to_replicate = GrowingLayer
    cache.layers = [GrowingLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def clone_cache(cache: Cache) -> Cache:
    """A cache with layers of its own that share the tensors of `cache`; selecting its rows leaves `cache` as it is."""
    clone = copy.copy(cache)
    for name, value in vars(cache).items():
        setattr(clone, name, copy.copy(value))
    clone.layers = [copy.copy(layer) for layer in cache.layers]
    return clone


class JoinError(GraftError):
    """Caches can't be joined."""


def join(caches: Sequence[Cache], paddings: Sequence[int]) -> Cache:
    """Join the rows of several caches into one cache; their newest columns are aligned.

    The given caches must not be used afterwards. A layer class may define `join(layers, paddings)`, which is called on
    the first layer.

    Args:
        caches: caches of the same model and the same owners.
        paddings: columns of padding to add on the left of each cache. A negative number removes columns, which must be
            padding in all rows.

    Raises JoinError if owners, layer types or numbers of columns differ.
    """
    forms = [(slots_of(cache), len(cache.layers)) for cache in caches]
    if any(form != forms[0] for form in forms):
        raise JoinError("The caches have layers of different owners: join only caches of the same grafts.")
    joined = copy.copy(caches[0])
    joined.layers = [_join_layers(layers, paddings) for layers in zip(*(cache.layers for cache in caches), strict=True)]
    return joined


def is_joinable(cache: Cache) -> bool:
    """Whether a cache could be joined now; one whose layers have read nothing yet may lose that later."""
    try:
        join([cache], [0])
    except JoinError:
        return False
    return True


def _join_layers(layers: Sequence[Any], paddings: Sequence[int]) -> Any:
    first = layers[0]
    if any(type(layer) is not type(first) or layer.is_initialized != first.is_initialized for layer in layers):
        raise JoinError("The caches have layers of different types: join only caches of the same model.")
    if not first.is_initialized:
        return first
    if hasattr(first, "join"):
        return first.join(layers, paddings)
    if type(first) in (DynamicLayer, GrowingLayer):
        return join_columns(layers, paddings)
    if type(first) is DynamicSlidingWindowLayer:
        return _join_windows(layers, paddings)
    if type(first) is StateLayer:
        return _join_states(layers, [(layer.keys, layer.values) for layer in layers])
    raise JoinError(f"A {type(first).__name__} can't be joined with another: define join in its class.")


def join_columns(layers: Sequence[DynamicLayer], paddings: Sequence[int]) -> DynamicLayer:
    """Join layers that have one column a token; other attributes are copied from the first layer."""
    pairs = zip(layers, paddings, strict=True)
    return _join_states(layers, [(_pad_left(layer.keys, by), _pad_left(layer.values, by)) for layer, by in pairs])


def _join_windows(layers: Sequence[Any], paddings: Sequence[int]) -> Any:
    """Join layers that count all tokens, and keep only the last ones."""
    totals = {layer.cumulative_length + by for layer, by in zip(layers, paddings, strict=True)}
    if len(totals) > 1:
        raise JoinError(f"The caches would have {sorted(totals)} columns: give paddings that make them equal.")
    (total,) = totals
    kept = min(total, layers[0].sliding_window - 1)
    states = [[_pad_left(s, kept - s.shape[-2]) for s in (layer.keys, layer.values)] for layer in layers]
    joined = _join_states(layers, states)
    joined.cumulative_length = total
    return joined


def _join_states(layers: Sequence[Any], states: Sequence[Sequence[Tensor]]) -> Any:
    """A copy of the first layer with the keys and values of all, concatenated over the rows."""
    joined = copy.copy(layers[0])
    joined.keys, joined.values = (_concatenate(tensors) for tensors in zip(*states, strict=True))
    return joined


def _pad_left(states: Any, by: int) -> Tensor:
    """States (B, H, S, d) with `by` columns of zeros before them; a negative number removes columns."""
    return states[..., -by:, :] if by <= 0 else functional.pad(states, (0, 0, by, 0))


def _concatenate(states: Sequence[Tensor]) -> Tensor:
    if len({tensor.shape[1:] for tensor in states}) > 1:
        shapes = " and ".join(str(tuple(tensor.shape[1:])) for tensor in states)
        raise JoinError(f"The caches' states have the shapes {shapes} per row, but one is expected: keep them apart.")
    return states[0] if len(states) == 1 else torch.cat(list(states))


class PrefixBlocks:
    """Keys and values of texts that were read, for later prompts that begin alike. Not thread-safe.

    A text is cut into blocks of 32 tokens. A block is known by its grafts and by all tokens up to its end, compared by
    value. The blocks that were used last are kept, of `tokens` tokens at most.
    """

    def __init__(self, tokens: int) -> None:
        self.limit = tokens // BLOCK_TOKENS
        self._blocks: OrderedDict[tuple[Hashable, int, tuple[int, ...]], tuple[int, Block]] = OrderedDict()
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        return len(self._blocks)

    def longest(self, owner: Hashable, prompt: Sequence[int]) -> list[Block]:
        """The known blocks at the start of a prompt, but of its last token, which is always read."""
        keys = [key for key in self._walk(owner, prompt[:-1]) if key in self._blocks]
        self._touch(keys)
        return [self._blocks[key][1] for key in keys]

    def add(self, owner: Hashable, text: Sequence[int], layers: Sequence[tuple[Any, int]]) -> None:
        """Keep the blocks of a row, given as each layer and its row there; the last columns are those of `text`."""
        keys = []
        for number, key in enumerate(self._walk(owner, text)):
            if key not in self._blocks:
                block = []
                for layer, row in layers:
                    first = layer.get_seq_length() - len(text) + number * BLOCK_TOKENS
                    columns = (slice(row, row + 1), slice(None), slice(first, first + BLOCK_TOKENS))
                    block.append((layer.keys[columns].clone(), layer.values[columns].clone()))
                self._blocks[key] = (next(self._numbers), block)
            keys.append(key)
        self._touch(keys)
        while len(self._blocks) > self.limit:
            self._blocks.popitem(last=False)

    def keep(self, condition: Callable[[Hashable], bool]) -> None:
        """Forget the blocks of owners for which the condition is false."""
        self._blocks = OrderedDict((key, block) for key, block in self._blocks.items() if condition(key[0]))

    def _walk(self, owner: Hashable, text: Sequence[int]) -> Iterator[tuple[Hashable, int, tuple[int, ...]]]:
        """The keys of a text's blocks: owner, number of the block before, and tokens; up to the first unknown block."""
        before = 0
        for start in range(0, min(len(text) // BLOCK_TOKENS, self.limit) * BLOCK_TOKENS, BLOCK_TOKENS):
            yield (key := (owner, before, tuple(text[start : start + BLOCK_TOKENS])))
            if key not in self._blocks:
                return
            before = self._blocks[key][0]

    def _touch(self, keys: Sequence[tuple[Hashable, int, tuple[int, ...]]]) -> None:
        """Make blocks the newest, earlier ones of a text newer than later ones, which are of no use without them."""
        for key in reversed(keys):
            self._blocks.move_to_end(key)


def as_cache(blocks: Sequence[Block], length: int, config: Any, own: dict[str, range]) -> Cache:
    """A cache of one row for a model with this config, filled with the first `length` tokens of some blocks.

    `own` has the layers of each graft, which follow the backbone's.
    """
    cache = use_growing_layers(DynamicCache(config=config))
    cache.layers += [DynamicLayer() for _ in range(len(blocks[0]) - len(cache.layers))]
    vars(cache)[_SLOTS] = dict(own)
    for index, pairs in enumerate(zip(*blocks, strict=True)):
        keys, values = (torch.cat(parts, dim=-2)[..., :length, :] for parts in zip(*pairs, strict=True))
        cache.update(keys, values, index)
    return cache
