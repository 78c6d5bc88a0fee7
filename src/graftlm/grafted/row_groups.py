"""A batch whose rows have different grafts, and the caches of its row groups.

Rows are padded on the left, so that their newest tokens are in the same column. Consecutive rows with the same grafts
form a row group. A single cache holds the backbone's keys and values of all rows. The grafts of a group read it through
layer views, and keep their own layers in a cache of the group. A group may begin some columns later than the batch: its
grafts do not see the earlier columns.

Shape suffixes: B rows, S columns of the cache.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.cache_utils import Cache, DynamicLayer

from graftlm.backbone import Call
from graftlm.backbone.cache_joining import JoinError, clone_cache, is_joinable, join
from graftlm.errors import GraftError


@dataclass
class RowSpan:
    """The position of a row group in its batch.

    Attributes:
        shared: the batch's cache.
        rows: the rows of the group in the batch.
        offset: the first column of the batch that the group's grafts see.
    """

    shared: Cache
    rows: slice
    offset: int = 0


class LayerView(DynamicLayer):
    """A layer of the batch's cache as the grafts of a row group see it: their rows, from their first column on.

    The states are those of the batch's layer. Assigned keys and values may cover the group's rows only.

    Args:
        span: the position of the group.
        index: the index of the layer in the batch's cache.
    """

    def __init__(self, span: RowSpan, index: int) -> None:
        # DynamicLayer.__init__ is not called, because a view has no states of its own.
        self._span = span
        self._index = index

    @property
    def _layer(self) -> Any:
        return self._span.shared.layers[self._index]

    @property
    def is_initialized(self) -> bool:
        return self._layer.is_initialized

    @property
    def keys(self) -> Tensor | None:
        """The keys (group's rows, key-value heads, columns of the group, head width); None before the first pass."""
        return self._read("keys")

    @keys.setter
    def keys(self, value: Tensor) -> None:
        self._write("keys", value)

    @property
    def values(self) -> Tensor | None:
        """The values (group's rows, key-value heads, columns of the group, head width), as `keys`."""
        return self._read("values")

    @values.setter
    def values(self, value: Tensor) -> None:
        self._write("values", value)

    def _read(self, name: str) -> Tensor | None:
        states = getattr(self._layer, name)
        if states is None:
            return None
        dropped = self._layer.get_seq_length() - states.shape[-2]
        first = max(0, self._span.offset - dropped)
        return states[self._span.rows, :, first:]

    def _write(self, name: str, value: Tensor) -> None:
        """Write keys or values of the group's rows, or of all rows, to the batch's layer."""
        states = getattr(self._layer, name)
        if value.shape != states.shape:
            # The value covers some rows or columns; the others keep their states.
            first = states.shape[-2] - value.shape[-2]
            merged = states.clone()
            merged[self._span.rows, :, first:] = value
            value = merged
        setattr(self._layer, name, value)

    def get_seq_length(self) -> int:
        return max(0, self._layer.get_seq_length() - self._span.offset)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        length, start = self._layer.get_mask_sizes(query_length)
        stop = start + length - self._span.offset
        first = max(0, start - self._span.offset)
        return stop - first, first

    def update(self, *args: object, **kwargs: object) -> Any:
        """Raise `GraftError`, because only the backbone appends to its own layers."""
        raise GraftError(
            f"A graft appends to layer {self._index} of the cache, but only the backbone may fill it: let the graft "
            "append to layers of its own, which graftlm.backbone.cache.slots returns."
        )

    def batch_select_indices(self, indices: Tensor) -> None:
        """Do nothing: the batch selects the rows of the shared cache."""

    def join(self, layers: Sequence[Any], paddings: Sequence[int]) -> LayerView:
        """Return this view.

        `RowGroup.replace_cache` replaces it by a view of the joined rows.

        Args:
            layers: not used.
            paddings: not used.
        """
        return self


class RowGroupCache(Cache):
    """The cache that the grafts of a row group receive: first layer views, then the grafts' own layers."""


@dataclass
class RowGroup:
    """Consecutive rows that have the same grafts.

    Attributes:
        owner: the grafts whose taps act on these rows.
        size: number of rows.
        cache: the cache as the grafts see it.
        span: the group's position in the batch.
        separate: whether the grafts' own layers can't be joined with those of other groups.
    """

    owner: Hashable
    size: int
    cache: RowGroupCache
    span: RowSpan
    separate: bool = False

    @classmethod
    def create(cls, owner: Hashable, size: int, shared: Cache, layers: int) -> RowGroup:
        """Create a group of new rows, whose cache has only layer views. `MixedBatch` sets its position.

        Args:
            owner: the grafts whose taps act on the rows.
            size: number of rows.
            shared: the batch's cache.
            layers: number of layers of the backbone.
        """
        span = RowSpan(shared, slice(0, size))
        views: list[Any] = [LayerView(span, index) for index in range(layers)]
        return cls(owner, size, RowGroupCache(layers=views), span)

    def replace_cache(self, cache: Cache) -> None:
        """Use another `RowGroupCache`, whose layer views are replaced in place by views of this group's rows."""
        assert isinstance(cache, RowGroupCache)
        self.cache = cache
        for index, layer in enumerate(cache.layers):
            if isinstance(layer, LayerView):
                cache.layers[index] = LayerView(self.span, index)

    def select(self, rows: list[int]) -> None:
        """Keep only some rows of the group.

        Args:
            rows: the different indices in the group of the rows to keep, in ascending order.
        """
        if len(rows) < self.size:
            self.cache.batch_select_indices(torch.tensor(rows))
            self.size = len(rows)

    def single_row(self, row: int) -> RowGroup:
        """Return a new group with a copy of a single row. This group does not change.

        Args:
            row: index of the row in this group.
        """
        group = RowGroup(
            owner=self.owner,
            size=self.size,
            cache=self.cache,
            span=copy.copy(self.span),
            separate=self.separate,
        )
        group.replace_cache(clone_cache(self.cache))
        group.select([row])
        return group

    def absorb(self, other: RowGroup, columns: int) -> bool:
        """Append another group's rows, if both have the same grafts and the grafts' own layers can be joined.

        Args:
            other: the group whose rows are appended.
            columns: number of columns of the batch, which is the same for both groups.

        Returns:
            Whether the rows were appended. If not, this group does not change.
        """
        if self.owner != other.owner or self.separate or other.separate:
            return False
        length = columns - self.span.offset
        other_length = columns - other.span.offset
        longest = max(length, other_length)
        try:
            joined = join([self.cache, other.cache], [longest - length, longest - other_length])
        except JoinError:
            return False
        self.span.offset = columns - longest
        self.size += other.size
        self.replace_cache(joined)
        return True


@dataclass
class MixedBatch:
    """Rows that go through the backbone together.

    Attributes:
        cache: the backbone's keys and values of all rows.
        mask: (B, S), 1 for real tokens, which are the last columns of each row.
        lengths: number of real tokens of each row. The host knows them, and so reads no mask on a device.
        groups: the row groups, in the order of the rows.
        tags: any object for each row, which moves with the row.
        separate: whether the backbone's layers can't be joined with those of another batch.
        calls: the `Call` of each group in the last pass.
    """

    cache: Cache
    mask: Tensor
    lengths: list[int]
    groups: list[RowGroup]
    tags: list[Any] = field(default_factory=list)
    separate: bool = False
    calls: list[Call] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._update_spans()

    def __len__(self) -> int:
        return len(self.tags)

    @property
    def has_padding(self) -> bool:
        """Whether a row has columns of padding."""
        columns = self.mask.shape[1]
        return any(length < columns for length in self.lengths)

    @torch.inference_mode()
    def join(self, other: MixedBatch) -> bool:
        """Append the rows of another batch, if the caches can be joined.

        Rows of the same grafts become neighbors, so the order of all rows may change; `tags` shows the new order. An
        empty batch absorbs no rows, because its cache still has the states of the rows that left.

        Args:
            other: the other batch of the same model, which must not be used again if its rows were appended.

        Returns:
            Whether the rows were appended.
        """
        if self.separate or other.separate or not self.tags:
            return False
        width = max(self.mask.shape[1], other.mask.shape[1])
        padding = width - self.mask.shape[1]
        other_padding = width - other.mask.shape[1]
        try:
            self.cache = join([self.cache, other.cache], [padding, other_padding])
        except JoinError:
            self.separate = True
            return False
        self._pad(padding)
        other._pad(other_padding)
        self.mask = torch.cat([self.mask, other.mask])
        self.lengths += other.lengths
        self.tags += other.tags
        self._merge(other.groups)
        return True

    def _pad(self, columns: int) -> None:
        """Insert columns of padding on the left."""
        self.mask = functional.pad(self.mask, (columns, 0))
        for group in self.groups:
            group.span.offset += columns

    def _merge(self, new_groups: Sequence[RowGroup]) -> None:
        """Append groups, or merge them into groups of the same owner; then reorder the rows."""
        rows_of_group = [list(rows) for rows in _rows_of([*self.groups, *new_groups])]
        new_rows = rows_of_group[len(self.groups) :]
        order = rows_of_group[: len(self.groups)]
        for group, rows in zip(new_groups, new_rows, strict=True):
            number = self._absorb(group)
            if number is None:
                self.groups.append(group)
                order.append(rows)
            else:
                order[number] += rows
        self._select([row for rows in order for row in rows])

    def _absorb(self, group: RowGroup) -> int | None:
        """Append a group's rows to a group of this batch, and return its index; None if no group can absorb them."""
        columns = self.mask.shape[1]
        for number, candidate in enumerate(self.groups):
            if candidate.absorb(group, columns):
                return number
        return None

    @torch.inference_mode()
    def keep(self, rows: Sequence[int]) -> None:
        """Keep only some rows in their present order, and drop the columns that are padding in all of them.

        Args:
            rows: the different indices of the rows to keep, in any order.
        """
        if len(rows) == len(self):
            return
        if not rows:
            self.groups = []
            self.tags = []
            self.lengths = []
            self.mask = self.mask[:0]
            return
        kept = set(rows)
        groups = []
        for group, rows_of_group in zip(self.groups, _rows_of(self.groups), strict=True):
            kept_of_group = [row - rows_of_group.start for row in rows_of_group if row in kept]
            if kept_of_group:
                group.select(kept_of_group)
                groups.append(group)
        self.groups = groups
        self._select(sorted(kept))
        self._trim()

    def layers_of(self, row: int) -> list[tuple[Any, int]]:
        """Return the cache layers that store a row, each with the row's index in that layer.

        Args:
            row: index of the row in the batch.

        Returns:
            The backbone's layers, then those of the grafts of the row's group.
        """
        group = next(group for group in self.groups if row < group.span.rows.stop)
        row_of_group = row - group.span.rows.start
        backbone_layers = [(layer, row) for layer in self.cache.layers]
        graft_layers = [(layer, row_of_group) for layer in group.cache.layers[len(backbone_layers) :]]
        return backbone_layers + graft_layers

    def split(self, number: int) -> None:
        """Replace a group by a group for each of its rows.

        Args:
            number: index of the group in `groups`.
        """
        group = self.groups[number]
        single_rows = [group.single_row(row) for row in range(group.size)]
        self.groups[number : number + 1] = single_rows
        self._update_spans()

    def _select(self, rows: list[int]) -> None:
        """Select and reorder the rows of cache, mask and tags, and update the spans."""
        if rows != list(range(len(self.tags))):
            self.cache.batch_select_indices(torch.tensor(rows))
            self.mask = self.mask[rows]
            self.lengths = [self.lengths[row] for row in rows]
            self.tags = [self.tags[row] for row in rows]
        self._update_spans()

    def _update_spans(self) -> None:
        """Make the span of each group refer to the batch's cache and to the group's rows in it."""
        for group, rows in zip(self.groups, _rows_of(self.groups), strict=True):
            group.span.shared = self.cache
            group.span.rows = slice(rows.start, rows.stop)

    def _trim(self) -> None:
        """Drop the columns that are padding in all rows, except those that a separate group still has."""
        if not self.tags or self.separate:
            return
        columns = self._droppable_columns()
        if columns <= 0:
            return
        try:
            self.cache = join([self.cache], [-columns])
        except JoinError:
            self.separate = True
            return
        self.mask = self.mask[:, columns:]
        for group in self.groups:
            group.span.offset -= columns
            if group.span.offset < 0:
                group.replace_cache(join([group.cache], [group.span.offset]))
                group.span.offset = 0
        self._update_spans()

    def _droppable_columns(self) -> int:
        """Return how many columns can be dropped; groups whose layers can't follow become separate."""
        columns = self.mask.shape[1] - max(self.lengths)
        for group in self.groups:
            if group.span.offset < columns and not is_joinable(group.cache):
                group.separate = True
        offsets = [group.span.offset for group in self.groups if group.separate]
        return min([columns, *offsets])


def _rows_of(groups: Iterable[RowGroup]) -> list[range]:
    """Return each group's rows in a batch that consists of these groups in this order."""
    ranges = []
    first = 0
    for group in groups:
        ranges.append(range(first, first + group.size))
        first += group.size
    return ranges
