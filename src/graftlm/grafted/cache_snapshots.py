"""Restore caches after a pass that failed halfway."""

from __future__ import annotations

import copy
from collections.abc import Callable

from torch import Tensor
from transformers.cache_utils import Cache

from graftlm.grafted.row_groups import LayerView


def snapshot(cache: Cache) -> Callable[[], None]:
    """Return a function that restores the current state of a cache.

    Args:
        cache: a cache whose layers never write to their tensors in place. Its layer views have no state of their own.
    """
    own = {name: copy.copy(value) for name, value in vars(cache).items()}
    states = [(layer, _state(layer)) for layer in cache.layers if not isinstance(layer, LayerView)]

    def restore() -> None:
        vars(cache).clear()
        vars(cache).update(own)
        for layer, values in states:
            vars(layer).clear()
            vars(layer).update(values)

    return restore


def _state(layer: object) -> dict[str, object]:
    """Return the attributes of a cache layer; everything except tensors is copied."""
    return {name: value if isinstance(value, Tensor) else copy.copy(value) for name, value in vars(layer).items()}
