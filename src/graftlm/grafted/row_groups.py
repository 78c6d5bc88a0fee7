"""A batch whose rows carry different grafts, and the caches of its row groups.

Rows are padded on the left, so that their newest tokens are in one column. Consecutive rows with the same grafts form a
row group. One cache holds the backbone's keys and values of all rows. A group's grafts read it through layer views, and
keep their own layers in a cache of the group. A group may begin some columns later than the batch: its grafts do not
see the earlier columns. Shape suffixes: B rows, S columns of the cache.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.cache_utils import Cache, DynamicLayer

from graftlm.backbone import Call
from graftlm.backbone.cache import JoinError, clone_cache, is_joinable, join
from graftlm.errors import GraftError


@dataclass
class RowSpan:
    """The position of a row group: its rows, and its first column in the batch's cache."""

    shared: Cache
    rows: slice
    offset: int = 0


class LayerView(DynamicLayer):
    """A layer of the batch's cache as the grafts of one row group see it: their rows, from their first column on."""

    def __init__(self, span: RowSpan, index: int) -> None:
        self._span, self._index = span, index  # a view has no states, so that DynamicLayer.__init__ is not called

    @property
    def _layer(self) -> Any:
        return self._span.shared.layers[self._index]

    @property
    def is_initialized(self) -> bool:
        return self._layer.is_initialized

    def _read(self, name: str) -> Tensor | None:
        states = getattr(self._layer, name)
        if states is None:
            return None
        hidden = self._span.offset - (self._layer.get_seq_length() - states.shape[-2])
        return states[self._span.rows, :, max(0, hidden) :]

    def _write(self, name: str, value: Tensor) -> None:
        states = getattr(self._layer, name)
        if value.shape != states.shape:  # the value covers some rows or columns; the others keep their states
            merged = states.clone()
            merged[self._span.rows, :, states.shape[-2] - value.shape[-2] :] = value
            value = merged
        setattr(self._layer, name, value)

    keys = property(lambda self: self._read("keys"), lambda self, value: self._write("keys", value))
    values = property(lambda self: self._read("values"), lambda self, value: self._write("values", value))

    def get_seq_length(self) -> int:
        return max(0, self._layer.get_seq_length() - self._span.offset)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        length, start = self._layer.get_mask_sizes(query_length)
        first = max(0, start - self._span.offset)
        return start + length - self._span.offset - first, first

    def update(self, *args: Any, **kwargs: Any) -> Any:
        """Raise: only the backbone appends to its own layers."""
        raise GraftError("A graft adds to a layer of the backbone's cache, which is the backbone's to fill: use slots.")

    def batch_select_indices(self, indices: Tensor) -> None:
        """Do nothing: the batch selects the rows of the shared cache."""

    def join(self, layers: Sequence[Any], paddings: Sequence[int]) -> LayerView:
        """The first view; `RowGroup.replace_cache` then points it at the joined rows."""
        return self


class RowGroupCache(Cache):
    """The cache that a row group's grafts receive: layer views first, then the grafts' own layers."""


@dataclass
class RowGroup:
    """Consecutive rows that have the same grafts.

    Attributes:
        owner: the grafts whose taps act on these rows.
        cache: the cache as the grafts see it.
        span: the group's position in the batch.
        separate: True if the grafts' own layers can not be joined with those of other groups.
    """

    owner: Hashable
    size: int
    cache: RowGroupCache
    span: RowSpan
    separate: bool = False

    @classmethod
    def create(cls, owner: Hashable, size: int, shared: Cache, layers: int) -> RowGroup:
        """A group of new rows of a batch, which gives it its position, and whose backbone has so many layers."""
        span = RowSpan(shared, slice(0, size))
        return cls(owner, size, RowGroupCache(layers=[LayerView(span, index) for index in range(layers)]), span)

    def replace_cache(self, cache: Cache) -> None:
        """Use another cache, and point its layer views at this group's position."""
        assert isinstance(cache, RowGroupCache)
        self.cache = cache
        for index, layer in enumerate(cache.layers):
            if isinstance(layer, LayerView):
                cache.layers[index] = LayerView(self.span, index)

    def select(self, rows: list[int]) -> None:
        """Keep these rows of the group."""
        if len(rows) < self.size:
            self.cache.batch_select_indices(torch.tensor(rows))
            self.size = len(rows)

    def single_row(self, row: int) -> RowGroup:
        """A new group of one row; this group stays as it is."""
        group = RowGroup(self.owner, self.size, self.cache, copy.copy(self.span), self.separate)
        group.replace_cache(clone_cache(self.cache))
        group.select([row])
        return group

    def absorb(self, other: RowGroup, columns: int) -> bool:
        """Append another group's rows, if the layers can be joined; `columns` is the width of the batch."""
        if self.owner != other.owner or self.separate or other.separate:
            return False
        lengths = [columns - group.span.offset for group in (self, other)]
        try:
            joined = join([self.cache, other.cache], [max(lengths) - length for length in lengths])
        except JoinError:
            return False
        self.span.offset = columns - max(lengths)
        self.size += other.size
        self.replace_cache(joined)
        return True


@dataclass
class MixedBatch:
    """Rows that go through the backbone together.

    Attributes:
        cache: the backbone's keys and values of all rows.
        mask: (B, S) 1 for real tokens.
        groups: in the order of the rows.
        tags: the caller's object for each row.
        separate: True if the backbone's layers can not be joined with those of another batch.
        calls: the `Call` of each group in the last pass.
    """

    cache: Cache
    mask: Tensor
    groups: list[RowGroup]
    tags: list[Any] = field(default_factory=list)
    separate: bool = False
    calls: list[Call] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._update_spans()

    def __len__(self) -> int:
        return len(self.tags)

    def join(self, other: MixedBatch) -> bool:
        """Append the rows of another batch, if the caches can be joined; the other batch is used up.

        An empty batch absorbs no rows, because its cache still has the states of the rows that left.
        """
        if self.separate or other.separate or not self.tags:
            return False
        width = max(self.mask.shape[1], other.mask.shape[1])
        paddings = [width - batch.mask.shape[1] for batch in (self, other)]
        try:
            self.cache = join([self.cache, other.cache], paddings)
        except JoinError:
            self.separate = True
            return False
        for batch, padding in zip((self, other), paddings, strict=True):
            batch.mask = functional.pad(batch.mask, (padding, 0))
            for group in batch.groups:
                group.span.offset += padding
        self.mask = torch.cat([self.mask, other.mask])
        self.tags += other.tags
        self._merge(other.groups)
        return True

    def _merge(self, new_groups: list[RowGroup]) -> None:
        """Append groups, or merge them into groups of the same owner; then reorder the rows."""
        row_order, first = [], 0
        for group in (*self.groups, *new_groups):
            row_order.append(list(range(first, first + group.size)))
            first += group.size
        for group, rows in zip(new_groups, row_order[len(self.groups) :], strict=True):
            for number, own in enumerate(self.groups):
                if own.absorb(group, self.mask.shape[1]):
                    row_order[number] += rows
                    break
            else:
                row_order[len(self.groups)] = rows
                self.groups.append(group)
        self._select([row for rows in row_order[: len(self.groups)] for row in rows])

    def keep(self, rows: Sequence[int]) -> None:
        """Keep these rows only, and drop the columns that are padding in all of them."""
        if len(rows) == len(self):
            return
        if not rows:
            self.groups, self.tags, self.mask = [], [], self.mask[:0]
            return
        kept, first, groups = set(rows), 0, []
        for group in self.groups:
            own = [row for row in range(group.size) if first + row in kept]
            first += group.size
            if own:
                group.select(own)
                groups.append(group)
        self.groups = groups
        self._select(sorted(kept))
        self._trim()

    def layers_of(self, row: int) -> list[tuple[Any, int]]:
        """The layers that a row's columns are in, the backbone's first, each with the row's index there."""
        group = next(group for group in self.groups if row < group.span.rows.stop)
        own = group.cache.layers[len(self.cache.layers) :]
        return [(layer, row) for layer in self.cache.layers] + [(layer, row - group.span.rows.start) for layer in own]

    def split(self, number: int) -> None:
        """Make each row of a group a group of its own."""
        group = self.groups[number]
        self.groups[number : number + 1] = [group.single_row(row) for row in range(group.size)]
        self._update_spans()

    def _select(self, rows: list[int]) -> None:
        if rows != list(range(len(self.tags))):
            self.cache.batch_select_indices(torch.tensor(rows))
            self.mask = self.mask[rows]
            self.tags = [self.tags[row] for row in rows]
        self._update_spans()

    def _update_spans(self) -> None:
        """Give each group the batch's cache and its current rows."""
        first = 0
        for group in self.groups:
            group.span.shared, group.span.rows = self.cache, slice(first, first + group.size)
            first += group.size

    def _trim(self) -> None:
        """Drop the columns that are padding in all rows, unless a separate group still counts them."""
        if not self.tags or self.separate:
            return
        columns = int(self.mask.any(0).int().argmax())
        for group in self.groups:
            group.separate |= group.span.offset < columns and not is_joinable(group.cache)
        columns = min([columns, *(group.span.offset for group in self.groups if group.separate)])
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
