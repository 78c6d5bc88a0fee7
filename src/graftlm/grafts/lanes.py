"""The rows of a mixed batch: which of them have which grafts, and what is remembered of them.

Rows are padded on the left, so that their newest tokens stand in one column. Rows of the same grafts stand together, in
a lane. What the backbone remembers is in one cache; a lane's grafts see it through stand-ins, and have layers of their
own beside. A lane may begin some columns later than the batch: its grafts never hear of those before.
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

from graftlm.backbone import Call, JoinError, RowScope, clone_cache, join
from graftlm.errors import GraftError


@dataclass
class _View:
    """Where a lane lies in its batch."""

    shared: Cache
    rows: slice
    offset: int = 0


class StandIn(DynamicLayer):
    """One of the batch's layers as a lane's grafts see it: of their rows, from the lane's first column on."""

    def __init__(self, view: _View, index: int) -> None:
        self._view, self._index = view, index  # and no states of its own

    @property
    def _layer(self) -> Any:
        return self._view.shared.layers[self._index]

    @property
    def is_initialized(self) -> bool:
        return self._layer.is_initialized

    def _read(self, name: str) -> Tensor | None:
        states = getattr(self._layer, name)
        if states is None:
            return None
        hidden = self._view.offset - (self._layer.get_seq_length() - states.shape[-2])
        return states[self._view.rows, :, max(0, hidden) :]

    def _write(self, name: str, value: Tensor) -> None:
        states = getattr(self._layer, name)
        if value.shape != states.shape:  # some of the rows or columns, beside which the others stay
            whole = states.clone()
            whole[self._view.rows, :, states.shape[-2] - value.shape[-2] :] = value
            value = whole
        setattr(self._layer, name, value)

    @property
    def keys(self) -> Tensor | None:
        return self._read("keys")

    @keys.setter
    def keys(self, value: Tensor) -> None:
        self._write("keys", value)

    @property
    def values(self) -> Tensor | None:
        return self._read("values")

    @values.setter
    def values(self, value: Tensor) -> None:
        self._write("values", value)

    def get_seq_length(self) -> int:
        return max(0, self._layer.get_seq_length() - self._view.offset)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        length, start = self._layer.get_mask_sizes(query_length)
        first = max(0, start - self._view.offset)
        return start + length - self._view.offset - first, first

    def update(self, *args: Any, **kwargs: Any) -> Any:
        """Raise: the backbone fills its layers itself."""
        raise GraftError("A graft adds to a layer of the backbone's cache, which is the backbone's to fill: use slots.")

    def batch_select_indices(self, indices: Tensor) -> None:
        """Nothing: the batch does it for all."""

    def join(self, layers: Sequence[Any], paddings: Sequence[int]) -> StandIn:
        """One stand-in for several, for a lane that is yet to be told its place."""
        return self


class LaneCache(Cache):
    """What a lane's grafts are given as the cache: stand-ins, and layers of their own behind them."""


@dataclass
class Lane:
    """Rows that stand together and have the same grafts.

    Attributes:
        owner: whose taps act on them.
        size: how many rows.
        cache: as its grafts see it.
        view: where it lies.
        kept_apart: whether its grafts' layers can't be joined with others.
    """

    owner: Hashable
    size: int
    cache: LaneCache
    view: _View
    kept_apart: bool = False

    @classmethod
    def begin(cls, owner: Hashable, size: int, shared: Cache, layers: int) -> Lane:
        """A lane of rows of which nothing was read."""
        view = _View(shared, slice(0, size))
        return cls(owner, size, LaneCache(layers=[StandIn(view, index) for index in range(layers)]), view)

    def row_scope(self) -> RowScope:
        """As a pass is told."""
        return RowScope(self.owner, self.view.rows, self.cache, self.view.offset)

    def move(self, cache: Cache) -> None:
        """Take a joined cache over."""
        assert isinstance(cache, LaneCache)
        self.cache = cache
        for index, layer in enumerate(cache.layers):
            if isinstance(layer, StandIn):
                cache.layers[index] = StandIn(self.view, index)

    def select(self, rows: list[int]) -> None:
        """Keep some of its rows."""
        if len(rows) < self.size:
            self.cache.batch_select_indices(torch.tensor(rows))
            self.size = len(rows)

    def row(self, number: int) -> Lane:
        """One of its rows, as a lane of its own."""
        found = Lane(self.owner, self.size, self.cache, copy.copy(self.view), self.kept_apart)
        found.move(clone_cache(self.cache))
        found.select([number])
        return found

    def absorb(self, other: Lane, columns: int) -> bool:
        """Take another lane's rows, behind its own, if their layers can be joined; `columns` are the batch's."""
        if self.owner != other.owner or self.kept_apart or other.kept_apart:
            return False
        lengths = [columns - lane.view.offset for lane in (self, other)]
        try:
            joined = join([self.cache, other.cache], [max(lengths) - length for length in lengths])
        except JoinError:
            return False
        self.view.offset = columns - max(lengths)
        self.size += other.size
        self.move(joined)
        return True


@dataclass
class Batch:
    """Rows that go through the backbone together.

    Attributes:
        cache: what the backbone remembers of them.
        mask: (B, S) 1 for real tokens.
        lanes: in the order of the rows.
        tags: whatever the caller knows of each row.
        apart: whether the backbone's layers can't be joined with those of another batch.
        calls: what the last pass was to each lane.
    """

    cache: Cache
    mask: Tensor
    lanes: list[Lane]
    tags: list[Any] = field(default_factory=list)
    apart: bool = False
    calls: list[Call] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.tags)

    def join(self, other: Batch) -> bool:
        """Take the rows of another batch, if the backbone's layers can be joined; the other one is used up.

        A batch that all rows have left takes none: what its cache held of them is still there.
        """
        if self.apart or other.apart or not self.tags:
            return False
        width = max(self.mask.shape[1], other.mask.shape[1])
        pads = [width - one.mask.shape[1] for one in (self, other)]
        try:
            self.cache = join([self.cache, other.cache], pads)
        except JoinError:
            self.apart = True
            return False
        for one, pad in zip((self, other), pads, strict=True):
            for lane in one.lanes:
                lane.view.offset += pad
        self.mask = torch.cat([functional.pad(one.mask, (by, 0)) for one, by in zip((self, other), pads, strict=True)])
        self.tags += other.tags
        self._merge(other.lanes)
        return True

    def _merge(self, more: list[Lane]) -> None:
        """Put lanes behind the others, or into those of the same owner; rows follow."""
        order, first = [], 0
        for lane in (*self.lanes, *more):
            order.append(list(range(first, first + lane.size)))
            first += lane.size
        for lane, rows in zip(more, order[len(self.lanes) :], strict=True):
            for number, own in enumerate(self.lanes):
                if own.absorb(lane, self.mask.shape[1]):
                    order[number] += rows
                    break
            else:
                order[len(self.lanes)] = rows
                self.lanes.append(lane)
        self._select([row for rows in order[: len(self.lanes)] for row in rows])

    def keep(self, rows: Sequence[int]) -> None:
        """Let all rows but these leave, and the columns that are padding for all that stay."""
        if len(rows) == len(self):
            return
        if not rows:
            self.lanes, self.tags, self.mask = [], [], self.mask[:0]
            return
        kept, first, lanes = set(rows), 0, []
        for lane in self.lanes:
            own = [row for row in range(lane.size) if first + row in kept]
            first += lane.size
            if own:
                lane.select(own)
                lanes.append(lane)
        self.lanes = lanes
        self._select(sorted(kept))
        self._trim()

    def split(self, number: int) -> None:
        """Make each row of a lane one of its own."""
        lane = self.lanes[number]
        self.lanes[number : number + 1] = [lane.row(row) for row in range(lane.size)]
        self.place()

    def _select(self, rows: list[int]) -> None:
        if rows != list(range(len(self.tags))):
            self.cache.batch_select_indices(torch.tensor(rows))
            self.mask = self.mask[rows]
            self.tags = [self.tags[row] for row in rows]
        self.place()

    def place(self) -> None:
        """Tell the lanes where they lie."""
        first = 0
        for lane in self.lanes:
            lane.view.shared, lane.view.rows = self.cache, slice(first, first + lane.size)
            first += lane.size

    def _trim(self) -> None:
        """Take away the columns that are padding for all rows, as far as every lane can do without them."""
        if not self.tags or self.apart:
            return
        columns = int(self.mask.any(0).int().argmax())
        columns = min([columns, *(lane.view.offset for lane in self.lanes if lane.kept_apart)])
        if columns <= 0:
            return
        try:
            self.cache = join([self.cache], [-columns])
        except JoinError:
            self.apart = True
            return
        self.mask = self.mask[:, columns:]
        for lane in self.lanes:
            lane.view.offset -= columns
            if lane.view.offset < 0:
                lane.move(join([lane.cache], [lane.view.offset]))
                lane.view.offset = 0
        self.place()
