"""A LoRA for each task, the four conditional modules, and FiLM, on which those modules are built.

FiLM turns a task's embedding z into a scale and a shift of values y,

    film(y, z) = gamma(z) * y + beta(z),    gamma(z) = 1 + G z,    beta(z) = B z

with G = B = 0 at the start: film(y, z) then equals y bit for bit, and G has a gradient.

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
    """The tasks of the rows of one pass.

    Attributes:
        numbers: (U,) long, the index of each task of the pass.
        z: (U, Z), the embedding of each task of the pass.
        index: (B,) long, each row's position in `numbers`; None when U is 1.
    """

    numbers: Tensor
    z: Tensor
    index: Tensor | None

    def rows(self, values_U: Tensor) -> Tensor:
        """Select each row's value: (U, ...) becomes (B, ...), or stays (1, ...) when all rows have the same task."""
        if self.index is None:
            return values_U
        return values_U.index_select(0, self.index)


class TaskLora(nn.Module):
    """A LoRA for each task in parallel to a Linear (Hu et al. 2021).

    A row of task i adds x A_i B_i to the output of the Linear that reads x. There is no factor alpha. B_i = 0 at the
    start, and the entries of A_i have variance 1 / inputs.

    Args:
        tasks: number of tasks.
        rank: R, the rank of the factors.
        inputs: input width of the Linear.
        outputs: output width of the Linear.
    """

    def __init__(self, tasks: int, rank: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.rank = rank
        self.inputs = inputs
        self.outputs = outputs
        self.a = nn.ParameterList()
        self.b = nn.ParameterList()
        for _ in range(tasks):
            self.add()

    def add(self) -> TaskLora:
        """Append the factors (inputs, R) and (R, outputs) of another task, and return this module."""
        a = torch.randn(self.inputs, self.rank) / math.sqrt(self.inputs)
        b = torch.zeros(self.rank, self.outputs)
        self.a.append(nn.Parameter(a))
        self.b.append(nn.Parameter(b))
        return self

    def forward(self, x: Tensor, tasks: RowTasks) -> Tensor:
        """Compute x A_i B_i of each row's task i.

        Args:
            x: (B, ..., inputs)
            tasks: the tasks of the rows.

        Returns:
            (B, ..., outputs)
        """
        a = _factors_of_rows(self.a, tasks)
        b = _factors_of_rows(self.b, tasks)
        product = x.flatten(1, -2) @ a @ b
        return product.unflatten(1, x.shape[1:-1])


def _factors_of_rows(factors: nn.ParameterList, tasks: RowTasks) -> Tensor:
    # All tasks are stacked, because a compiled graph must not depend on which tasks a batch has.
    stacked = torch.stack([*factors])
    return tasks.rows(stacked.index_select(0, tasks.numbers))


class FiLM(nn.Module):
    """Feature-wise linear modulation: scale and shift values by functions of a task embedding.

    Args:
        task_width: Z, the width of the task embedding.
        width: number of values.
    """

    def __init__(self, task_width: int, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(width, task_width))
        self.shift = nn.Parameter(torch.zeros(width, task_width))

    def scale_and_shift(self, z_UZ: Tensor) -> tuple[Tensor, Tensor]:
        """Compute gamma(z) - 1 and beta(z), both (U, width), from the embeddings (U, Z)."""
        z_UZ = z_UZ.to(self.scale.dtype)
        gain = functional.linear(z_UZ, self.scale)
        shift = functional.linear(z_UZ, self.shift)
        return gain, shift

    def change(self, y_BTD: Tensor, tasks: RowTasks) -> Tensor:
        """Compute film(y, z) - y, (B, T, D), for values (B, T, D) and each row's z."""
        gain, shift = self._by_row(y_BTD, tasks)
        return torch.addcmul(shift, y_BTD, gain)

    def forward(self, y_BTD: Tensor, tasks: RowTasks) -> Tensor:
        """Compute film(y, z), (B, T, D), for values (B, T, D) and each row's z, in a single operation on y."""
        gain, shift = self._by_row(y_BTD, tasks)
        return torch.addcmul(shift, y_BTD, 1 + gain)

    def _by_row(self, y_BTD: Tensor, tasks: RowTasks) -> tuple[Tensor, Tensor]:
        """Return gamma(z) - 1 and beta(z) of each row, both (B or 1, 1, D)."""
        gain_UD, shift_UD = self.scale_and_shift(tasks.z)
        gain = tasks.rows(gain_UD)[:, None]
        shift = tasks.rows(shift_UD)[:, None]
        return gain.to(y_BTD.dtype), shift.to(y_BTD.dtype)


class Alignment(nn.Module):
    """A matrix R = I + D between two layers, modulated by the task: film(x R, z), with D = 0 at the start.

    Args:
        width: D, the backbone's width.
        task_width: Z, the width of the task embedding.
    """

    def __init__(self, width: int, task_width: int) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.zeros(width, width))
        self.film = FiLM(task_width, width)

    def change(self, x_BTD: Tensor, tasks: RowTasks) -> Tensor:
        """Compute film(x R, z) - x, (B, T, D), for hidden states x (B, T, D) and each row's z."""
        product = x_BTD @ self.matrix
        return product + self.film.change(x_BTD + product, tasks)


class ConditionalNorm(nn.Module):
    """A layer norm that the task modulates: film(norm(x), z), with gain 1 and bias 0 of the norm at the start.

    Args:
        width: D, the width of x.
        task_width: Z, the width of the task embedding.
    """

    def __init__(self, width: int, task_width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.film = FiLM(task_width, width)

    def forward(self, x_BTD: Tensor, tasks: RowTasks) -> Tensor:
        """Compute film(norm(x), z), (B, T, D), for values (B, T, D) and each row's z."""
        return self.film(self.norm(x_BTD), tasks)


class Bottleneck(nn.Module):
    """A modulated bottleneck adapter: film(U act(film(V x, z)), z), with U = 0 at the start.

    The entries of V have variance 1 / width at the start. With a norm, V reads film(norm(x), z) instead of x.

    Args:
        width: D, the width of x.
        inner: the inner width.
        task_width: Z, the width of the task embedding.
        activation: the name of `act` in transformers' ACT2FN.
        has_norm: whether there is a norm.
    """

    def __init__(self, width: int, inner: int, task_width: int, activation: str, *, has_norm: bool = False) -> None:
        super().__init__()
        self.norm = ConditionalNorm(width, task_width) if has_norm else None
        self.down = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(inner, width, bias=False)
        self.inner_film = FiLM(task_width, inner)
        self.outer_film = FiLM(task_width, width)
        # Imported here because it imports transformers' models, which takes seconds.
        from transformers.activations import ACT2FN

        self.activation = ACT2FN[activation]
        nn.init.normal_(self.down.weight, std=1 / math.sqrt(width))
        nn.init.zeros_(self.up.weight)

    def forward(self, x_BTD: Tensor, tasks: RowTasks) -> Tensor:
        if self.norm is not None:
            x_BTD = self.norm(x_BTD, tasks)
        modulated = self.inner_film(self.down(x_BTD), tasks)
        inner = self.activation(modulated)
        return self.outer_film(self.up(inner), tasks)


@dataclass(frozen=True)
class TokenPositions:
    """The positions of a pass's tokens in their rows, counted from 0 without padding.

    Attributes:
        keys: (B or 1, S) positions of all keys, or the number of keys S if the position equals the column in every row.
        queries: number of queries, which are the last keys.
    """

    keys: Tensor | int
    queries: int

    @classmethod
    def of_call(cls, call: Call, queries: int, limit: int) -> TokenPositions:
        """Determine the positions of a pass.

        Args:
            call: the pass.
            queries: number of queries of the pass.
            limit: maximum number of tokens of a row.

        Raises:
            GraftError: a row has more than `limit` tokens.
        """
        past = call.past()
        keys: Tensor | int = past + queries
        positions = call.position_ids
        if call.attention_mask is not None:
            keys = _keys_of_mask(call, call.attention_mask)
        elif positions is not None and past == 0 and _restarts(positions):
            keys = positions
        _check_length(keys, call.attention_mask, limit)
        return cls(keys, queries)

    def visible(self, call: Call, layer: int) -> slice:
        """Return the keys that a layer reads: all except those that the cache of a sliding window has dropped.

        Args:
            call: the pass.
            layer: index of the layer.
        """
        total = self.keys if isinstance(self.keys, int) else self.keys.shape[1]
        if call.cache is None:
            return slice(0, total)
        length, start = call.cache.get_mask_sizes(self.queries, layer)
        # A static cache also has columns for future tokens.
        return slice(start, min(start + length, total))


def _keys_of_mask(call: Call, mask: Tensor) -> Tensor | int:
    """Return `TokenPositions.keys` of a pass with an attention mask."""
    padded_right = call.extras.get("padding") == "right"
    if not padded_right and may_read(mask):
        never_rises = mask[:, 1:] <= mask[:, :-1]
        padded_right = bool(never_rises.all())
    if padded_right:
        return mask.shape[1]
    positions = mask.long().cumsum(-1) - 1
    return positions.clamp(min=0)


def _restarts(positions: Tensor) -> bool:
    """Return whether positions restart inside a row, as they do for packed documents."""
    restarts = positions[:, 1:] <= positions[:, :-1]
    return bool(restarts.any())


def _check_length(keys: Tensor | int, mask: Tensor | None, limit: int) -> None:
    """Raise `GraftError` if a row has more than `limit` tokens."""
    longest = keys if isinstance(keys, int) else keys.shape[1]
    if longest <= limit:
        return
    # The columns include padding and other documents of the row, so the longest text may still fit.
    if mask is not None:
        longest = int(mask.sum(-1).max())
    elif isinstance(keys, Tensor):
        longest = int(keys.max()) + 1
    if longest > limit:
        raise GraftError(
            f"A row has {longest} tokens, but conditional attention was built for at most {limit}: shorten the text, "
            "or train with a larger max_length."
        )


class ConditionalBias(nn.Module):
    """A bias M(z) of the attention scores, which depends on the task and has blocks along the diagonal.

    M(z) = diag(A'_1, ..., A'_N) with A'_n = gamma(z) * A_n + beta(z), elementwise over (W, W), and zero outside the
    blocks. A_n = 0 at the start.

    Args:
        length: maximum number of tokens of a row.
        width: W, the width of a block.
        task_width: Z, the width of the task embedding.
    """

    def __init__(self, length: int, width: int, task_width: int) -> None:
        super().__init__()
        self.width = width
        count = math.ceil(length / width)
        self.blocks = nn.Parameter(torch.zeros(count, width, width))
        self.film = FiLM(task_width, width * width)

    def matrices(self, tasks: RowTasks, count: int) -> Tensor:
        """Compute A'_n of the first `count` blocks for each task of the pass, (U, count, W, W)."""
        gain, shift = self.film.scale_and_shift(tasks.z)
        gain = gain.view(-1, 1, self.width, self.width)
        shift = shift.view(-1, 1, self.width, self.width)
        blocks = self.blocks[:count]
        return blocks + blocks * gain + shift

    def forward(self, tasks: RowTasks, positions: TokenPositions, visible: slice) -> Tensor:
        """Compute the bias of the keys that a layer reads.

        Args:
            tasks: the tasks of the rows.
            positions: the positions of the pass's tokens.
            visible: the keys that the layer reads, all of them in `positions`.

        Returns:
            The bias (B or 1, 1, T, S) of the S visible keys.
        """
        if isinstance(positions.keys, int):
            bias = self._aligned(tasks, positions.keys, positions.queries, visible)
        else:
            bias = self._gathered(tasks, positions.keys, positions.queries, visible)
        return bias[:, None]

    def _aligned(self, tasks: RowTasks, total: int, queries: int, visible: slice) -> Tensor:
        """Return the bias (B or 1, T, S) for rows in which the position equals the column."""
        needed = math.ceil(total / self.width)
        count = min(len(self.blocks), needed)
        blocks_UNWW = self.matrices(tasks, count)
        diagonal_UWWNN = torch.diag_embed(blocks_UNWW.permute(0, 2, 3, 1))
        size = count * self.width
        full = diagonal_UWWNN.permute(0, 3, 1, 4, 2).reshape(-1, size, size)
        if size < total:  # the other columns are padding in every row
            padding = total - size
            full = functional.pad(full, (0, padding, 0, padding))
        rows = slice(total - queries, total)
        return tasks.rows(full[:, rows, visible])

    def _gathered(self, tasks: RowTasks, keys_BS: Tensor, queries: int, visible: slice) -> Tensor:
        """Return the bias (B, T, S) for rows that begin at different columns."""
        query = keys_BS[:, -queries:, None]
        key = keys_BS[:, None, visible]
        query_block = query // self.width
        key_block = key // self.width
        row = query % self.width
        column = key % self.width
        task: Tensor | int = 0
        if tasks.index is not None:
            task = tasks.index[:, None, None]
        blocks = self.matrices(tasks, len(self.blocks))
        bias = blocks[task, query_block, row, column]
        return bias.masked_fill(query_block != key_block, 0)
