"""Join the caches of several batches into one cache.

Shape suffixes: B rows, H heads, S columns.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from graftlm.backbone.cache import StateLayer, slots_of
from graftlm.backbone.growing_layer import GrowingLayer
from graftlm.errors import GraftError


class JoinError(GraftError):
    """Caches can't be joined."""


def clone_cache(cache: Cache) -> Cache:
    """Return a cache with its own layers that shares the tensors of `cache`.

    Selecting rows of the clone does not change `cache`.
    """
    clone = copy.copy(cache)
    for name, value in vars(cache).items():
        setattr(clone, name, copy.copy(value))
    clone.layers = [copy.copy(layer) for layer in cache.layers]
    return clone


def join(caches: Sequence[Cache], paddings: Sequence[int]) -> Cache:
    """Join the rows of several caches into one cache; their newest columns are aligned.

    The given caches must not be used afterwards. A layer class may define `join(layers, paddings)`, which is called on
    the first layer.

    Args:
        caches: caches of the same model and the same owners, at least one.
        paddings: columns of padding to add on the left of each cache. A negative number removes columns, which must be
            padding in all rows.

    Raises:
        JoinError: the owners or layer types differ, some layers are empty while others are not, the numbers of columns
            differ after padding, or a layer class can't be joined.
    """
    first = caches[0]
    for cache in caches:
        if len(cache.layers) != len(first.layers):
            raise JoinError(
                f"The caches have {len(first.layers)} and {len(cache.layers)} layers, but equal numbers are expected: "
                "join only caches of the same model with the same grafts."
            )
        if slots_of(cache) != slots_of(first):
            raise JoinError(
                "The caches have layers of different grafts, but the same grafts are expected: join them separately."
            )
    joined = copy.copy(first)
    joined.layers = []
    for index in range(len(first.layers)):
        layers = [cache.layers[index] for cache in caches]
        joined.layers.append(_join_layers(layers, paddings))
    return joined


def is_joinable(cache: Cache) -> bool:
    """Return whether a cache can be joined now. That can change later if some layers are still empty."""
    try:
        join([cache], [0])
    except JoinError:
        return False
    return True


def _join_layers(layers: Sequence[Any], paddings: Sequence[int]) -> Any:
    """Return a layer with the rows of all given layers, which have the same index in their caches."""
    first = layers[0]
    for layer in layers:
        if type(layer) is not type(first):
            raise JoinError(
                f"The caches have layers of the types {type(first).__name__} and {type(layer).__name__}, but one type "
                "is expected: join only caches of the same model."
            )
        if layer.is_initialized != first.is_initialized:
            raise JoinError("One cache has an empty layer that is filled in another: run the same layers for all rows.")
    if not first.is_initialized:
        return first
    if hasattr(first, "join"):
        return first.join(layers, paddings)
    if type(first) in (DynamicLayer, GrowingLayer):
        return join_columns(layers, paddings)
    if type(first) is DynamicSlidingWindowLayer:
        return _join_windows(layers, paddings)
    if type(first) is StateLayer:
        return _join_states(
            layers,
            keys=[layer.keys for layer in layers],
            values=[layer.values for layer in layers],
        )
    raise JoinError(f"A {type(first).__name__} can't be joined with another: define join in its class.")


def join_columns(layers: Sequence[DynamicLayer], paddings: Sequence[int]) -> DynamicLayer:
    """Join layers that have one column for each token; other attributes are copied from the first layer.

    Args:
        layers: the initialized layers of one index in all caches.
        paddings: columns of padding to add on the left of each layer; a negative number removes columns.

    Raises:
        JoinError: the numbers of columns differ after padding.
    """
    keys = []
    values = []
    for layer, padding in zip(layers, paddings, strict=True):
        keys.append(_pad_left(layer.keys, padding))
        values.append(_pad_left(layer.values, padding))
    return _join_states(layers, keys, values)


def _join_windows(layers: Sequence[Any], paddings: Sequence[int]) -> Any:
    """Join layers that count all tokens, and keep only the last ones."""
    totals = {layer.cumulative_length + padding for layer, padding in zip(layers, paddings, strict=True)}
    if len(totals) > 1:
        listed = " and ".join(str(total) for total in sorted(totals))
        raise JoinError(f"The caches would have {listed} columns: give paddings that make the numbers equal.")
    (total,) = totals
    kept = min(total, layers[0].sliding_window - 1)
    keys = []
    values = []
    for layer in layers:
        keys.append(_pad_left(layer.keys, kept - layer.keys.shape[-2]))
        values.append(_pad_left(layer.values, kept - layer.values.shape[-2]))
    joined = _join_states(layers, keys, values)
    joined.cumulative_length = total
    return joined


def _join_states(layers: Sequence[Any], keys: Sequence[Tensor], values: Sequence[Tensor]) -> Any:
    """Return a copy of the first layer with keys and values that are concatenated over the rows."""
    joined = copy.copy(layers[0])
    joined.keys = _concatenate(keys)
    joined.values = _concatenate(values)
    return joined


def _pad_left(states: Any, columns: int) -> Tensor:
    """Insert columns of zeros before states (B, H, S, d); a negative number removes columns."""
    if columns <= 0:
        return states[..., -columns:, :]
    return functional.pad(states, (0, 0, columns, 0))


def _concatenate(states: Sequence[Tensor]) -> Tensor:
    """Concatenate states (B, ...) over the rows."""
    if len(states) == 1:
        return states[0]
    shapes = {tensor.shape[1:] for tensor in states}
    if len(shapes) > 1:
        listed = " and ".join(str(tuple(tensor.shape[1:])) for tensor in states)
        raise JoinError(
            f"The caches' states have the shapes {listed} per row, but equal shapes are expected: keep them separate."
        )
    return torch.cat(list(states))
