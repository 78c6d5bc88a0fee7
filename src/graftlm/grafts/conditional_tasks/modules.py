"""A LoRA for each task, the four conditional modules, and FiLM, which those are built from.

FiLM turns a task's embedding z into a scale and a shift of values y,

    film(y, z) = gamma(z) * y + beta(z),    gamma(z) = 1 + G z,    beta(z) = B z

with G = B = 0 at the start: film(y, z) then equals y to the bit, and G has a gradient.

Shape suffixes: B rows, T tokens of this pass, S keys, D the backbone's width, Z a task embedding's width, U different
tasks in the pass, N blocks, W the width of a block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from graftlm.backbone import Call, may_read
from graftlm.errors import GraftError


@dataclass(frozen=True)
class RowTasks:
    """The tasks of one pass: their `numbers` (U,) and embeddings `z` (U, Z); each row's `index`, None where U is 1."""

    numbers: Tensor
    z: Tensor
    index: Tensor | None

    def rows(self, values_U: Tensor) -> Tensor:
        """Each row's value: (U, ...) becomes (B, ...), or stays (1, ...) where all rows have one task."""
        return values_U if self.index is None else values_U.index_select(0, self.index)


class TaskLora(nn.Module):
    """B A x of each row's task beside a Linear, with B = 0 at the start (Hu et al. 2021, without alpha)."""

    def __init__(self, tasks: int, rank: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.sizes = (inputs, rank, outputs)
        self.a, self.b = nn.ParameterList(), nn.ParameterList()
        for _ in range(tasks):
            self.add()

    def add(self) -> TaskLora:
        """The factors of one more task, (inputs, R) and (R, outputs)."""
        inputs, rank, outputs = self.sizes
        self.a.append(nn.Parameter(torch.randn(inputs, rank) / math.sqrt(inputs)))
        self.b.append(nn.Parameter(torch.zeros(rank, outputs)))
        return self

    def forward(self, x: Tensor, tasks: RowTasks) -> Tensor:
        """Of x (B, ..., inputs). All tasks are stacked, as a graph must not depend on which there are."""
        a, b = (tasks.rows(torch.stack([*own]).index_select(0, tasks.numbers)) for own in (self.a, self.b))
        return (x.flatten(1, -2) @ a @ b).unflatten(1, x.shape[1:-1])


class FiLM(nn.Module):
    """Scale and shift of `width` values, from a task embedding of `task_width`."""

    def __init__(self, task_width: int, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(width, task_width))
        self.shift = nn.Parameter(torch.zeros(width, task_width))

    def scale_and_shift(self, z_UZ: Tensor) -> tuple[Tensor, Tensor]:
        """gamma(z) - 1 and beta(z), (U, width) each."""
        z_UZ = z_UZ.to(self.scale.dtype)
        return functional.linear(z_UZ, self.scale), functional.linear(z_UZ, self.shift)

    def change(self, y_BTD: Tensor, tasks: RowTasks) -> Tensor:
        """film(y, z) - y."""
        gain, shift = self._by_row(y_BTD, tasks)
        return torch.addcmul(shift, y_BTD, gain)

    def forward(self, y_BTD: Tensor, tasks: RowTasks) -> Tensor:
        """film(y, z), in one operation on y."""
        gain, shift = self._by_row(y_BTD, tasks)
        return torch.addcmul(shift, y_BTD, 1 + gain)

    def _by_row(self, y_BTD: Tensor, tasks: RowTasks) -> list[Tensor]:
        """gamma(z) - 1 and beta(z) of each row, (B or 1, 1, D)."""
        return [tasks.rows(values_UD)[:, None].to(y_BTD.dtype) for values_UD in self.scale_and_shift(tasks.z)]


class Alignment(nn.Module):
    """film(x + x D, z): the matrix R = I + D between embedding and first layer, modulated by the task."""

    def __init__(self, width: int, task_width: int) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.zeros(width, width))
        self.film = FiLM(task_width, width)

    def change(self, x_BTD: Tensor, tasks: RowTasks) -> Tensor:
        """film(x + x D, z) - x."""
        product = x_BTD @ self.matrix
        return product + self.film.change(x_BTD + product, tasks)


class Bottleneck(nn.Module):
    """film(U act(film(V x, z)), z), with U = 0 at the start."""

    def __init__(self, width: int, inner: int, task_width: int, activation: str) -> None:
        super().__init__()
        self.down = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(inner, width, bias=False)
        self.inner_film, self.outer_film = FiLM(task_width, inner), FiLM(task_width, width)
        from transformers.activations import ACT2FN  # imports transformers' models, which takes seconds

        self.activation = ACT2FN[activation]
        nn.init.normal_(self.down.weight, std=1 / math.sqrt(width))
        nn.init.zeros_(self.up.weight)

    def forward(self, x_BTD: Tensor, tasks: RowTasks) -> Tensor:
        inner = self.activation(self.inner_film(self.down(x_BTD), tasks))
        return self.outer_film(self.up(inner), tasks)


@dataclass(frozen=True)
class TokenPositions:
    """The positions of the tokens of a pass in their rows, counted from 0 without padding.

    Attributes:
        keys: (B or 1, S) of all keys, or their number where column and position are equal in every row.
        queries: the number of queries, which are the last keys.
    """

    keys: Tensor | int
    queries: int

    @classmethod
    def of_call(cls, call: Call, queries: int, limit: int) -> TokenPositions:
        """The positions of a pass with this many queries. Raises GraftError if a row has more than `limit` tokens."""
        mask, positions = call.attention_mask, call.position_ids
        past = call.past()
        keys: Tensor | int = past + queries
        if mask is not None:
            padded_right = call.extras.get("padding") == "right"
            padded_right = padded_right or (may_read(mask) and bool((mask[:, 1:] <= mask[:, :-1]).all()))
            keys = mask.shape[1] if padded_right else (mask.long().cumsum(-1) - 1).clamp(min=0)
        elif positions is not None and past == 0 and bool((positions[:, 1:] <= positions[:, :-1]).any()):
            keys = positions  # packed documents
        _check_length(keys, mask, limit)
        return cls(keys, queries)

    def visible(self, call: Call, layer: int) -> slice:
        """The keys that a layer sees: all but those that the cache of a sliding window has dropped."""
        total = self.keys if isinstance(self.keys, int) else self.keys.shape[1]
        if call.cache is None:
            return slice(0, total)
        length, start = call.cache.get_mask_sizes(self.queries, layer)
        return slice(start, min(start + length, total))  # a static cache has columns for tokens to come


def _check_length(keys: Tensor | int, mask: Tensor | None, limit: int) -> None:
    longest = keys if isinstance(keys, int) else keys.shape[1]
    if longest > limit:  # padding and packed documents have columns of their own
        longest = int(keys.max()) + 1 if isinstance(keys, Tensor) else longest
        longest = longest if mask is None else int(mask.sum(-1).max())
    if longest > limit:
        raise GraftError(
            f"A row has {longest} tokens, and conditional attention was built for {limit}: cut the text, or train with "
            "a larger max_length."
        )


class ConditionalBias(nn.Module):
    """M(z), which is added to attention scores: blocks along the diagonal.

    M(z) = diag(A'_1, ..., A'_N) with A'_n = gamma(z) * A_n + beta(z), elementwise over (W, W), and zero outside the
    blocks. A_n = 0 at the start. W is `width`, Z `task_width`, and `length` the maximum number of tokens of a row.
    """

    def __init__(self, length: int, width: int, task_width: int) -> None:
        super().__init__()
        self.width = width
        self.blocks = nn.Parameter(torch.zeros(math.ceil(length / width), width, width))
        self.film = FiLM(task_width, width * width)

    def matrices(self, tasks: RowTasks, count: int) -> Tensor:
        """A'_n of the first `count` blocks, (U, N, W, W)."""
        gain, shift = (values.view(-1, 1, self.width, self.width) for values in self.film.scale_and_shift(tasks.z))
        blocks = self.blocks[:count]
        return blocks + blocks * gain + shift

    def forward(self, tasks: RowTasks, positions: TokenPositions, visible: slice) -> Tensor:
        """(B or 1, 1, T, S) of the keys that a layer sees."""
        if isinstance(positions.keys, int):
            bias = self._aligned(tasks, positions.keys, positions.queries, visible)
        else:
            bias = self._gathered(tasks, positions.keys, positions.queries, visible)
        return functional.pad(bias, (0, max(0, visible.stop - visible.start - bias.shape[-1])))[:, None]

    def _aligned(self, tasks: RowTasks, total: int, queries: int, visible: slice) -> Tensor:
        """(B or 1, T, S) where column and position are equal."""
        count = min(len(self.blocks), math.ceil(total / self.width))
        full = torch.diag_embed(self.matrices(tasks, count).permute(0, 2, 3, 1))  # (U, W, W, N, N)
        size = count * self.width
        full = full.permute(0, 3, 1, 4, 2).reshape(-1, size, size)
        if size < total:  # columns of padding alone
            full = functional.pad(full, (0, total - size, 0, total - size))
        return tasks.rows(full[:, total - queries : total, visible.start : min(visible.stop, total)])

    def _gathered(self, tasks: RowTasks, keys_BS: Tensor, queries: int, visible: slice) -> Tensor:
        """(B, T, S) where rows begin at different columns."""
        query, key = keys_BS[:, -queries:, None], keys_BS[:, None, visible]
        blocks = self.matrices(tasks, len(self.blocks))
        task = 0 if tasks.index is None else tasks.index[:, None, None]
        query_block, key_block = query // self.width, key // self.width
        bias = blocks[task, query_block, query % self.width, key % self.width]
        return bias.masked_fill(query_block != key_block, 0)
