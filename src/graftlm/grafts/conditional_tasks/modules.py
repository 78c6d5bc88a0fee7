"""The four conditional modules, and FiLM, which they are made of.

Shape suffixes: B rows, T tokens of this pass, S keys, D the backbone's width, Z a task embedding's width, U different
tasks in the pass, N blocks, W the width of a block.

One FiLM turns a task's embedding z into a scale and a shift of what it modulates,

    film(y, z) = gamma(z) * y + beta(z),    gamma(z) = 1 + G z,    beta(z) = B z

with G = B = 0 at the start: it then gives y, to the bit, and G has a gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import ACT2FN

from graftlm.backbone import Call
from graftlm.errors import GraftError


@dataclass(frozen=True)
class TaskBatch:
    """The tasks of one pass: their embeddings `z` (U, Z), and each row's index `which` (B,); None for one task."""

    z: Tensor
    which: Tensor | None

    def rows(self, each_U: Tensor) -> Tensor:
        """Of (U, ...) what each row's task has: (B, ...), or (1, ...) where all rows have one task."""
        return each_U if self.which is None else each_U.index_select(0, self.which)


class FiLM(nn.Module):
    """Scale and shift of `width` values, from a task embedding of `task_width`."""

    def __init__(self, task_width: int, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(width, task_width))
        self.shift = nn.Parameter(torch.zeros(width, task_width))

    def of(self, z_UZ: Tensor) -> tuple[Tensor, Tensor]:
        """gamma(z) - 1 and beta(z), (U, width) each."""
        z_UZ = z_UZ.to(self.scale.dtype)
        return functional.linear(z_UZ, self.scale), functional.linear(z_UZ, self.shift)

    def change(self, y_BTD: Tensor, tasks: TaskBatch) -> Tensor:
        """film(y, z) - y."""
        gain, shift = (tasks.rows(each)[:, None].to(y_BTD.dtype) for each in self.of(tasks.z))
        return torch.addcmul(shift, y_BTD, gain)

    def forward(self, y_BTD: Tensor, tasks: TaskBatch) -> Tensor:
        """film(y, z)."""
        return y_BTD + self.change(y_BTD, tasks)


class Alignment(nn.Module):
    """film(x + x D, z): one matrix R = I + D between embedding and first layer, modulated by the task."""

    def __init__(self, width: int, task_width: int) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.zeros(width, width))
        self.film = FiLM(task_width, width)

    def change(self, x_BTD: Tensor, tasks: TaskBatch) -> Tensor:
        """What is added to x."""
        turned = x_BTD @ self.matrix
        return turned + self.film.change(x_BTD + turned, tasks)


class Bottleneck(nn.Module):
    """film(U act(film(V x, z)), z), with U = 0 at the start."""

    def __init__(self, width: int, inner: int, task_width: int, activation: str) -> None:
        super().__init__()
        self.down = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(inner, width, bias=False)
        self.inner_film, self.outer_film = FiLM(task_width, inner), FiLM(task_width, width)
        self.activation = ACT2FN[activation]
        nn.init.normal_(self.down.weight, std=1 / math.sqrt(width))
        nn.init.zeros_(self.up.weight)

    def forward(self, x_BTD: Tensor, tasks: TaskBatch) -> Tensor:
        inner = self.activation(self.inner_film(self.down(x_BTD), tasks))
        return self.outer_film(self.up(inner), tasks)


@dataclass(frozen=True)
class Places:
    """Where the tokens of a pass stand in their rows, counted from 0 without padding.

    Attributes:
        keys: (B or 1, S) of all keys, or their number when they stand one after another in every row.
        queries: how many of the last keys ask.
    """

    keys: Tensor | int
    queries: int

    @classmethod
    def of(cls, call: Call, queries: int, limit: int) -> Places:
        """The places of a pass of so many tokens.

        Raises:
            GraftError: a row has more than `limit` tokens.
        """
        mask, places = call.attention_mask, call.position_ids
        past = 0 if call.cache is None else call.cache.get_seq_length()
        if mask is not None:
            keys: Tensor | int = (
                mask.shape[1] if _one_after_another(mask) else (mask.long().cumsum(-1) - 1).clamp(min=0)
            )
        elif places is not None and past == 0 and bool((places[:, 1:] <= places[:, :-1]).any()):
            keys = places  # packed documents
        else:
            keys = past + queries
        _check_length(keys, mask, limit)
        return cls(keys, queries)

    def window(self, call: Call, layer: int) -> slice:
        """Which keys a layer sees: all, but for those that a cache of a sliding window has dropped."""
        total = self.keys if isinstance(self.keys, int) else self.keys.shape[1]
        if call.cache is None:
            return slice(0, total)
        length, start = call.cache.get_mask_sizes(self.queries, layer)
        return slice(start, start + length)


def _one_after_another(mask: Tensor) -> bool:
    """Whether real tokens come first in every row, so that column and place are one."""
    return bool((mask[:, 1:] <= mask[:, :-1]).all())


def _check_length(keys: Tensor | int, mask: Tensor | None, limit: int) -> None:
    most = keys if isinstance(keys, int) else keys.shape[1]
    if most <= limit:
        return
    if mask is not None:
        most = int(mask.sum(-1).max())
    elif isinstance(keys, Tensor):
        most = int(keys.max()) + 1
    if most > limit:
        raise GraftError(
            f"A row has {most} tokens, and conditional attention was built for {limit}: cut the text, or train with a "
            "larger max_length."
        )


class ConditionalBias(nn.Module):
    """M(z): what is added to attention scores, blocks along the diagonal.

    M(z) = diag(A'_1, ..., A'_N) with A'_n = gamma(z) * A_n + beta(z), elementwise over (W, W), and zero outside the
    blocks. A_n = 0 at the start.

    Args:
        length: most tokens of a row.
        width: W.
        task_width: Z.
    """

    def __init__(self, length: int, width: int, task_width: int) -> None:
        super().__init__()
        self.width = width
        self.blocks = nn.Parameter(torch.zeros(math.ceil(length / width), width, width))
        self.film = FiLM(task_width, width * width)

    def matrices(self, tasks: TaskBatch, count: int) -> Tensor:
        """A'_n of the first `count` blocks, (U, N, W, W)."""
        gain, shift = (each.view(-1, 1, self.width, self.width) for each in self.film.of(tasks.z))
        blocks = self.blocks[:count]
        return blocks + blocks * gain + shift

    def forward(self, tasks: TaskBatch, places: Places, seen: slice) -> Tensor:
        """(B or 1, 1, T, S) of the keys that a layer sees."""
        if isinstance(places.keys, int):
            bias = self._straight(tasks, places.keys, places.queries, seen)
        else:
            bias = self._anywhere(tasks, places.keys, places.queries, seen)
        return functional.pad(bias, (0, max(0, seen.stop - seen.start - bias.shape[-1])))[:, None]

    def _straight(self, tasks: TaskBatch, total: int, queries: int, seen: slice) -> Tensor:
        """Where column and place are one: (B or 1, T, S)."""
        count = min(len(self.blocks), math.ceil(total / self.width))
        whole = torch.diag_embed(self.matrices(tasks, count).permute(0, 2, 3, 1))  # (U, W, W, N, N)
        size = count * self.width
        whole = whole.permute(0, 3, 1, 4, 2).reshape(-1, size, size)
        if size < total:  # columns of padding alone
            whole = functional.pad(whole, (0, total - size, 0, total - size))
        return tasks.rows(whole[:, total - queries : total, seen.start : min(seen.stop, total)])

    def _anywhere(self, tasks: TaskBatch, keys_BS: Tensor, queries: int, seen: slice) -> Tensor:
        """Where rows begin at different columns: (B, T, S)."""
        asking, asked = keys_BS[:, -queries:, None], keys_BS[:, None, seen]
        blocks = self.matrices(tasks, len(self.blocks))
        task = 0 if tasks.which is None else tasks.which[:, None, None]
        block, other = asking // self.width, asked // self.width
        picked = blocks[task, block, asking % self.width, asked % self.width]
        return picked.masked_fill(block != other, 0)
