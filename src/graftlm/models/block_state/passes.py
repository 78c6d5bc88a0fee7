"""Where the tokens of one pass stand: rows side by side, windows in line.

A pass brings each row of a batch some new tokens, after n that the row has had before. Windows are counted from a
row's own first token, so rows may stand at different places within a window. `Pass` lays the new tokens of every row on
a grid of whole windows that begins with the window which the row's first new token falls into:

    row with n = 5, W = 4, new tokens a b c d e          row with n = 0, new tokens a b c
    | . a b c | d e . . |                                | a b c . | . . . . |

What every layer does is then the same for all rows, and padding on either side has no place in it.

Shape suffixes: B rows, T tokens of the pass, G slots of the grid.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from graftlm.errors import GraftError


@dataclass(frozen=True)
class Pass:
    """One pass over new tokens.

    Args:
        window: W.
        past: n, how many tokens each row has had.
        new: how many each row has now.
        slots: G, a whole number of windows; or less than one, where all new tokens fall into their first window; or 1
            in a step, where each row has one token in the only slot.
        step: whether this is a step of decoding.
        columns: (B, G) the column of the pass that each slot holds (any, where it holds none); None where slots are
            columns.
        device: where tensors lie.
    """

    window: int
    past: tuple[int, ...]
    new: tuple[int, ...]
    slots: int
    step: bool
    columns: Tensor | None
    device: torch.device

    @classmethod
    def over(cls, shape: tuple[int, int], mask: Tensor | None, past: tuple[int, ...] | None, window: int) -> Pass:
        """A pass over (B, T) columns, of which `mask` (B, T) bool marks those that hold tokens.

        The columns of one row that hold tokens stand in one piece.
        """
        rows, length = shape
        past = past or (0,) * rows
        device = torch.device("cpu") if mask is None else mask.device
        first, new = [0] * rows, [length] * rows
        if mask is not None:
            new = mask.sum(-1).tolist()
            first = mask.int().argmax(-1).tolist()
        if length == 1 and any(past) and all(new):
            return cls(window, past, tuple(new), 1, True, None, device)
        phases = [n % window for n in past]
        used = max(phase + count for phase, count in zip(phases, new, strict=True))
        slots = used if used <= window else -(-used // window) * window
        columns = None
        if slots != length or any(phases) or any(first):
            begin = torch.tensor([a - b for a, b in zip(first, phases, strict=True)], device=device)
            columns = (begin[:, None] + torch.arange(slots, device=device)).clamp(0, length - 1)
        return cls(window, past, tuple(new), max(1, slots), False, columns, device)

    def to(self, device: torch.device) -> Pass:
        """The same with tensors elsewhere."""
        columns = None if self.columns is None else self.columns.to(device)
        return Pass(self.window, self.past, self.new, self.slots, self.step, columns, device)

    @property
    def phases(self) -> tuple[int, ...]:
        """The slot of each row's first new token."""
        return (0,) * len(self.past) if self.step else tuple(n % self.window for n in self.past)

    @property
    def total(self) -> tuple[int, ...]:
        """How many tokens each row has had after this pass."""
        return tuple(a + b for a, b in zip(self.past, self.new, strict=True))

    @property
    def full(self) -> bool:
        """Whether every slot holds a token."""
        return all(count == self.slots for count in self.new)

    @property
    def positions(self) -> Tensor:
        """(B, G) how many tokens of its row stand before each slot's."""
        begin = [n - phase for n, phase in zip(self.past, self.phases, strict=True)]
        return self.row_numbers(begin)[:, None] + torch.arange(self.slots, device=self.device)

    @property
    def holds(self) -> Tensor:
        """(B, G) whether a slot holds a new token."""
        slot = torch.arange(self.slots, device=self.device)
        first = self.row_numbers(self.phases)[:, None]
        return (slot >= first) & (slot < first + self.row_numbers(self.new)[:, None])

    @property
    def ended(self) -> tuple[int, ...]:
        """How many windows each row has come to the end of in this pass, from the grid's first on."""
        return tuple(total // self.window - n // self.window for n, total in zip(self.past, self.total, strict=True))

    def backwards(self) -> Pass:
        """The same grid from its end to its beginning, all of its slots taken for tokens."""
        rows = len(self.past)
        return Pass(self.window, (0,) * rows, (self.slots,) * rows, self.slots, False, None, self.device)

    def row_numbers(self, values: tuple[int, ...] | list[int]) -> Tensor:
        """(B) one number for each row, on the pass's device."""
        return torch.tensor(values, device=self.device)

    def onto_grid(self, values_BT: Tensor) -> Tensor:
        """(B, T, ...) to (B, G, ...); slots without a token are zero."""
        if self.columns is not None:
            values_BT = _gather(values_BT, self.columns)
        if self.full:
            return values_BT
        return values_BT * _like(self.holds, values_BT)

    def off_grid(self, values_BG: Tensor, length: int) -> Tensor:
        """(B, G, ...) to (B, T, ...); columns without a token are zero."""
        if self.columns is None:
            return values_BG
        out = values_BG.new_zeros(values_BG.shape[0], length, *values_BG.shape[2:])
        row, slot = self.holds.nonzero(as_tuple=True)
        return out.index_put((row, self.columns[row, slot]), values_BG[row, slot])


def refuse_packed(positions: Tensor | None, mask: Tensor | None) -> None:
    """Make sure that no row is to keep documents apart.

    Raises:
        GraftError: positions (B, T) begin anew between two tokens that `mask` (B, T or past + T) does not hide.
    """
    if positions is None or positions.shape[-1] < 2:
        return
    begins = positions[:, 1:] != positions[:, :-1] + 1
    if mask is not None and mask.dim() == 2:
        there = mask[:, -positions.shape[-1] :].bool().expand(len(positions), -1)
        begins = begins & there[:, 1:] & there[:, :-1]
    if bool(begins.any()):
        raise GraftError(
            "position_ids begin anew within a row, and states would carry one document over into the next: give each "
            "document a row, or set boundaries to joined."
        )


def take(values_BG: Tensor, start: tuple[int, ...], length: int) -> Tensor:
    """(B, length, ...): of each row the slots from its own start on; zero past either end."""
    size = values_BG.shape[1]
    if len(set(start)) == 1:
        first = start[0]
        before, after = max(0, -first), max(0, first + length - size)
        inner = values_BG[:, max(0, first) : min(size, first + length)]
        if not before and not after:
            return inner
        padding = [0, 0] * (values_BG.dim() - 2) + [min(before, length), min(after, length)]
        return torch.nn.functional.pad(inner, padding)
    index = torch.tensor(start, device=values_BG.device)[:, None] + torch.arange(length, device=values_BG.device)
    inside = (index >= 0) & (index < size)
    return _gather(values_BG, index.clamp(0, size - 1)) * _like(inside, values_BG)


def put(values_BG: Tensor, start: tuple[int, ...], other_BM: Tensor) -> Tensor:
    """(B, G, ...) with `other` (B, M, ...) written over each row from its own start on."""
    if len(set(start)) == 1:
        first, last = start[0], start[0] + other_BM.shape[1]
        return torch.cat([values_BG[:, :first], other_BM, values_BG[:, last:]], dim=1)
    index = torch.tensor(start, device=values_BG.device)[:, None] + torch.arange(
        other_BM.shape[1], device=values_BG.device
    )
    index = index.reshape(*index.shape, *[1] * (values_BG.dim() - 2)).expand(-1, -1, *values_BG.shape[2:])
    return values_BG.scatter(1, index, other_BM)


def _gather(values_BG: Tensor, index_BM: Tensor) -> Tensor:
    rest = values_BG.shape[2:]
    return values_BG.gather(1, index_BM.reshape(*index_BM.shape, *[1] * len(rest)).expand(-1, -1, *rest))


def _like(mask_BG: Tensor, values_BG: Tensor) -> Tensor:
    return mask_BG.reshape(*mask_BG.shape, *[1] * (values_BG.dim() - 2)).to(values_BG.dtype)
