"""The layout of one forward pass: the new tokens of each row, aligned to attention windows.

A pass brings each row of a batch some new tokens, after the n tokens that the row had before. Windows are counted from
a row's own first token, so rows may start at different offsets within a window. `WindowGrid` places the new tokens of
every row on a grid of whole windows. The grid begins with the window that contains the row's first new token:

    row with n = 5, W = 4, new tokens a b c d e          row with n = 0, new tokens a b c
    | . a b c | d e . . |                                | a b c . | . . . . |

On the grid, every layer does the same for all rows, and padding on either side has no effect.

Shape suffixes: B rows, T tokens of the pass, G slots of the grid.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from graftlm.errors import GraftError


@dataclass(frozen=True)
class WindowGrid:
    """The grid of one pass over new tokens.

    Args:
        window: W.
        past_lengths: n, the number of tokens that each row had before the pass.
        new_lengths: the number of new tokens of each row.
        slots: G, a whole number of windows; fewer than W slots if all new tokens fall into their first window; 1 in a
            decode step.
        decoding: whether this is a decode step: each row has one new token, in the only slot.
        columns: (B, G) the input column of each slot, arbitrary for empty slots; None if slots equal columns.
    """

    window: int
    past_lengths: tuple[int, ...]
    new_lengths: tuple[int, ...]
    slots: int
    decoding: bool
    columns: Tensor | None
    device: torch.device

    @classmethod
    def build(cls, x_BT: Tensor, mask: Tensor | None, past_lengths: tuple[int, ...] | None, window: int) -> WindowGrid:
        """The grid of inputs (B, T, ...). `mask` (B, T) bool marks the tokens, which are contiguous in each row."""
        rows, length = x_BT.shape[:2]
        past_lengths, device = past_lengths or (0,) * rows, x_BT.device
        starts, new_lengths = [0] * rows, [length] * rows
        if mask is not None:
            starts, new_lengths = mask.int().argmax(-1).tolist(), mask.sum(-1).tolist()
        if length == 1 and any(past_lengths) and all(new_lengths):
            return cls(window, past_lengths, tuple(new_lengths), 1, True, None, device)
        offsets = [n % window for n in past_lengths]
        used = max(offset + count for offset, count in zip(offsets, new_lengths, strict=True))
        slots = used if used <= window else -(-used // window) * window
        columns = None
        if slots != length or any(offsets) or any(starts):
            begin = torch.tensor([a - b for a, b in zip(starts, offsets, strict=True)], device=device)
            columns = (begin[:, None] + torch.arange(slots, device=device)).clamp(0, length - 1)
        return cls(window, past_lengths, tuple(new_lengths), max(1, slots), False, columns, device)

    @property
    def offsets(self) -> tuple[int, ...]:
        """The slot of each row's first new token."""
        return (0,) * len(self.past_lengths) if self.decoding else tuple(n % self.window for n in self.past_lengths)

    @property
    def ends(self) -> tuple[int, ...]:
        """The slot behind each row's last new token."""
        return tuple(offset + count for offset, count in zip(self.offsets, self.new_lengths, strict=True))

    @property
    def first_positions(self) -> tuple[int, ...]:
        """The position in its text of each row's first slot."""
        return tuple(n - offset for n, offset in zip(self.past_lengths, self.offsets, strict=True))

    @property
    def total_lengths(self) -> tuple[int, ...]:
        """The number of tokens of each row after this pass."""
        return tuple(a + b for a, b in zip(self.past_lengths, self.new_lengths, strict=True))

    @property
    def is_full(self) -> bool:
        """Whether every slot holds a new token."""
        return all(count == self.slots for count in self.new_lengths)

    @property
    def occupied(self) -> Tensor:
        """(B, G) bool: whether a slot holds a new token."""
        slot = torch.arange(self.slots, device=self.device)
        return (slot >= self.per_row(self.offsets)[:, None]) & (slot < self.per_row(self.ends)[:, None])

    @property
    def completed_windows(self) -> tuple[int, ...]:
        """The number of windows that end in this pass, for each row."""
        lengths = zip(self.past_lengths, self.total_lengths, strict=True)
        return tuple(total // self.window - past // self.window for past, total in lengths)

    def reversed(self) -> WindowGrid:
        """The grid read from its end to its beginning; every slot counts as a token."""
        rows = len(self.past_lengths)
        return WindowGrid(self.window, (0,) * rows, (self.slots,) * rows, self.slots, False, None, self.device)

    def per_row(self, values: Sequence[int]) -> Tensor:
        """(B) one number for each row, on the grid's device."""
        return torch.tensor(values, device=self.device)

    def to_grid(self, values_BT: Tensor) -> Tensor:
        """(B, T, ...) to (B, G, ...); empty slots are zero."""
        values_BG = values_BT if self.columns is None else _gather(values_BT, self.columns)
        return values_BG if self.is_full else values_BG * _append_dimensions(self.occupied, values_BG)

    def from_grid(self, values_BG: Tensor, length: int) -> Tensor:
        """(B, G, ...) to (B, T, ...) with T = `length`; columns without a token are zero."""
        if self.columns is None:
            return values_BG
        out = values_BG.new_zeros(values_BG.shape[0], length, *values_BG.shape[2:])
        row, slot = self.occupied.nonzero(as_tuple=True)
        return out.index_put((row, self.columns[row, slot]), values_BG[row, slot])


def check_not_packed(position_ids: Tensor | None, mask: Tensor | None) -> None:
    """Check that no row holds several documents.

    Raises GraftError if `position_ids` (B, T) restart between two tokens that `mask` (B, T or past + T) does not hide.
    """
    if position_ids is None or position_ids.shape[-1] < 2:
        return
    restarts = position_ids[:, 1:] != position_ids[:, :-1] + 1
    if mask is not None and mask.dim() == 2:
        present = mask[:, -position_ids.shape[-1] :].bool().expand(len(position_ids), -1)
        restarts = restarts & present[:, 1:] & present[:, :-1]
    if bool(restarts.any()):
        raise GraftError(
            "position_ids begin anew within a row, and states would carry one document over into the next: give each "
            "document a row, or set boundaries to joined."
        )


def slice_rows(values_BG: Tensor, starts: tuple[int, ...], length: int) -> Tensor:
    """(B, length, ...): the slots of each row from its own start; zero outside the grid."""
    size = values_BG.shape[1]
    if len(set(starts)) == 1:
        first = starts[0]
        before, after = max(0, -first), max(0, first + length - size)
        inner = values_BG[:, max(0, first) : min(size, first + length)]
        if not before and not after:
            return inner
        padding = [0, 0] * (values_BG.dim() - 2) + [min(before, length), min(after, length)]
        return torch.nn.functional.pad(inner, padding)
    index = _row_indices(values_BG, starts, length)
    inside = (index >= 0) & (index < size)
    return _gather(values_BG, index.clamp(0, size - 1)) * _append_dimensions(inside, values_BG)


def write_rows(values_BG: Tensor, starts: tuple[int, ...], other_BM: Tensor) -> Tensor:
    """(B, G, ...) with `other` (B, M, ...) written into each row from its own start."""
    length = other_BM.shape[1]
    if len(set(starts)) == 1:
        return torch.cat([values_BG[:, : starts[0]], other_BM, values_BG[:, starts[0] + length :]], dim=1)
    index = _append_dimensions(_row_indices(values_BG, starts, length), values_BG)
    return values_BG.scatter(1, index.expand_as(other_BM), other_BM)


def _row_indices(values_BG: Tensor, starts: tuple[int, ...], length: int) -> Tensor:
    return torch.tensor(starts, device=values_BG.device)[:, None] + torch.arange(length, device=values_BG.device)


def _gather(values_BG: Tensor, index_BM: Tensor) -> Tensor:
    return torch.take_along_dim(values_BG, _append_dimensions(index_BM, values_BG), 1)


def _append_dimensions(x_BM: Tensor, values_BG: Tensor) -> Tensor:
    return x_BM.reshape(*x_BM.shape, *[1] * (values_BG.dim() - 2))
