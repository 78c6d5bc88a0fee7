"""The layout of one forward pass: the new tokens of each row, aligned to attention windows.

In a pass, each row of a batch has some new tokens, which follow the n tokens that the row had before. Windows are
counted from a row's first token, so rows may start at different offsets within a window. `WindowGrid` places the new
tokens of every row on a grid of whole windows. The grid begins with the window that contains the row's first new token:

    row with n = 5, W = 4, new tokens a b c d e          row with n = 0, new tokens a b c
    | . a b c | d e . . |                                | a b c . | . . . . |

On the grid, every layer performs the same operations for all rows, and padding on either side has no effect.

A decode step has one column, so its `StepGrid` has a single slot. Its numbers of tokens are tensors, which only
unstructured kernels read on the host, so the decode step of other models compiles as one graph.

Shape suffixes: B rows, T tokens of the pass, G slots of the grid, M slots of a slice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor

from graftlm.errors import GraftError


@dataclass(frozen=True)
class WindowGrid:
    """The grid of one pass over new tokens.

    Args:
        window: window length W.
        past_lengths: number of tokens n that each row had before the pass.
        new_lengths: number of new tokens of each row.
        slots: number of slots G, a whole number of windows; fewer than W slots if all new tokens fall into their first
            window.
        columns: input column of each slot (B, G), arbitrary for empty slots; None if slots equal columns.
        device: device of the pass's tensors.
    """

    window: int
    past_lengths: tuple[int, ...]
    new_lengths: tuple[int, ...]
    slots: int
    columns: Tensor | None
    device: torch.device

    @classmethod
    def build(
        cls,
        x_BT: Tensor,
        mask: Tensor | None,
        past_lengths: tuple[int, ...] | None,
        window: int,
    ) -> WindowGrid:
        """Build the grid of a pass.

        Args:
            x_BT: inputs (B, T, ...).
            mask: bool (B, T), True at tokens, which are contiguous in each row; None if all columns are tokens.
            past_lengths: number of tokens that each row had before the pass; None for zero.
            window: window length W.
        """
        rows, length = x_BT.shape[:2]
        device = x_BT.device
        past_lengths = past_lengths or (0,) * rows
        starts = [0] * rows
        new_lengths = [length] * rows
        if mask is not None:
            starts = mask.int().argmax(-1).tolist()
            new_lengths = mask.sum(-1).tolist()
        offsets = [n % window for n in past_lengths]
        slots = _count_slots(offsets, new_lengths, window)
        columns = None
        if slots != length or any(offsets) or any(starts):
            columns = _slot_columns(starts, offsets, slots, length, device)
        return cls(
            window=window,
            past_lengths=past_lengths,
            new_lengths=tuple(new_lengths),
            slots=max(1, slots),
            columns=columns,
            device=device,
        )

    @property
    def offsets(self) -> tuple[int, ...]:
        """The slot of each row's first new token."""
        return tuple(n % self.window for n in self.past_lengths)

    @property
    def ends(self) -> tuple[int, ...]:
        """The slot after each row's last new token."""
        pairs = zip(self.offsets, self.new_lengths, strict=True)
        return tuple(offset + count for offset, count in pairs)

    @property
    def first_positions(self) -> tuple[int, ...]:
        """The position in its text of each row's first slot."""
        pairs = zip(self.past_lengths, self.offsets, strict=True)
        return tuple(n - offset for n, offset in pairs)

    @property
    def total_lengths(self) -> tuple[int, ...]:
        """The number of tokens of each row after this pass."""
        pairs = zip(self.past_lengths, self.new_lengths, strict=True)
        return tuple(past + count for past, count in pairs)

    @property
    def past_counts(self) -> Tensor:
        """The number of tokens (B) that each row had before the pass."""
        return self.per_row(self.past_lengths)

    @property
    def new_counts(self) -> Tensor:
        """The number of new tokens (B) of each row."""
        return self.per_row(self.new_lengths)

    @property
    def total_counts(self) -> Tensor:
        """The number of tokens (B) of each row after this pass."""
        return self.per_row(self.total_lengths)

    @property
    def completed_counts(self) -> Tensor:
        """The number of windows (B) that end in this pass, for each row."""
        return self.per_row(self.completed_windows)

    @property
    def is_full(self) -> bool:
        """Whether every slot contains a new token."""
        return all(count == self.slots for count in self.new_lengths)

    @property
    def occupied(self) -> Tensor:
        """Mask (B, G), bool, of the slots that contain a new token."""
        slot = torch.arange(self.slots, device=self.device)
        first = self.per_row(self.offsets)[:, None]
        end = self.per_row(self.ends)[:, None]
        return (slot >= first) & (slot < end)

    @property
    def completed_windows(self) -> tuple[int, ...]:
        """The number of windows that end in this pass, for each row."""
        pairs = zip(self.past_lengths, self.total_lengths, strict=True)
        return tuple(total // self.window - past // self.window for past, total in pairs)

    def reversed(self) -> WindowGrid:
        """Return the grid in reverse order, in which every slot counts as a token and nothing precedes the pass."""
        rows = len(self.past_lengths)
        return WindowGrid(
            window=self.window,
            past_lengths=(0,) * rows,
            new_lengths=(self.slots,) * rows,
            slots=self.slots,
            columns=None,
            device=self.device,
        )

    def per_row(self, values: Sequence[int]) -> Tensor:
        """Convert one number per row to an int64 tensor (B,) on the grid's device."""
        return torch.tensor(values, device=self.device)

    def to_grid(self, values_BT: Tensor) -> Tensor:
        """Move columns (B, T, ...) to slots (B, G, ...), with zeros in empty slots."""
        values_BG = values_BT
        if self.columns is not None:
            values_BG = _gather(values_BT, self.columns)
        if self.is_full:
            return values_BG
        return values_BG * _append_dimensions(self.occupied, values_BG)

    def from_grid(self, values_BG: Tensor, length: int) -> Tensor:
        """Move slots (B, G, ...) back to columns (B, T, ...), with zeros in columns without a token.

        Args:
            values_BG: values on the grid (B, G, ...).
            length: number of columns T.
        """
        if self.columns is None:
            return values_BG
        out = values_BG.new_zeros(values_BG.shape[0], length, *values_BG.shape[2:])
        row, slot = self.occupied.nonzero(as_tuple=True)
        column = self.columns[row, slot]
        return out.index_put((row, column), values_BG[row, slot])

    def aligned(self, values_BG: Tensor) -> Tensor:
        """Move the new tokens of each row to the left: slots (B, G, ...) to (B, T, ...)."""
        offsets = self.offsets
        return slice_rows(values_BG, offsets, self.slots - min(offsets))

    def unaligned(self, values_BT: Tensor) -> Tensor:
        """Move left-aligned values (B, T, ...) back to slots (B, G, ...)."""
        starts = tuple(-offset for offset in self.offsets)
        return slice_rows(values_BT, starts, self.slots)


@dataclass(frozen=True)
class StepGrid:
    """The grid of a decode step, which has one column for each row.

    Args:
        window: window length W.
        past_counts: number of tokens (B) that each row had before the pass.
        is_token: bool (B), True where the column is a token; None if it is one in every row.
    """

    window: int
    past_counts: Tensor
    is_token: Tensor | None
    slots: ClassVar[int] = 1

    @property
    def past_lengths(self) -> tuple[int, ...]:
        """`past_counts`, read on the host."""
        return tuple(self.past_counts.tolist())

    @property
    def new_lengths(self) -> tuple[int, ...]:
        """`new_counts`, read on the host."""
        return tuple(self.new_counts.tolist())

    @property
    def completed_windows(self) -> tuple[int, ...]:
        """`completed_counts`, read on the host."""
        return tuple(self.completed_counts.tolist())

    @classmethod
    def build(cls, mask_B1: Tensor | None, past_counts: Tensor, window: int) -> StepGrid:
        """Build the grid of a decode step.

        Args:
            mask_B1: bool (B, 1), True at tokens; None if all columns are tokens.
            past_counts: number of tokens (B) that each row had before the pass.
            window: window length W.
        """
        if mask_B1 is None or (_is_readable(mask_B1) and bool(mask_B1.all())):
            return cls(window, past_counts, is_token=None)
        return cls(window, past_counts, is_token=mask_B1[:, 0])

    @property
    def new_counts(self) -> Tensor:
        """The number of new tokens (B) of each row, 0 or 1."""
        return torch.ones_like(self.past_counts) if self.is_token is None else self.is_token.long()

    @property
    def total_counts(self) -> Tensor:
        """The number of tokens (B) of each row after this pass."""
        return self.past_counts + self.new_counts

    @property
    def completed_counts(self) -> Tensor:
        """The number of windows (B) that end in this pass, for each row, 0 or 1."""
        return self.total_counts // self.window - self.past_counts // self.window

    @property
    def may_complete_windows(self) -> bool:
        """Whether a window may end in this step; the host doesn't wait for an accelerator to know it."""
        return not _is_readable(self.past_counts) or bool(self.completed_counts.any())

    def kept(self, new: Tensor, old: Tensor) -> Tensor:
        """Return (B, ...): `new` in rows with a token, `old` in the others."""
        if self.is_token is None:
            return new
        trailing = [1] * (new.dim() - 1)
        return torch.where(self.is_token.view(-1, *trailing), new, old)

    def to_grid(self, values_B1: Tensor) -> Tensor:
        """Return the values (B, 1, ...), as the column is the slot."""
        return values_B1

    def from_grid(self, values_B1: Tensor, length: int) -> Tensor:
        """Return the values (B, 1, ...), as the slot is the column, whose number is `length`."""
        return values_B1

    def aligned(self, values_B1: Tensor) -> Tensor:
        """Return the values (B, 1, ...), as there is a single slot."""
        return values_B1

    def unaligned(self, values_B1: Tensor) -> Tensor:
        """Return the values (B, 1, ...), as there is a single slot."""
        return values_B1


Grid: TypeAlias = WindowGrid | StepGrid


def _is_readable(tensor: Tensor) -> bool:
    """Return whether the host may branch on a tensor: on a CPU, outside compiled code."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


def _count_slots(offsets: Sequence[int], new_lengths: Sequence[int], window: int) -> int:
    """Return the number of slots up to the last new token, rounded up to whole windows beyond the first."""
    pairs = zip(offsets, new_lengths, strict=True)
    used = max(offset + count for offset, count in pairs)
    if used <= window:
        return used
    return -(-used // window) * window


def _slot_columns(
    starts: Sequence[int],
    offsets: Sequence[int],
    slots: int,
    length: int,
    device: torch.device,
) -> Tensor:
    """Return the input column (B, G) of each slot; a row's first token is in column `start` and slot `offset`."""
    pairs = zip(starts, offsets, strict=True)
    shifts = torch.tensor([start - offset for start, offset in pairs], device=device)
    columns = shifts[:, None] + torch.arange(slots, device=device)
    return columns.clamp(0, length - 1)


def check_not_packed(position_ids: Tensor | None, mask: Tensor | None) -> None:
    """Check that no row contains several documents.

    Args:
        position_ids: positions (B, T) within documents.
        mask: attention mask (B, T or past + T), nonzero at tokens; other columns are not checked.

    Raises:
        GraftError: the positions of two neighboring tokens of a row are not consecutive.
    """
    if position_ids is None or position_ids.shape[-1] < 2:
        return
    restarts = position_ids[:, 1:] != position_ids[:, :-1] + 1
    if mask is not None and mask.dim() == 2:
        rows, length = position_ids.shape
        present = mask[:, -length:].bool().expand(rows, -1)
        restarts = restarts & present[:, 1:] & present[:, :-1]
    if bool(restarts.any()):
        raise GraftError(
            "position_ids restart within a row, but the states of a block-state model can't separate the documents of "
            "a row: put each document in a row of its own, or set data.boundaries to joined."
        )


def slice_rows(values_BG: Tensor, starts: tuple[int, ...], length: int) -> Tensor:
    """Slice each row from its start, with zeros for slots outside the grid.

    Args:
        values_BG: values (B, G, ...).
        starts: first slot of each row's slice, which may lie outside the grid.
        length: number of slots M of the slices.

    Returns:
        Slices (B, M, ...).
    """
    size = values_BG.shape[1]
    if len(set(starts)) == 1:
        return _slice_padded(values_BG, starts[0], length)
    index = _row_indices(values_BG, starts, length)
    inside = (index >= 0) & (index < size)
    return _gather(values_BG, index.clamp(0, size - 1)) * _append_dimensions(inside, values_BG)


def _slice_padded(values_BG: Tensor, start: int, length: int) -> Tensor:
    """Slice all rows from the same start, with zeros outside the grid."""
    size = values_BG.shape[1]
    before = max(0, -start)
    after = max(0, start + length - size)
    inner = values_BG[:, max(0, start) : min(size, start + length)]
    if not before and not after:
        return inner
    trailing = [0, 0] * (values_BG.dim() - 2)
    return torch.nn.functional.pad(inner, [*trailing, min(before, length), min(after, length)])


def write_rows(values_BG: Tensor, starts: tuple[int, ...], other_BM: Tensor) -> Tensor:
    """Return a copy of `values_BG` with `other_BM` written into each row from its start.

    Args:
        values_BG: values (B, G, ...).
        starts: first slot of each row to write to; all written slots lie inside the grid.
        other_BM: values to write (B, M, ...).

    Returns:
        Values (B, G, ...).
    """
    length = other_BM.shape[1]
    if len(set(starts)) == 1:
        start = starts[0]
        return torch.cat([values_BG[:, :start], other_BM, values_BG[:, start + length :]], dim=1)
    index = _append_dimensions(_row_indices(values_BG, starts, length), values_BG)
    return values_BG.scatter(1, index.expand_as(other_BM), other_BM)


def _row_indices(values_BG: Tensor, starts: tuple[int, ...], length: int) -> Tensor:
    """Return the slots (B, M) of a slice of each row."""
    first = torch.tensor(starts, device=values_BG.device)
    return first[:, None] + torch.arange(length, device=values_BG.device)


def _gather(values_BG: Tensor, index_BM: Tensor) -> Tensor:
    """Return the values (B, M, ...) of the slots `index_BM` of each row."""
    return torch.take_along_dim(values_BG, _append_dimensions(index_BM, values_BG), 1)


def _append_dimensions(x_BM: Tensor, values_BG: Tensor) -> Tensor:
    """Append dimensions of size 1, so that (B, M) broadcasts over the trailing dimensions of (B, G, ...)."""
    trailing = [1] * (values_BG.dim() - 2)
    return x_BM.reshape(*x_BM.shape, *trailing)
