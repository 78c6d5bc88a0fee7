"""One growable cache for backbone, augmenting models and grafts.

transformers' `generate` makes a `DynamicCache` with as many layers as the backbone has. A graft that needs keys and
values, or a state, of its own appends layers; beam reordering, cropping and batch selection then reach them with the
rest. Caches of several batches join into one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from graftlm.errors import GraftError

_SLOTS = "_graft_slots"


def slots(
    cache: Cache, owner: str, count: int, backbone_layers: int, make: Callable[[], CacheLayerMixin] = DynamicLayer
) -> range:
    """The indices of `owner`'s layers in `cache`, appended at the first call.

    Args:
        cache: the cache of one generation.
        owner: who asks, such as the graft's name; the same owner gets the same layers again.
        count: how many layers it needs.
        backbone_layers: how many layers the backbone itself fills (they may not exist yet in a lazy cache).
        make: builds one layer.
    """
    taken: dict[str, range] = cache.__dict__.setdefault(_SLOTS, {})
    if owner not in taken:
        replicate = getattr(cache, "layer_class_to_replicate", None)
        while len(cache.layers) < backbone_layers and replicate is not None:
            cache.layers.append(replicate())
        start = len(cache.layers)
        cache.layers.extend(make() for _ in range(count))
        taken[owner] = range(start, start + count)
    return taken[owner]


class StateLayer(CacheLayerMixin):
    """A cache layer for a recurrent state of fixed size, batch first, such as a state-space model's.

    The state is kept in `keys`, a second one where needed in `values`, so that every batch operation of
    `CacheLayerMixin` applies. A state can't be cropped back in time, and says so.
    """

    is_croppable = False
    is_sliding = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor | None = None, *args: object, **kwargs: object):
        """Replace the state by `key_states` (B, ...), and the second one by `value_states` (B, ...)."""
        if not self.is_initialized:
            self.lazy_initialization(key_states)
        self.keys = key_states
        self.values = key_states.new_empty((key_states.shape[0], 0)) if value_states is None else value_states
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def reset(self) -> None:
        self.keys = self.values = None
        self.is_initialized = False

    def crop(self, tokens_to_remove: int) -> None:
        """Take the last tokens back, which a state can't.

        Raises:
            GraftError: there is a token to take back.
        """
        if tokens_to_remove and self.is_initialized:
            raise GraftError(
                "A graft keeps a state here that can't be taken back by some tokens, as assisted decoding asks: decode "
                "greedily, with beams or by sampling, without an assistant or prompt_lookup_num_tokens."
            )

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self._apply(lambda state: state.index_select(0, beam_idx.to(state.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._apply(lambda state: state.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._apply(lambda state: state[indices.to(state.device), ...])

    def _apply(self, function: Callable[[Tensor], Tensor]) -> None:
        if self.keys is not None and self.values is not None:
            self.keys, self.values = function(self.keys), function(self.values)


def twin(cache: Cache) -> Cache:
    """A cache of its own with the same tensors, for rows to be taken out of."""
    found = copy.copy(cache)
    for name, value in vars(cache).items():
        setattr(found, name, copy.copy(value))
    found.layers = [copy.copy(layer) for layer in cache.layers]
    return found


class JoinError(GraftError):
    """Caches can't be made into one."""


def join(caches: Sequence[Cache], paddings: Sequence[int]) -> Cache:
    """One cache of the rows of several, one after another, whose newest columns stand together.

    The caches given are used up. A layer's class may bring its own way, `join(layers, paddings)`, called on the first.

    Args:
        caches: of the same model and the same owners.
        paddings: how many columns of padding come before each one's; a negative number takes so many away, which are to
            be padding in all of its rows.

    Raises:
        JoinError: they can't be joined, as the owner of a layer has it, or as numbers of columns do not fit.
    """
    first = caches[0]
    if any(_owners(cache) != _owners(first) or len(cache.layers) != len(first.layers) for cache in caches):
        raise JoinError("The caches have layers of several owners: join those that went through the same model alone.")
    joined = copy.copy(first)
    joined.layers = [_joined(layers, paddings) for layers in zip(*(cache.layers for cache in caches), strict=True)]
    return joined


def _owners(cache: Cache) -> dict[str, range]:
    return cache.__dict__.get(_SLOTS, {})


def _joined(layers: Sequence[Any], paddings: Sequence[int]) -> Any:
    first = layers[0]
    if any(type(layer) is not type(first) or layer.is_initialized != first.is_initialized for layer in layers):
        raise JoinError("The caches have other layers: join those that went through the same model alone.")
    if not first.is_initialized:
        return first
    if hasattr(first, "join"):
        return first.join(layers, paddings)
    if type(first) is DynamicLayer:
        return joined_columns(layers, paddings)
    if type(first) is DynamicSlidingWindowLayer:
        return _joined_windows(layers, paddings)
    if type(first) is StateLayer:
        return _with(first, _stacked([layer.keys for layer in layers]), _stacked([layer.values for layer in layers]))
    raise JoinError(f"A {type(first).__name__} can't be joined with another: give its class a join.")


def joined_columns(layers: Sequence[DynamicLayer], paddings: Sequence[int]) -> DynamicLayer:
    """A layer whose columns are the tokens, joined as `join` has it; the other attributes are those of the first."""
    keys = _stacked([_padded(layer.keys, by) for layer, by in zip(layers, paddings, strict=True)])
    return _with(
        layers[0], keys, _stacked([_padded(layer.values, by) for layer, by in zip(layers, paddings, strict=True)])
    )


def _joined_windows(layers: Sequence[DynamicSlidingWindowLayer], paddings: Sequence[int]) -> DynamicSlidingWindowLayer:
    """Layers that keep the last tokens alone: they count all, and keep as many as the longest has."""
    totals = {layer.cumulative_length + by for layer, by in zip(layers, paddings, strict=True)}
    if len(totals) > 1:
        raise JoinError(f"The caches would have {sorted(totals)} columns: give paddings that make them equal.")
    (total,) = totals
    kept = min(total, layers[0].sliding_window - 1)

    def fitted(tensor: Tensor) -> Tensor:
        return _padded(tensor, kept - tensor.shape[-2])

    joined = _with(
        layers[0],
        _stacked([fitted(layer.keys) for layer in layers]),  # type: ignore[arg-type]  # it is initialised
        _stacked([fitted(layer.values) for layer in layers]),  # type: ignore[arg-type]  # it is initialised
    )
    joined.cumulative_length = total
    return joined


def _with(layer: Any, keys: Tensor, values: Tensor) -> Any:
    found = copy.copy(layer)
    found.keys, found.values = keys, values
    return found


def _padded(states: Tensor | None, by: int) -> Tensor:
    """(B, H, S, d) with so many columns of zeros before it, or so many taken away."""
    assert states is not None, "an initialised layer has states"
    return states[..., -by:, :] if by <= 0 else functional.pad(states, (0, 0, by, 0))


def _stacked(states: Sequence[Tensor]) -> Tensor:
    if len({one.shape[1:] for one in states}) > 1:
        shapes = " and ".join(str(tuple(one.shape[1:])) for one in states)
        raise JoinError(
            f"What caches keep of their rows has the shapes {shapes}, but one is expected: keep them apart."
        )
    return states[0] if len(states) == 1 else torch.cat(list(states))
