"""Static memory for compiled decode steps: keys and values, mask and new tokens, by bucket of rows and columns.

Every bucket uses the beginning of the same memory, so that its addresses stay the same until a larger bucket needs
more.

Shape suffixes: B rows and C columns of a bucket, of which b rows and S columns are those of the batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, StaticLayer

from graftlm.backbone.cache import set_slots

_MIN_COLUMNS = 256


class Bucket(NamedTuple):
    """The size of a compiled step: rows, and columns of its cache."""

    rows: int
    columns: int


def bucket_of(rows: int, columns: int, most: Bucket) -> Bucket | None:
    """Return the smallest bucket for a batch; None if the batch is larger than `most`.

    Args:
        rows: rows of the batch.
        columns: columns of the batch, with that of the new token.
        most: the largest bucket.
    """
    if rows > most.rows or columns > most.columns:
        return None
    return Bucket(
        rows=min(_doubled(1, rows), most.rows),
        columns=min(_doubled(_MIN_COLUMNS, columns), most.columns),
    )


def _doubled(size: int, needed: int) -> int:
    """Double a size until it suffices."""
    while size < needed:
        size *= 2
    return size


class LayerWithStates(Protocol):
    """A layer of a cache with keys and values (b, H, S, d)."""

    keys: Tensor
    values: Tensor


def layers_with_states(cache: Cache) -> list[LayerWithStates]:
    """Return the layers of a cache that has one column for each token in all of them."""
    return cast("list[LayerWithStates]", list(cache.layers))


class BucketLayer(StaticLayer):
    """A layer of a cache whose columns are those of a bucket; new tokens are written to one of them.

    Args:
        keys: (B, H, C, d).
        values: (B, H, C, d).
        column: (), index of the column that is written next. The layers of a cache share it, and never change it.
    """

    keys: Tensor
    values: Tensor

    def __init__(self, keys: Tensor, values: Tensor, column: Tensor) -> None:
        # StaticLayer.__init__ is not called, because it makes a counter of its own.
        self.keys = keys
        self.values = values
        self.cumulative_length = column
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write the keys and values (B, H, 1, d) of a new token, and return those of all columns.

        Args:
            key_states: keys of one new token.
            value_states: values of this token.
            args: not used.
            kwargs: not used.
        """
        column = self.cumulative_length.reshape(1)
        self.keys.index_copy_(2, column, key_states)
        self.values.index_copy_(2, column, value_states)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.keys.shape[-2], 0  # read from the tensor, because a number would be a constant of compiled code


class _StepCache(Cache):
    """The cache of a compiled step."""

    @property
    def is_compileable(self) -> bool:
        return True  # layers of grafts don't change how the backbone makes its masks


class StaticColumns(NamedTuple):
    """The columns of a bucket, in static memory.

    Attributes:
        mask: (B, C), 1 for real tokens.
        newest: (), index of the column of the new tokens.
    """

    mask: Tensor
    newest: Tensor


@dataclass
class StepInputs:
    """What a compiled step reads.

    Attributes:
        ids: (B, 1), the new token of each row.
        columns: the columns of the cache; None if the backbone's layers have a state instead, and stay where they are.
        cache: the backbone's keys and values, in layers of the type `BucketLayer`, and after them the layers of grafts.
            Without `columns`, the backbone's own layers.
    """

    ids: Tensor
    columns: StaticColumns | None
    cache: Cache

    @classmethod
    def in_place(cls, rows: int, cache: Cache, device: torch.device) -> StepInputs:
        """Return inputs with the layers of a cache as they are.

        Args:
            rows: number of rows of the cache.
            cache: the cache of the backbone.
            device: device of the model.
        """
        ids = torch.zeros(rows, 1, dtype=torch.long, device=device)
        return cls(ids=_marked(ids, 0), columns=None, cache=_StepCache(layers=list(cache.layers)))

    @property
    def layers(self) -> list[BucketLayer]:
        """The layers of the backbone in static memory."""
        return [layer for layer in self.cache.layers if isinstance(layer, BucketLayer)]

    @property
    def own_layers(self) -> list[CacheLayerMixin]:
        """The layers that stay where they are: those of grafts, and without `columns` the backbone's."""
        return cast("list[CacheLayerMixin]", self.cache.layers[len(self.layers) :])

    def add_layers(self, layers: Sequence[CacheLayerMixin], slots_by_owner: Mapping[str, range]) -> None:
        """Append the layers of grafts to the cache.

        Args:
            layers: layers with states (B, ...). A step may make them longer, or replace their states.
            slots_by_owner: the indices of each owner's layers in the cache.
        """
        for layer in layers:
            if layer.keys is not None and layer.values is not None:
                # Code is compiled for strides, too. Tensors that are contiguous stay the same objects.
                layer.keys = layer.keys.contiguous()
                layer.values = layer.values.contiguous()
        self.cache.layers += layers
        set_slots(self.cache, slots_by_owner)

    def mark_own_layers(self) -> None:
        """Mark the sizes of the layers of grafts that change, so that code for one size is compiled for others too."""
        for layer in self.own_layers:
            dims = (0, 2) if isinstance(layer, DynamicLayer) else (0,)
            for states in (layer.keys, layer.values):
                if states is not None:
                    _marked(states, *dims)


class StepBuffers:
    """The memory of compiled steps. It grows with the largest bucket, and is freed together with this object.

    Attributes:
        moves: how often the memory has moved to new addresses.
    """

    def __init__(self) -> None:
        self.moves = 0
        self._states: defaultdict[tuple[int, str], _Memory] = defaultdict(_Memory)
        self._ids = _Memory()
        self._mask = _Memory()
        self._column: Tensor | None = None

    def load(self, bucket: Bucket, cache: Cache, mask: Tensor) -> StepInputs:
        """Copy a batch to the memory.

        Columns and rows beyond those of the batch become zero, since a masked value that is not finite would still
        spoil the sums in which it has the weight 0.

        Args:
            bucket: a bucket that is large enough for the batch.
            cache: the cache of the batch. Keys and values (b, H, S, d) of its layers become views of the memory. They
                may have been such views before, for another bucket.
            mask: (b, S), 1 for real tokens.
        """
        if self._column is None:
            self._column = torch.zeros((), dtype=torch.long, device=mask.device)
        column = self._column
        given = enumerate(layers_with_states(cache))
        layers = [self._load_layer(bucket, index, layer, column) for index, layer in given]
        ids = self._view(self._ids, (bucket.rows, 1), mask).zero_()
        mask_BC = _filled(self._view(self._mask, bucket, mask), mask, dim=1)
        return StepInputs(
            ids=_marked(ids, 0),
            columns=StaticColumns(mask=_marked(mask_BC, 0, 1), newest=column),
            cache=_StepCache(layers=list(layers)),
        )

    def holds(self, cache: Cache) -> bool:
        """Return whether the keys or values of a cache lie in the memory."""
        for index, layer in enumerate(layers_with_states(cache)):
            if self._states[index, "keys"].has(layer.keys) or self._states[index, "values"].has(layer.values):
                return True
        return False

    def _load_layer(self, bucket: Bucket, index: int, layer: LayerWithStates, column: Tensor) -> BucketLayer:
        """Copy a layer. If memory lacks, it still has its keys and values."""
        views: dict[str, Tensor] = {}
        for name in ("keys", "values"):
            memory = self._states[index, name]
            states = memory.apart(getattr(layer, name))
            rows, heads, columns, width = states.shape
            view = self._view(memory, (bucket.rows, heads, bucket.columns, width), states)
            _filled(view, states, dim=2)
            setattr(layer, name, view[:rows, :, :columns])
            views[name] = _marked(view, 0, 2)
        return BucketLayer(views["keys"], views["values"], column)

    def _view(self, memory: _Memory, shape: Sequence[int], like: Tensor) -> Tensor:
        self.moves += memory.grow(shape, like)
        return memory.view(shape)


class _Memory:
    """A piece of memory that is viewed in several shapes."""

    def __init__(self) -> None:
        self._flat: Tensor | None = None

    def grow(self, shape: Sequence[int], like: Tensor) -> bool:
        """Allocate new memory if there is too little for a shape. Returns whether that was necessary."""
        needed = torch.Size(shape).numel()
        if self._flat is not None and self._flat.numel() >= needed:
            return False
        self._flat = None  # freed first, unless the batch still reads it
        self._flat = like.new_zeros(needed)
        return True

    def view(self, shape: Sequence[int]) -> Tensor:
        assert self._flat is not None
        return self._flat[: torch.Size(shape).numel()].view(tuple(shape))

    def has(self, tensor: Tensor | None) -> bool:
        """Return whether a tensor lies in this memory."""
        if tensor is None or self._flat is None:
            return False
        return tensor.untyped_storage().data_ptr() == self._flat.untyped_storage().data_ptr()

    def apart(self, source: Tensor) -> Tensor:
        """Return a tensor, or a copy if it lies in this memory, where it would be overwritten while it is read."""
        return source.clone() if self.has(source) else source


def _filled(view: Tensor, source: Tensor, dim: int) -> Tensor:
    """Copy the rows and columns of a batch to the beginning of a view, and set the others to zero."""
    rows, columns = len(source), source.shape[dim]
    own = view[:rows].narrow(dim, 0, columns)
    own.copy_(source)
    view[rows:].zero_()
    view[:rows].narrow(dim, columns, view.shape[dim] - columns).zero_()
    return view


def _marked(tensor: Tensor, *dims: int) -> Tensor:
    """Mark dimensions as those of the bucket, so that code for one bucket is compiled for others too."""
    for dim in dims:
        torch._dynamo.maybe_mark_dynamic(tensor, dim)
    return tensor
